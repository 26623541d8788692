from decimal import Decimal

import pytest

from gpushare.core.api import CORDONED, Taint, parse_quantity
from gpushare.extender.reduce import reduce_gpunode, reduce_node


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2113411328Ki", 2113411328 * 1024),
        ("512Gi", 512 * 2**30),
        ("250m", Decimal("0.25")),
        ("192", 192),
        ("1.5", Decimal("1.5")),
        ("1e3", 1000),
        ("12E", 12 * 10**18),
        ("100k", 100_000),
        (3, 3),
    ],
)
def test_quantities(text, value):
    assert parse_quantity(text) == value


@pytest.mark.parametrize("text", ["", "lots", "1 Gi", "Gi", "--1", "1KiB"])
def test_what_is_no_quantity(text):
    with pytest.raises(ValueError, match="not a quantity"):
        parse_quantity(text)


def test_a_gpunode():
    view = reduce_gpunode(
        {
            "metadata": {"name": "n"},
            "status": {
                "gpus": [
                    {"uuid": "B", "index": 1, "model": "H200", "memoryMiB": 100, "health": "Unhealthy"},
                    {"uuid": "A", "index": 0, "tenants": [{"podUid": "u1"}, {"podUid": "u2"}]},
                    {"index": 2},
                ]
            },
        }
    )
    assert [gpu.uuid for gpu in view.gpus] == ["A", "B"]
    assert [gpu.memory_mib for gpu in view.gpus] == [None, 100]
    assert (view.unhealthy, view.allocated) == ({"B"}, {"u1": ("A",), "u2": ("A",)})
    assert reduce_gpunode({"metadata": {"name": "n"}}).gpus == ()


def test_idle_are_pods_without_a_process_where_the_gate_sets_caps():
    def idle(mps, *clients):
        tenants = [{"podUid": f"u{number}", "clients": count} for number, count in enumerate(clients)]
        gpu = {"uuid": "A", "index": 0, "mps": mps, "tenants": tenants}
        return reduce_gpunode({"metadata": {"name": "n"}, "status": {"gpus": [gpu]}}).idle

    enforced = {"state": "Active", "ceilings": "Enforced"}
    assert idle(enforced, 0, 1, None, 0) == {"u0", "u3"}
    assert idle(None, 0) == set()
    assert idle(enforced | {"state": "Fault"}, 0) == idle(enforced | {"ceilings": "Untested"}, 0) == set()


def test_only_nodes_with_shares_are_of_interest():
    node = {"metadata": {"name": "n"}, "status": {"allocatable": {"cpu": "64", "memory": "1Gi"}}}
    assert reduce_node(node) is None
    node["status"]["allocatable"]["gpushare.io/share"] = "200"
    view = reduce_node(node)
    assert (view.cpu_milli, view.memory_mib) == (64000, 1024)


def test_a_cordoned_node_keeps_pods_out_before_it_has_the_taint():
    node = {"metadata": {"name": "n"}, "status": {"allocatable": {"gpushare.io/share": "100"}}}
    reduced = reduce_node(
        {**node, "spec": {"unschedulable": True, "taints": [{"key": "a", "effect": "NoExecute"}]}}
    )
    assert reduced is not None
    assert reduced.taints == (CORDONED, Taint("a", "", "NoExecute"))
