"""The operator: its connection, watches, loop and metrics, started and stopped together."""

import asyncio
import gc
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Final

from gpushare.core.control import HygieneAction, HygieneSettings, OperatorSettings, RetractionSettings
from gpushare.core.placement import parse_settings
from gpushare.kube import GPUNODES, GPUSHARES, PODS, ApiError, Change, Json, Reflector, connect
from gpushare.runtime.heap import keep_small
from gpushare.runtime.http import METRICS_PATH, MetricsAndProbes, Route, metrics_route, probe_route
from gpushare.runtime.options import Variables
from gpushare.runtime.tasks import watch_lag, without_end
from gpushare_operator.intake import Intake
from gpushare_operator.learner import Learner
from gpushare_operator.listings import KopfListings, KopfRefusals, WatchedResource
from gpushare_operator.metrics import OperatorMetrics
from gpushare_operator.reconciler import CONTROLLER, ShareReconciler
from gpushare_operator.reports import NodeReport
from gpushare_operator.retractor import Retractor
from gpushare_operator.workloads import WorkloadCollector

_log = logging.getLogger(__name__)
# Far more than one round with an API server that never answers (30 s a call).
_STUCK_SECONDS: Final = 300.0
_BEAT_SECONDS: Final = 1.0
# Far above any step: with 10,000 GpuShares the event loop answered within 0.9 s (docs/measurements/operator.md).
_HUNG_SECONDS: Final = 60.0
# Kopf asks for its lists within a second. It never does for a type that was not served as it started.
_UNASKED_SECONDS: Final = 120.0
_METRICS_PORT: Final = 9090
# Of garbage collection. With Python's own (700, 10, 10) it is a tenth of the work of a start with 2,000 GpuShares.
# The extender's go without full collections; here Kopf leaves a cycle behind at each event.
_GC_THRESHOLDS: Final = (20_000, 10, 10)


@dataclass(frozen=True, slots=True)
class Environment:
    """The chart's values, from environment variables.

    Attributes:
        namespaces: to watch; empty means all. Kopf gets the same by --namespace.
        metrics_port: 0 serves no metrics.
        probe_port: port of the probe alone; 0 for none, as it is also on the metrics port.
    """

    settings: OperatorSettings
    namespaces: tuple[str, ...] = ()
    metrics_port: int = _METRICS_PORT
    probe_port: int = 0

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> "Environment":
        """Read the process's environment.

        Raises:
            ValueError: a value is invalid; the message names the variable and its value.
        """
        found, given = parse_settings(variables), Variables(variables)
        settings = OperatorSettings(
            found.defaults, found.probation, _retraction(given), _hygiene(given), found.joined
        )
        ports = given.count("metrics-port", _METRICS_PORT), given.count("probe-port", 0)
        return cls(settings, given.words("namespaces"), *ports)


def _retraction(given: Variables) -> RetractionSettings:
    """Read whether pods are evicted to keep a neighbour's promise, and how many a minute."""
    standard = RetractionSettings()
    return RetractionSettings(
        evicts=given.one_of("retraction", ("evict", "none"), "evict") == "evict",
        per_minute=given.count("retractions-per-minute", standard.per_minute, least=1),
    )


def _hygiene(given: Variables) -> HygieneSettings:
    """Read what to do with pods in trouble."""

    report = HygieneAction.REPORT
    stalled = given.one_of("hygiene-stalled", HygieneAction, report)
    outside_mps = given.one_of("hygiene-outside-mps", HygieneAction, report)
    fault = given.one_of("hygiene-fault", HygieneAction, report)
    return HygieneSettings(HygieneAction(stalled), HygieneAction(outside_mps), HygieneAction(fault))


class Operator:
    """Tasks that run beside Kopf's own.

    Attributes:
        intake: where Kopf's events go.
    """

    def __init__(self, environment: Environment, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._environment = environment
        self._clock = clock
        self._beat_at = self._started_at = clock()
        self._kopf: asyncio.Task[object] | None = None
        self._stack = AsyncExitStack()
        self._metrics = OperatorMetrics()
        self._listings: list[KopfListings] = []
        self._refusals = KopfRefusals(())
        self._tasks: list[asyncio.Task[None]] = []
        self._synced = False
        self._reconciler: ShareReconciler | None = None
        self._retractor: Retractor | None = None
        self._learner: Learner | None = None
        self._nodes: Reflector[NodeReport] | None = None

    @property
    def intake(self) -> Intake:
        """Return the receiver of Kopf's events; it exists only once the operator was started."""
        assert self._reconciler is not None
        return self._reconciler.intake

    async def start(self) -> None:
        """Connect and start the tasks; the reconciler waits until every GpuShare, pod and node is known.

        GpuNodes have a reflector of their own, not Kopf: every agent writes its own every 10 s (ADR 0102).

        Raises:
            ApiError: there is no usable configuration, or no definition of GpuShares; nothing was started.
            OSError: a port is in use; nothing was started.
        """
        gc.set_threshold(*_GC_THRESHOLDS)
        self._kopf = asyncio.current_task()  # Kopf cancels the task that calls its startup handlers when it ends
        async with AsyncExitStack() as stack:
            api = await stack.enter_async_context(connect(field_manager="gpushare-operator"))
            if GPUSHARES.version not in await api.versions_of(GPUSHARES.group):  # Kopf looks for its types once
                raise ApiError(f"the API server does not serve {GPUSHARES.group}/{GPUSHARES.version} yet")
            self._started_at = self._clock()
            settings = self._environment.settings
            self._reconciler = ShareReconciler(
                api,
                settings,
                self._metrics,
                clock=self._clock,
                is_known=self._is_known,
            )
            self._retractor = Retractor(
                api,
                self._reconciler.world,
                settings,
                self._metrics,
                controller=CONTROLLER,
                is_known=self._is_known,
            )
            self._learner = Learner(self._reconciler.world, self._metrics)
            self._listings = [
                KopfListings(watched, namespace)
                for watched in watched_resources(self.intake)
                for namespace in self._environment.namespaces or (None,)
            ]
            self._refusals = KopfRefusals(self._listings)
            self._metrics.refused_namespaces.set_function(partial(len, self._refusals))
            self._nodes = Reflector(
                api, GPUNODES, NodeReport.of, on_change=self._on_node, on_answer=self._retractor.answered
            )
            await stack.enter_async_context(self._nodes)
            self._tasks = [asyncio.create_task(self._work(), name="reconciler")]
            self._tasks.append(asyncio.create_task(self._beat(), name="heartbeat"))
            self._tasks.append(
                asyncio.create_task(watch_lag(self._metrics.lag.labels("operator").observe), name="loop-lag")
            )
            stack.push_async_callback(_cancel, self._tasks)
            self._show_objects()
            self._serve(stack)
            self._stack = stack.pop_all()

    async def stop(self) -> None:
        """Stop everything that `start` started."""
        await self._stack.aclose()

    def begins(self, path: str) -> None:
        """Note what is known, as Kopf asks for the list at `path`."""
        for each in self._listings:
            each.begins(path)

    def page(self, path: str, body: Json) -> None:
        """Record a page of Kopf's list at `path`, and what the whole list lacks."""
        for each in self._listings:
            each.page(path, body)
        self._look_at_refusals()

    def answered(self, path: str, status: int) -> None:
        """Note whether Kopf may list or watch at `path`."""
        changed = [each.answered(path, status, self._clock()) for each in self._listings]
        if any(changed):  # of many namespaces that are refused for long, the heartbeat's look is enough
            self._look_at_refusals()

    def must_list(self, path: str) -> bool:
        """Return whether Kopf's watch at `path` cannot go on where it was, as its objects were forgotten."""
        return any(each.must_list(path) for each in self._listings)

    def _is_known(self, namespace: str) -> bool:
        return self._refusals.is_known(namespace)

    def _look_at_refusals(self) -> None:
        self._refusals.look(self._clock())
        if self._reconciler is not None:
            self._reconciler.take_up()

    async def _work(self) -> None:
        """Start working once every object is known: before that, GpuShares would seem to have no pods."""
        assert self._reconciler is not None
        assert self._retractor is not None
        assert self._learner is not None
        assert self._nodes is not None
        for event in (*(each.done for each in self._listings), self._nodes.synced):
            await event.wait()
        self._synced = True
        world = self._reconciler.world
        _log.info("knows %d pods and %d GpuShares", len(world.pods), len(world.shares))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(without_end("reconciling", self._reconciler.run()))
            tasks.create_task(without_end("retracting", self._retractor.run()))
            tasks.create_task(without_end("learning", self._learner.run()))
            tasks.create_task(without_end("keeping the heap small", keep_small()))

    async def _beat(self) -> None:
        """Record that the event loop, which is Kopf's too, is running."""
        while True:
            self._beat_at = self._clock()
            self._look_at_refusals()
            await asyncio.sleep(_BEAT_SECONDS)

    def trouble(self) -> str:
        """Return a sentence on why this process should be restarted; empty while it is well."""
        if self._kopf is None or self._reconciler is None or not self._tasks:
            return "the operator is not started"
        if (silent_seconds := self._clock() - self._beat_at) > _HUNG_SECONDS:
            return f"the event loop has been stuck for {silent_seconds:.0f} s"
        if self._kopf.cancelling():
            return "Kopf is ending"
        if ended := [task.get_name() for task in self._tasks if task.done()]:
            return f"ended: {', '.join(ended)}"
        unasked = [each.path for each in self._listings if not each.is_asked]
        if unasked and (silent_seconds := self._clock() - self._started_at) > _UNASKED_SECONDS:
            return f"Kopf has not asked for {unasked[0]} in {silent_seconds:.0f} s"
        if self._synced and (silent_seconds := self._clock() - self._reconciler.beat) > _STUCK_SECONDS:
            return f"the reconciler has been stuck for {silent_seconds:.0f} s"
        return ""

    def routes(self) -> dict[str, Route]:
        """Return the HTTP routes for Prometheus and kubelet, which are served outside the event loop."""
        return {METRICS_PATH: metrics_route(self._metrics.registry), "/healthz": probe_route(self.trouble)}

    def _on_node(self, change: Change, key: str, report: NodeReport) -> None:
        assert self._reconciler is not None
        assert self._retractor is not None
        assert self._learner is not None
        gone = change is Change.DELETED
        self._reconciler.world.put_node(key, {} if gone else report.pod_reports)
        self._retractor.node_changed(key, None if gone else report)
        self._learner.node_changed(key, () if gone else report.sets)

    def _show_objects(self) -> None:
        assert self._nodes is not None
        assert self._reconciler is not None
        self._metrics.registry.register(WorkloadCollector(self._reconciler.world))
        bad = self._metrics.bad_objects
        bad.labels(GPUNODES.kind).set_function(partial(getattr, self._nodes, "present_bad_objects"))
        for kind, objects in self.intake.bad_objects.items():
            bad.labels(kind).set_function(partial(len, objects.present))
            self._metrics.missed_deletions.labels(kind).set_function(partial(self._missed, kind))

    def _serve(self, stack: AsyncExitStack) -> None:
        environment = self._environment
        server = MetricsAndProbes(self.routes(), environment.metrics_port, environment.probe_port, os.environ)
        server.start()
        stack.callback(server.close)

    def _missed(self, kind: str) -> int:
        return sum(each.missed for each in self._listings if each.watched.resource.kind == kind)


def watched_resources(intake: Intake) -> tuple[WatchedResource, ...]:
    """Return the resource types that Kopf watches."""
    return (
        WatchedResource(
            GPUSHARES,
            intake.share,
            intake.share_uids,
            intake.forget_shares,
            partial(intake.newest, GPUSHARES.kind),
            partial(intake.start_over, GPUSHARES.kind),
        ),
        WatchedResource(
            PODS,
            intake.pod,
            intake.pod_uids,
            intake.forget_pods,
            partial(intake.newest, PODS.kind),
            partial(intake.start_over, PODS.kind),
        ),
    )


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
