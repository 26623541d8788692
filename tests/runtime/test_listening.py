"""Each part of the chart listens on every address of its pod, whichever families the cluster has."""

import socket
from pathlib import Path

import pytest

from gpushare.extender import parse_options
from gpushare.mps import host as mps_host
from gpushare.runtime.http import MetricsServer, listen_at
from gpushare_operator.admission import AdmissionServerSettings
from gpushare_operator.admission.__main__ import parse_settings

FAMILIES = {"127.0.0.1": socket.AF_INET, "::1": socket.AF_INET6}
# What each process listens on as the chart starts it, without an address.
DEFAULTS = {
    "admission": parse_settings(["--cert-dir", "/tls"], {}).host,
    "admission's settings": AdmissionServerSettings(Path("/tls")).host,
    "the extender's metrics and probes": parse_options([], {}).metrics_host,
    "the MPS host": mps_host._parse([]).listen,
}


def _has(address: str) -> bool:
    try:
        with socket.create_server((address, 0), family=FAMILIES[address]):
            return True
    except OSError:
        return False


def accepts(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=60).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize("part", DEFAULTS)
@pytest.mark.parametrize("address", FAMILIES)
def test_a_part_is_reached_by_either_family(part: str, address: str) -> None:
    """Before: by IPv4 alone, so on an IPv6 cluster no probe and no Service reached it."""
    if not _has(address):
        pytest.skip(f"this machine has no {address}")
    with listen_at(DEFAULTS[part], 0, backlog=5) as listening:
        assert accepts(address, listening.getsockname()[1])


@pytest.mark.parametrize("address", FAMILIES)
def test_so_are_the_agent_and_the_operator_which_name_no_address(address: str) -> None:
    if not _has(address):
        pytest.skip(f"this machine has no {address}")
    server = MetricsServer({}, 0)
    try:
        assert accepts(address, server.port)
    finally:
        server.close()


def test_a_node_without_ipv6_is_served_by_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with listen_at("", 0, backlog=5) as listening:
        assert listening.family is socket.AF_INET
        assert accepts("127.0.0.1", listening.getsockname()[1])


@pytest.mark.parametrize("address", FAMILIES)
def test_an_address_that_is_named_is_the_only_one(address: str) -> None:
    if not all(map(_has, FAMILIES)):
        pytest.skip("this machine has one family")
    (other,) = FAMILIES.keys() - {address}
    with listen_at(address, 0, backlog=5) as listening:
        port = listening.getsockname()[1]
        assert accepts(address, port)
        assert not accepts(other, port)
