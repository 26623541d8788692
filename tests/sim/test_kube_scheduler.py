"""kube-scheduler's rule for pods without a GPU, worked out by hand."""

import numpy as np

from gpushare.core.api import Reason, Rejection
from gpushare.core.placement import ClusterState, NodeSpec, Placement, PlacementRequest
from gpushare.sim.kube_scheduler import KubeSchedulerRule


def ask(cpu_milli: int, memory_mib: int) -> PlacementRequest:
    return PlacementRequest("p", 0, 0, None, cpu_milli, memory_mib)


def rule_over(*nodes: NodeSpec, balanced: bool = False) -> tuple[KubeSchedulerRule, ClusterState]:
    state = ClusterState(nodes)
    return KubeSchedulerRule(state, np.random.default_rng(0), balanced=balanced), state


def test_the_emptier_node_is_taken() -> None:
    rule, state = rule_over(NodeSpec("a", (), 1000, 1000), NodeSpec("b", (), 1000, 1000))
    state.reserve("x", Placement("a", ()), ask(500, 500))
    assert rule.place(ask(100, 100).shape) == Placement("b", ())


def test_of_equally_empty_nodes_the_balanced_one_is_taken() -> None:
    # After 100m and 100 MiB: a has 0.5 of its CPU and 0.7 of its memory left, b 0.6 of both: LeastAllocated 60 and
    # 60, BalancedAllocation 100 (1 - 0.2 / 2) = 90 and 100.
    for balanced, taken in ((True, {"b"}), (False, {"a", "b"})):
        rule, state = rule_over(NodeSpec("a", (), 1000, 1000), NodeSpec("b", (), 1000, 1000), balanced=balanced)
        state.reserve("x", Placement("a", ()), ask(400, 200))
        state.reserve("y", Placement("b", ()), ask(300, 300))
        places = [rule.place(ask(100, 100).shape) for _ in range(40)]
        assert {place.node for place in places if isinstance(place, Placement)} == taken


def test_equals_are_drawn_and_a_full_cluster_refuses() -> None:
    rule, state = rule_over(*(NodeSpec(f"n{i}", (), 1000, 1000) for i in range(3)))
    taken = {place.node for _ in range(40) if isinstance(place := rule.place(ask(1, 1).shape), Placement)}
    assert taken == {"n0", "n1", "n2"}
    refused = rule.place(ask(2000, 1).shape)
    assert isinstance(refused, Rejection)
    assert refused.reason is Reason.CPU
    assert not state.reservations
