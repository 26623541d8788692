"""Which node has a GPU that several list, by the pods' decisions and the age of the GpuNodes."""

from typing import Any

import pytest

from gpushare.core.api import PodView
from gpushare.core.placement import in_order_of_claim, nodes_by_decision


def pod(name: str, gpus: str, *, node: str | None = "a", share: int = 50, phase: str = "Running") -> PodView:
    count = len(gpus.split(",")) if gpus else 0
    decision: dict[str, Any] = {
        "gpushare.io/gpu": gpus,
        "gpushare.io/thread-percentage": "50",
        "gpushare.io/memory-limit": ",".join(f"{index}=1M" for index in range(count)),
        "gpushare.io/decided-at": "2026-11-21T12:00:00Z",
    }
    limits = {"gpushare.io/share": str(share)}
    return PodView.from_object(
        {
            "metadata": {"name": name, "uid": name, "annotations": decision if gpus else {}},
            "spec": {"nodeName": node, "containers": [{"resources": {"limits": limits}}]},
            "status": {"phase": phase},
        }
    )


def test_pods_that_run_name_the_gpus_of_their_nodes() -> None:
    pods = [
        pod("one", "g1"),
        pod("two", "g1", node="b", phase="Pending"),
        pod("ended", "g3", phase="Succeeded"),
        pod("undecided", ""),
        pod("unbound", "g4", node=None),
        pod("whole", "g5,g6", share=200),
    ]
    assert nodes_by_decision(pods) == {"g1": {"a", "b"}, "g5": {"a"}, "g6": {"a"}}


@pytest.mark.parametrize(("gpus", "share"), [("g1,g2", 100), ("g1,g2", 50), ("g1,g2,g3", 200)])
def test_a_decision_for_more_gpus_than_the_pod_pays_for_claims_none(gpus: str, share: int) -> None:
    assert nodes_by_decision([pod("forged", gpus, share=share)]) == {}


def test_who_has_pods_comes_before_who_is_older() -> None:
    made = {"a": "2026-11-22", "b": "2026-11-21", "c": "2026-11-21", "d": "2026-11-23"}
    assert in_order_of_claim("dcba", {"d"}, made) == ["d", "b", "c", "a"]
