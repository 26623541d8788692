from decimal import Decimal

import pytest

from gpushare.extender.reduce import parse_quantity, reduce_gpunode, reduce_node, reduce_pod


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


def test_a_pod():
    pod = reduce_pod(
        {
            "metadata": {
                "name": "p",
                "namespace": "ns",
                "uid": "u",
                "labels": {"a": "b"},
                "annotations": {
                    "gpushare.io/fraction": "0.25",
                    "other": "x" * 1000,
                    "gpushare.io/gpu": "GPU-1",
                    "gpushare.io/thread-percentage": "25",
                    "gpushare.io/memory-limit": "0=100M",
                },
                "ownerReferences": [{"uid": "o"}],
            },
            "spec": {
                "nodeName": "n",
                "priority": 7,
                "containers": [
                    {"resources": {"limits": {"gpushare.io/share": "25"}, "requests": {"cpu": "500m"}}},
                    {"resources": {"requests": {"cpu": "1", "memory": "1Gi"}}},
                ],
                "initContainers": [{"resources": {"limits": {"gpushare.io/share": "10"}}}],
            },
            "status": {"phase": "Running", "startTime": "2026-11-21T00:00:00Z"},
        }
    )
    assert pod.annotations == {"gpushare.io/fraction": "0.25"}
    assert (pod.node, pod.priority, pod.owner_uids, pod.finished, pod.admitted) == ("n", 7, ("o",), False, True)
    assert (pod.limit_percent, pod.cpu_milli, pod.memory_mib) == (25, 1500, 1024)
    assert pod.decision is not None
    assert pod.decision.gpu_uuids == ("GPU-1",)


def test_malformed_decisions_are_none_and_bare_pods_pass():
    pod = reduce_pod({"metadata": {"name": "p", "uid": "u", "annotations": {"gpushare.io/gpu": "GPU-1"}}})
    assert (pod.decision, pod.node, pod.limit_percent, pod.finished) == (None, None, 0, False)
    assert reduce_pod({"metadata": {"name": "p", "uid": "u"}, "status": {"phase": "Failed"}}).finished


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


def test_only_nodes_with_shares_are_of_interest():
    node = {"metadata": {"name": "n"}, "status": {"allocatable": {"cpu": "64", "memory": "1Gi"}}}
    assert reduce_node(node) is None
    node["status"]["allocatable"]["gpushare.io/share"] = "200"
    view = reduce_node(node)
    assert (view.cpu_milli, view.memory_mib) == (64000, 1024)
