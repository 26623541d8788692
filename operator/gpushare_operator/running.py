"""The operator as a running thing: its connection, watches, loop and metrics, started and stopped together."""

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from prometheus_client import start_http_server

from gpushare.core.api.names import MANAGED_SELECTOR
from gpushare.core.api.objects import GpuNode, GpuShare
from gpushare.core.control.lifecycle import Fares, PodFacts, Settings, fares_of
from gpushare.core.placement.settings import parse_settings
from gpushare.kube import GPUNODES, GPUSHARES, PODS, Api, ApiError, Change, Json, Reflector, connect
from gpushare_operator.metrics import Metrics
from gpushare_operator.reconciler import Reconciler

_log = logging.getLogger(__name__)
# Far above what one round takes with an API server that answers nothing (30 s a call).
_STUCK_SECONDS: Final = 300.0
_METRICS_PORT: Final = 9090
_RESYNC_SECONDS: Final = 45.0  # how long a deletion that the watch did not bring can go unnoticed


@dataclass(frozen=True, slots=True)
class Environment:
    """The chart's values, from environment variables.

    Attributes:
        namespaces: to watch; empty means all. Kopf gets the same by --namespace.
        metrics_port: 0 serves no metrics.
    """

    settings: Settings
    namespaces: tuple[str, ...] = ()
    metrics_port: int = _METRICS_PORT

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> "Environment":
        """From the process's environment.

        Raises:
            ValueError: a value makes no sense; the message names the variable's value.
        """
        defaults = parse_settings(variables).defaults
        listed = (variables.get("GPUSHARE_NAMESPACES") or "").split(",")
        namespaces = tuple(name.strip() for name in listed if name.strip())
        return cls(Settings(defaults), namespaces, int(variables.get("GPUSHARE_METRICS_PORT") or _METRICS_PORT))


class Operator:
    """Everything that runs beside Kopf's own tasks."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._stack = AsyncExitStack()
        self._metrics = Metrics()
        self._uid_of: dict[str, str] = {}
        self._reflectors: list[Reflector[Any]] = []
        self._synced = False
        self._loop: asyncio.Task[None] | None = None
        self.reconciler: Reconciler | None = None

    async def start(self) -> None:
        """Learn of every GpuShare, then watch pods and nodes and work.

        Raises:
            ApiError: the API server cannot be asked now; nothing was started.
        """
        async with AsyncExitStack() as stack:
            api = await stack.enter_async_context(connect(field_manager="gpushare-operator"))
            self.reconciler = Reconciler(api, self._environment.settings, self._metrics)
            namespaces: tuple[str | None, ...] = self._environment.namespaces or (None,)
            for namespace in namespaces:  # all of them before the first pod, which else would seem to have none
                for share in (await api.list(GPUSHARES, GpuShare.from_object, namespace=namespace)).items:
                    self.reconciler.world.put_share(share)
            self._reflectors = [
                Reflector(
                    api, PODS, PodFacts.from_object, on_change=self._on_pod, namespace=namespace,
                    label_selector=MANAGED_SELECTOR,
                )
                for namespace in namespaces
            ]  # fmt: skip
            self._reflectors.append(Reflector(api, GPUNODES, _fares, on_change=self._on_node))
            for reflector in self._reflectors:
                await stack.enter_async_context(reflector)
            self._loop = asyncio.create_task(self._work(), name="reconciler")
            stack.push_async_callback(_cancel, self._loop)
            resync = asyncio.create_task(self._resync(api, namespaces), name="resync")
            stack.push_async_callback(_cancel, resync)
            self._serve_metrics(stack)
            self._stack = stack.pop_all()

    async def stop(self) -> None:
        """Stop everything that `start` started."""
        await self._stack.aclose()

    def on_share(self, event_type: str | None, obj: Mapping[str, Any]) -> None:
        """Take up Kopf's event about a GpuShare."""
        assert self.reconciler is not None
        share = GpuShare.from_object(obj)
        if event_type == "DELETED":
            self.reconciler.world.drop_share(share.namespace, share.name)
        else:
            self.reconciler.world.put_share(share)

    async def _work(self) -> None:
        """Begin once every pod and node is known: before, each GpuShare would look as if its pods were gone."""
        assert self.reconciler is not None
        for reflector in self._reflectors:
            await reflector.synced.wait()
        self._synced = True
        _log.info(
            "knows %d pods and %d GpuShares", len(self.reconciler.world.pods), len(self.reconciler.world.shares)
        )
        await self.reconciler.run()

    async def _resync(self, api: Api, namespaces: tuple[str | None, ...]) -> None:
        """Look now and then for GpuShares that are gone without a word: their pods would stay without one."""
        assert self.reconciler is not None
        world = self.reconciler.world
        while True:
            await asyncio.sleep(_RESYNC_SECONDS)
            before = dict(world.shares)
            try:
                lists = [await api.list(GPUSHARES, GpuShare.from_object, namespace=each) for each in namespaces]
            except ApiError as error:
                _log.warning("GpuShares not listed, again in %.0f s: %s", _RESYNC_SECONDS, error)
                continue
            there = {share.uid for listed in lists for share in listed.items}
            for key, share in before.items():
                now = world.shares.get(key)
                if share.uid not in there and now is not None and now.uid == share.uid:
                    _log.warning("GpuShare %s/%s is gone and no watch said so", key.namespace, key.name)
                    world.drop_share(key.namespace, key.name)

    def health(self) -> str:
        """One word when the loop goes round.

        Raises:
            RuntimeError: it ended or is stuck; only a restart helps.
        """
        if self.reconciler is None or self._loop is None or self._loop.done():
            raise RuntimeError("the reconciler ended")
        if not self._synced:
            return "syncing"
        if (silent := time.monotonic() - self.reconciler.beat) > _STUCK_SECONDS:
            raise RuntimeError(f"the reconciler is stuck since {silent:.0f} s")
        return "running"

    def _on_pod(self, change: Change, key: str, pod: PodFacts) -> None:
        assert self.reconciler is not None
        world = self.reconciler.world
        known = self._uid_of.pop(key, pod.uid)
        if known != pod.uid:  # deleted and made anew under its name while the watch was away
            world.drop_pod(known)
        if change is Change.DELETED:
            world.drop_pod(pod.uid)
        else:
            self._uid_of[key] = pod.uid
            world.put_pod(pod)

    def _on_node(self, change: Change, key: str, fares: dict[str, Fares]) -> None:
        assert self.reconciler is not None
        self.reconciler.world.put_node(key, {} if change is Change.DELETED else fares)

    def _serve_metrics(self, stack: AsyncExitStack) -> None:
        for kind in {reflector.resource.kind for reflector in self._reflectors}:
            self._metrics.bad_objects.labels(kind).set_function(partial(self._bad_objects, kind))
        if self._environment.metrics_port:
            server, thread = start_http_server(self._environment.metrics_port, registry=self._metrics.registry)
            stack.callback(thread.join, 5.0)
            stack.callback(server.server_close)
            stack.callback(server.shutdown)

    def _bad_objects(self, kind: str) -> int:
        return sum(one.bad_objects for one in self._reflectors if one.resource.kind == kind)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _fares(obj: Json) -> dict[str, Fares]:
    return fares_of([GpuNode.from_object(obj).status])
