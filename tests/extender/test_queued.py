"""What is remembered of pods that wait, and how much of it is worked out at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gpushare.core.api import NodeRules, PodView, Reason, Rejection, Taint
from gpushare.core.placement import (
    MOST_EXAMINED,
    ClusterState,
    DecisionContext,
    GpuSpec,
    Judge,
    NodeSpec,
    PlacementRequest,
)
from gpushare.core.placement.policies import make
from gpushare.data import default_model
from gpushare.extender import queued
from gpushare.extender.queued import BINDING_SECONDS, QueuedPods
from gpushare.extender.reduce import NodeView

AFTER = 1800.0
NO_RULES = NodeRules((), None, ())
NOW = 1e9 + 2 * AFTER  # pods were created at 1e9
LATER = "2001-09-09T01:47:40Z"
TOO_MUCH_MIB = 200_000


def node(name: str, pool: str = "a", taints: tuple[Taint, ...] = ()) -> NodeView:
    return NodeView(name, 64_000, 500_000, labels={"pool": pool}, taints=taints)


def pod(name: str, pool: str, created_at: str = "2001-09-09T01:46:40Z") -> PodView:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    return PodView.from_object(
        {
            "metadata": {"uid": name, "name": name, "creationTimestamp": created_at},
            "spec": {"nodeSelector": {"pool": pool}, "tolerations": [{"key": name, "operator": "Exists"}]},
            "status": {"conditions": [condition]},
        }
    )


class Cluster:
    """Nodes of eight GPUs each, and the pods that wait for them."""

    def __init__(self, *nodes: NodeView) -> None:
        self.nodes = {each.name: each for each in nodes}
        state = ClusterState(
            NodeSpec(each.name, tuple(GpuSpec(f"{each.name}-{slot}", "H200", 80_000) for slot in range(8)))
            for each in nodes
        )
        policy = make("bestfit", {}, np.random.default_rng(0))
        self.context = DecisionContext(state, policy, Judge(default_model), NOW, reserve_after_seconds=AFTER)
        self.queue = QueuedPods(AFTER)
        self.refused: set[str] = set()

    def wait(self, *pods: PodView) -> None:
        for each in pods:
            self.queue.put(each, NOW)

    def change(self, name: str, new: NodeView | None) -> None:
        self.queue.node_changed(name, new)
        self.nodes = {key: each for key, each in self.nodes.items() if key != name}
        if new is not None:
            self.nodes[name] = new

    def kept(self) -> dict[str, str]:
        """The node on which a GPU is kept, by pod."""

        def request_of(asked: PodView) -> PlacementRequest | Rejection:
            if asked.uid in self.refused:
                return Rejection(Reason.INVALID_ANNOTATION, "odd")
            memory_mib = TOO_MUCH_MIB if asked.uid.startswith("never") else None
            return PlacementRequest(asked.uid, 800, memory_mib=memory_mib, queued_at=self.queue.since(asked))

        self.context = self.queue.keeping(self.context.at(self.context.now + 1), request_of, self.nodes)
        return {each.pod.request.pod_uid: each.node for each in self.context.kept}


def test_a_node_that_changes_is_looked_at_alone_and_gives_what_a_fresh_look_gives() -> None:
    cluster = Cluster(node("n1", "a"), node("n2", "b"))
    cluster.wait(pod("one", "a"), pod("two", "b"))
    assert cluster.kept() == {"one": "n1", "two": "n2"}
    for name, new in [
        ("n1", node("n1", "b")),
        ("n2", node("n2", "a")),
        ("n1", node("n1", "b", (Taint("two", "", "NoSchedule"),))),
        ("n2", node("n2", "a", (Taint("other", "", "NoSchedule"),))),
        ("n1", None),
        ("n1", node("n1", "a")),
    ]:
        cluster.change(name, new)
        fresh = Cluster(*cluster.nodes.values())
        fresh.wait(pod("one", "a"), pod("two", "b"))
        assert cluster.kept() == fresh.kept()
    assert cluster.kept() == {"one": "n1"}


def test_rules_of_pods_that_wait_no_more_are_forgotten() -> None:
    cluster = Cluster(node("n1"), node("n2"))
    for number in range(200):
        cluster.wait(pod(f"p{number}", "a"))
        assert cluster.kept()
        cluster.queue.drop(f"p{number}")
    cluster.kept()
    assert len(cluster.queue._allowed) == 0


def test_rules_that_cannot_be_worked_out_at_once_have_their_turn(monkeypatch) -> None:
    cluster = Cluster(node("n1"), node("n2"))
    monkeypatch.setattr(queued, "MOST_MATCHED", 4)
    cluster.wait(*(pod(f"p{number}", "a") for number in range(4)))
    assert sorted(cluster.kept()) == ["p0", "p1"]
    assert sorted(cluster.kept()) == ["p0", "p1", "p2", "p3"]


def test_a_pod_whose_creation_cannot_be_read_is_kept_nothing() -> None:
    cluster = Cluster(node("n1"))
    cluster.wait(pod("odd", "a", created_at="yesterday"), pod("none", "a", created_at=""))
    assert cluster.kept() == {}


def test_a_pod_with_rules_that_are_too_large_is_kept_nothing() -> None:
    cluster = Cluster(node("n1"))
    large = replace(pod("large", "a"), rules=replace(NO_RULES, is_too_large=True))
    cluster.wait(large, pod("usual", "a"))
    assert cluster.kept() == {"usual": "n1"}


def test_rules_that_cost_more_than_a_call_may_are_kept_nothing_and_hold_up_nobody(monkeypatch) -> None:
    cluster = Cluster(node("n1"), node("n2"))
    monkeypatch.setattr(queued, "MOST_MATCHED", 4)
    costly = pod("costly", "a")
    assert costly.rules is not None
    cluster.wait(replace(costly, rules=replace(costly.rules, parts=500)), pod("usual", "a"))
    assert sorted(cluster.kept()) == ["usual"]


def test_who_was_asked_about_is_tried_until_a_binding_can_come_no_more() -> None:
    ticks = [0.0]
    queue = QueuedPods(AFTER, clock=lambda: ticks[0])
    fresh = replace(pod("fresh", "a"), unschedulable=False)
    queue.asked("fresh")  # before the watch shows it
    queue.put(fresh, NOW + 1)
    for name in ("new", "nominated"):
        queue.put(replace(fresh, uid=name, nominated_node="n1" if name == "nominated" else ""), NOW)
    ticks[0] = BINDING_SECONDS
    assert [each.uid for each in queue.untried()] == ["new"]
    ticks[0] = BINDING_SECONDS + 1
    assert [each.uid for each in queue.untried()] == ["fresh", "new"]
    queue.asked("new")
    assert list(queue._asked_at) == ["new"]
    queue.drop("new")
    assert queue._asked_at == {}


@pytest.mark.parametrize("never", [4, 200])
def test_pods_that_no_gpu_could_take_hold_up_nobody(never) -> None:
    """They have waited longest, so they are examined first; each search of theirs is one of a second's few."""
    cluster = Cluster(node("n1"))
    cluster.wait(*(pod(f"never{number}", "a") for number in range(never)), pod("usual", "a", LATER))
    seconds = next(second for second in range(60) if "usual" in cluster.kept())
    assert seconds <= never // MOST_EXAMINED
    cluster.wait(pod("late", "a", LATER))
    assert sorted(cluster.kept()) == ["late", "usual"]


@pytest.mark.parametrize("invalid", [False, True], ids=["rules", "request"])
def test_pods_that_are_never_examined_hold_up_nobody(invalid) -> None:
    cluster = Cluster(node("n1"))
    large = replace(NO_RULES, is_too_large=True)
    odd = [replace(pod(f"odd{number}", "a"), rules=large) for number in range(MOST_EXAMINED)]
    if invalid:
        cluster.refused = {each.uid for each in odd}
        odd = [replace(each, rules=None) for each in odd]
    cluster.wait(*odd, pod("usual", "a", LATER))
    assert cluster.kept() == {}
    assert cluster.kept() == {"usual": "n1"}


def test_a_pod_that_no_gpu_could_take_is_examined_again_in_turn() -> None:
    cluster = Cluster(node("n1", "b"), node("n2", "a"))
    cluster.wait(pod("usual", "a", LATER), *(pod(f"never{number}", "a") for number in range(9)), pod("moved", "b"))
    cluster.change("n1", node("n1", "c"))
    assert cluster.kept() == {"usual": "n2"}
    cluster.change("n1", node("n1", "b"))
    seconds = next(second for second in range(60) if "moved" in cluster.kept())
    assert seconds <= 10
    assert cluster.kept() == {"moved": "n1", "usual": "n2"}


def test_of_a_pod_that_is_gone_nothing_is_remembered() -> None:
    cluster = Cluster(node("n1"))
    cluster.wait(*(pod(f"never{number}", "a") for number in range(3)))
    assert cluster.kept() == {}
    cluster.queue.drop("never0")
    cluster.wait(replace(pod("never1", "a"), unschedulable=False))
    assert list(cluster.queue._in_vain) == ["never2"]
    assert cluster.kept() == {}
