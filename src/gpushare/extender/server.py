"""One complete extender: it runs the watches and serves the verbs."""

import asyncio
import contextlib
import gc
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, Final

from aiohttp import web

from gpushare.core.api import GpuShare, PodView, names
from gpushare.extender.binding import Binder
from gpushare.extender.blind import BlindScheduler
from gpushare.extender.claims import GpuClaims
from gpushare.extender.explain import Explainer
from gpushare.extender.fence import Fence
from gpushare.extender.idle import IdlePods
from gpushare.extender.leadership import Leadership
from gpushare.extender.ledger import ShareLedger
from gpushare.extender.metrics import ExtenderMetrics
from gpushare.extender.options import ExtenderOptions
from gpushare.extender.others import ON_A_NODE, reduce_other_pod
from gpushare.extender.recapping import CapChanger
from gpushare.extender.reduce import reduce_gpunode, reduce_node
from gpushare.extender.verbs import Verbs
from gpushare.extender.waiting import EXAMINING_SECONDS, WaitingPods
from gpushare.kube import GPUNODES, GPUSHARES, NODES, PODS, Api, ApiError, Reflector, Retryable, current_namespace
from gpushare.runtime.heap import keep_small
from gpushare.runtime.http import HttpAnswer, MetricsAndProbes, Route, metrics_route, probe_route
from gpushare.runtime.tasks import watch_lag

_log = logging.getLogger(__name__)
WAKE_PERIOD_SECONDS: Final = 1.0
BEAT_SECONDS: Final = 1.0
HUNG_SECONDS: Final = 60.0  # far above any step; learning runs in another thread, a page of a list takes 50 ms
STOOD_STILL_SECONDS: Final = 10.0
"""If this process stood still for longer, another replica may hold kube-scheduler's lease of 15 s and bind too."""
CATCH_UP_SECONDS: Final = 10.0
"""The longest that a question waits for the pods after a change of the leader; kube-scheduler allows 30 s."""
QUIET_SECONDS: Final = 0.5  # full garbage collections wait until kube-scheduler has asked nothing for this long
_GC_THRESHOLDS: Final = (100_000, 50, 1000)  # with the defaults, reading a large cluster takes twice as long


class Extender:
    """The connected parts of one extender; `watching` starts them."""

    def __init__(self, api: Api, options: ExtenderOptions, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.metrics = ExtenderMetrics()
        self.waiting = WaitingPods()
        self.ledger = ShareLedger(
            options.settings,
            fence=Fence(options.fence_timeout_seconds),
            idle=IdlePods(clock),
            claims=GpuClaims(clock),
            on_room=lambda: self.waiting.room(clock()),
        )
        ledger = self.ledger
        namespace = current_namespace(options.kubeconfig)
        # Nodes come before the pods on them, so that each pod is counted once.
        self.reflectors: tuple[Reflector[Any], ...] = (
            Reflector(api, NODES, reduce_node, on_change=ledger.node_changed),
            Reflector(api, GPUNODES, reduce_gpunode, on_change=ledger.gpunode_changed),
            Reflector(api, GPUSHARES, GpuShare.from_object, on_change=ledger.share_changed),
            Reflector(
                api,
                PODS,
                PodView.from_object,
                on_change=ledger.pod_changed,
                on_answer=lambda: self.waiting.heard(clock()),
                label_selector=names.MANAGED_SELECTOR,
            ),
            Reflector(
                api,
                PODS,
                partial(reduce_other_pod, namespace=namespace),
                on_change=ledger.other_pod_changed,
                label_selector=names.UNMANAGED_SELECTOR,
                field_selector=ON_A_NODE,
                name="other pods",
            ),
        )
        self._pods = self.reflectors[3]
        self.leadership = Leadership(api, options.lease, namespace, clock)
        self.metrics.watch(self.reflectors)
        self.binder = Binder(api, ledger, self.metrics, clock=clock, refusal=self.refusal)
        self.verbs = Verbs(
            ledger,
            self.binder,
            self.metrics,
            self.waiting,
            best_nodes=options.best_nodes,
            not_ready=self.refusal,
            catch_up=self.catch_up,
            clock=clock,
        )
        self.explainer = Explainer(api, ledger, clock)
        self.caps = CapChanger(api, ledger, self.metrics, clock)
        self.blind = BlindScheduler(
            api,
            untried=ledger.untried,
            asked_at=lambda: self.verbs.asked_at,
            restarts=lambda: self._pods.restarts,
            leads=self.leadership.is_here,
            after_seconds=options.unseen_seconds,
            clock=clock,
        )
        self._api = api
        self._clock = clock
        self._beat_at = clock()
        self._listed = asyncio.Event()
        self._tasks: tuple[asyncio.Task[None], ...] = ()

    def not_ready(self) -> str:
        """Return a sentence on what is missing before decisions can be right; empty if nothing is."""
        missing = ", ".join(one.name for one in self.reflectors if not one.synced.is_set())
        if missing and self._listed.is_set():
            return f"the extender is reading {missing} again; it answers when it has"
        return f"the extender is starting: {missing} not read yet" if missing else ""

    def refusal(self) -> str:
        """Return a sentence on why no question is answered now; empty if questions are answered."""
        self._look_back()
        if self.leadership.is_elsewhere:
            return "another kube-scheduler leads, by its lease: the extender beside that one answers"
        return self.not_ready()

    async def catch_up(self) -> None:
        """Find out who leads, and read the pods again if another has; the watch may be behind its bindings."""
        if not self.not_ready() and await self.leadership.has_changed():
            _log.info("another kube-scheduler has led: the pods are read again")
            self._pods.relist()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CATCH_UP_SECONDS):
                    await self._pods.synced.wait()

    def _look_back(self) -> None:
        """Read the pods again if this process stood still for long, as others may have bound some meanwhile."""
        still_seconds, self._beat_at = self._clock() - self._beat_at, self._clock()
        if still_seconds > STOOD_STILL_SECONDS and self._listed.is_set():
            _log.warning("this process was stopped for %.0f s: the pods are read again", still_seconds)
            self._pods.relist()

    def trouble(self) -> str:
        """Return a sentence on why this process should be restarted; empty while it is well."""
        silent_seconds = self._clock() - self._beat_at
        if silent_seconds > HUNG_SECONDS:
            return f"the event loop has been stuck for {silent_seconds:.0f} s"
        for task in self._tasks:
            if task.done() and task.cancelled():
                return f"{task.get_name()} was cancelled"
            if task.done() and (error := task.exception()) is not None:
                return f"{task.get_name()} ended: {error!r}"
        return ""

    def routes(self) -> dict[str, Route]:
        """Return the HTTP routes for kubelet and Prometheus, which are served outside the event loop."""

        def metrics() -> HttpAnswer:
            self.metrics.ready.set(0 if self.not_ready() else 1)
            self.metrics.reservations.set(len(self.ledger.state.reservations))
            return render()

        render, ready = metrics_route(self.metrics.registry), probe_route(self.not_ready)
        return {"/metrics": metrics, "/livez": probe_route(self.trouble), "/readyz": ready, "/healthz": ready}

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Run the watches until the context is left; they start one after the other in the background."""
        async with AsyncExitStack() as stack:
            self._tasks = (
                asyncio.create_task(self._start(stack), name="the first lists"),
                asyncio.create_task(self._follow_time(), name="following the time"),
                asyncio.create_task(self._wake(), name="waking waiting pods"),
                asyncio.create_task(self._beat(), name="the heartbeat"),
                asyncio.create_task(
                    watch_lag(self.metrics.lag.labels("extender").observe), name="watching the event loop's lag"
                ),
                asyncio.create_task(self._keep_small(), name="keeping the heap small"),
            )
            try:
                yield
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _start(self, stack: AsyncExitStack) -> None:
        gc.set_threshold(*_GC_THRESHOLDS)
        await self.leadership.note()
        for reflector in self.reflectors:
            await stack.enter_async_context(reflector)
            await reflector.synced.wait()
        self.ledger.settle_claims()
        self._recall()
        await self.ledger.learn(self._clock())
        self._listed.set()
        _log.info("synced: %d GPU nodes, %d tenants", len(self.reflectors[1].items), len(self.ledger.pods))

    def _recall(self) -> None:
        """Count the pods as refused that kube-scheduler found no node for before this process started.

        Only beside the leader: another kube-scheduler tries every pod once it leads, and its extender hears of it.
        """
        if self.leadership.is_elsewhere:
            return
        for pod in self.ledger.pods.values():
            if pod.waits_for_room:
                self.waiting.refused(pod, self._clock())

    async def _beat(self) -> None:
        """Record that the event loop is running."""
        while True:
            self._look_back()
            await asyncio.sleep(BEAT_SECONDS)

    async def _keep_small(self) -> None:
        await self._listed.wait()
        await keep_small(lambda: self._clock() - self.verbs.asked_at > QUIET_SECONDS)

    async def _follow_time(self) -> None:
        """Update what changes with the time alone; nothing here waits for the API server."""
        while True:
            await asyncio.sleep(WAKE_PERIOD_SECONDS)
            self.ledger.listen(self._clock())
            self.ledger.end_probations()
            self.metrics.silent_nodes.set(len(self.ledger.silent))
            if not self.not_ready():
                self.ledger.keep()
                self.metrics.kept_gpus.set(sum(len(each.gpu_uuids) for each in self.ledger.kept))

    async def _wake(self) -> None:
        """Make the writes that are due: touches, caps, events. Each may take as long as the API server lets it."""
        while True:
            await asyncio.sleep(WAKE_PERIOD_SECONDS)
            await self.wake()
            await self.binder.look_again(self._clock())
            if not self.not_ready():
                await self.caps.round()
                await self.explainer.round()
                self.metrics.schedulers_restarted.inc(await self.blind.round())
                self.metrics.contested_gpus.set(len(self.ledger.claims.contested()))
                await self.ledger.learn(self._clock())

    async def wake(self) -> None:
        """Touch waiting pods that fit now and that kube-scheduler has not asked about again.

        Touch also one that does not fit, but whose status may give an outdated reason.
        """
        self.ledger.begin_round()
        pods = self.ledger.pods
        self.waiting.prune(lambda uid: uid in pods and pods[uid].node is None, self._clock())
        began = self._clock()
        for pod in self.waiting.due(
            began, self.ledger.fits_somewhere, lambda: self._clock() - began < EXAMINING_SECONDS
        ):
            await self._touch(pod, "room")
        if (stale := self.waiting.with_stale_reason(self._clock())) is not None:
            await self._touch(stale, "room that does not suffice")

    async def _touch(self, pod: PodView, why: str) -> None:
        """Write a pod's annotation `gpushare.io/room-since`, so that kube-scheduler tries it again."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        body = {"metadata": {"uid": pod.uid, "annotations": {names.ROOM_SINCE: stamp}}}
        try:
            await self._api.patch(PODS, pod.name, body, namespace=pod.namespace)
            self.metrics.woken.inc()
            _log.info("%s for %s: marked for another try", why, pod.key)
        except ApiError as error:
            if isinstance(error, Retryable):
                self.waiting.failed(pod.uid, self._clock())
            _log.warning("pod %s not marked for another try: %s", pod.key, error)


async def serve(api: Api, options: ExtenderOptions) -> None:
    """Run until cancelled."""
    extender = Extender(api, options)
    async with extender.watching(), AsyncExitStack() as stack:
        probes = MetricsAndProbes(
            extender.routes(), options.metrics_port, options.probe_port, os.environ, address=options.metrics_host
        )
        probes.start()
        stack.callback(probes.close)
        runner = web.AppRunner(extender.verbs.app(), access_log=None)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, options.host, options.port).start()
        _log.info("serving on %s:%d with policy %s", options.host, options.port, options.settings.policy)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
