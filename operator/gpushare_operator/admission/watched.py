"""The admission server's view of the cluster: GPUs' memory and GpuShares; the server works without them too."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

from gpushare.core import admission
from gpushare.core.admission import Defaults, JoinedWorkload, ShareIndex
from gpushare.core.api import GpuNode, GpuNodeStatus, GpuShare
from gpushare.core.placement import with_joint_profile
from gpushare.kube import GPUNODES, GPUSHARES, ApiError, Change, Reflector, connect

_log = logging.getLogger(__name__)
_CONNECT_AGAIN_SECONDS: Final = 10.0


class Watched:
    """GpuNodes and GpuShares as last seen; empty until the watches run."""

    def __init__(
        self,
        gpu_memory_reserve_mib: int = 0,
        joined: Iterable[JoinedWorkload] = (),
        defaults: Defaults | None = None,
    ) -> None:
        """Create an empty view.

        Args:
            gpu_memory_reserve_mib: memory of each GPU that tenants never get.
            joined: workload keys that mean one workload in several namespaces.
        """
        self._reserve_mib = gpu_memory_reserve_mib
        self._defaults = defaults or Defaults()
        self._memories_mib: dict[str, frozenset[int]] = {}
        self._shares = ShareIndex(joined=joined)

    def know(self, obj: Mapping[str, Any], namespace: str) -> admission.Knowledge:
        """Return the known facts that matter for a pod, a pod template or a GpuShare of a namespace."""
        name = (obj.get("metadata") or {}).get("name")
        return admission.Knowledge(
            frozenset[int]().union(*self._memories_mib.values()),
            self._share(obj, namespace),
            self._shares.selecting(namespace, besides=name if isinstance(name, str) else None),
        )

    def _share(self, pod: Mapping[str, Any], namespace: str) -> GpuShare | None:
        metadata = pod.get("metadata") or {}
        owners = [owner.uid for owner in admission.owners_of(pod)]
        found = self._shares.of(namespace, metadata.get("labels") or {}, owners)
        found = found or self._share_of_deployment(pod, namespace)
        annotations = metadata.get("annotations") or {}
        return with_joint_profile(found, namespace, annotations, self._shares, self._defaults)

    def _share_of_deployment(self, pod: Mapping[str, Any], namespace: str) -> GpuShare | None:
        """Return the GpuShare of a pod's Deployment, for the first pod of a ReplicaSet that it does not list yet.

        The Deployment's uid is not known here, but its name. The GpuShare's own name says nothing: a user's may
        have the plain one, and the operator's then has another.
        """
        owner = admission.guess_top_owner(pod)
        if owner is None or (owner.kind, owner.uid) != (admission.DEPLOYMENT, ""):
            return None
        return self._shares.of_deployment(namespace, owner.name)

    def on_node(self, change: Change, name: str, sizes_mib: frozenset[int]) -> None:
        """Record the memory sizes of a GpuNode's GPUs."""
        if change is Change.DELETED:
            self._memories_mib.pop(name, None)
        else:
            self._memories_mib[name] = admission.tenant_memories_mib(sizes_mib, self._reserve_mib)

    def on_share(self, change: Change, _key: str, share: GpuShare) -> None:
        """Record a GpuShare."""
        if change is Change.DELETED:
            self._shares.drop(share.namespace, share.name)
        else:
            self._shares.put(share)

    async def keep(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Watch until cancelled; without a cluster configuration, go on without."""
        while True:
            try:
                async with self._watches():
                    await asyncio.Event().wait()
            except ApiError as error:
                _log.warning("serving without knowledge of the cluster: %s", error)
            await sleep(_CONNECT_AGAIN_SECONDS)

    @asynccontextmanager
    async def _watches(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            api = await stack.enter_async_context(connect(field_manager="gpushare-admission"))
            await stack.enter_async_context(Reflector(api, GPUNODES, _sizes_mib, on_change=self.on_node))
            await stack.enter_async_context(
                Reflector(api, GPUSHARES, GpuShare.from_object, on_change=self.on_share)
            )
            yield


def _sizes_mib(obj: Mapping[str, Any]) -> frozenset[int]:
    status: GpuNodeStatus = GpuNode.from_object(obj).status
    return frozenset(gpu.memory_mib for gpu in status.gpus)
