"""The cluster's bridge and firewall rules on this machine, and their removal."""

import json
import re
from collections.abc import Callable
from pathlib import Path

from devcluster import progress
from devcluster.progress import Failed
from devcluster.settings import BRIDGE, BRIDGE_MAC, NODE_IP, POD_CIDR

FORWARD = Path("/proc/sys/net/ipv4/ip_forward")
BRIDGE_RULES = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
MARK = ["-m", "comment", "--comment", BRIDGE]
RULES = [
    ["nat", "POSTROUTING", "-s", POD_CIDR, "!", "-d", POD_CIDR, *MARK, "-j", "MASQUERADE"],
    ["filter", "FORWARD", "-i", BRIDGE, *MARK, "-j", "ACCEPT"],
    ["filter", "FORWARD", "-o", BRIDGE, *MARK, "-j", "ACCEPT"],
]
# kubelet and kube-proxy create these chains; `down` removes them unless they existed before
KUBERNETES_CHAIN = re.compile(r"^:(KUBE-\S+)", re.MULTILINE)


def _succeeds(*command: str) -> bool:
    try:
        progress.run(command)
    except Failed:
        return False
    return True


def make_bridge(ip: Callable[..., str]) -> None:
    """Create the bridge, by `ip`, with the node's address and a MAC that stays.

    A bridge without a MAC of its own takes the lowest of its ports, so any pod that comes or goes may change it.
    Pods then send to the former one until they ask again: on the GPU machine no pod reached the node for 14 s, and
    the API server no webhook. The CNI plugin would fix the MAC, but only where it adds the address itself.
    """
    if f" {BRIDGE}:" not in ip("link", "show"):
        ip("link", "add", "name", BRIDGE, "type", "bridge")
    ip("link", "set", BRIDGE, "address", BRIDGE_MAC)
    if f"{NODE_IP}/" not in ip("addr", "show", "dev", BRIDGE):
        ip("addr", "add", f"{NODE_IP}/{POD_CIDR.partition('/')[2]}", "dev", BRIDGE)
    ip("link", "set", BRIDGE, "up")


def up(state: Path) -> None:
    """Create the bridge with the node's address, forwarding and masquerading; record the former settings."""
    before = state / "network-before.json"
    if not before.exists():
        found = {str(path): path.read_text().strip() for path in (FORWARD, BRIDGE_RULES) if path.exists()}
        before.write_text(json.dumps({"sysctl": found, "chains": _chains()}))
    make_bridge(lambda *arguments: progress.run(["ip", *arguments]))
    FORWARD.write_text("1")
    if BRIDGE_RULES.exists():
        BRIDGE_RULES.write_text("1")
    for table, chain, *rule in RULES:
        if not _succeeds("iptables", "-w", "-t", table, "-C", chain, *rule):
            progress.run(["iptables", "-w", "-t", table, "-I", chain, *rule])


def down(state: Path) -> None:
    """Undo `up` and remove what kubelet, kube-proxy and CNI left; works without a running cluster."""
    before = state / "network-before.json"
    known = json.loads(before.read_text()) if before.exists() else {"sysctl": {}, "chains": {}}
    for table, chain, *rule in RULES:
        while _succeeds("iptables", "-w", "-t", table, "-C", chain, *rule):
            progress.run(["iptables", "-w", "-t", table, "-D", chain, *rule])
    if before.exists():
        _remove_kubernetes_chains(known["chains"])
    if Path(f"/sys/class/net/{BRIDGE}").exists():
        progress.run(["ip", "link", "delete", BRIDGE])
    for path, value in known["sysctl"].items():
        Path(path).write_text(value)


def _chains() -> dict[str, list[str]]:
    """Return Kubernetes' chains by "program table"."""
    found = {}
    for program in ("iptables", "ip6tables"):
        for table in ("filter", "nat", "mangle"):
            try:
                found[f"{program} {table}"] = KUBERNETES_CHAIN.findall(
                    progress.run([f"{program}-save", "-t", table])
                )
            except Failed:  # this machine has no IPv6
                continue
    return found


def _remove_kubernetes_chains(before: dict[str, list[str]]) -> None:
    for place, chains in _chains().items():
        ours = set(chains) - set(before.get(place, []))
        if not ours:
            continue
        program, table = place.split()
        kept = [
            line
            for line in progress.run([f"{program}-save", "-t", table]).splitlines()
            if not any(word.removeprefix(":") in ours for word in line.split())
        ]
        progress.run([f"{program}-restore", "-w", "-T", table], stdin="\n".join(kept) + "\n")
