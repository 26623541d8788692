"""The bridge of the local clusters keeps its MAC, whichever pods come and go."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from devcluster import debian, network
from devcluster.progress import Failed
from devcluster.settings import BRIDGE, BRIDGE_MAC, NODE_IP

HACK = Path(network.__file__).parents[1]
LOWEST = "02:00:00:00:00:01"  # below any that the kernel draws for a pod's interface, but for one in millions
SCRIPT = f"""
import subprocess, sys
from devcluster import network

def ip(*arguments):
    return subprocess.run([*sys.argv[1:], *arguments], check=True, capture_output=True, text=True).stdout

def iproute(*arguments):
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout

def show():
    print(iproute("-oneline", "addr", "show", "dev", "{BRIDGE}").strip().replace("\\n", " "))
    print(iproute("-oneline", "link", "show", "dev", "{BRIDGE}").strip())

network.make_bridge(ip)
show()
iproute("link", "add", "pod", "address", "{LOWEST}", "type", "veth", "peer", "name", "inside")
iproute("link", "set", "pod", "master", "{BRIDGE}")
iproute("link", "set", "pod", "up")
show()
iproute("link", "delete", "pod")
network.make_bridge(ip)  # `up` may be called again
show()
"""


def _in_own_network(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(HACK)}
    return subprocess.run(
        ["unshare", "--net", *command], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(params=["iproute2", "busybox"])
def ip(request: pytest.FixtureRequest) -> list[str]:
    """Return the command of each `ip` that makes a bridge: this machine's, and the GPU cluster's."""
    if os.geteuid() != 0 or _in_own_network("ip", "link", "add", "x", "type", "bridge").returncode != 0:
        pytest.skip("needs root, and a kernel with bridges")
    if request.param == "iproute2":
        return ["ip"]
    try:
        return [str(debian.busybox()), "ip"]
    except Failed as error:
        pytest.skip(f"no busybox: {error}")


def test_the_bridge_keeps_its_mac(ip: list[str]) -> None:
    done = _in_own_network(sys.executable, "-c", SCRIPT, *ip)
    assert done.returncode == 0, done.stderr
    addresses, links = done.stdout.splitlines()[0::2], done.stdout.splitlines()[1::2]
    assert all(f"inet {NODE_IP}/16" in line for line in addresses), done.stdout
    assert [f"link/ether {BRIDGE_MAC}" in line for line in links] == [True] * 3, done.stdout
