"""An API server that was away: no agent could write meanwhile, and none counts as silent for that."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from gpushare.core.admission import Defaults
from gpushare.core.api import Decision, GpuNodeStatus, GpuStatus, TenantStatus, names, to_json
from gpushare.core.control import SILENT_SECONDS, OperatorSettings
from gpushare.kube import GPUNODES, GPUSHARES, PODS, Change, Reflector, Resource, Retryable, WatchEvent
from gpushare.kube.fake import FakeApi
from gpushare_operator.metrics import OperatorMetrics
from gpushare_operator.reconciler import ShareReconciler
from gpushare_operator.reports import DEAF_SECONDS, NodeReport, Reports
from gpushare_operator.retractor import Retractor

Json = dict[str, Any]
START = 1_795_000_000.0  # 2026-11-18
WRITE_SECONDS = 10  # between two reports of an agent
HANGING_SECONDS = 30  # of a write that began while the API server was away
BOOKMARK_SECONDS = 60


class Server(FakeApi):
    """The fake API server, which may be away; it keeps the reasons of all conditions written."""

    def __init__(self) -> None:
        super().__init__()
        self.is_away = False
        self.reasons: set[str] = set()

    async def _call(self, method: str, path: str, query: Any = None, body: Any = None, **kind: str) -> Json:
        if self.is_away:
            raise Retryable("cannot connect", retry_after_seconds=1.0)
        if path.endswith("/status") and isinstance(body, Mapping):
            self.reasons |= {each["reason"] for each in (body.get("status") or {}).get("conditions") or ()}
        return await super()._call(method, path, query, body, **kind)

    async def watch(self, resource: Resource, **asked: Any) -> AsyncIterator[WatchEvent]:
        """Yield the store's events until the server goes away."""
        if self.is_away:
            raise Retryable("cannot connect", retry_after_seconds=1.0)
        async for event in super().watch(resource, **asked):
            yield event
        if self.is_away:
            raise Retryable("the connection broke", retry_after_seconds=1.0)

    def go(self) -> None:
        """Go away, and break every watch."""
        self.is_away = True
        self.store.break_watches()


class Scene:
    """An operator's parts on the fake; node n1 has the pod `old`, n2 none. The test turns the clock."""

    def __init__(self) -> None:
        self.api, self.time = Server(), START
        self.dead: set[str] = set()
        settings, metrics = OperatorSettings(Defaults()), OperatorMetrics()
        self.reconciler = ShareReconciler(
            self.api,
            settings,
            metrics,
            clock=lambda: self.time,
            now=lambda: datetime.fromtimestamp(self.time, UTC),
        )
        self.retractor = Retractor(
            self.api,
            self.reconciler.world,
            settings,
            metrics,
            controller="test",
            clock=lambda: self.time,
            monotonic=lambda: self.time,
        )
        self.nodes = Reflector(
            self.api,
            GPUNODES,
            NodeReport.of,
            on_change=self._on_node,
            on_answer=self.retractor.answered,
            sleep=lambda _: asyncio.sleep(0),
        )
        decision = Decision(("GPU-1",), 25, 8192, "2026-11-22T11:00:00Z").to_annotations()
        owner = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "old", "uid": "s", "controller": True}
        metadata: Json = {"namespace": "shop", "name": "old", "uid": "uid-old", "ownerReferences": [owner]}
        metadata["annotations"] = {names.FRACTION: "0.25", **decision}
        spec = {"nodeName": "n1"}
        raw: Json = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        self.reconciler.intake.pod(self.api.store.put(PODS, raw))

    def _on_node(self, change: Change, key: str, report: NodeReport) -> None:
        gone = change is Change.DELETED
        self.reconciler.world.put_node(key, {} if gone else report.pod_reports)
        self.retractor.node_changed(key, None if gone else report)

    def write(self) -> None:
        """Let every agent that lives write its GpuNode, if the API server is there."""
        if self.api.is_away:
            return
        for name in {"n1", "n2"} - self.dead:
            tenants = (TenantStatus("uid-old", share_percent=25, progress_ratio=0.9),) if name == "n1" else ()
            gpu = GpuStatus(uuid=f"GPU-{name[1:]}", tenants=tenants)
            status = GpuNodeStatus.of((gpu,), observed_at=f"T{self.time}")
            self.api.store.put(GPUNODES, {"metadata": {"name": name}, "status": to_json(status)})

    async def run(self, seconds: int) -> None:
        """Work for so long: each second a step of each part, every ten a report of each agent that lives."""
        for _ in range(seconds):
            self.time += 1.0
            if int(self.time) % WRITE_SECONDS == 0:
                self.write()
            for _ in range(20):
                await asyncio.sleep(0)
            await self.step()

    async def step(self) -> None:
        await self.retractor.step()
        while await self.reconciler.step():
            pass
        for raw in list(self.api.store.objects(GPUSHARES).values()):
            self.reconciler.intake.share(raw)

    def reason(self) -> str:
        """Return why the pod's promise is kept, or not, by its GpuShare."""
        (share,) = self.api.store.objects(GPUSHARES).values()
        conditions = share["status"]["conditions"]
        return next(str(each["reason"]) for each in conditions if each["type"] == "PromiseKept")


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    made = Scene()
    made.write()
    async with made.nodes:
        await made.run(30)
        yield made


@pytest.mark.parametrize("away_seconds", [60, 100, 200, 3000])
async def test_no_gpushare_calls_an_agent_silent_after_an_outage_of_the_api_server(
    scene: Scene, away_seconds: int
) -> None:
    """Before, each did until its agent had written again."""
    before = scene.reason()
    assert before != "AgentSilent"
    scene.api.go()
    await scene.run(away_seconds)
    scene.dead, scene.api.is_away = {"n1", "n2"}, False
    await scene.run(HANGING_SECONDS)
    scene.dead.clear()
    await scene.run(2 * WRITE_SECONDS)
    assert scene.reason() == before
    assert "AgentSilent" not in scene.api.reasons


async def test_an_agent_that_does_not_write_after_an_outage_is_silent_after_150_s_of_answers(scene: Scene) -> None:
    scene.dead = {"n1"}
    await scene.run(60)
    scene.api.go()
    await scene.run(200)
    scene.api.is_away = False
    await scene.run(int(SILENT_SECONDS) - 60 - 2 * WRITE_SECONDS)
    assert "AgentSilent" not in scene.api.reasons
    await scene.run(4 * WRITE_SECONDS)
    assert scene.reason() == "AgentSilent"


async def test_an_agent_that_was_silent_stays_so_through_an_outage(scene: Scene) -> None:
    scene.dead = {"n1"}
    await scene.run(int(SILENT_SECONDS) + WRITE_SECONDS)
    assert scene.reason() == "AgentSilent"
    scene.api.go()
    await scene.run(200)
    scene.api.reasons.clear()
    scene.api.is_away = False
    await scene.run(60)
    assert scene.reason() == "AgentSilent"
    assert scene.api.reasons <= {"AgentSilent"} | {"Placed"}
    scene.dead.clear()
    await scene.run(2 * WRITE_SECONDS)
    assert scene.reason() != "AgentSilent"


class TestReports:
    """Times as a watch brings them: `answered` at each event and bookmark."""

    def reports(self) -> Reports:
        made = Reports()
        made.put("n1", NodeReport({}, (("uid", "GPU-1", "why"),), "T1"), 0.0)
        return made

    def test_bookmarks_are_answers(self) -> None:
        reports = self.reports()
        for at in (60.0, 120.0):
            reports.answered(at)
        assert reports.silent(SILENT_SECONDS, SILENT_SECONDS) == frozenset()
        assert reports.silent(SILENT_SECONDS + 1.0, SILENT_SECONDS) == {"n1"}

    def test_without_answers_nobody_falls_silent(self) -> None:
        reports = self.reports()
        assert reports.silent(1e6, SILENT_SECONDS) == frozenset()
        reports.answered(1e6)
        assert reports.silent(1e6, SILENT_SECONDS) == frozenset()

    def test_the_time_of_an_outage_does_not_count_and_that_of_answers_does(self) -> None:
        reports = self.reports()
        reports.answered(60.0)
        reports.answered(1060.0)
        for at in (1100.0, 1150.0):
            assert reports.silent(at, SILENT_SECONDS) == frozenset()
            reports.answered(at)
        assert reports.silent(1151.0, SILENT_SECONDS) == {"n1"}, "60 s before, 91 s after"

    def test_the_watch_is_deaf_only_after_the_time_of_a_bookmark(self) -> None:
        reports = self.reports()
        reports.answered(DEAF_SECONDS)
        reports.answered(2 * DEAF_SECONDS)
        assert reports.silent(2 * DEAF_SECONDS + 1.0, SILENT_SECONDS) == {"n1"}
        assert BOOKMARK_SECONDS < DEAF_SECONDS < SILENT_SECONDS - BOOKMARK_SECONDS

    def test_a_report_ends_the_silence_and_what_was_not_counted(self) -> None:
        reports = self.reports()
        reports.answered(1000.0)
        reports.put("n1", NodeReport({}, (), "T2"), 1001.0)
        for at in (1060.0, 1120.0):
            reports.answered(at)
        assert reports.silent(1001.0 + SILENT_SECONDS, SILENT_SECONDS) == frozenset()
        assert reports.silent(1002.0 + SILENT_SECONDS, SILENT_SECONDS) == {"n1"}

    def test_an_ask_is_as_old_as_it_is(self) -> None:
        """Nobody is evicted by what an agent asked for before an outage."""
        reports = self.reports()
        reports.answered(1000.0)
        ((_, ask),) = reports.asks(1000.0)
        assert ask.silent_seconds == 1000.0
        assert ask.is_stale


async def test_an_api_error_of_the_watch_is_no_answer() -> None:
    answers = 0

    def answered() -> None:
        nonlocal answers
        answers += 1

    api = Server()
    async with Reflector(
        api, GPUNODES, NodeReport.of, on_answer=answered, sleep=lambda _: asyncio.sleep(0)
    ) as nodes:
        await nodes.synced.wait()
        assert answers == 1
        api.go()
        for _ in range(50):
            await asyncio.sleep(0)
        assert answers == 1
        assert nodes.restarts > 1
