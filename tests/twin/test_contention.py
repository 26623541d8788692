import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.core.gpu import Counters
from gpushare.twin.contention import WORKLOADS, TwinLoad, cap_progress, contended_progress

ratio = st.floats(0, 1)
counters = st.builds(
    Counters,
    sm_util=ratio,
    fp32_util=ratio,
    fp64_util=ratio,
    hmma_tensor_util=ratio,
    integer_util=ratio,
    dram_bw_util=ratio,
)
loads = st.lists(st.builds(TwinLoad, counters, st.integers(1, 100)), min_size=1, max_size=8)


def test_alone_and_uncapped_everything_runs_at_its_own_speed():
    for workload in WORKLOADS.values():
        assert contended_progress([TwinLoad(workload.solo)]) == (1.0,)


@given(loads)
def test_progress_is_a_ratio_and_never_above_what_the_cap_allows(loads):
    progress = contended_progress(loads)
    assert len(progress) == len(loads)
    for load, value in zip(loads, progress, strict=True):
        assert 0 < value <= max(0.01, cap_progress(load.solo, load.thread_percentage)) + 1e-9


@given(loads, counters)
def test_at_uncapped_gpus_a_neighbour_never_speeds_anyone_up(loads, arriving):
    uncapped = [TwinLoad(load.solo) for load in loads]
    before, after = contended_progress(uncapped), contended_progress([*uncapped, TwinLoad(arriving)])
    if len(loads) > 1:  # one alone has no neighbours' SMs to share either way
        assert all(b >= a - 1e-9 for b, a in zip(before, after, strict=False))


def test_two_who_want_the_same_pipe_get_about_half_each():
    stream = TwinLoad(WORKLOADS["stream"].solo)
    assert contended_progress([stream, stream]) == pytest.approx((0.5, 0.5), abs=0.06)


def test_those_who_want_different_pipes_hardly_meet():
    quiet, busy = TwinLoad(WORKLOADS["latency-probe"].solo), TwinLoad(WORKLOADS["resnet50-train"].solo)
    assert min(contended_progress([quiet, busy])) > 0.85


def test_a_cap_above_the_need_costs_nothing_and_one_below_less_than_its_cut():
    solo = Counters(sm_util=0.5)
    assert cap_progress(solo, 60) == 1.0
    assert 0.5 < cap_progress(solo, 25) < 1.0
