"""One extender put together: watches in, verbs out."""

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

from aiohttp import web

from gpushare.core.api import GpuShare, PodView, names
from gpushare.extender.binding import Binder
from gpushare.extender.explain import Explainer
from gpushare.extender.fence import Fence
from gpushare.extender.ledger import ShareLedger
from gpushare.extender.metrics import ExtenderMetrics
from gpushare.extender.options import POLICIES, ExtenderOptions
from gpushare.extender.others import ON_A_NODE, reduce_other_pod
from gpushare.extender.reduce import reduce_gpunode, reduce_node
from gpushare.extender.verbs import Verbs
from gpushare.extender.waiting import WaitingPods
from gpushare.kube import GPUNODES, GPUSHARES, NODES, PODS, Api, ApiError, Reflector

_log = logging.getLogger(__name__)
WAKE_PERIOD_SECONDS: Final = 1.0
_GC_THRESHOLDS: Final = (100_000, 50, 1000)  # the defaults double the time to read a large cluster


class Extender:
    """The parts of one extender, wired; `running` starts them."""

    def __init__(self, api: Api, options: ExtenderOptions, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.metrics = ExtenderMetrics()
        self.waiting = WaitingPods()
        self.ledger = ShareLedger(
            POLICIES[options.settings.policy](),
            options.settings.defaults,
            gpu_memory_reserve_mib=options.settings.gpu_memory_reserve_mib,
            fence=Fence(options.fence_timeout_seconds),
            on_room=lambda: self.waiting.room(clock()),
        )
        ledger = self.ledger
        # In this order: nodes before the pods on them, so that each is counted once.
        self.reflectors: tuple[Reflector[Any], ...] = (
            Reflector(api, NODES, reduce_node, on_change=ledger.node_changed),
            Reflector(api, GPUNODES, reduce_gpunode, on_change=ledger.gpunode_changed),
            Reflector(api, GPUSHARES, GpuShare.from_object, on_change=ledger.share_changed),
            Reflector(
                api, PODS, PodView.from_object, on_change=ledger.pod_changed, label_selector=names.MANAGED_SELECTOR
            ),
            Reflector(
                api,
                PODS,
                reduce_other_pod,
                on_change=ledger.other_pod_changed,
                label_selector=names.UNMANAGED_SELECTOR,
                field_selector=ON_A_NODE,
                name="other pods",
            ),
        )
        self.metrics.watch(self.reflectors)
        self.verbs = Verbs(
            ledger,
            Binder(api, ledger, self.metrics),
            self.metrics,
            self.waiting,
            best_nodes=options.best_nodes,
            not_ready=self.not_ready,
            clock=clock,
        )
        self.explainer = Explainer(api, ledger, clock)
        self._api = api
        self._clock = clock

    def not_ready(self) -> str:
        """What is missing before a decision can be right, as a sentence; empty when nothing is."""
        missing = [one.name for one in self.reflectors if not one.synced.is_set()]
        return f"the extender is starting: {', '.join(missing)} not read yet" if missing else ""

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch until left; the watches are started one after the other in the background."""
        async with AsyncExitStack() as stack:
            starting = asyncio.create_task(self._start(stack))
            waking = asyncio.create_task(self._wake())
            try:
                yield
            finally:
                for task in (starting, waking):
                    task.cancel()
                await asyncio.gather(starting, waking, return_exceptions=True)

    async def _start(self, stack: AsyncExitStack) -> None:
        gc.set_threshold(*_GC_THRESHOLDS)
        for reflector in self.reflectors:
            await stack.enter_async_context(reflector)
            await reflector.synced.wait()
        await self.ledger.learn()
        gc.collect()
        gc.freeze()
        _log.info("synced: %d GPU nodes, %d tenants", len(self.reflectors[1].items), len(self.ledger.pods))

    async def _wake(self) -> None:
        while True:
            await asyncio.sleep(WAKE_PERIOD_SECONDS)
            await self.wake()
            if not self.not_ready():
                await self.explainer.round()
                await self.ledger.learn()

    async def wake(self) -> None:
        """Touch waiting pods that fit by now and that kube-scheduler has not asked for again."""
        pods = self.ledger.pods
        self.waiting.prune(lambda uid: uid in pods and pods[uid].node is None, self._clock())
        for pod in self.waiting.due(self._clock(), self.ledger.fits_somewhere):
            stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            body = {"metadata": {"uid": pod.uid, "annotations": {names.ROOM_SINCE: stamp}}}
            try:
                await self._api.patch(PODS, pod.name, body, namespace=pod.namespace)
                self.metrics.woken.inc()
                _log.info("room for %s: marked for another try", pod.key)
            except ApiError as error:
                _log.warning("pod %s not marked for another try: %s", pod.key, error)


async def serve(api: Api, options: ExtenderOptions) -> None:
    """Run until cancelled."""
    extender = Extender(api, options)
    async with extender.watching(), AsyncExitStack() as stack:
        for app, host, port in (
            (extender.verbs.app(), options.host, options.port),
            (extender.verbs.probes(), options.metrics_host, options.metrics_port),
        ):
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, host, port).start()
        _log.info("serving on %s:%d with policy %s", options.host, options.port, options.settings.policy)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
