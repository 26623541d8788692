"""The reconciler against an API that refuses, fails and races; time is the test's."""

import asyncio
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import replace
from typing import Any, ClassVar, cast

import pytest

from gpushare.core.admission import Defaults, ShareKey, pod_as_owner, share_name
from gpushare.core.api import (
    CapPoint,
    Decision,
    GpuShare,
    Phase,
    PhaseReading,
    PodView,
    WorkloadPhase,
    WorkloadSignature,
    names,
    to_json,
)
from gpushare.core.control import OperatorSettings, PodReport
from gpushare.kube import EVENTS, GPUSHARES, PODS, ApiError, Forbidden, Invalid, Resource, Retryable
from gpushare.kube.fake import FakeApi, ObjectStore
from gpushare.runtime.tasks import TaskEndedError
from gpushare_operator.announcements import Announcements
from gpushare_operator.dropped import DroppedFields
from gpushare_operator.metrics import OperatorMetrics
from gpushare_operator.reconciler import FIGURES_SECONDS, ShareReconciler

Json = dict[str, Any]
KEY = ShareKey("shop", "pod-p")
OWNER = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "web", "uid": "w", "controller": True}


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Objects(MutableMapping[tuple[str, str], Json]):
    """The fake server's objects of the namespace shop by (plural, name)."""

    KINDS: ClassVar = {
        one.plural: one for one in (PODS, GPUSHARES, Resource("apps", "v1", "replicasets", "", True))
    }

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def __getitem__(self, at: tuple[str, str]) -> Json:
        return self._store.objects(self.KINDS[at[0]])[f"shop/{at[1]}"]

    def __setitem__(self, at: tuple[str, str], obj: Json) -> None:
        metadata = {**obj["metadata"], "name": at[1], "namespace": "shop"}
        self._store.put(self.KINDS[at[0]], {**obj, "metadata": metadata})

    def __delitem__(self, at: tuple[str, str]) -> None:
        self._store.remove(self.KINDS[at[0]], f"shop/{at[1]}")

    def __iter__(self) -> Iterator[tuple[str, str]]:
        for plural, resource in self.KINDS.items():
            yield from ((plural, key.partition("/")[2]) for key in self._store.objects(resource))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class ScriptedApi(FakeApi):
    """The fake API server; `errors` are raised first, one for each call of that method."""

    def __init__(self) -> None:
        super().__init__()
        self.objects = Objects(self.store)
        self.errors: dict[str, list[ApiError]] = {}
        self.calls: list[tuple[str, str, str]] = []

    @property
    def events(self) -> list[Json]:
        return list(self.store.objects(EVENTS).values())

    def _enter(self, method: str, resource: Resource, name: str) -> None:
        self.calls.append((method, resource.plural, name))
        if self.errors.get(method):
            raise self.errors[method].pop(0)

    async def get(self, resource: Resource, name: str, *, namespace: str | None = None) -> Json:
        self._enter("get", resource, name)
        return await super().get(resource, name, namespace=namespace)

    async def create(self, resource: Resource, body: Mapping[str, Any], **more: Any) -> Json:
        if resource != EVENTS:
            self._enter("create", resource, body["metadata"]["name"])
        return await super().create(resource, body, **more)

    async def patch(self, resource: Resource, name: str, body: Any, **more: Any) -> Json:
        self._enter("patch", resource, name)
        return await super().patch(resource, name, body, **more)

    def count(self, method: str) -> int:
        return sum(called == method for called, _, _ in self.calls)


class Bench:
    """A reconciler on the fake, with a clock that the test turns."""

    def __init__(self) -> None:
        self.api, self.clock, self.metrics = ScriptedApi(), Clock(), OperatorMetrics()
        self.reconciler = ShareReconciler(
            self.api,
            OperatorSettings(Defaults(max_slowdown_ratio=1.5)),
            self.metrics,
            clock=self.clock,
        )
        self.world = self.reconciler.world

    def pod(self, name: str = "p", *, placed: bool = False, owner: Json | None = None) -> Json:
        annotations = {names.FRACTION: "0.25"}
        if placed:
            annotations |= Decision(("GPU-1",), 25, 8192, "2026-11-21T11:00:00Z").to_annotations()
        metadata: Json = {"namespace": "shop", "name": name, "uid": f"uid-{name}", "annotations": annotations}
        if owner is not None:
            metadata["ownerReferences"] = [owner]
        raw = {"metadata": metadata, "spec": {"nodeName": "n1"} if placed else {}}
        self.api.objects["pods", name] = raw
        self.world.put_pod(PodView.from_object(raw))
        return raw

    async def settle(self, seconds: float = 1.0) -> None:
        """Let that much time pass with everything done that falls due, then look once more."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now = min(end, self.clock.now + 0.2)
            while await self.reconciler.step():
                pass

    def result(self, kind: str, result: str) -> float:
        labels = {"kind": kind, "result": result}
        return self.metrics.registry.get_sample_value("gpushare_operator_reconciliations_total", labels) or 0.0

    def share(self, name: str = "pod-p") -> GpuShare:
        return GpuShare.from_object(self.api.objects["gpushares", name])


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_a_pod_gets_its_gpushare_and_status_in_two_writes(bench: Bench) -> None:
    bench.pod(placed=True)
    await bench.settle()
    assert bench.share().status.phase is Phase.SHARING
    assert (bench.api.count("create"), bench.api.count("patch")) == (1, 1)
    assert [event["reason"] for event in bench.api.events] == ["Sharing"]
    await bench.settle(60)
    assert (bench.api.count("create"), bench.api.count("patch")) == (1, 1), "nothing changed, nothing is written"


async def test_figures_wait_for_their_time_and_what_matters_does_not(bench: Bench) -> None:
    bench.pod(placed=True)
    await bench.settle()
    for slowdown in (1.1, 1.2, 1.3):
        bench.world.put_node("n1", {"uid-p": PodReport(1 / slowdown, slowdown)})
        await bench.settle(1)
    # Unknown to kept is a change of condition and goes out at once; then the figures wait.
    assert bench.api.count("patch") == 2
    await bench.settle(FIGURES_SECONDS)
    assert bench.api.count("patch") == 3
    observed = bench.share().status.observed
    assert observed is not None
    assert observed.slowdown_ratio == 1.3
    bench.world.put_node("n1", {"uid-p": PodReport(0.1, 10.0)})
    await bench.settle(1)
    assert bench.api.count("patch") == 4, "a broken promise is told at once"
    assert [event["reason"] for event in bench.api.events] == ["Sharing", "PromiseBroken"]


async def test_figures_wait_unlooked_at_and_a_broken_promise_among_them_does_not(bench: Bench) -> None:
    uids = [bench.pod(f"p{number}", placed=True, owner=OWNER)["metadata"]["uid"] for number in range(20)]
    kept = PodReport(0.9, 1.1, error_ratio=0.05, promise_ratio=0.6)
    bench.world.put_node("n1", dict.fromkeys(uids, kept))
    await bench.settle(2 * FIGURES_SECONDS)
    looks = bench.result("share", "done")
    for number in range(100):  # nodes report one after the other
        report = replace(kept, progress_ratio=0.7 + number / 1000)
        bench.world.put_node("n1", {**dict.fromkeys(uids, kept), uids[number % 20]: report})
        await bench.settle(0.2)
    assert bench.result("share", "done") - looks <= 2 * 20 / FIGURES_SECONDS + 2, "also at what it wrote itself"
    assert bench.share("statefulset-web").status.observed.progress_ratio < 0.9
    bench.world.put_node("n1", {**dict.fromkeys(uids, kept), uids[0]: replace(kept, progress_ratio=0.3)})
    await bench.settle(0.4)
    assert bench.api.events[-1]["reason"] == "PromiseBroken"


async def test_a_gpushare_with_many_pods_takes_a_bounded_part_of_the_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpushare_operator.reconciler._REST_SECONDS_PER_POD", 0.1)
    uids = [bench.pod(f"p{number}", placed=True, owner=OWNER)["metadata"]["uid"] for number in range(20)]
    await bench.settle(10.0)
    before = bench.result("share", "done")
    for progress in [0.3, 0.9] * 50:  # each one of consequence
        bench.world.put_node("n1", {uids[0]: PodReport(progress, 1.1, promise_ratio=0.6)})
        await bench.settle(0.2)
    assert 8 <= bench.result("share", "done") - before <= 11


async def test_phases_that_agents_publish_are_written_once_and_an_agent_of_before_takes_none_away(
    bench: Bench,
) -> None:
    bench.pod(placed=True)
    usual = {"sm_util": 0.6, "fp32_util": 0.5, "dram_bw_util": 0.1}
    of_before = WorkloadSignature("NVIDIA H200", usual, window_seconds=60.0)
    evaluation = WorkloadPhase(
        {"sm_util": 0.4, "fp32_util": 0.05, "dram_bw_util": 0.4},
        0.3,
        PhaseReading.IN_PLACE,
        50,
        (CapPoint(50, 0.8),),
        12.0,
    )
    published = replace(of_before, phases=(evaluation,))
    bench.world.put_node("n1", {"uid-p": PodReport(profile=of_before)})
    await bench.settle()
    kept = bench.share().status.profile
    assert kept is not None
    assert kept.phases == ()
    writes = bench.api.count("patch")
    for _ in range(3):
        for seen in (published, of_before, None):
            bench.world.put_node("n1", {"uid-p": PodReport(profile=seen)})
            await bench.settle(FIGURES_SECONDS)
    assert bench.share().status.profile == replace(kept, phases=(evaluation,))
    assert bench.api.count("patch") == writes + 1
    del bench.api.objects["gpushares", "pod-p"]["status"]["profile"]["phases"]  # an operator of before wrote it
    assert bench.share().status.profile == kept


@pytest.mark.parametrize("placed", [False, True], ids=["pending", "on another node"])
async def test_a_node_gives_no_profile_to_a_pod_that_is_not_on_it(bench: Bench, *, placed: bool) -> None:
    """Before: any node's report counted while the pod was on none, so a stolen agent wrote its profile."""
    bench.pod(placed=placed)
    forged = WorkloadSignature("NVIDIA H200", {"sm_util": 0.01, "fp32_util": 0.01, "dram_bw_util": 0.01})
    bench.world.put_node("n2", {"uid-p": PodReport(1.0, 1.0, profile=forged)})
    await bench.settle(FIGURES_SECONDS)
    status = bench.share().status
    assert (status.profile, status.observed) == (None, None)
    assert bench.world.pod_reports_of(KEY) == {}


async def test_what_a_node_reports_of_a_pod_before_the_watch_shows_it_there_counts_then(bench: Bench) -> None:
    bench.pod()
    bench.world.put_node("n1", {"uid-p": PodReport(0.8, 1.25)})
    await bench.settle()
    assert bench.share().status.observed is None
    bench.pod(placed=True)
    await bench.settle()
    observed = bench.share().status.observed
    assert observed is not None
    assert observed.slowdown_ratio == 1.25


async def test_a_profile_that_somebody_else_wrote_is_kept(bench: Bench) -> None:
    bench.pod(placed=True)
    await bench.settle()
    assert bench.share().status.profile is None
    restored = WorkloadSignature("NVIDIA H200", {"sm_util": 0.6, "fp32_util": 0.5, "dram_bw_util": 0.1})
    body = {"status": {"profile": to_json(restored)}}
    written = await bench.api.patch(GPUSHARES, "pod-p", body, namespace="shop", subresource="status")
    bench.reconciler.intake.share(written)
    await bench.settle(FIGURES_SECONDS)
    kept = bench.share().status.profile
    assert kept is not None
    assert kept.counters == restored.counters
    assert kept.gpu_model == "NVIDIA H200"


async def test_figures_of_a_large_cluster_are_written_at_a_bounded_rate_and_not_looked_at_before(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, each GpuShare was looked at once in vain after each write."""
    monkeypatch.setattr("gpushare_operator.reconciler.FIGURE_WRITES_PER_SECOND", 1.0)
    uids = [bench.pod(f"p{number}", placed=True)["metadata"]["uid"] for number in range(40)]
    kept = PodReport(0.9, 1.1, error_ratio=0.05, promise_ratio=0.6)
    bench.world.put_node("n1", dict.fromkeys(uids, kept))
    await bench.settle(100.0)
    before, looks = bench.api.count("patch"), bench.result("share", "done")
    for second in range(120):
        bench.world.put_node("n1", dict.fromkeys(uids, replace(kept, progress_ratio=0.7 + second / 1000)))
        await bench.settle(1)
    written = bench.api.count("patch") - before
    assert written == 120, "three rounds of 40 in 120 s at 1/s, where each 10 s would be 480"
    assert bench.result("share", "done") - looks == 2 * written, "once to write, and once at what it wrote itself"


async def test_an_older_object_from_the_watch_tells_no_event_twice(bench: Bench) -> None:
    bench.pod(placed=True)
    bench.api.objects["gpushares", "pod-p"] = {
        "metadata": {"name": "pod-p", "namespace": "shop", "uid": "u", "ownerReferences": [{"uid": "uid-p"}]}
    }
    stale = bench.api.objects["gpushares", "pod-p"]
    bench.reconciler.intake.share(stale)
    await bench.settle()
    before = bench.share().status
    bench.reconciler.intake.share(stale)
    await bench.settle()
    assert bench.share().status == before
    assert len(bench.api.events) == 1


async def test_a_gpushare_that_the_watch_has_not_brought_yet(bench: Bench) -> None:
    bench.api.objects["gpushares", "pod-p"] = {
        "metadata": {"name": "pod-p", "namespace": "shop", "uid": "u", "ownerReferences": [{"uid": "uid-p"}]}
    }
    bench.pod()
    await bench.settle()
    assert bench.world.share_of_pod("uid-p") == KEY
    assert bench.share().status.conditions


async def test_where_both_its_names_are_taken_a_pod_is_tried_less_and_less_often(bench: Bench) -> None:
    """Whoever may write GpuShares may take them, and must not keep the operator and the API server busy."""
    distinct = share_name(pod_as_owner(bench.pod()), distinct=True)
    for name in ("pod-p", distinct):
        bench.api.objects["gpushares", name] = {
            "metadata": {"name": name, "namespace": "shop", "uid": f"u-{name}"}
        }
    await bench.settle(60)
    assert 3 <= bench.api.count("create") <= 12
    assert bench.world.share_of_pod("uid-p") is None
    for name in ("pod-p", distinct):
        del bench.api.objects["gpushares", name]
        bench.world.drop_share("shop", name)
    await bench.settle(300)
    assert bench.world.share_of_pod("uid-p") == KEY


async def test_many_pods_of_one_owner_make_one_gpushare(bench: Bench) -> None:
    replicaset = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-1", "uid": "rs", "controller": True}
    deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "web", "uid": "d", "controller": True}
    bench.api.objects["replicasets", "web-1"] = {"metadata": {"uid": "rs", "ownerReferences": [deployment]}}
    for number in range(50):
        bench.pod(f"web-{number}", owner=replicaset)
    await bench.settle()
    assert [call for call in bench.api.calls if call[0] == "create"] == [("create", "gpushares", "deployment-web")]
    assert len(bench.world.pods_of(ShareKey("shop", "deployment-web"))) == 50
    assert sum(plural == "replicasets" for _, plural, _ in bench.api.calls) <= 16, "the answer is remembered"


async def test_a_failure_is_tried_again_later_and_later(bench: Bench) -> None:
    bench.api.errors["create"] = [
        Retryable("busy", status=429, retry_after_seconds=3.0),
        Retryable("", retry_after_seconds=0.1),
    ]
    bench.pod()
    await bench.settle(2.5)
    assert bench.api.count("create") == 1, "the server asked for 3 s"
    await bench.settle(5)
    assert bench.api.count("create") == 3
    assert bench.share().name == "pod-p"
    assert bench.result("pod", "failed") == 2


async def test_what_the_server_finds_invalid_is_not_tried_again(bench: Bench) -> None:
    bench.api.errors["create"] = [Invalid("spec.fraction: nonsense", status=422)]
    bench.pod()
    await bench.settle(300)
    assert bench.api.count("create") == 1
    assert bench.result("pod", "refused") == 1


async def test_an_unforeseen_error_stops_nobody_else(bench: Bench) -> None:
    bench.api.errors["create"] = cast("list[ApiError]", [ValueError("unforeseen"), asyncio.CancelledError()])
    bench.pod("a")
    bench.pod("b")
    await bench.settle(5)
    assert {name for plural, name in bench.api.objects if plural == "gpushares"} == {"pod-a", "pod-b"}


async def test_a_pod_whose_owner_is_gone_gets_nothing(bench: Bench) -> None:
    gone = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-1", "uid": "rs", "controller": True}
    bench.pod(owner=gone)
    await bench.settle(60)
    assert (bench.api.count("create"), bench.result("pod", "skipped")) == (0, 1)
    bench.api.objects["replicasets", "web-1"] = {"metadata": {"uid": "another"}}
    bench.pod("q", owner=gone)
    await bench.settle(60)
    assert (bench.api.count("create"), bench.result("pod", "skipped")) == (0, 2)


async def test_without_the_right_to_read_owners_each_stands_for_itself(bench: Bench) -> None:
    bench.api.errors["get"] = []
    replicaset = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-1", "uid": "rs", "controller": True}
    bench.pod(owner=replicaset)
    original = bench.api.get

    async def get(resource: Resource, name: str, *, namespace: str | None = None) -> Json:
        if resource.plural == "replicasets":
            raise Forbidden("no", status=403)
        return await original(resource, name, namespace=namespace)

    bench.api.get = get  # type: ignore[method-assign]  # the fake's
    await bench.settle()
    assert ("create", "gpushares", "replicaset-web-1") in bench.api.calls


async def test_a_gpushare_deleted_meanwhile_is_no_error(bench: Bench) -> None:
    bench.pod(placed=True)
    bench.api.objects["gpushares", "pod-p"] = {"metadata": {}}
    bench.world.put_share(
        GpuShare.from_object(
            {"metadata": {"name": "pod-p", "namespace": "shop", "ownerReferences": [{"uid": "uid-p"}]}}
        )
    )
    del bench.api.objects["gpushares", "pod-p"]
    await bench.settle(60)
    assert bench.result("share", "failed") == 0


async def test_a_gpushare_deleted_while_its_status_is_written_stays_deleted(bench: Bench) -> None:
    """The watch's word comes before the answer to the write: the answer must not bring it back for ever."""
    bench.pod(placed=True)
    await bench.settle()
    patch = bench.api.patch

    async def deleted_meanwhile(resource: Resource, name: str, body: Json, **options: Any) -> Json:
        answer = await patch(resource, name, body, **options)
        del bench.api.objects["gpushares", name]
        bench.world.drop_share("shop", name)
        bench.api.patch = patch  # type: ignore[method-assign]
        return answer

    bench.api.patch = deleted_meanwhile  # type: ignore[method-assign]
    bench.world.put_node("n1", {"uid-p": PodReport(0.1, 10.0)})
    await bench.settle(5)
    assert bench.api.patch is patch, "the write happened"
    assert bench.api.count("create") == 2, "the pod has a GpuShare again"
    assert bench.world.share_of_pod("uid-p") is not None
    assert ("gpushares", "pod-p") in bench.api.objects


async def test_a_gpushare_whose_deletion_the_watch_missed_is_given_up(bench: Bench) -> None:
    bench.pod(placed=True)
    await bench.settle()
    del bench.api.objects["gpushares", "pod-p"]
    bench.world.put_node("n1", {"uid-p": PodReport(0.1, 10.0)})
    await bench.settle(5)
    assert bench.api.count("create") == 2
    assert bench.share().status.observed is not None


async def test_an_object_that_takes_long_holds_up_no_other(bench: Bench) -> None:
    answers = asyncio.Event()
    patch = bench.api.patch

    async def slow(resource: Resource, name: str, body: Json, **options: Any) -> Json:
        if name == "pod-slow":
            await answers.wait()
        return await patch(resource, name, body, **options)

    bench.api.patch = slow  # type: ignore[method-assign]
    others = [f"other-{number}" for number in range(40)]
    for name in ("slow", *others):
        bench.pod(name, placed=True)

    async def until_placed(*names: str) -> None:
        async with asyncio.timeout(60):
            while not all(bench.world.shares.get(ShareKey("shop", f"pod-{name}")) for name in names) or not all(
                bench.share(f"pod-{name}").status.phase is Phase.SHARING for name in names
            ):
                bench.clock.now += 0.2
                await asyncio.sleep(0.01)

    running = asyncio.create_task(bench.reconciler.run())
    await until_placed(*others)
    assert bench.share("pod-slow").status.phase is Phase.PENDING
    bench.world.put_node("n1", {"uid-slow": PodReport(0.5, 2.0)})  # touched while it is in work
    answers.set()
    await until_placed("slow")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def test_the_gauges_are_taken_at_each_scrape(bench: Bench) -> None:
    def gauge(name: str, **labels: str) -> float | None:
        return bench.metrics.registry.get_sample_value(f"gpushare_operator_{name}", labels)

    assert (gauge("pods"), gauge("queue_length"), gauge("gpushares", phase="Pending")) == (0, 0, 0)
    bench.pod()
    bench.world.put_share(GpuShare.from_object({"metadata": {"name": "own", "namespace": "shop"}}))
    assert (gauge("pods"), gauge("queue_length"), gauge("gpushares", phase="Pending")) == (1, 2, 1)
    assert gauge("events_waiting") == 0


async def test_events_follow_the_statuses_and_a_stop_writes_the_last_ones(bench: Bench) -> None:
    for number in range(12):
        bench.pod(f"p{number}", placed=True)
    bench.clock.now += 1.0
    running = asyncio.create_task(bench.reconciler.run())
    while bench.metrics.registry.get_sample_value("gpushare_operator_status_writes_total") != 12:
        await asyncio.sleep(0)
        bench.clock.now += 0.01
    assert (bench.metrics.registry.get_sample_value("gpushare_operator_events_waiting") or 0) > 0
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert len(bench.api.events) == 12


async def test_it_ends_with_an_error_when_the_writing_of_events_ends(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, no event was written from then on, and nobody was told."""

    async def lost(_: Announcements) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(Announcements, "run", lost)
    async with asyncio.timeout(60):
        with pytest.raises(TaskEndedError, match="writing events"):
            await bench.reconciler.run()


async def test_it_ends_when_it_is_cancelled_in_the_moment_of_a_change(bench: Bench) -> None:
    """Kopf's stop waits for it: a cancellation that is lost keeps the whole process from ending."""
    running = asyncio.create_task(bench.reconciler.run())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    bench.world.put_share(GpuShare.from_object({"metadata": {"name": "own", "namespace": "shop"}}))
    running.cancel()
    done, _ = await asyncio.wait({running}, timeout=30)
    assert done == {running}


async def test_a_definition_that_drops_fields_is_told_of_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before: each restart of the operator forgot who had ended its neighbours, and nobody was told why."""
    bench.pod(placed=True)
    await bench.settle()
    assert "drops" not in caplog.text, "a definition of this release keeps all"

    answered = bench.api.patch

    async def pruned(*arguments: Any, **more: Any) -> Json:
        found = await answered(*arguments, **more)
        status = {name: value for name, value in found["status"].items() if name != "neighboursEnded"}
        return {**found, "status": status}

    monkeypatch.setattr(bench.api, "patch", pruned)
    for slowdown in (2.0, 1.0):
        bench.world.put_node("n1", {"uid-p": PodReport(1 / slowdown, slowdown)})
        await bench.settle(FIGURES_SECONDS)
    (told,) = [record.getMessage() for record in caplog.records if "drops" in record.getMessage()]
    assert told.startswith(
        "the API server drops status.neighboursEnded: its definition of GpuShares is of an older"
    )


async def test_a_definition_that_drops_a_field_of_the_profile_costs_no_further_writes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.pod(placed=True)
    await bench.settle()
    answered = bench.api.patch

    async def pruned(kind: Any, name: str, body: Json, **more: Any) -> Json:
        status = body.get("status", {})
        if status.get("profile"):
            profile = {key: value for key, value in status["profile"].items() if key != "smClockMHz"}
            body = {**body, "status": {**status, "profile": profile}}
        return await answered(kind, name, body, **more)

    monkeypatch.setattr(bench.api, "patch", pruned)
    signature = WorkloadSignature("NVIDIA H200", {"sm_util": 0.6}, window_seconds=60.0, sm_clock_mhz=1500.0)
    bench.world.put_node("n1", {"uid-p": PodReport(0.9, 1.1, profile=signature)})
    await bench.settle(FIGURES_SECONDS)
    written = bench.api.count("patch")
    bench.world.put_node("n1", {"uid-p": PodReport(0.9, 1.1, profile=signature, neighbours=("uid-q",))})
    await bench.settle()
    assert bench.api.count("patch") == written, "nothing changed"
    bench.world.put_node("n1", {"uid-p": PodReport(0.9, 1.2, profile=signature)})
    await bench.settle()
    assert bench.api.count("patch") == written + 1
    for slowdown in (1.3, 1.4, 1.5):
        bench.world.put_node("n1", {"uid-p": PodReport(0.9, slowdown, profile=signature)})
        await bench.settle(1)
    assert bench.api.count("patch") == written + 1, "figures alone wait"


def test_fields_within_lists_that_are_dropped_are_named(caplog: pytest.LogCaptureFixture) -> None:
    dropped = DroppedFields()
    sent = {"a": 1, "gone": None, "list": [{"x": 1, "y": 2}, {"x": 1, "y": 3}], "inner": {"z": [], "w": {}}}
    dropped.look(sent, {"a": 2, "list": [{"x": 1}, {"x": 1}], "inner": {"w": {}}})
    dropped.look(sent, {"a": 1, "list": [{"x": 1}, {"x": 1}], "inner": {"w": {}}})
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("the API server drops status.inner.z, status.list.y: ")
