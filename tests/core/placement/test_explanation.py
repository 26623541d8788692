"""Why a pod is where it is: the decision asked again, with everybody on its GPU."""

from dataclasses import replace

import pytest

from gpushare.core.admission import Defaults
from gpushare.core.api import GpuShare, JobClass, Rejection, TenantStatus
from gpushare.core.interference import Profile, promised_progress
from gpushare.core.placement import (
    ClusterState,
    DecisionContext,
    GpuSpec,
    Happening,
    Judge,
    KnownWorkload,
    NodeSpec,
    Placement,
    PlacementRequest,
    PlaceStanding,
    ProbationSettings,
    ProbationTerm,
    Settings,
    Unprofiled,
    decide,
    explain,
)
from gpushare.core.placement.policies import NAMES, BestFit
from gpushare.data import default_model
from gpushare.twin.contention import WORKLOADS

H200 = "NVIDIA H200"


def known(workload: str, max_slowdown: float = 3.0) -> KnownWorkload:
    solo = WORKLOADS[workload]
    return KnownWorkload(workload, H200, max_slowdown, Profile(solo.solo, solo.iterations_per_s))


def context_of(*running: tuple[PlacementRequest, Placement], nodes: int = 2) -> DecisionContext:
    state = ClusterState(NodeSpec(f"n{at}", (GpuSpec(f"g{at}", H200),)) for at in range(nodes))
    for request, placement in running:
        state.reserve(request.pod_uid, placement, request)
    return DecisionContext(state, BestFit(), Judge(default_model))


def at(node: int, cap: int = 50) -> Placement:
    return Placement(f"n{node}", (f"g{node}",), 0, cap)


def asked(name: str, percent: int, workload: str | None = None) -> PlacementRequest:
    return PlacementRequest(f"shop/{name}", percent * 10, known=known(workload) if workload else None)


def explained(request: PlacementRequest, context: DecisionContext, placed: Placement | None, **more: object):
    return explain(request, context, default_model, placed, defaults=Defaults(), **more)  # type: ignore[arg-type]


def test_its_answer_is_the_decisions_own() -> None:
    context = context_of((asked("other", 40), at(1)))
    found = explained(asked("web", 50), context, at(1))
    assert found.now == decide(asked("web", 50), context)
    assert (found.standing, found.fits_on, found.nodes, found.better) == (PlaceStanding.BEST, 2, 2, 0)


def test_a_better_node_and_one_where_it_no_longer_fits_are_told() -> None:
    better = explained(asked("web", 50), context_of((asked("other", 40), at(1))), at(0))
    assert (better.standing, better.better) == (PlaceStanding.BETTER_ELSEWHERE, 1)
    gone = explained(asked("web", 50), context_of((asked("other", 60), at(0))), at(0))
    assert gone.standing is PlaceStanding.NOT_NOW
    assert [(each.example, each.nodes) for each in gone.elsewhere] == [("n0", 1)]
    assert "needs 50% of one GPU, the freest has 40% free" in gone.elsewhere[0].rejection.detail


def test_a_waiting_pod_is_told_where_it_would_go_or_why_nowhere() -> None:
    fits = explained(asked("web", 50), context_of(), None)
    assert (fits.standing, len(fits.gpus)) == (PlaceStanding.FITS, 1)
    full = explained(asked("web", 50), context_of((asked("a", 60), at(0)), (asked("b", 60), at(1))), None)
    assert (full.standing, full.gpus, full.elsewhere[0].nodes) == (PlaceStanding.WAITS, (), 2)
    assert isinstance(full.now, Rejection)


def test_everybody_on_its_gpu_has_a_promise_and_a_prediction_under_its_own_cap() -> None:
    context = context_of((asked("other", 50, "stream"), at(0, cap=30)))
    subject = asked("web", 50, "latency-probe")
    (gpu,) = explained(subject, context, at(0)).gpus
    web, other = gpu.tenants
    assert [(each.pod, each.is_subject, each.thread_percentage) for each in gpu.tenants] == [
        ("shop/web", True, 50),
        ("shop/other", False, 30),
    ]
    expected = (
        default_model()
        .for_gpu(H200)
        .predict([(known("latency-probe").profile, 50), (known("stream").profile, 30)])
    )
    assert (web.predicted, other.predicted) == expected
    assert web.promise_ratio == promised_progress(known("latency-probe").profile, 50, 3.0)


def test_a_process_that_keeps_an_older_cap_is_predicted_under_that_one() -> None:
    context = context_of((asked("other", 50, "stream"), at(0, cap=30)))
    seen = {"shop/other": TenantStatus(pod_uid="u", thread_percentage=30, thread_percentage_in_force=80)}
    (gpu,) = explained(asked("web", 50, "latency-probe"), context, at(0), seen=seen).gpus
    tenants = [(known("latency-probe").profile, 50), (known("stream").profile, 80)]
    assert tuple(each.predicted for each in gpu.tenants) == default_model().for_gpu(H200).predict(tenants)
    assert gpu.tenants[1].thread_percentage == 30


def test_pods_with_auto_are_promised_what_a_whole_gpu_makes_over_the_slowdown() -> None:
    auto = replace(asked("other", 50, "stream"), is_auto=True)
    subject = replace(asked("web", 50, "latency-probe"), is_auto=True)
    (gpu,) = explained(subject, context_of((auto, at(0, cap=50))), at(0)).gpus
    profiles = [known(name).profile for name in ("latency-probe", "stream")]
    kept = [promised_progress(profile, 50, 3.0, is_auto=True) for profile in profiles]
    assert [each.promise_ratio for each in gpu.tenants] == kept
    assert kept[0] == pytest.approx(1 / 3)


def test_with_somebody_unknown_nothing_is_predicted_and_the_class_sets_the_tolerance() -> None:
    stranger = replace(asked("other", 40), job_class=JobClass.LATENCY)
    (gpu,) = explained(asked("web", 50, "stream"), context_of((stranger, at(0))), at(0)).gpus
    assert [each.predicted for each in gpu.tenants] == [None, None]
    assert gpu.tenants[1].promise_ratio == pytest.approx(promised_progress(None, 40, 1.1))
    assert [each.is_known for each in gpu.tenants] == [True, False]


def test_what_the_agent_keeps_beats_what_is_worked_out_here() -> None:
    seen = {"shop/web": TenantStatus(pod_uid="u", promise_ratio=0.42, progress_ratio=0.5)}
    (gpu,) = explained(asked("web", 50), context_of(), at(0), seen=seen).gpus
    assert (gpu.tenants[0].promise_ratio, gpu.tenants[0].seen) == (0.42, seen["shop/web"])


def test_what_was_done_is_in_its_order_retractions_among_it() -> None:
    retraction = {"neighbours": ["shop/web"], "at": "2026-11-22T12:00:30Z", "until": "2026-11-22T13:00:00Z"}
    replaced = {"neighbours": [], "at": "2026-11-22T11:59:50Z", "until": "2026-11-22T12:00:50Z"}
    status = {"retractions": [replaced, retraction]}
    share = GpuShare.from_object({"metadata": {"name": "s"}, "status": status})
    events = [
        Happening("2026-11-22T12:01:00Z", "Throttled", "x"),
        Happening("2026-11-22T12:00:00Z", "NoRoom", "y"),
    ]
    found = explained(asked("web", 50), context_of(), at(0), share=share, happened=events)
    assert [each.reason for each in found.done] == ["NoRoom", "Retracted", "Throttled"]
    assert "not beside them again before 2026-11-22T13:00:00Z" in found.done[1].note


@pytest.mark.parametrize("policy", NAMES)
def test_a_cluster_without_gpu_nodes_is_told(policy: str) -> None:
    state = ClusterState()
    context = DecisionContext.of(state, Settings(policy=policy), Judge(default_model))
    found = explained(asked("web", 50), context, None)
    assert (found.standing, found.nodes) == (PlaceStanding.WAITS, 0)
    assert str(found.now) == "the cluster has no nodes with GPUs that gpushare manages"


def test_a_pod_of_two_gpus_shows_both() -> None:
    state = ClusterState([NodeSpec("n", (GpuSpec("a", H200), GpuSpec("b", H200)))])
    whole = PlacementRequest("shop/big", 1000, 2)
    found = explained(whole, DecisionContext(state, BestFit(), Judge(default_model)), Placement("n", ("a", "b")))
    assert [gpu.uuid for gpu in found.gpus] == ["a", "b"]


def test_it_says_how_the_profile_of_an_unknown_workload_is_taken() -> None:
    latency = PlacementRequest("shop/api", 250, job_class=JobClass.LATENCY)
    new = PlacementRequest("shop/new", 250, unprofiled=Unprofiled(frozenset({"new"})))
    context = replace(context_of((latency, at(0))), probation=ProbationSettings(), now=0.0)
    waits = explained(new, context, None).profiling
    assert waits.startswith("It would have its GPU to itself until 00:01:00 UTC at the latest")
    term = ProbationTerm(frozenset({"new"}), "shop/new", 60.0)
    assert (
        "It has its GPU to itself until 00:01:00 UTC"
        in explained(new, context, replace(at(1), probation=term)).profiling
    )
    over = replace(context, now=60.0)
    assert explained(new, over, replace(at(1), probation=term)).profiling == "", "alone, it is seen"
    beside = explained(new, context, at(0)).profiling
    assert beside.startswith("Not profiled: it runs under its share as cap beside pods of class latency")
    assert explained(asked("web", 25), context, at(0)).profiling == ""
