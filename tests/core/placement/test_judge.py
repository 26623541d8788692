"""The judge remembers its verdicts on the newcomers that it was asked about last, and not too much else."""

from dataclasses import replace

import numpy as np
import pytest

from gpushare.core.api import JobClass
from gpushare.core.interference import Profile
from gpushare.core.placement import judge as judge_module
from gpushare.core.placement.caution import Cautious
from gpushare.core.placement.judge import MOST_NEWCOMERS, MOST_SETS, Judge, Newcomer, most_remembered
from gpushare.core.placement.known import KeptApart, KnownWorkload
from gpushare.core.placement.policies.classic import BestFit
from gpushare.core.placement.shapes import GpuSpec, NodeSpec, Placement, PlacementRequest
from gpushare.core.placement.state import ClusterState
from gpushare.data import default_model
from gpushare.twin.contention import WORKLOADS

H200 = "NVIDIA H200"


class CountingJudge(Judge):
    """Notes which newcomers it judges, instead of taking from what it remembers."""

    def __init__(self) -> None:
        super().__init__(default_model)
        self.judged: list[Newcomer] = []

    def _judge(self, newcomer, begin):
        self.judged.append(newcomer)
        return super()._judge(newcomer, begin)


def newcomer(number: int) -> Newcomer:
    return Newcomer(None, 1 + number % 99, JobClass.THROUGHPUT, 1.5 + number)


def test_a_newcomer_that_is_asked_about_again_and_again_is_not_judged_anew():
    judge = CountingJudge()
    frequent = newcomer(0)
    judge.verdicts(frequent)
    for number in range(1, MOST_NEWCOMERS + 1):
        judge.verdicts(newcomer(number))
        judge.verdicts(frequent)
    assert judge.judged.count(frequent) == 1
    assert len(judge.judged) == 1 + MOST_NEWCOMERS
    judge.verdicts(newcomer(1))
    assert judge.judged[-1] == newcomer(1), "of 257 the one that was asked about longest ago is forgotten"


def one_gpu() -> ClusterState:
    return ClusterState([NodeSpec("n", (GpuSpec("g", H200),))])


def of_workload(number: int) -> PlacementRequest:
    """A pod of a workload of its own, whose profile is all that is known of it."""
    solo = WORKLOADS["gemm-fp16"]
    profile = Profile(solo.solo, solo.iterations_per_s)
    return PlacementRequest("pod", 200, known=KnownWorkload(f"w{number}@now", H200, 1.5, profile, f"w{number}"))


def test_profiles_of_workloads_that_are_gone_are_forgotten():
    judge, state = Judge(default_model), one_gpu()
    neighbour = of_workload(0).as_tenant(0)
    counts = []
    for number in range(200):
        judge.resident_sets(state)
        judge.takes(of_workload(number), H200, [neighbour], 0.0)
        counts.append(len(judge.table(H200)))
        judge.forget()  # as when the GpuShare of the workload is gone
    most = most_remembered(state.clients.size)
    assert max(counts) < most + 20
    assert len(judge.table(H200)) < most


def test_sets_of_tenants_that_were_on_a_gpu_for_a_while_are_forgotten():
    judge, state = Judge(default_model), one_gpu()
    most = most_remembered(state.clients.size)
    counts = []
    for number in range(5 * most):
        request = replace(PlacementRequest("pod", 200), max_slowdown=1.5 + number)
        state.reserve("pod", Placement("n", ("g",)), request)
        assert judge.set_at(int(judge.resident_sets(state)[0, 0])).members[0].max_slowdown == 1.5 + number
        state.release("pod")
        counts.append(len(judge.census(state)))
    assert max(counts) <= most + state.clients.size + 2


@pytest.mark.parametrize("gpus", [0, 1])
def test_gpus_that_a_node_has_lost_hold_no_tenants(gpus):
    """Before: the tenants of a node that was gone counted in the outlook until another node had its row."""
    both = NodeSpec("n", (GpuSpec("g", H200), GpuSpec("h", H200)))
    judge, state = Judge(default_model), ClusterState([both])
    request = replace(of_workload(0), pod_uid="pod")
    state.reserve("pod", Placement("n", ("h",)), request)
    assert int(judge.census(state).sum()) == 1
    if gpus:
        state.update_node(replace(both, gpus=both.gpus[:gpus]))
    else:
        state.remove_node("n")
    assert int(judge.census(state).sum()) == 0
    assert judge.totals(state) == (0.0, 0.0)


def test_where_a_node_is_gone_no_workloads_are_kept_apart():
    judge, state = Judge(default_model), one_gpu()
    wary = of_workload(0)
    wary = replace(wary, known=replace(wary.known, apart=(KeptApart(frozenset({"w1"}), 10.0),)))
    state.reserve("pod", Placement("n", ("g",)), wary)
    assert judge.kept_apart(state, of_workload(1).known, 0.0) is not None
    state.remove_node("n")
    assert judge.kept_apart(state, of_workload(1).known, 0.0) is None


def test_a_large_cluster_remembers_as_many_sets_as_ever():
    assert most_remembered(5000 * 8) == MOST_SETS
    assert most_remembered(2) < most_remembered(200) < MOST_SETS


def test_what_a_newcomer_adds_is_of_the_sets_as_they_are_numbered_then(monkeypatch):
    placed, asked = of_workload(0), replace(of_workload(1), share_milli=300)
    unnamed = replace(asked, known=replace(asked.known, name=""))
    state = ClusterState([NodeSpec("n", (GpuSpec("g", H200), GpuSpec("h", H200)))])
    judge = Judge(default_model)
    for number in range(1 + state.clients.size):  # sets with earlier numbers than that of the one that stays
        state.reserve(
            "pod", Placement("n", ("g",)), replace(PlacementRequest("pod", 200), max_slowdown=1.5 + number)
        )
        judge.resident_sets(state)
        state.release("pod")
    state.reserve("pod", Placement("n", ("h",)), placed)
    judge.resident_sets(state)
    rows = np.array([0])
    gains = Cautious(BestFit(), judge, unnamed, 0.0)._gains_of(state, rows)
    monkeypatch.setattr(judge_module, "LEAST_SETS", 0)
    monkeypatch.setattr(judge_module, "SETS_PER_GPU", 0)
    version = judge.version
    again = Cautious(BestFit(), judge, unnamed, 0.0)._gains_of(state, rows)
    assert judge.version > version, "the sets were numbered anew"
    assert again == pytest.approx(gains, abs=1e-5)
    assert gains[0, 0] > gains[1, 0], "an empty GPU gains more"
