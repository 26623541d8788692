"""What a GpuShare says of a workload without a profile: on probation, under its share, or nothing special."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from gpushare.core.admission import Defaults, ShareKey
from gpushare.core.api import ConditionStatus, Decision, GpuNode, GpuShare, Phase, PodView, names
from gpushare.core.control import OperatorSettings, pod_reports_of
from gpushare.core.placement import ProbationSettings
from gpushare.kube import GPUSHARES
from gpushare.kube.fake import FakeApi
from gpushare.runtime.moments import unix_seconds
from gpushare_operator.metrics import OperatorMetrics
from gpushare_operator.profiling import profiling_of
from gpushare_operator.reconciler import ShareReconciler
from gpushare_operator.world import ClusterView

BEGAN = 1_795_402_800.0  # 2026-11-23T03:00:00Z
KEY = ShareKey("shop", "new")
FREES = {"type": names.THROTTLE_READY, "status": "True"}
STUCK = {"type": names.THROTTLE_READY, "status": "False"}
SLOW = {"type": names.READINGS_READY, "status": "False"}  # the counters of GPUs before Hopper


def pod(name: str, *, probation: int | None = None, job_class: str = "throughput", started: str = "") -> PodView:
    decision = Decision(("GPU-1",), 25, 8192, "2026-11-23T03:00:00Z", probation).to_annotations()
    running = [{"state": {"running": {"startedAt": started}}}] if started else []
    return PodView.from_object(
        {
            "metadata": {
                "namespace": "shop",
                "name": name,
                "uid": f"uid-{name}",
                "labels": {"app": name.partition("-")[0]},
                "annotations": {
                    names.FRACTION: "0.25",
                    names.CLASS: job_class,
                    names.WORKLOAD: name.partition("-")[0],
                    **decision,
                },
            },
            "spec": {"nodeName": "n1"},
            "status": {"containerStatuses": running},
        }
    )


def share(name: str, **status: Any) -> GpuShare:
    return GpuShare.from_object(
        {
            "metadata": {"name": name, "namespace": "shop", "uid": f"share-{name}"},
            "spec": {"selector": {"matchLabels": {"app": name}}},
            "status": status,
        }
    )


def world_of(
    *pods: PodView,
    conditions: tuple[Mapping[str, str], ...] = (FREES,),
    told: Any = None,
    now: Callable[[], float] = lambda: BEGAN + 10,
) -> ClusterView:
    made = ClusterView(told or (lambda _: None), now, monotonic=now)
    for name in ("new", "web", "batch"):
        made.put_share(share(name))
    for each in pods:
        made.put_pod(each)
    tenants = [{"podUid": each.uid, "share": 25} for each in pods]
    node = {
        "metadata": {"name": "n1"},
        "status": {"gpus": [{"uuid": "GPU-1", "tenants": tenants}], "conditions": list(conditions)},
    }
    made.put_node("n1", pod_reports_of([GpuNode.from_object(node).status]))
    return made


def seen(
    world: ClusterView, now: float = BEGAN + 10, **settings: Any
) -> tuple[dict[str, str], dict[str, str], float | None]:
    probation = ProbationSettings(**settings)
    view, ends = profiling_of(world, KEY, OperatorSettings(Defaults(), probation), now)
    return dict(view.on_probation), dict(view.unread), ends


def test_on_probation_until_its_window_ends() -> None:
    waiting = world_of(pod("new-1", probation=60))
    assert seen(waiting) == ({"new-1": "03:05:00 UTC"}, {}, BEGAN + 300)
    running = world_of(pod("new-1", probation=60, started="2026-11-23T03:00:05Z"))
    assert seen(running) == ({"new-1": "03:01:05 UTC"}, {}, BEGAN + 65)
    assert seen(running, BEGAN + 65) == ({}, {}, None)
    assert seen(running, seconds=0.0) == ({}, {}, None)


def test_pods_without_a_key_hide_no_other_pods_probation() -> None:
    """A selector's pods without a workload key get no profile; one that has a key may be on probation."""
    keyless = [replace(pod(f"new-{number}"), annotations={names.FRACTION: "0.25"}) for number in range(2, 30)]
    world = world_of(pod("new-1", probation=60), *keyless)
    assert seen(world) == ({"new-1": "03:05:00 UTC"}, {}, BEGAN + 300)


def test_a_start_that_was_seen_counts_by_the_operators_clock() -> None:
    """Before: a node's time was compared with nobody's, so a pod that kubelet took up late lost its window."""
    clock = Turned()
    for accepted, started in (("03:01:10", "03:01:20"), ("02:51:10", "02:51:20"), ("03:11:10", "03:11:20")):
        clock.seconds = BEGAN + 70
        world = world_of(pod("new-1", probation=60), now=clock.monotonic)
        clock.seconds = BEGAN + 80
        runs = pod("new-1", probation=60, started=f"2026-11-23T{started}Z")
        world.put_pod(replace(runs, accepted_at=f"2026-11-23T{accepted}Z"))
        assert seen(world, BEGAN + 81) == ({"new-1": "03:02:20 UTC"}, {}, BEGAN + 140)
        world.drop_pod(runs.uid)
        assert world.starts.of(runs) == min(max(unix_seconds(runs.started_at), BEGAN), BEGAN + 240), "forgotten"


@pytest.mark.parametrize(
    ("neighbour", "conditions", "freezes", "why"),
    [
        (None, (FREES,), False, ""),
        ("throughput", (FREES,), True, ""),
        ("throughput", (), True, ""),
        ("throughput", (STUCK,), True, "where nobody can be stopped for as long as a reading takes"),
        ("throughput", (FREES, SLOW), True, "where nobody can be stopped for as long as a reading takes"),
        ("throughput", (FREES,), False, "where nobody can be stopped for as long as a reading takes"),
        ("latency", (FREES,), True, "beside pods of class latency, which are never stopped"),
    ],
)
def test_why_it_cannot_be_read_where_it_is(
    neighbour: str | None, conditions: tuple[Mapping[str, str], ...], freezes: bool, why: str
) -> None:
    others = [pod("web-1", job_class=neighbour)] if neighbour else []
    world = world_of(pod("new-1"), *others, conditions=conditions)
    assert seen(world, freezes=freezes) == ({}, {"new-1": why} if why else {}, None)


def test_nothing_is_said_of_a_workload_with_a_profile() -> None:
    world = world_of(pod("new-1", probation=60), pod("web-1", job_class="latency"))
    profile = {"gpuModel": "NVIDIA H200", "counters": {"sm_util": 0.5}, "windowSeconds": 10.0}
    world.put_share(share("new", profile=profile))
    assert seen(world) == ({}, {}, None)


class Turned:
    """A clock that the test turns, monotonic and of the day; the latter may be set, by `set_by`."""

    def __init__(self) -> None:
        self.seconds = BEGAN
        self.set_by = 0.0

    def monotonic(self) -> float:
        return self.seconds

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.seconds + self.set_by, UTC)


async def test_the_condition_follows_without_an_event() -> None:
    api, clock = FakeApi(), Turned()
    reconciler = ShareReconciler(
        api, OperatorSettings(Defaults()), OperatorMetrics(), clock=clock.monotonic, now=clock.now
    )
    raw = {
        "metadata": {"name": "new", "namespace": "shop", "uid": "share-new"},
        "spec": {"selector": {"matchLabels": {"app": "new"}}},
    }
    api.store.put(GPUSHARES, raw)
    reconciler.intake.share(raw)
    reconciler.world.put_pod(pod("new-1", probation=60, started="2026-11-23T03:00:05Z"))

    async def after(seconds: float) -> GpuShare:
        clock.seconds = BEGAN + seconds
        while await reconciler.step():
            pass
        return GpuShare.from_object(api.store.objects(GPUSHARES)["shop/new"])

    first = await after(1)
    assert first.status.phase is Phase.PROBATION
    told = next(one for one in first.status.conditions if one.type == "Profiled")
    assert (told.status, told.reason) == (ConditionStatus.FALSE, "OnProbation")
    assert told.message == "new-1 has its GPU to itself until 03:01:05 UTC at the latest: it is taken meanwhile"
    last = await after(66)
    assert last.status.phase is Phase.SHARING
    told = next(one for one in last.status.conditions if one.type == "Profiled")
    assert told.reason == "NotYet"


@pytest.mark.parametrize("set_by", [-3600.0, 0.0, 3600.0])
async def test_a_wall_clock_that_is_set_changes_nothing_in_how_long_a_window_is_told(set_by: float) -> None:
    """Before: set back, it was told until the clock had come back; set ahead, no more at once."""
    api, clock = FakeApi(), Turned()
    reconciler = ShareReconciler(
        api, OperatorSettings(Defaults()), OperatorMetrics(), clock=clock.monotonic, now=clock.now
    )
    raw = {
        "metadata": {"name": "new", "namespace": "shop", "uid": "share-new"},
        "spec": {"selector": {"matchLabels": {"app": "new"}}},
    }
    api.store.put(GPUSHARES, raw)
    reconciler.intake.share(raw)
    reconciler.world.put_pod(pod("new-1", probation=60, started="2026-11-23T03:00:05Z"))
    clock.set_by = set_by
    phases = []
    for seconds in (1.0, 64.0, 2.0):
        clock.seconds += seconds
        reconciler.world.put_pod(pod("new-1", probation=60, started="2026-11-23T03:00:05Z"))
        while await reconciler.step():
            pass
        share = GpuShare.from_object(api.store.objects(GPUSHARES)["shop/new"])
        phases.append(share.status.phase)
    assert phases[0] is Phase.PROBATION
    assert phases[2] is Phase.SHARING
