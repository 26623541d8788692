"""A GpuShare's phase, conditions and status from what was decided and observed."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.core.admission.resolve import Defaults
from gpushare.core.api import names
from gpushare.core.api.decision import Decision
from gpushare.core.api.objects import (
    Condition,
    ConditionStatus,
    GpuNodeStatus,
    GpuShare,
    GpuShareStatus,
    GpuStatus,
    Observed,
    Phase,
    PodPlacement,
    TenantStatus,
    WorkloadSignature,
)
from gpushare.core.api.pod import PodView
from gpushare.core.api.request import JobClass
from gpushare.core.api.schema import from_json, to_json
from gpushare.core.control.lifecycle import (
    PROFILED,
    READY,
    WITHIN_TOLERANCE,
    Fares,
    OperatorSettings,
    Situation,
    differs_only_in_figures,
    fares_of,
    next_phase,
    status_of,
    transitions,
)

Json = dict[str, Any]
SETTINGS = OperatorSettings(Defaults(max_slowdown_ratio=1.5))
NOW, LATER = "2026-11-21T11:00:00Z", "2026-11-21T12:00:00Z"
SHARE = GpuShare.from_object({"metadata": {"name": "deployment-web", "namespace": "shop", "generation": 3}})


def facts(
    name: str, *, placed: bool = True, phase: str = "Running", fraction: str = "0.25", **more: str
) -> PodView:
    annotations = {names.FRACTION: fraction, **more}
    if placed:
        annotations = Decision(("GPU-1",), 25, 8192, NOW).to_annotations() | annotations
    return PodView.from_object(
        {
            "metadata": {"namespace": "shop", "name": name, "uid": f"uid-{name}", "annotations": annotations},
            "spec": {
                "nodeName": "n1" if placed else None,
                "containers": [
                    {"name": "a"},
                    {"name": "b", "resources": {"limits": {names.SHARE_RESOURCE: "25"}}},
                ],
            },
            "status": {"phase": phase},
        }
    )


def test_the_class_is_what_the_pods_say_and_stays_when_they_end():
    usual = facts("a")
    protected = facts("b", **{names.CLASS: "latency"})
    [of_default, of_both] = [status_of(SHARE, pods, {}, SETTINGS, NOW) for pods in ([usual], [usual, protected])]
    assert (of_default.job_class, of_both.job_class) == (JobClass.THROUGHPUT, JobClass.LATENCY)
    ended = facts("b", phase="Succeeded", **{names.CLASS: "latency"})
    assert status_of(replace(SHARE, status=of_both), [ended], {}, SETTINGS, LATER).job_class is JobClass.LATENCY
    own = replace(SHARE, spec=replace(SHARE.spec, job_class=JobClass.LATENCY))
    assert status_of(own, [usual], {}, SETTINGS, NOW).job_class is JobClass.LATENCY


def condition(status: GpuShareStatus, kind: str) -> Condition:
    (found,) = (one for one in status.conditions if one.type == kind)
    return found


def pod_metadata() -> Json:
    return {"namespace": "n", "name": "p", "uid": "u"}


def test_a_placed_group() -> None:
    pods = [facts("b"), facts("a"), facts("c", placed=False), facts("d", phase="Succeeded")]
    fares = {"uid-a": Fares(0.8, 1.25), "uid-b": Fares(0.5, 2.0), "uid-elsewhere": Fares(0.1, 10.0)}
    status = status_of(SHARE, pods, fares, SETTINGS, NOW)
    assert status.phase is Phase.SHARING
    assert status.observed_generation == 3
    assert status.observed == Observed(0.5, 2.0)
    assert status.placements == (
        PodPlacement("uid-a", "a", "n1", ("GPU-1",), 25, 25, 8192, 0.8, 1.25),
        PodPlacement("uid-b", "b", "n1", ("GPU-1",), 25, 25, 8192, 0.5, 2.0),
    )
    ready = condition(status, READY)
    assert (ready.status, ready.reason) == (ConditionStatus.FALSE, "WaitingForRoom")
    assert ready.message.startswith("2 of 3 pods are placed")
    broken = condition(status, WITHIN_TOLERANCE)
    assert (broken.status, broken.reason) == (ConditionStatus.FALSE, "SlowdownBeyondTolerance")
    assert from_json(GpuShareStatus, to_json(status)) == status, "what is written is what is read back"


def test_the_share_of_an_auto_pod_is_what_admission_gave_it() -> None:
    status = status_of(SHARE, [facts("a", fraction="auto")], {}, SETTINGS, NOW)
    assert status.placements[0].share_percent == 25


def test_an_empty_group() -> None:
    status = status_of(SHARE, [], {}, SETTINGS, NOW)
    assert (status.phase, status.observed, status.placements) == (Phase.PENDING, None, ())
    assert condition(status, READY).reason == "NoPods"
    assert condition(status, WITHIN_TOLERANCE).status is ConditionStatus.UNKNOWN
    assert condition(status, PROFILED).reason == "NotYet"


@pytest.mark.parametrize("wrong", [{names.FRACTION: "7.5"}, {names.THREAD_PERCENTAGE: "none"}])
def test_a_malformed_pod_is_named_and_the_others_are_shown(wrong: Json) -> None:
    bad = facts("bad", **({"fraction": wrong[names.FRACTION]} if names.FRACTION in wrong else wrong))
    status = status_of(SHARE, [bad, facts("good")], {}, SETTINGS, NOW)
    assert "good" in [placement.pod for placement in status.placements]
    ready = condition(status, READY)
    assert (ready.status, ready.reason) == (ConditionStatus.FALSE, "Malformed")
    assert ready.message.startswith("bad: annotation gpushare.io/")


def test_the_profile_is_kept_and_the_tolerance_is_the_specs() -> None:
    share = GpuShare.from_object(
        {
            "metadata": {"name": "s", "namespace": "shop"},
            "spec": {"maxSlowdown": 3.0},
            "status": {"profile": {"gpuModel": "NVIDIA H200"}, "recommendedFraction": "0.2"},
        }
    )
    status = status_of(share, [facts("a")], {"uid-a": Fares(0.5, 2.0)}, SETTINGS, NOW)
    assert status.profile == WorkloadSignature(gpu_model="NVIDIA H200")
    assert status.recommended_fraction == "0.2"
    assert condition(status, PROFILED).status is ConditionStatus.TRUE
    assert condition(status, WITHIN_TOLERANCE).status is ConditionStatus.TRUE


def test_a_condition_keeps_its_time_until_its_status_changes() -> None:
    first = status_of(SHARE, [facts("a")], {}, SETTINGS, NOW)
    again = status_of(replace(SHARE, status=first), [facts("a")], {}, SETTINGS, LATER)
    assert again == first, "nothing changed: nothing to write"
    waiting = status_of(replace(SHARE, status=first), [facts("a", placed=False)], {}, SETTINGS, LATER)
    assert condition(waiting, READY).last_transition_time == LATER
    assert condition(waiting, PROFILED).last_transition_time == NOW


def test_figures_alone_can_wait() -> None:
    one = status_of(SHARE, [facts("a")], {"uid-a": Fares(0.9, 1.1)}, SETTINGS, NOW)
    other = status_of(replace(SHARE, status=one), [facts("a")], {"uid-a": Fares(0.8, 1.2)}, SETTINGS, NOW)
    assert one != other
    assert differs_only_in_figures(one, other)
    broken = status_of(replace(SHARE, status=one), [facts("a")], {"uid-a": Fares(0.1, 9.0)}, SETTINGS, NOW)
    assert not differs_only_in_figures(one, broken), "a tolerance broken is told at once"


def test_events_are_told_once() -> None:
    empty = GpuShareStatus()
    placed = status_of(SHARE, [facts("a")], {}, SETTINGS, NOW)
    assert transitions(empty, placed) == (("Sharing", "phase was Pending, is Sharing"),)
    slow = status_of(replace(SHARE, status=placed), [facts("a")], {"uid-a": Fares(0.4, 2.5)}, SETTINGS, NOW)
    assert transitions(placed, slow) == (
        ("SlowdownBeyondTolerance", "a pod is slowed down more than the tolerated 1.5 times"),
    )
    assert transitions(slow, slow) == ()


def test_fares_are_the_worst_over_a_pods_gpus() -> None:
    def gpu(*tenants: TenantStatus) -> GpuStatus:
        return GpuStatus(uuid="g", tenants=tenants)

    nodes = [
        GpuNodeStatus(gpus=(gpu(TenantStatus("p", progress_ratio=0.9, slowdown_ratio=1.1), TenantStatus("q")),)),
        GpuNodeStatus(gpus=(gpu(TenantStatus("p", progress_ratio=0.77777, slowdown_ratio=1.3)), gpu())),
    ]
    assert fares_of(nodes) == {"p": Fares(0.778, 1.3), "q": Fares(None, None)}


SITUATIONS = st.builds(
    lambda live, part, *flags: Situation(live, min(part, live), *flags),
    st.integers(0, 5),
    st.integers(0, 5),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)


@pytest.mark.parametrize(
    ("current", "situation", "expected"),
    [
        (Phase.PENDING, Situation(1, 0), Phase.PENDING),
        (Phase.PENDING, Situation(1, 1), Phase.SHARING),
        (Phase.PENDING, Situation(1, 1, profiling=True), Phase.PROBATION),
        (Phase.PROBATION, Situation(1, 1, profiling=True, profiled=True), Phase.SHARING),
        (Phase.PROBATION, Situation(1, 0, profiling=True), Phase.PENDING),
        (Phase.SHARING, Situation(0, 0), Phase.PENDING),
        (Phase.SHARING, Situation(0, 0, profiled=True), Phase.PROFILED),
        (Phase.PROFILED, Situation(1, 1, profiling=True, profiled=True), Phase.SHARING),
        (Phase.SHARING, Situation(2, 1, retracting=True), Phase.RETRACTED),
        (Phase.RETRACTED, Situation(1, 0), Phase.RETRACTED),
        (Phase.RETRACTED, Situation(1, 1), Phase.SHARING),
        (Phase.RETRACTED, Situation(0, 0, profiled=True), Phase.PROFILED),
    ],
)
def test_phases(current: Phase, situation: Situation, expected: Phase) -> None:
    assert next_phase(current, situation) is expected


@given(st.sampled_from(Phase), SITUATIONS)
def test_phases_settle_at_once_and_mean_what_they_say(current: Phase, situation: Situation) -> None:
    phase = next_phase(current, situation)
    assert next_phase(phase, situation) is phase, "the same facts give the same phase again: no flapping"
    if phase in (Phase.SHARING, Phase.PROBATION):
        assert situation.placed > 0
    if phase in (Phase.PENDING, Phase.PROFILED):
        assert situation.placed == 0
    if phase is Phase.PROBATION:
        assert situation.profiling
        assert not situation.profiled


def test_every_phase_is_reachable_from_every_other() -> None:
    situations = [
        Situation(live, placed, *flags)
        for live, placed in [(0, 0), (1, 0), (1, 1)]
        for flags in itertools.product([False, True], repeat=3)
    ]
    for current in Phase:
        one_step = {next_phase(current, situation) for situation in situations}
        assert one_step | {next_phase(p, s) for p in one_step for s in situations} == set(Phase)
