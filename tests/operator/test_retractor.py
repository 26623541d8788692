"""The retractor and the reconciler against an API server in memory: steps, refusals, a kill between any two."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from gpushare.core.admission import Defaults, ShareKey, resolve
from gpushare.core.api import (
    Decision,
    GpuNodeStatus,
    GpuShare,
    GpuStatus,
    MpsFault,
    MpsStatus,
    Phase,
    PodView,
    TenantStatus,
    TenantTrouble,
    names,
    to_json,
)
from gpushare.core.control import HygieneSettings, OperatorSettings, RetractionSettings
from gpushare.core.placement import known_of
from gpushare.kube import EVENTS, GPUSHARES, PODS, ApiError, Conflict, Forbidden, NotFound, Resource, Retryable
from gpushare.kube.fake import FakeApi
from gpushare.runtime.moments import unix_seconds
from gpushare_operator.metrics import OperatorMetrics
from gpushare_operator.reconciler import ShareReconciler
from gpushare_operator.reports import NodeReport, Reports
from gpushare_operator.retractor import TOLD_AFTER_SECONDS, WAITED_SECONDS, Retractor

Json = dict[str, Any]
START = 1_795_000_000.0  # 2026-11-18
CAUSES = ("DisruptionBudget",)
BUDGET = "Cannot evict pod as it would violate the pod's disruption budget."
WHY = "old makes 0.52 of what it makes alone, promised are 0.60"


class EvictingApi(FakeApi):
    """The fake API server, on which an evicted pod stays for its grace period; `errors` come first.

    A pod that is asked for is `read_first` while that is set: what the watch has not brought yet.
    """

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[ApiError] = []
        self.read_first: Json | None = None
        self.evicted: list[str] = []
        self.tried = 0

    async def get(self, resource: Resource, name: str, *, namespace: str | None = None) -> Json:
        if resource == PODS and self.read_first is not None:
            return self.read_first
        return await super().get(resource, name, namespace=namespace)

    async def evict(self, name: str, *, namespace: str, uid: str | None = None, **_: Any) -> None:
        self.tried += 1
        if self.errors:
            raise self.errors.pop(0)
        pod = self.store.objects(PODS)[f"{namespace}/{name}"]
        assert pod["metadata"]["uid"] == uid
        self.evicted.append(name)
        pod["metadata"]["deletionTimestamp"] = "2026-11-22T12:00:00Z"
        self.store.put(PODS, pod)


class Bench:
    """An operator on the fake, with a clock that the test turns."""

    def __init__(self, settings: RetractionSettings | None = None, hygiene: HygieneSettings | None = None) -> None:
        self.api, self.time, self.clock_set = EvictingApi(), START, 0.0
        self.settings = OperatorSettings(
            Defaults(), retraction=settings or RetractionSettings(), hygiene=hygiene or HygieneSettings()
        )
        self.metrics = OperatorMetrics()
        self.asks: dict[str, str] = {}
        self.troubles: dict[str, TenantTrouble] = {}
        self.node = "n1"
        self.unknown: set[str] = set()
        self.start()

    def start(self) -> None:
        """Start an operator that knows nothing, as after kill -9."""
        self.metrics = OperatorMetrics()
        self.reconciler = ShareReconciler(
            self.api,
            self.settings,
            self.metrics,
            clock=lambda: self.time,
            now=lambda: datetime.fromtimestamp(self.time, UTC),
        )
        self.world = self.reconciler.world
        self.retractor = Retractor(
            self.api,
            self.world,
            self.settings,
            self.metrics,
            controller="test",
            clock=lambda: self.time + self.clock_set,
            monotonic=lambda: self.time,
            is_known=lambda namespace: namespace not in self.unknown,
        )
        self.deliver()

    def kill_in_kernel(self, name: str, *, node: str = "n1", gpu: str = "GPU-1") -> None:
        """Have a node's agent say that a pod of it ended its neighbours, now."""
        at = datetime.fromtimestamp(self.time, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        mps = MpsStatus(last_fault=MpsFault(at, f"uid-{name}"))
        status = GpuNodeStatus.of((GpuStatus(uuid=gpu, mps=mps),), observed_at=at)
        self.retractor.node_changed(node, NodeReport.of({"metadata": {"name": node}, "status": to_json(status)}))

    def pod(self, name: str, gpu: str = "GPU-1", **annotations: str) -> None:
        owner: Json = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": name, "uid": f"s-{name}"}
        owner["controller"] = True
        decision = Decision((gpu,), 25, 8192, "2026-11-22T11:00:00Z").to_annotations()
        metadata: Json = {"namespace": "shop", "name": name, "uid": f"uid-{name}", "ownerReferences": [owner]}
        metadata["annotations"] = {names.FRACTION: "0.25", **decision, **annotations}
        spec = {"nodeName": "n1"}
        self.api.store.put(PODS, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})

    def deliver(self) -> None:
        """Bring what the API server holds to the operator, as its watches do, and a new report of the agent."""
        self.retractor.answered()
        pods = {key: PodView.from_object(raw) for key, raw in self.api.store.objects(PODS).items()}
        for uid in set(self.world.pods) - {pod.uid for pod in pods.values()}:
            self.world.drop_pod(uid)
        for pod in pods.values():
            self.world.put_pod(pod)
        for raw in self.api.store.objects(GPUSHARES).values():
            self.reconciler.intake.share(raw)
        by_gpu: dict[str, list[TenantStatus]] = {}
        for pod in pods.values():
            assert pod.decision is not None
            tenant = TenantStatus(
                pod.uid, share_percent=25, retract=self.asks.get(pod.uid), trouble=self.troubles.get(pod.uid)
            )
            by_gpu.setdefault(pod.decision.gpu_uuids[0], []).append(tenant)
        gpus = tuple(GpuStatus(uuid=gpu, tenants=tuple(tenants)) for gpu, tenants in by_gpu.items())
        status = GpuNodeStatus.of(gpus, observed_at=f"T{self.time}")
        report = NodeReport.of({"metadata": {"name": "n1"}, "status": to_json(status)})
        self.retractor.node_changed(self.node, report)
        self.world.put_node(self.node, report.pod_reports)

    async def killed_after(self, seconds: int) -> None:
        """Let an operator work for so long, and start another: before statuses are written, or after, in turn."""
        for _ in range(seconds):
            self.time += 1.0
            self.deliver()
            await self.retractor.step()
            if seconds % 2:
                await self.reconciler.step()
        self.start()

    async def settle(self, seconds: int = 5) -> None:
        for _ in range(seconds):
            self.time += 1.0
            self.deliver()
            await self.retractor.step()
            while await self.reconciler.step():
                pass

    def share(self, name: str) -> GpuShare:
        return GpuShare.from_object(self.api.store.objects(GPUSHARES)[f"shop/statefulset-{name}"])

    def condition(self, name: str, kind: str) -> tuple[str, str] | None:
        found = [(one.reason, one.message) for one in self.share(name).status.conditions if one.type == kind]
        return found[0] if found else None

    def told(self, reason: str) -> list[tuple[str, str]]:
        events = self.api.store.objects(EVENTS).values()
        return [(one["regarding"]["kind"], one["note"]) for one in events if one["reason"] == reason]

    def value(self, name: str, labels: Mapping[str, str] | None = None) -> float:
        return self.metrics.registry.get_sample_value(name, dict(labels or {})) or 0.0


@pytest.fixture
async def bench() -> Bench:
    made = Bench()
    made.pod("old")
    made.pod("new")
    await made.settle(3)
    return made


async def test_one_retraction_from_the_ask_to_the_record(bench: Bench) -> None:
    bench.asks["uid-new"] = WHY
    await bench.settle(1)
    intended = known_of(bench.share("new"), unix_seconds)
    assert intended.apart_from(bench.time) == {"shop/statefulset-old"}, "its successor may come before the record"
    await bench.settle()
    assert bench.api.evicted == ["new"]
    share = bench.share("new")
    (record,) = share.status.retractions
    assert (record.neighbours, record.pod_uid, record.gpu, record.count) == (
        ("shop/statefulset-old",),
        "uid-new",
        "GPU-1",
        1,
    )
    assert record.at is not None
    assert record.until is not None
    known = known_of(share, unix_seconds)
    assert known.apart_from(bench.time) == {"shop/statefulset-old"}
    assert known.apart_from(bench.time + 3601) == frozenset()
    assert share.status.phase is Phase.RETRACTED, "while its pod leaves"
    bench.api.store.remove(PODS, "shop/new")
    await bench.settle(3)
    assert bench.share("new").status.phase is Phase.RETRACTED, "and until another pod of it is placed"
    bench.pod("new", "GPU-2")
    bench.asks.clear()
    await bench.settle()
    assert bench.share("new").status.phase is Phase.SHARING
    assert bench.share("new").status.retractions == (record,)
    assert bench.api.evicted == ["new"]
    assert bench.value("gpushare_retractions_total") == 1
    [(of_pod, note), (of_share, record_note)] = sorted(bench.told("Retracted"), reverse=True)
    assert (of_pod, of_share) == ("Pod", "GpuShare")
    assert WHY in note
    assert record_note.startswith("new left GPU-1 ")
    assert WHY in record_note
    assert "none of these pods is put beside shop/statefulset-old" in record_note


@pytest.mark.parametrize("killed_after", range(6))
async def test_a_kill_between_any_two_steps_ends_in_the_same_state(bench: Bench, killed_after: int) -> None:
    bench.asks["uid-new"] = WHY
    await bench.killed_after(killed_after)
    await bench.settle(8)
    assert bench.api.evicted == ["new"]
    (record,) = bench.share("new").status.retractions
    assert (record.count, record.pod_uid, record.until is not None) == (1, "uid-new", True)


async def test_a_budget_holds_the_pod_and_it_is_said_and_tried_again_until_it_may_leave(bench: Bench) -> None:
    bench.asks["uid-new"] = WHY
    bench.api.errors = [Retryable(BUDGET, status=429, causes=CAUSES, retry_after_seconds=10)] * 8
    await bench.settle(30)
    assert (bench.api.evicted, bench.condition("new", "RetractionRefused")) == ([], None)
    assert bench.api.tried < 4, "not every second"
    await bench.settle(int(TOLD_AFTER_SECONDS))
    found = bench.condition("new", "RetractionRefused")
    assert found is not None
    assert found[0] == "DisruptionBudget"
    assert found[1].startswith("new should leave its GPU since 2026-11-18T")
    assert found[1].endswith(BUDGET)
    before = bench.share("new").status
    bench.start()  # what was intended outlives a restart
    await bench.settle(20)
    assert bench.share("new").status.retractions == before.retractions
    await bench.settle(120)
    assert bench.api.evicted == ["new"]
    await bench.settle(3)
    assert bench.condition("new", "RetractionRefused") is None
    assert bench.share("new").status.retractions[0].count == 1


async def test_an_api_server_that_is_busy_is_not_taken_for_a_budget(bench: Bench) -> None:
    """Before: its 429 counted, and was told of the GpuShare, as a disruption budget's."""
    bench.asks["uid-new"] = WHY
    busy = Retryable("too many requests, please try again later", status=429, retry_after_seconds=1)
    bench.api.errors = [busy] * 99
    await bench.settle(int(TOLD_AFTER_SECONDS) + 5)
    assert bench.value("gpushare_retractions_refused_total", {"reason": "DisruptionBudget"}) == 0
    found = bench.condition("new", "RetractionRefused")
    assert found is not None
    assert found[0] == "EvictionFailed"


@pytest.mark.parametrize("clock_set", [-86_400.0, 86_400.0])
async def test_a_clock_that_is_set_neither_holds_up_a_refused_eviction_nor_hurries_it(
    bench: Bench, clock_set: float
) -> None:
    """Before: set back, it was not tried again until the clock had come back."""
    bench.asks["uid-new"] = WHY
    bench.api.errors = [Retryable(BUDGET, status=429, causes=CAUSES, retry_after_seconds=30)]
    await bench.settle(5)
    assert bench.api.tried == 1
    bench.clock_set = clock_set
    await bench.settle(20)
    assert bench.api.tried == 1
    await bench.settle(15)
    assert bench.api.evicted == ["new"]


@pytest.mark.parametrize("clock_set", [-86_400.0, 86_400.0])
async def test_a_clock_that_is_set_changes_nothing_in_when_a_wait_is_told(bench: Bench, clock_set: float) -> None:
    """Before: set ahead, at once; set back, not until the clock had come back."""
    bench.pod("third")
    leave(bench, "third", phase="Running")
    bench.asks["uid-new"] = WHY
    await bench.settle(10)
    bench.clock_set = clock_set
    await bench.settle(int(WAITED_SECONDS) - 20)
    assert bench.condition("new", "RetractionRefused") is None
    await bench.settle(20)
    assert bench.condition("new", "RetractionRefused") is not None


def leave(bench: Bench, name: str, *, phase: str) -> None:
    """Delete a pod, and keep its object in this phase."""
    raw = bench.api.store.objects(PODS)[f"shop/{name}"]
    raw["metadata"] |= {"deletionTimestamp": "2026-11-18T00:00:00Z", "finalizers": ["example.com/logs"]}
    raw["status"] = {"phase": phase}
    bench.api.store.put(PODS, raw)


async def test_a_pod_that_is_gone_is_not_evicted_again_while_the_watch_is_behind(bench: Bench) -> None:
    """Before: each second, for as long as the watch showed it."""
    bench.asks["uid-new"] = WHY
    bench.api.errors = [NotFound("pods new not found", status=404)] * 99
    await bench.settle(40)
    assert bench.api.tried == 1
    assert bench.told("Retracted") == []
    bench.api.store.remove(PODS, "shop/new")
    await bench.settle()
    (record,) = bench.share("new").status.retractions
    assert (record.pod_uid, record.until is not None) == ("uid-new", True), "it left, whoever made it leave"


CONFLICT = Conflict("the UID in the precondition does not match the UID in record", status=409, reason="Conflict")


async def test_a_pod_whose_name_another_has_by_now_is_gone(bench: Bench) -> None:
    """Before: refused, and tried again with back-off for as long as the watch showed the former pod."""
    bench.asks["uid-new"] = WHY
    bench.api.errors = [CONFLICT] * 99
    bench.api.read_first = {"metadata": {"name": "new", "namespace": "shop", "uid": "uid-of-its-successor"}}
    await bench.settle(40)
    assert bench.api.tried == 1
    assert bench.told("Retracted") == []
    assert bench.value("gpushare_retractions_refused_total", {"reason": "EvictionFailed"}) == 0


async def test_a_conflict_about_a_pod_that_is_still_present_is_a_refusal(bench: Bench) -> None:
    bench.asks["uid-new"] = WHY
    bench.api.errors = [CONFLICT]
    await bench.settle(20)
    assert (bench.api.tried, bench.api.evicted) == (2, ["new"])
    assert bench.value("gpushare_retractions_refused_total", {"reason": "EvictionFailed"}) == 1


async def test_a_pod_that_has_ended_and_that_a_finalizer_keeps_holds_nobody_up(bench: Bench) -> None:
    bench.pod("third")
    leave(bench, "third", phase="Running")
    await bench.settle(5)
    bench.asks["uid-new"] = WHY
    await bench.settle(20)
    assert bench.api.evicted == [], "it still has its part of the GPU"
    leave(bench, "third", phase="Failed")
    await bench.settle(55)
    assert bench.api.evicted == [], "the pause after it"
    await bench.settle(10)
    assert bench.api.evicted == ["new"]


async def test_who_waits_for_long_says_for_what(bench: Bench) -> None:
    bench.pod("third")
    leave(bench, "third", phase="Running")
    bench.asks["uid-new"] = WHY
    await bench.settle(int(WAITED_SECONDS))
    assert bench.condition("new", "RetractionRefused") is None
    await bench.settle(5)
    found = bench.condition("new", "RetractionRefused")
    assert found is not None
    assert found[0] == "WaitsForLong"
    assert found[1].startswith(
        "new should leave its GPU so that its neighbours keep their promises, and waits since"
    )
    assert found[1].endswith("Z: another pod is leaving its GPU")
    writes = bench.share("new")
    await bench.settle(600)
    assert bench.share("new") == writes, "written once"
    bench.api.store.remove(PODS, "shop/third")
    await bench.settle(70)
    assert bench.api.evicted == ["new"]
    assert bench.condition("new", "RetractionRefused") is None


async def test_for_an_hour_a_budget_holds_one_pod_and_nobody_else_is_evicted_in_its_place(bench: Bench) -> None:
    bench.asks["uid-new"] = WHY
    bench.api.errors = [Retryable(BUDGET, status=429, causes=CAUSES, retry_after_seconds=10)] * 10_000
    await bench.settle(int(TOLD_AFTER_SECONDS) + 15)
    condition = bench.condition("new", "RetractionRefused")
    assert condition is not None
    tried, writes = bench.api.tried, bench.share("new")
    await bench.settle(3600 - int(TOLD_AFTER_SECONDS) - 15)
    assert bench.api.evicted == []
    assert 30 <= bench.api.tried - tried <= 70, "about once a minute"
    assert bench.condition("new", "RetractionRefused") == condition
    assert bench.share("new") == writes, "written once, not every minute"
    assert len(bench.told("Retracted")) == 0
    [intent] = bench.share("new").status.retractions
    assert intent.until is None
    bench.api.errors.clear()
    await bench.settle(70)
    assert bench.api.evicted == ["new"]


async def test_no_pod_counts_as_gone_before_the_pods_of_its_namespace_are_known(bench: Bench) -> None:
    """A namespace that was refused is listed again, its GpuShares some seconds before its pods."""
    bench.asks["uid-new"] = WHY
    bench.api.errors = [Retryable(BUDGET, status=429, causes=CAUSES, retry_after_seconds=1)] * 3
    await bench.settle()
    [intent] = bench.share("new").status.retractions
    bench.unknown.add("shop")
    for uid in list(bench.world.pods):
        bench.world.drop_pod(uid)
    await bench.retractor.step()
    key = ShareKey("shop", "statefulset-new")
    assert bench.world.retractions()[key] == (intent,)
    assert (bench.told("Retracted"), bench.value("gpushare_retractions_total")) == ([], 0)
    bench.unknown.clear()
    await bench.settle(70)
    assert bench.api.evicted == ["new"]
    [record] = bench.share("new").status.retractions
    assert record.stands_for == 1


async def test_an_ask_that_ends_while_the_budget_holds_leaves_no_trace(bench: Bench) -> None:
    bench.asks["uid-new"] = WHY
    bench.api.errors = [Retryable(BUDGET, status=429, causes=CAUSES, retry_after_seconds=1)] * 100
    await bench.settle(70)
    assert bench.condition("new", "RetractionRefused") is not None
    assert bench.value("gpushare_retractions_refused_total", {"reason": "DisruptionBudget"}) >= 2
    assert bench.value("gpushare_retractions_waiting") == 1
    bench.asks.clear()
    await bench.settle()
    assert bench.share("new").status.retractions == ()
    assert bench.condition("new", "RetractionRefused") is None
    assert (bench.api.evicted, bench.value("gpushare_retractions_total")) == ([], 0)


async def test_without_the_right_to_evict_it_says_so(bench: Bench) -> None:
    bench.asks["uid-new"] = WHY
    bench.api.errors = [Forbidden("may not create pods/eviction", status=403)] * 100
    await bench.settle(70)
    assert bench.condition("new", "RetractionRefused") is not None
    assert "may not create pods/eviction" in bench.condition("new", "RetractionRefused")[1]  # type: ignore[index]


async def test_evictions_can_be_switched_off_and_latency_pods_stay() -> None:
    off = Bench(RetractionSettings(evicts=False))
    off.pod("old")
    off.pod("new")
    off.asks["uid-new"] = WHY
    await off.settle(10)
    assert off.api.tried == 0
    assert off.condition("new", "RetractionRefused") == (
        "NotRetractable",
        "new should leave its GPU and stays: policy.retraction is none",
    )
    bench = Bench()
    bench.pod("old")
    bench.pod("new", **{names.CLASS: "latency"})
    bench.asks["uid-new"] = WHY
    await bench.settle(10)
    assert bench.api.tried == 0


async def test_two_gpus_at_the_clusters_rate() -> None:
    bench = Bench(RetractionSettings(per_minute=1))
    for number in (1, 2):
        bench.pod(f"old{number}", f"GPU-{number}")
        bench.pod(f"new{number}", f"GPU-{number}")
        bench.asks[f"uid-new{number}"] = WHY
    await bench.settle(30)
    assert len(bench.api.evicted) == 1
    await bench.settle(60)
    assert sorted(bench.api.evicted) == ["new1", "new2"]


async def test_a_gpushare_that_goes_takes_its_intent_along(bench: Bench) -> None:
    bench.asks["uid-new"] = WHY
    bench.api.errors = [Retryable(BUDGET, status=429, causes=CAUSES, retry_after_seconds=1)] * 100
    await bench.settle()
    bench.api.store.remove(GPUSHARES, "shop/statefulset-new")
    bench.world.drop_share("shop", "statefulset-new")
    assert bench.world.retractions() == {}
    assert bench.world.standing_of(ShareKey("shop", "statefulset-new")).retractions == ()


async def test_a_clock_that_is_set_makes_no_agent_silent_and_none_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.pod("new")
    bench.pod("old")
    bench.asks["uid-new"] = WHY
    bench.deliver()
    silenced: list[frozenset[str]] = []
    monkeypatch.setattr(bench.world, "silence", silenced.append)

    async def stepped(clock_set: float, seconds: float) -> tuple[frozenset[str], list[bool]]:
        bench.clock_set = clock_set
        for _ in range(4):
            bench.time += seconds / 4
            bench.retractor.answered()
        await bench.retractor.step()
        asks = bench.retractor._situation(bench.time + clock_set).asks
        return silenced[-1], [ask.is_stale for ask in asks]

    assert await stepped(180.0, 1.0) == (frozenset(), [False])
    assert await stepped(-3600.0, 200.0) == (frozenset({"n1"}), [True]), "it has not written for 200 s"


def test_an_agent_counts_as_alive_once_it_writes_again_whatever_its_clock_says() -> None:
    asks = (("uid", "GPU-1", "why"),)
    reports = Reports()
    reports.put("n1", NodeReport({}, asks, "2020-01-01T00:00:00Z"), 100.0)
    ((node, ask),) = reports.asks(105.0)
    assert node == "n1"
    assert (ask.is_confirmed, ask.silent_seconds) == (False, 5.0)
    reports.put("n1", NodeReport({}, asks, "2020-01-01T00:00:00Z"), 110.0)
    assert not reports.asks(111.0)[0][1].is_confirmed, "the same report once more, as after a new list"
    reports.put("n1", NodeReport({}, asks, "2019-01-01T00:00:00Z"), 120.0)
    ((_, ask),) = reports.asks(125.0)
    assert (ask.is_confirmed, ask.silent_seconds) == (True, 5.0)
    reports.put("n1", NodeReport({}, asks, "2019-01-01T00:00:00Z"), 130.0)
    assert reports.asks(500.0)[0][1].silent_seconds == 380.0
    reports.put("n1", NodeReport({}, (), "2019-01-02T00:00:00Z"), 131.0)
    assert reports.asks(132.0) == ()
    reports.put("n1", None, 133.0)
    assert reports.asks(134.0) == ()


async def test_a_record_without_its_times_stops_nothing(bench: Bench) -> None:
    raw = bench.api.store.objects(GPUSHARES)["shop/statefulset-new"]
    raw["status"]["retractions"] = [{"neighbours": ["shop/x"]}, {"neighbours": ["shop/y"], "until": "never"}]
    bench.api.store.put(GPUSHARES, raw)
    bench.asks["uid-new"] = WHY
    await bench.settle(8)
    assert bench.api.evicted == ["new"]
    assert [one.pod_uid for one in bench.share("new").status.retractions][-1] == "uid-new"


async def test_a_node_cannot_have_pods_of_another_node_moved_away(bench: Bench) -> None:
    bench.node = "stolen"
    bench.asks["uid-new"] = WHY
    await bench.settle(20)
    assert (bench.api.tried, bench.share("new").status.retractions) == (0, ())
    assert bench.value("gpushare_retractions_waiting") == 0


async def test_an_event_names_no_neighbour_of_another_namespace(bench: Bench) -> None:
    raw = bench.api.store.objects(PODS).pop("shop/old")
    del bench.api.store.objects(GPUSHARES)["shop/statefulset-old"]
    bench.world.drop_share("shop", "statefulset-old")
    bench.api.store.put(PODS, {**raw, "metadata": {**raw["metadata"], "namespace": "secret", "uid": "uid-2"}})
    bench.asks["uid-new"] = WHY
    await bench.settle(10)
    assert bench.share("new").status.retractions[0].neighbours == ("secret/statefulset-old",)
    [note] = [note for kind, note in bench.told("Retracted") if kind == "GpuShare"]
    assert note.endswith("none of these pods is put beside 1 of other namespaces")


async def test_a_workload_that_ended_its_neighbours_twice_is_isolated_for_a_day(bench: Bench) -> None:
    bench.kill_in_kernel("new")
    bench.kill_in_kernel("new")  # the same, told again
    await bench.settle(1)
    share = bench.share("new")
    assert len(share.status.neighbours_ended) == 1
    assert not known_of(share, unix_seconds).wants_own
    assert bench.condition("new", "EndsNeighbours") is not None
    assert bench.told("Isolated") == []
    bench.api.store.remove(PODS, "shop/new")  # by force: it is gone from the API before it is killed
    await bench.settle(1)
    bench.kill_in_kernel("new")
    await bench.settle(1)
    share = bench.share("new")
    assert len(share.status.neighbours_ended) == 2
    assert resolve({names.FRACTION: "0.25"}, share).limit_percent == 100
    assert not known_of(share, unix_seconds).wants_own, "who is charged all of a GPU is alone; nobody else is"
    assert [kind for kind, _ in bench.told("Isolated")] == ["GpuShare"]
    bench.start()  # kill -9: the status remembers
    await bench.settle(1)
    assert bench.share("new").status.ends_neighbours
    assert not bench.share("old").status.neighbours_ended
    bench.time += 86_400
    await bench.settle(61)
    assert not bench.share("new").status.neighbours_ended
    assert resolve({names.FRACTION: "0.25"}, bench.share("new")).limit_percent == 25
    assert bench.condition("new", "EndsNeighbours") is None


async def test_a_node_has_no_say_about_faults_of_pods_elsewhere(bench: Bench) -> None:
    bench.kill_in_kernel("new", node="n2")
    bench.kill_in_kernel("new", gpu="GPU-9")
    bench.kill_in_kernel("unheard-of")
    for at in ("yesterday", "2999-01-01T00:00:00Z", "2999-01-02T00:00:00Z"):
        mps = MpsStatus(last_fault=MpsFault(at, "uid-new"))
        report = NodeReport.of({"status": to_json(GpuNodeStatus.of((GpuStatus(uuid="GPU-1", mps=mps),)))})
        bench.retractor.node_changed("n1", report)
    key = next(key for key in bench.world.shares if key.name == bench.share("new").name)
    assert not bench.world.standing_of(key).neighbours_ended
    await bench.settle(1)
    assert not bench.share("new").status.neighbours_ended
