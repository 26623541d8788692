"""The agent's calls to the API server: its pods, the GpuNode, corrected annotations, events."""

import functools
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from gpushare.core.admission import JoinedWorkload
from gpushare.core.api import API_VERSION, MANAGED_SELECTOR, Decision, GpuNodeStatus, to_json
from gpushare.core.control import SILENT_SECONDS
from gpushare.kube import (
    GPUNODES,
    GPUSHARES,
    NODES,
    PODS,
    AlreadyExists,
    Api,
    ApiError,
    Change,
    EventType,
    Forbidden,
    Json,
    NotFound,
    Reflector,
    record_event,
)
from gpushare_deviceplugin.container_runtime import node_runtime
from gpushare_deviceplugin.gates import Notice
from gpushare_deviceplugin.pods import ManagedPod, reduce_pod
from gpushare_deviceplugin.shares import NodeShares, SharedProfile, reduce_gpushare
from gpushare_deviceplugin.state import AgentPart, NodeState

_log = logging.getLogger(__name__)
CONTROLLER: Final = "gpushare.io/agent"
NOT_WRITTEN: Final = "GpuNodeNotWritten"


class AgentApi:
    """The agent's API client; no method but `pods` raises ApiError."""

    def __init__(
        self,
        api: Api,
        node_name: str,
        state: NodeState,
        joined: Iterable[JoinedWorkload] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._node_name = node_name
        self._state = state
        self._clock = clock
        self._unwritten_since: float | None = None  # when the first write of the GpuNode failed in a row
        self._why_unwritten = ""  # what was answered last
        self._is_silence_logged = False
        self._may_adopt = True
        self._watched_during_list: list[set[str]] = []  # by list under way: uids of pods that the watch delivered
        self.shares = NodeShares(pods=state.pods, joined=joined)
        """The GpuShares that concern pods on this node, as `profiles` keeps them."""
        self._node: dict[str, Any] = {"kind": "Node", "apiVersion": "v1", "name": node_name}

    def pods(self) -> Reflector[ManagedPod]:
        """Return the reflector of this node's managed pods, delivered into the state."""

        def on_change(change: Change, key: str, pod: ManagedPod) -> None:  # noqa: ARG001 - the reflector's signature
            if change is Change.DELETED:
                gone = [pod.uid]
            else:
                gone = [p.uid for p in self._state.pods.values() if p.key == pod.key and p.uid != pod.uid]
            for watched in self._watched_during_list:
                watched.update((pod.uid, *gone))
            for uid in gone:
                self._state.drop_pod(uid)
            if change is not Change.DELETED:
                self._state.put_pod(pod)

        return Reflector(
            self._api,
            PODS,
            reduce_pod,
            on_change=on_change,
            label_selector=MANAGED_SELECTOR,
            field_selector=f"spec.nodeName={self._node_name}",
        )

    def profiles(self) -> Reflector[SharedProfile]:
        """Return the reflector that keeps `shares`; it notifies the state of changes."""

        def on_change(change: Change, key: str, share: SharedProfile) -> None:
            if change is Change.DELETED:
                self.shares.pop(key, None)
            else:
                self.shares[key] = share
            self._state.touch()

        reduce = functools.partial(reduce_gpushare, node_name=self._node_name, joins=self.shares.joins)
        return Reflector(self._api, GPUSHARES, reduce, on_change=on_change)

    async def refresh_pods(self) -> frozenset[str] | None:
        """List this node's pods now, because our watch may be behind; return their uids, or None on failure.

        The listed state of a pod that the watch delivered during the list is not used: it may be the older one.
        """
        watched: set[str] = set()
        self._watched_during_list.append(watched)
        try:
            listing = await self._api.list(
                PODS,
                reduce_pod,
                label_selector=MANAGED_SELECTOR,
                field_selector=f"spec.nodeName={self._node_name}",
            )
        except ApiError as error:
            _log.warning("the node's pods could not be read: %s", error)
            return None
        finally:
            self._watched_during_list = [each for each in self._watched_during_list if each is not watched]
        listed = [pod for pod in listing.items if pod.uid not in watched]
        for pod in listed:
            self._state.put_pod(pod)
        return frozenset(pod.uid for pod in listed) | (watched & self._state.pods.keys())

    async def find_pod(self, uid: str) -> ManagedPod | None:
        """Return a pod of this node by its uid, whether or not it asks for a share; None if it cannot be found."""
        if uid in self._state.pods:
            return self._state.pods[uid]
        try:
            listing = await self._api.list(PODS, reduce_pod, field_selector=f"spec.nodeName={self._node_name}")
        except ApiError as error:
            _log.warning("the node's pods could not be read: %s", error)
            return None
        return next((pod for pod in listing.items if pod.uid == uid), None)

    async def correct(self, pod: ManagedPod, decision: Decision) -> bool:
        """Write a pod's decision annotations; return False when it could not be done now."""
        body = {"metadata": {"uid": pod.uid, "annotations": decision.to_annotations()}}
        try:
            await self._api.patch(PODS, pod.name, body, namespace=pod.namespace)
        except ApiError as error:
            self._state.counts.error(AgentPart.ANNOTATIONS)
            _log.warning("annotations of pod %s not corrected: %s", pod.key, error, extra={"pod": pod.uid})
            return False
        return True

    async def write(self, status: GpuNodeStatus) -> bool:
        """Write the GpuNode's status, creating the object if it is missing and this node is in the cluster."""
        body = {"status": to_json(status, nulls=True)}
        try:
            try:
                written = await self._api.patch(GPUNODES, self._node_name, body, subresource="status")
            except NotFound:
                await self._create()
                written = await self._api.patch(GPUNODES, self._node_name, body, subresource="status")
        except ApiError as error:
            if self._unwritten_since is None:
                _log.warning("GpuNode %s not written, retrying: %s", self._node_name, error)
                self._unwritten_since, self._is_silence_logged = self._clock(), False
            self._why_unwritten = str(error)
            self._log_silence(self._clock() - self._unwritten_since)
            return False
        if self._unwritten_since is not None:
            seconds, self._unwritten_since = self._clock() - self._unwritten_since, None
            _log.info("GpuNode %s is written again, after %.0f s", self._node_name, seconds)
            if seconds > SILENT_SECONDS:
                await self._tell_silence(seconds)
        if self._may_adopt and "ownerReferences" not in written["metadata"]:
            await self._adopt(str(written["metadata"]["uid"]))
        return True

    def _log_silence(self, seconds: float) -> None:
        """Log once that the GpuNode could not be written for so long that the agent counts as silent."""
        if seconds > SILENT_SECONDS and not self._is_silence_logged:
            self._is_silence_logged = True
            _log.error(
                "GpuNode %s not written for %.0f s, so its agent counts as silent and it gets no new pods: %s",
                *(self._node_name, seconds, self._why_unwritten),
            )

    async def _tell_silence(self, seconds: float) -> None:
        """Write an event on the node: its agent counted as silent though it ran, and could not say so before."""
        note = (
            f"the agent could not write its GpuNode for {seconds:.0f} s and so counted as silent, "
            f"although it ran: {self._why_unwritten}"
        )
        await self.tell(Notice(None, NOT_WRITTEN, note))

    async def tell(self, notice: Notice, pod: ManagedPod | None = None) -> None:
        """Write an event about a pod of this node, or about the node; give `pod` if it is not a managed one."""
        regarding = self._node
        if notice.pod_uid is not None:
            pod = pod or self._state.pods.get(notice.pod_uid)
            if pod is None:
                return
            regarding = {
                "kind": "Pod",
                "apiVersion": "v1",
                "name": pod.name,
                "namespace": pod.namespace,
                "uid": pod.uid,
            }
        await record_event(
            self._api,
            regarding,
            reason=notice.reason,
            note=notice.note,
            action="Sharing",
            event_type=EventType.WARNING if notice.is_warning else EventType.NORMAL,
            controller=CONTROLLER,
        )

    async def _create(self) -> None:
        """Create the GpuNode.

        Raises:
            ApiError: also if the Node cannot be read. Without it the GpuNode would have no owner, and so outlive a
                node that was deleted under its agent.
        """
        metadata = {"name": self._node_name, "ownerReferences": await self._owners()}
        try:
            await self._api.create(GPUNODES, {"apiVersion": API_VERSION, "kind": "GpuNode", "metadata": metadata})
        except AlreadyExists:
            return

    async def container_runtime(self) -> str | None:
        """Return the name and version of this node's container runtime; None when the Node cannot be read."""
        try:
            return node_runtime(await self._api.get(NODES, self._node_name))
        except ApiError as error:
            _log.warning("the version of the node's container runtime could not be read: %s", error)
            return None

    async def _adopt(self, uid: str) -> None:
        """Give the GpuNode its owner, which agents of former versions left out if their node was not there."""
        try:
            body = {"metadata": {"uid": uid, "ownerReferences": await self._owners()}}
            await self._api.patch(GPUNODES, self._node_name, body)
        except Forbidden as error:
            self._may_adopt = False  # where the API server lets only those set owners who may delete the object
            _log.warning("GpuNode %s has no owner, delete it with its node by hand: %s", self._node_name, error)
        except ApiError as error:
            _log.info("GpuNode %s has no owner yet: %s", self._node_name, error)

    async def _owners(self) -> list[Json]:
        """Return this node as an owner, so that its GpuNode is deleted with it."""
        node = await self._api.get(NODES, self._node_name)
        return [{"apiVersion": "v1", "kind": "Node", "name": self._node_name, "uid": str(node["metadata"]["uid"])}]
