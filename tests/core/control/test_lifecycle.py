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
from gpushare.core.api.meta import Condition, ConditionStatus
from gpushare.core.api.objects import (
    GpuNodeStatus,
    GpuShare,
    GpuShareStatus,
    GpuStatus,
    LearnedEffect,
    Observed,
    Phase,
    PodPlacement,
    Retraction,
    TenantStatus,
)
from gpushare.core.api.pod import PodView
from gpushare.core.api.request import JobClass
from gpushare.core.api.schema import from_json, to_json
from gpushare.core.api.slo import TenantSlo
from gpushare.core.api.workload_signature import CapPoint, WorkloadSignature
from gpushare.core.control.conditions import BROKEN, OVERLAPPING, PROFILED, PROMISE_KEPT, READY, SLO_MET
from gpushare.core.control.lifecycle import (
    OperatorSettings,
    PodReport,
    Situation,
    Standing,
    differs_only_in_figures,
    next_phase,
    pod_reports_of,
    reports_only_figures,
    status_of,
    transitions,
)
from gpushare.core.control.profiling import ProfilingView

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
    pod_reports = {
        "uid-a": PodReport(0.8, 1.25),
        "uid-b": PodReport(0.15, 6.7),
        "uid-elsewhere": PodReport(0.1, 10.0),
    }
    status = status_of(SHARE, pods, pod_reports, SETTINGS, NOW)
    assert status.phase is Phase.SHARING
    assert status.observed_generation == 3
    assert status.observed == Observed(0.15, 6.7)
    promise = 0.167  # a quarter of a GPU, unknown, over the tolerated 1.5
    assert status.placements == (
        PodPlacement("uid-a", "a", "n1", ("GPU-1",), 25, 25, 8192, 0.8, 1.25, promise),
        PodPlacement("uid-b", "b", "n1", ("GPU-1",), 25, 25, 8192, 0.15, 6.7, promise, is_promise_broken=True),
    )
    assert status.promise_ratio == promise
    ready = condition(status, READY)
    assert (ready.status, ready.reason) == (ConditionStatus.FALSE, "WaitingForRoom")
    assert ready.message.startswith("2 of 3 pods are placed")
    broken = condition(status, PROMISE_KEPT)
    assert (broken.status, broken.reason) == (ConditionStatus.FALSE, BROKEN)
    assert broken.message == "b makes less than the 0.17 of running alone that it may count on"
    assert from_json(GpuShareStatus, to_json(status)) == status, "what is written is what is read back"


def test_the_share_of_an_auto_pod_is_what_admission_gave_it() -> None:
    status = status_of(SHARE, [facts("a", fraction="auto")], {}, SETTINGS, NOW)
    assert status.placements[0].share_percent == 25


def test_an_empty_group() -> None:
    status = status_of(SHARE, [], {}, SETTINGS, NOW)
    assert (status.phase, status.observed, status.placements) == (Phase.PENDING, None, ())
    assert condition(status, READY).reason == "NoPods"
    assert (condition(status, PROMISE_KEPT).status, status.promise_ratio) == (ConditionStatus.UNKNOWN, None)
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
    status = status_of(share, [facts("a")], {"uid-a": PodReport(0.5, 2.0)}, SETTINGS, NOW)
    assert status.profile == WorkloadSignature(gpu_model="NVIDIA H200")
    assert status.recommended_fraction == "0.2"
    assert condition(status, PROFILED).status is ConditionStatus.TRUE
    assert condition(status, PROMISE_KEPT).status is ConditionStatus.TRUE


def test_a_promise_is_what_the_profile_and_the_tolerance_of_the_class_say() -> None:
    counters = {"sm_util": 0.9, "sm_occupancy": 0.5, "dram_bw_util": 0.1, "graphics_util": 1.0}
    curve = [{"threadPercentage": 25, "progress": 0.6}]
    profile = {"gpuModel": "NVIDIA H200", "counters": counters, "capCurve": curve, "windowSeconds": 60}
    known = GpuShare.from_object({"metadata": {"name": "s"}, "status": {"profile": profile}})
    usual, protected = facts("a"), facts("b", **{names.CLASS: "latency"})
    [of_known, of_latency] = [status_of(known, [pod], {}, SETTINGS, NOW) for pod in (usual, protected)]
    assert of_known.promise_ratio == 0.4, "0.6 under a cap of its share, over 1.5"
    assert of_latency.promise_ratio == 0.545, "0.6 over 1.1"
    assert status_of(known, [usual, protected], {}, SETTINGS, NOW).promise_ratio == 0.4, "the least"
    of_auto = status_of(known, [facts("c", fraction="auto")], {}, SETTINGS, NOW)
    assert of_auto.promise_ratio == 0.49, "0.6 over the root of 1.5: that share was not chosen by the profile"
    unknown = GpuShare.from_object({"metadata": {"name": "s"}})
    assert status_of(unknown, [facts("c", fraction="auto")], {}, SETTINGS, NOW).promise_ratio == 0.167


def test_a_promise_on_another_gpu_model_is_the_agents() -> None:
    counters = {"sm_util": 0.9, "sm_occupancy": 0.5, "dram_bw_util": 0.1, "graphics_util": 1.0}
    profile = WorkloadSignature("NVIDIA H200", counters, cap_curve=(CapPoint(25, 0.6),), window_seconds=60.0)
    share = replace(SHARE, status=GpuShareStatus(profile=profile))
    assert status_of(share, [facts("a")], {}, SETTINGS, NOW).promise_ratio == 0.4, "0.6 over 1.5"

    def reported(model: str, promise: float | None) -> GpuShareStatus:
        tenant = TenantStatus("uid-a", progress_ratio=0.3, progress_error_ratio=0.03, promise_ratio=promise)
        pod_reports = pod_reports_of([GpuNodeStatus(gpus=(GpuStatus("GPU-1", model=model, tenants=(tenant,)),))])
        return status_of(share, [facts("a")], pod_reports, SETTINGS, NOW)

    kept = reported("NVIDIA L4", 0.28)
    assert kept.promise_ratio == kept.placements[0].promise_ratio == 0.28
    assert condition(kept, PROMISE_KEPT).status is ConditionStatus.TRUE
    assert reported("NVIDIA L4", None).promise_ratio == 0.167, "of a workload without a profile on this model"
    assert reported("NVIDIA H200", None).promise_ratio == 0.4
    assert differs_only_in_figures(kept, reported("NVIDIA L4", 0.281)), "an agent still measures: it can wait"


def test_a_promise_is_broken_beyond_the_error_and_kept_again_once_reached() -> None:
    status = GpuShareStatus()
    told = []
    for progress, throttle in [(0.2, None), (0.15, None), (0.1, None), (0.15, None), (0.17, 0.4), (0.15, 0.4)]:
        pod_reports = {"uid-a": PodReport(progress, 1 / progress, None, 0.03, throttle)}
        new = status_of(replace(SHARE, status=status), [facts("a")], pod_reports, SETTINGS, NOW)
        told += [reason for reason, _ in transitions(status, new) if reason != "Sharing"]
        told.append(condition(new, PROMISE_KEPT).status.value)
        status = new
    assert told == ["True", "True", BROKEN, "False", "False", "PromiseKept", "True", "True"]
    assert condition(status, PROMISE_KEPT).message == (
        "every pod whose progress is known makes what it may count on; kept stopped for a part of the time, "
        "for a neighbour's promise: a"
    )
    assert status.placements[0].throttle_ratio == 0.4


def test_each_promise_is_broken_and_kept_again_by_itself() -> None:
    """Pods within their error were never broken, whoever beside them in the GpuShare was."""
    pods, status, told = [facts("a"), facts("b"), facts("c")], GpuShareStatus(), []
    for a in (0.2, 0.1, 0.15, 0.2):
        pod_reports = {"uid-a": PodReport(a, None, None, 0.03)} | {
            uid: PodReport(0.15, None, None, 0.03) for uid in ("uid-b", "uid-c")
        }
        status = from_json(
            GpuShareStatus,
            to_json(status_of(replace(SHARE, status=status), pods, pod_reports, SETTINGS, NOW)),
        )
        one = condition(status, PROMISE_KEPT)
        told.append((one.status.value, one.message.count("makes less"), status.placements[0].is_promise_broken))
    assert told == [("True", 0, None), ("False", 1, True), ("False", 1, True), ("True", 0, None)]


def slo(met: ConditionStatus, reason: str = "Met", message: str = "") -> TenantSlo:
    return TenantSlo(met, reason, message, "p99<50ms", 0.05, 0.03)


def test_latency_targets_have_a_condition_of_their_own() -> None:
    target = {names.SLO: "p99<50ms", names.SLO_FROM: "port=80,series=s", names.CLASS: "latency"}
    pods = [facts("a", **target), facts("b", **target), facts("plain"), facts("c", placed=False, **target)]
    good, bad = slo(ConditionStatus.TRUE), slo(ConditionStatus.FALSE, "Missed", "p99 is 81ms over 5 s")
    dead = slo(ConditionStatus.UNKNOWN, "Unreachable", "port 80 of the pod cannot be read")

    def met(a: TenantSlo | None, b: TenantSlo | None, before: GpuShareStatus | None = None) -> GpuShareStatus:
        pod_reports = {"uid-a": PodReport(slo=a), "uid-b": PodReport(slo=b)}
        share = SHARE if before is None else replace(SHARE, status=before)
        return status_of(share, pods, pod_reports, SETTINGS, NOW)

    assert condition(met(good, good), SLO_MET).status is ConditionStatus.TRUE
    missed = condition(met(dead, bad), SLO_MET)
    assert (missed.status, missed.reason, missed.message) == (ConditionStatus.FALSE, "Missed", "b misses p99<50ms")
    unknown = condition(met(good, dead), SLO_MET)
    assert (unknown.status, unknown.reason) == (ConditionStatus.UNKNOWN, "Unreachable")
    assert unknown.message == "b: its page or Prometheus cannot be read"
    assert condition(met(good, None), SLO_MET).reason == "NotReported"
    without = status_of(SHARE, [facts("plain")], {}, SETTINGS, NOW)
    assert not any(one.type == SLO_MET for one in without.conditions)

    was, now = met(good, good), met(good, bad)
    assert ("SloMissed", "b misses p99<50ms") in transitions(was, now)
    assert not differs_only_in_figures(was, now)
    assert [reason for reason, _ in transitions(now, met(good, good, now))] == ["SloMet"]
    figures = replace(bad, message="p99 is 92ms over 5 s", measured_seconds=0.092)
    assert differs_only_in_figures(now, met(good, figures, now))


def test_a_gpushare_says_which_pods_that_it_selects_are_anothers() -> None:
    standing = Standing(overlaps=(("a", 1), ("b", 12)))
    found = condition(status_of(SHARE, [], {}, SETTINGS, NOW, standing=standing), OVERLAPPING)
    assert (found.status, found.reason) == (ConditionStatus.TRUE, "AnotherGpuShareFirst")
    assert found.message.endswith("come first by name: 1 pod to a, 12 pods to b")
    assert not any(one.type == OVERLAPPING for one in status_of(SHARE, [], {}, SETTINGS, NOW).conditions)


def test_a_workload_without_a_profile_runs_under_its_share_and_it_is_said() -> None:
    found = condition(status_of(SHARE, [facts("a")], {}, SETTINGS, NOW), PROFILED)
    assert (found.status, found.reason) == (ConditionStatus.FALSE, "NotYet")
    assert "its share is its cap" in found.message


def test_the_target_is_what_the_node_reports() -> None:
    tenant = TenantStatus("uid-a", slo=slo(ConditionStatus.FALSE, "Missed"))
    node = GpuNodeStatus.of((GpuStatus("GPU-1", tenants=(tenant,)),))
    again = from_json(GpuNodeStatus, to_json(node))
    assert pod_reports_of([again])["uid-a"].slo == tenant.slo


def test_many_broken_promises_name_the_first() -> None:
    pods = [facts(name) for name in "abcde"]
    pod_reports = {pod.uid: PodReport(0.01, 100.0, throttle_ratio=0.5) for pod in pods}
    message = condition(status_of(SHARE, pods, pod_reports, SETTINGS, NOW), PROMISE_KEPT).message
    assert message.count("makes less") == 3
    assert message.count("and 2 more") == 2
    unknown = {pod.uid: PodReport(throttle_ratio=0.5) for pod in pods}
    found = condition(status_of(SHARE, pods, unknown, SETTINGS, NOW), PROMISE_KEPT)
    assert (found.status, "kept stopped" in found.message) == (ConditionStatus.UNKNOWN, True)


def test_what_was_learnt_and_done_stays() -> None:
    effects = (LearnedEffect("NVIDIA H200", -0.1, -0.2, 5, 0.08),)
    done = (Retraction(("shop/other",), NOW, LATER),)
    share = replace(SHARE, status=GpuShareStatus(learned=effects, retractions=done))
    status = status_of(share, [facts("a")], {}, SETTINGS, NOW)
    assert (status.learned, status.retractions) == (effects, done)


def test_a_condition_keeps_its_time_until_its_status_changes() -> None:
    first = status_of(SHARE, [facts("a")], {}, SETTINGS, NOW)
    again = status_of(replace(SHARE, status=first), [facts("a")], {}, SETTINGS, LATER)
    assert again == first, "nothing changed: nothing to write"
    waiting = status_of(replace(SHARE, status=first), [facts("a", placed=False)], {}, SETTINGS, LATER)
    assert condition(waiting, READY).last_transition_time == LATER
    assert condition(waiting, PROFILED).last_transition_time == NOW


def test_figures_alone_can_wait() -> None:
    one = status_of(SHARE, [facts("a")], {"uid-a": PodReport(0.9, 1.1)}, SETTINGS, NOW)
    other = status_of(replace(SHARE, status=one), [facts("a")], {"uid-a": PodReport(0.8, 1.2)}, SETTINGS, NOW)
    assert one != other
    assert differs_only_in_figures(one, other)
    broken = status_of(replace(SHARE, status=one), [facts("a")], {"uid-a": PodReport(0.1, 9.0)}, SETTINGS, NOW)
    assert not differs_only_in_figures(one, broken), "a promise broken is told at once"


RATIOS = st.none() | st.sampled_from([0.0, 0.3, 0.55, 0.6, 0.604, 0.65, 1.0])
TARGETS = st.none() | st.builds(
    TenantSlo,
    met=st.sampled_from(ConditionStatus),
    reason=st.sampled_from(["Met", "Missed", "Starting"]),
    message=st.sampled_from(["p99 is 40ms", "p99 is 92ms"]),
    target=st.just("p99<50ms"),
    measured_seconds=st.none() | st.sampled_from([0.04, 0.092]),
)
POD_REPORTS = st.builds(
    PodReport,
    progress_ratio=RATIOS,
    slowdown_ratio=RATIOS,
    error_ratio=st.none() | st.sampled_from([0.0, 0.05]),
    throttle_ratio=RATIOS,
    slo=TARGETS,
    promise_ratio=RATIOS,
)


@given(POD_REPORTS, POD_REPORTS, POD_REPORTS)
def test_reports_of_figures_alone_change_nothing_but_figures(
    first: PodReport, one: PodReport, other: PodReport
) -> None:
    pod = facts("a", **{names.SLO: "p99<50ms"})
    before = status_of(SHARE, [pod], {pod.uid: first}, SETTINGS, NOW)
    share = replace(SHARE, status=before)
    was, now = (status_of(share, [pod], {pod.uid: each}, SETTINGS, NOW) for each in (one, other))
    assert not reports_only_figures(one, other) or differs_only_in_figures(was, now)


def test_reports_say_when_they_matter() -> None:
    kept = PodReport(0.9, 1.1, error_ratio=0.05, promise_ratio=0.6)
    assert reports_only_figures(kept, replace(kept, progress_ratio=0.7, slowdown_ratio=1.4, promise_ratio=0.59))
    for change in (
        {"progress_ratio": 0.57},
        {"progress_ratio": None},
        {"throttle_ratio": 0.1},
        {"is_silent": True},
        {"neighbours": ("uid-b",)},
        {"slo": slo(ConditionStatus.FALSE, "Missed")},
    ):
        assert not reports_only_figures(kept, replace(kept, **change)), change
    unknown = replace(kept, promise_ratio=None)
    assert not reports_only_figures(unknown, replace(unknown, progress_ratio=0.8)), "its profile's promise may be"


def test_events_are_told_once() -> None:
    empty = GpuShareStatus()
    placed = status_of(SHARE, [facts("a")], {}, SETTINGS, NOW)
    assert transitions(empty, placed) == (("Sharing", "phase was Pending, is Sharing"),)
    slow = status_of(replace(SHARE, status=placed), [facts("a")], {"uid-a": PodReport(0.1, 10.0)}, SETTINGS, NOW)
    assert transitions(placed, slow) == (
        (BROKEN, "a makes less than the 0.17 of running alone that it may count on"),
    )
    assert transitions(slow, slow) == ()


def test_a_pods_report_is_the_worst_over_its_gpus() -> None:
    def gpu(*tenants: TenantStatus) -> GpuStatus:
        return GpuStatus(uuid="g", tenants=tenants)

    worse = TenantStatus(
        "p", progress_ratio=0.77777, slowdown_ratio=1.3, progress_error_ratio=0.05, throttle_ratio=0.25
    )
    nodes = [
        GpuNodeStatus(gpus=(gpu(TenantStatus("p", progress_ratio=0.9, slowdown_ratio=1.1), TenantStatus("q")),)),
        GpuNodeStatus(gpus=(gpu(worse), gpu())),
    ]
    assert pod_reports_of(nodes) == {
        "p": PodReport(0.778, 1.3, None, 0.05, 0.25, neighbours=("q",)),
        "q": PodReport(None, None, neighbours=("p",)),
    }


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


def test_a_workload_without_a_profile_says_how_it_stands_with_it() -> None:
    share, pods = SHARE, [facts("a"), facts("b")]
    alone = ProfilingView({"a": "11:01:00 UTC"}, {"b": "beside pods of class latency, which are never stopped"})
    status = status_of(share, pods, {}, SETTINGS, NOW, profiling=alone)
    assert status.phase is Phase.PROBATION
    assert condition(status, PROFILED).reason == "OnProbation"
    unread = ProfilingView({}, alone.unread)
    status = status_of(share, pods, {}, SETTINGS, NOW, profiling=unread)
    assert status.phase is Phase.SHARING
    told = condition(status, PROFILED)
    assert (told.status, told.reason) == (ConditionStatus.FALSE, "UnderItsShare")
    assert told.message.startswith(
        "not profiled: b runs under its share as cap beside pods of class latency, which are never stopped"
    )


@pytest.mark.parametrize("condition", names.READING_CONDITIONS)
def test_pod_reports_know_the_neighbours_and_whether_pods_can_be_read_beside_them(condition: str) -> None:
    gpus = (
        GpuStatus("GPU-1", tenants=(TenantStatus("a"), TenantStatus("b"))),
        GpuStatus("GPU-2", tenants=(TenantStatus("c"), TenantStatus("a"))),
    )
    stuck = Condition(condition, ConditionStatus.FALSE)
    pod_reports = pod_reports_of([GpuNodeStatus(gpus=gpus, conditions=(stuck,))])
    assert {uid: report.neighbours for uid, report in pod_reports.items()} == {
        "a": ("b", "c"),
        "b": ("a",),
        "c": ("a",),
    }
    assert not any(report.can_read for report in pod_reports.values())
    assert all(report.can_read for report in pod_reports_of([GpuNodeStatus(gpus=gpus)]).values())
