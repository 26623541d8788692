"""Placement of workloads with phases: by the one that is hurt most and presses most."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare.core.api import (
    CapPoint,
    GpuShare,
    GpuShareStatus,
    JobClass,
    WorkloadPhase,
    WorkloadSignature,
)
from gpushare.core.interference import Profile
from gpushare.core.placement.decide import DecisionContext, survey
from gpushare.core.placement.forecasts import ForecastTable, Member
from gpushare.core.placement.judge import Judge, rows_of
from gpushare.core.placement.known import KnownWorkload, known_of
from gpushare.core.placement.policies import BestFit
from gpushare.core.placement.state import ClusterState, GpuSpec, NodeSpec, Placement, PlacementRequest
from gpushare.data import default_model
from gpushare.twin.contention import WORKLOADS

H200 = "NVIDIA H200"
SOLO = {name: Profile(each.solo, each.iterations_per_s) for name, each in WORKLOADS.items()}
LIGHT, HEAVY = "latency-probe", "stream"


def program(usual, *others):
    return replace(SOLO[usual], phases=tuple(SOLO[name] for name in others))


def known(profile, max_slowdown):
    return KnownWorkload(repr(profile), H200, max_slowdown, profile)


def takes(resident, comes):
    """Whether a GPU that one workload has half of takes another on the other half."""
    state = ClusterState([NodeSpec("n0", (GpuSpec("g0", H200),))])
    state.reserve("a", Placement("n0", ("g0",)), PlacementRequest("a", 500, job_class=JobClass.THROUGHPUT))
    judge = Judge(default_model, {"a": resident}.get)
    asked = PlacementRequest("new", 500, job_class=JobClass.THROUGHPUT, known=comes)
    return survey(asked, DecisionContext(state, BestFit(), judge)).nodes == ["n0"]


def test_a_phase_that_would_hurt_or_be_hurt_too_much_keeps_two_apart_whoever_was_there_first():
    strict = 1.25
    light, heavy, mixed = (known(each, strict) for each in (SOLO[LIGHT], SOLO[HEAVY], program(LIGHT, HEAVY)))
    assert takes(light, light)
    assert not takes(heavy, heavy)
    assert takes(light, mixed) == takes(light, heavy)
    assert not takes(heavy, mixed), "for most of the time it would be well"
    assert not takes(mixed, heavy)
    assert not takes(mixed, mixed)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(SOLO)), st.sampled_from(sorted(SOLO))), min_size=1, max_size=3),
    st.sampled_from((1.1, 1.5, 3.0)),
)
def test_of_a_set_no_more_is_expected_or_promised_than_of_each_mixture_of_phases(pairs, slowdown):
    share = 100 // len(pairs) - 1

    def member(profile, name):
        return Member(name, share, JobClass.THROUGHPUT, slowdown, max(share, 50), profile=profile)

    table = ForecastTable(default_model())
    mixed = [member(program(*pair), f"mixed {pair}") for pair in pairs]
    plain = [member(SOLO[usual], usual) for usual, _ in pairs]
    other = [member(SOLO[work], work) for _, work in pairs]
    index = rows_of(table, [mixed, plain, other])
    forecast = table.forecast(index, stops=False)
    floors = table.floors[index]
    assert (floors[0] <= floors[1:] + 1e-9).all(), "what is promised is promised for each phase"
    assert forecast.summed[0] <= forecast.summed[1:].min() + 1e-5
    assert forecast.summed[1:].tolist() == table.forecast(index[1:], stops=False).summed.tolist()


def test_what_is_known_changes_its_key_when_a_phase_is_added():
    def share(*phases):
        signature = WorkloadSignature(
            H200, WORKLOADS[LIGHT].solo.as_dict(), window_seconds=60.0, taken_at="t", phases=phases
        )
        made = GpuShare.from_object({"metadata": {"name": "s", "namespace": "shop"}})
        return replace(made, status=GpuShareStatus(profile=signature))

    phase = WorkloadPhase(WORKLOADS[HEAVY].solo.as_dict(), 0.2, window_seconds=20.0)
    before, after, again = (known_of(share(*each), lambda _: 0.0) for each in ((), (phase,), (phase,)))
    assert before.key != after.key == again.key
    assert [each.counters for each in after.profile.phases] == [WORKLOADS[HEAVY].solo]
    unusable = replace(phase, counters={"fp32_util": 0.4})
    assert known_of(share(unusable), lambda _: 0.0).profile.phases == ()


def test_what_is_known_changes_its_key_when_the_cap_curve_grows():
    def key(*caps):
        points = tuple(CapPoint(cap, cap / 100) for cap in caps)
        signature = WorkloadSignature(
            H200,
            WORKLOADS[LIGHT].solo.as_dict(),
            cap_curve=points,
            window_seconds=60.0,
            taken_at="t",
            thread_percentage=50,
        )
        made = GpuShare.from_object({"metadata": {"name": "s", "namespace": "shop"}})
        return known_of(replace(made, status=GpuShareStatus(profile=signature)), lambda _: 0.0).key

    keys = [key(50), key(25, 50), key(25, 33, 50)]
    assert len(set(keys)) == len(keys), "or the extender would go on with what it predicted before"
    assert key(25, 50) == keys[1]
