"""Workloads joined over namespaces in the agent: a pod's signature before its own GpuShare has one."""

from dataclasses import replace
from typing import Any

import pytest
from tests.deviceplugin.fakes import make_pod

from gpushare.core.admission import JoinedWorkload
from gpushare.core.api import WorkloadSignature, names, to_json
from gpushare.core.gpu import GpuSample
from gpushare_deviceplugin.node_signatures import Signatures
from gpushare_deviceplugin.shares import NodeShares, reduce_gpushare

H200 = "NVIDIA H200"
SIGNATURE = WorkloadSignature(
    H200,
    {"sm_util": 0.6, "fp32_util": 0.4, "dram_bw_util": 0.2},
    window_seconds=60.0,
    taken_at="2026-11-28T12:00:00Z",
)
POD = make_pod("a", **{names.WORKLOAD: "resnet"})  # in the namespace shop


class Node:
    """The GpuShares that an agent keeps, delivered as its watch delivers them."""

    def __init__(self, *namespaces: str) -> None:
        joined = (JoinedWorkload("resnet", namespaces),) if namespaces else ()
        self.shares = NodeShares(joined=joined)
        self.signatures = Signatures(self.shares)

    def deliver(self, namespace: str, profile: WorkloadSignature | None = None, **status: Any) -> None:
        placed = {"placements": [{"podUid": POD.uid, "pod": "a", "node": "n1"}]} if namespace == "shop" else {}
        raw = {
            "metadata": {"namespace": namespace, "name": "s"},
            "spec": status.pop("spec", {}),
            "status": {
                "workload": "resnet",
                **placed,
                **({"profile": to_json(profile)} if profile else {}),
                **status,
            },
        }
        reduced = reduce_gpushare(raw, "n1", self.shares.joins)
        if reduced is None:
            self.shares.pop(f"{namespace}/s", None)
        else:
            self.shares[f"{namespace}/s"] = reduced


def test_a_pod_has_the_signature_of_its_workload_in_the_other_namespace_at_once() -> None:
    node = Node("shop", "lab")
    node.deliver("lab", SIGNATURE)
    found = node.signatures.of(POD, H200)
    assert found is not None
    assert found.counters == SIGNATURE.as_counters()
    assert node.signatures.of(POD, "NVIDIA A100") is None, "of the GPU that it is on"
    node.deliver("shop")
    assert node.signatures.of(POD, H200) == found
    own = replace(SIGNATURE, counters={"sm_util": 0.3, "fp32_util": 0.1}, window_seconds=70.0)
    node.deliver("shop", own)
    found = node.signatures.of(POD, H200)
    assert found is not None
    assert found.counters == own.as_counters(), "its own GpuShare's from when it has one"
    node.deliver("shop")
    del node.shares["lab/s"]
    assert node.signatures.of(POD, H200) is None


@pytest.mark.parametrize("joined", [(), ("lab", "office")], ids=["nothing is joined", "others are"])
def test_nobody_speaks_for_a_workload_of_a_namespace_that_is_not_joined(joined: tuple[str, ...]) -> None:
    node = Node(*joined)
    node.deliver("lab", SIGNATURE)
    node.deliver("shop")
    assert node.signatures.of(POD, H200) is None
    assert ("lab/s" in node.shares) is bool(joined), "and it is not even kept where nothing is joined"


def test_neither_does_another_key() -> None:
    node = Node("shop", "lab")
    node.deliver("lab", SIGNATURE, workload="bert")
    node.deliver("shop")
    assert node.signatures.of(POD, H200) is None
    assert node.signatures.of(make_pod("b"), H200) is None, "nor for a pod without one"


@pytest.mark.parametrize("spec", [{"mode": "Off"}, {"windowSeconds": 600}])
def test_a_gpushare_that_would_not_take_it_has_none(spec: dict[str, Any]) -> None:
    node = Node("shop", "lab")
    node.deliver("lab", SIGNATURE)
    node.deliver("shop", spec={"profile": spec})
    assert node.signatures.of(POD, H200) is None


def test_what_is_as_good_is_not_published_and_what_is_better_is() -> None:
    node = Node("shop", "lab")
    node.deliver("lab", replace(SIGNATURE, window_seconds=5.0))
    node.deliver("shop")
    sample = GpuSample(SIGNATURE.as_counters(), 5.0, 2000, 0.6)
    published = []
    for _ in range(8):
        node.signatures.learn(POD, H200, sample)
        published.append(node.signatures.news(POD, H200))
    assert published[1] is None
    assert published[-1] is not None
    assert (published[-1].window_seconds or 0.0) >= 20.0
