"""Cut the network between pods and the API server: packets lost by rules in an own chain, or sockets closed."""

import subprocess
from collections.abc import Sequence
from typing import Final

from devcluster.settings import API_PORT

CHAIN: Final = "GPUSHARE-CHAOS"
HOOKS: Final = ("INPUT", "OUTPUT")


def lose_from(address: str) -> None:
    """Lose every packet between a pod and the API server."""
    _ensure()
    _iptables("-A", CHAIN, "-s", address, "-p", "tcp", "--dport", str(API_PORT), "-j", "DROP")
    _iptables("-A", CHAIN, "-d", address, "-p", "tcp", "--sport", str(API_PORT), "-j", "DROP")


def lose_to(address: str) -> None:
    """Lose every packet that this machine (so the API server, but kubelet too) sends to a pod."""
    _ensure()
    _iptables("-A", CHAIN, "-d", address, "-p", "tcp", "-j", "DROP")


def clear() -> None:
    """Remove every rule of ours."""
    for hook in HOOKS:
        while _succeeds("-C", hook, "-j", CHAIN):
            _iptables("-D", hook, "-j", CHAIN)
    if _succeeds("-L", CHAIN, "-n"):
        _iptables("-F", CHAIN)
        _iptables("-X", CHAIN)


def break_connections(addresses: Sequence[str]) -> int:
    """Close the API server's connections with these addresses, as a reset would; return how many."""
    closed = 0
    for address in addresses:
        done = subprocess.run(
            ["ss", "-K", "-H", "-t", "state", "established", "dst", address, "sport", "=", f":{API_PORT}"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        closed += len(done.stdout.splitlines())
    return closed


def _ensure() -> None:
    if not _succeeds("-L", CHAIN, "-n"):
        _iptables("-N", CHAIN)
    for hook in HOOKS:
        if not _succeeds("-C", hook, "-j", CHAIN):
            _iptables("-I", hook, "-j", CHAIN)


def _iptables(*arguments: str) -> None:
    subprocess.run(["iptables", "-w", *arguments], check=True, capture_output=True, timeout=30)


def _succeeds(*arguments: str) -> bool:
    done = subprocess.run(["iptables", "-w", *arguments], check=False, capture_output=True, timeout=30)
    return done.returncode == 0
