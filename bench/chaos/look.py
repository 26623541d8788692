"""Take a picture of the cluster: four lists from the API server, the rest from the node itself."""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from bench.chaos import node
from bench.chaos.api import ApiConnection, Json, NoAnswerError, RefusedError
from bench.chaos.auditor import is_slow
from bench.chaos.parts import RELEASE_NAMESPACE, Component, missing_roles
from bench.chaos.picture import ClientSeen, GpuSeen, Picture, PodSeen

MANAGED: Final = "gpushare.io%2Fmanaged%3Dtrue"
SILENT: Final = 1e6  # seconds: a gate or a twin that never wrote


class Eye:
    """Taker of pictures; it remembers gpushare's own pods while the API server is away.

    Attributes:
        excused: parts whose processes are not asked for by name, as a former release has others.
    """

    def __init__(self, api: ApiConnection) -> None:
        self._api = api
        self.parts: Mapping[str, Component] = {}
        self.part_pods: tuple[Json, ...] = ()
        self.excused: frozenset[Component] = frozenset()
        self._nodes: list[Json] = []
        self._wanted: Counter[Component] = Counter()
        self._caps: dict[str, int] = {}  # the largest so far, of each pod

    def count_parts_anew(self) -> None:
        """Forget how many pods each part has had: an upgrade has more of some for a while."""
        self._wanted.clear()

    def picture(self) -> Picture:
        """Look now."""
        found = node.processes()
        counted = Counter(one.pod_uid for one in found)
        pod_of = {one.pid: one.pod_uid for one in found}
        outside = frozenset(one.pod_uid for one in found if one.comm == node.OUTSIDE_COMM)
        try:
            pods = self._pods()
            self._nodes = self._api.items("/apis/gpushare.io/v1alpha1/gpunodes")
            unready = self._unready_parts() + self._unready_nodes()
        except (NoAnswerError, RefusedError) as error:
            pods, unready = None, [str(error)]
        gpus = tuple(_gpu(gpu, pod_of) for one in self._nodes for gpu in one.get("status", {}).get("gpus") or [])
        named = {uid: part for uid, part in self.parts.items() if part not in self.excused}
        unready += missing_roles(
            named, found, 0 if Component.MPS in self.excused else len(gpus), self._containers()
        )
        now = time.time()
        known = self._known_to_kubelet() if any(is_slow(pod, now) for pod in (pods or {}).values()) else None
        hosts = frozenset(uid for uid, part in self.parts.items() if part is Component.MPS)
        return Picture(pods, gpus, node.devices_by_pod(), counted, outside, tuple(unready), now, known, hosts)

    def _known_to_kubelet(self) -> frozenset[str] | None:
        """Return the uids of the pods that the kubelets have seen, admitted or not; None if one does not tell."""
        found: set[str] = set()
        try:
            for one in self._api.items("/api/v1/nodes"):
                pods = self._api.get(f"/api/v1/nodes/{one['metadata']['name']}/proxy/pods")
                found |= {item["metadata"]["uid"] for item in pods.get("items") or []}
        except (NoAnswerError, RefusedError):
            return None
        return frozenset(found)

    def _pods(self) -> dict[str, PodSeen]:
        items = self._api.items(f"/api/v1/pods?labelSelector={MANAGED}")
        seen = [pod_seen(item) for item in items]
        self._caps = {pod.uid: max(pod.thread_percentage, self._caps.get(pod.uid, 0)) for pod in seen}
        return {pod.uid: replace(pod, most_threads=self._caps[pod.uid]) for pod in seen}

    def _unready_parts(self) -> list[str]:
        items = self._api.items(f"/api/v1/namespaces/{RELEASE_NAMESPACE}/pods")
        known = {part.value for part in Component}
        ours = [
            item
            for item in items
            if item["metadata"].get("labels", {}).get("app.kubernetes.io/component") in known
            and item["status"].get("phase") not in {"Succeeded", "Failed"}
        ]
        living = [item for item in ours if "deletionTimestamp" not in item["metadata"]]
        self.part_pods = tuple(living)
        self.parts = {one["metadata"]["uid"]: _part(one) for one in living}
        present = Counter(self.parts.values())
        # A part should have as many pods as it ever had: a deleted one without a successor is missing.
        self._wanted = present | self._wanted
        unready = [
            f"{have} of {count} pods of {part}"
            for part, count in self._wanted.items()
            if (have := present[part]) < count
        ]
        return unready + [f"{item['metadata']['name']} is not ready" for item in living if not _is_ready(item)]

    def _containers(self) -> dict[str, frozenset[str]]:
        """Return the names of the containers of each of gpushare's own pods, by uid."""
        return {
            one["metadata"]["uid"]: frozenset(container["name"] for container in one["spec"]["containers"])
            for one in self.part_pods
        }

    def _unready_nodes(self) -> list[str]:
        items = self._api.items("/api/v1/nodes")
        return [f"node {item['metadata']['name']} is not ready" for item in items if not _is_ready(item)]


def pod_seen(item: Json) -> PodSeen:
    """Read a pod of the API server."""
    metadata, spec, status = item["metadata"], item["spec"], item.get("status", {})
    annotations = metadata.get("annotations") or {}
    limits = [one.get("resources", {}).get("limits") or {} for one in spec["containers"]]
    containers = status.get("containerStatuses") or []
    return PodSeen(
        uid=metadata["uid"],
        name=f"{metadata['namespace']}/{metadata['name']}",
        phase=status.get("phase", ""),
        share=sum(int(one.get(node.SHARE_RESOURCE, 0)) for one in limits),
        gpus=tuple(filter(None, annotations.get("gpushare.io/gpu", "").split(","))),
        thread_percentage=int(annotations.get("gpushare.io/thread-percentage") or 0),
        memory_mib=_mib(annotations.get("gpushare.io/memory-limit", "")),
        is_bound=bool(spec.get("nodeName")),
        is_deleting="deletionTimestamp" in metadata,
        restarts=sum(int(one.get("restartCount", 0)) for one in containers),
        why=_why(status, containers),
        admitted_at=_unix_time(status.get("startTime")),
        bound_at=_bound_at(status),
    )


def _unix_time(written: str | None) -> float | None:
    return datetime.fromisoformat(written).timestamp() if written else None


def _bound_at(status: Json) -> float | None:
    for one in status.get("conditions") or []:
        if one.get("type") == "PodScheduled" and one.get("status") == "True":
            return _unix_time(one.get("lastTransitionTime"))
    return None


def _mib(limit: str) -> int:
    """Return the MiB of a memory limit such as "0=8192M"."""
    amount = limit.partition(",")[0].partition("=")[2]
    return int(amount[:-1]) if amount.endswith("M") else 0


def _why(status: Json, containers: list[Json]) -> str:
    reasons = [status.get("reason"), status.get("message")]
    for one in containers:
        for state in one.get("state", {}).values():
            reasons += [state.get("reason"), state.get("message")]
    for one in status.get("conditions") or []:
        if one.get("type") == "PodScheduled" and one.get("status") != "True":
            reasons += [one.get("reason"), one.get("message")]
    return "; ".join(str(reason) for reason in reasons if reason)[:600]


def _part(item: Json) -> Component:
    return Component(item["metadata"]["labels"]["app.kubernetes.io/component"])


def _is_ready(item: Json) -> bool:
    conditions = item.get("status", {}).get("conditions") or []
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def clients_of_twin(twin: Json, pod_of: Mapping[int, str]) -> tuple[ClientSeen, ...]:
    """Return the MPS clients that the twin's daemon serves; the cgroups show whose they are."""
    return tuple(
        ClientSeen(
            pid=one["pid"],
            pod_uid=pod_of.get(one["pid"]),
            thread_percentage=one["thread_percentage"],
            memory_used_mib=one["memory_used_mib"],
            is_alive=node.is_alive(one["pid"], None),
        )
        for one in twin.get("clients") or []
        if one["is_mps_client"]
    )


def _clients_of_gate(gate: Json) -> tuple[ClientSeen, ...]:
    return tuple(
        ClientSeen(
            pid=one["pid"],
            pod_uid=one.get("pod_uid"),
            thread_percentage=one.get("thread_percentage"),
            memory_used_mib=one.get("memory_used_mib"),
            is_alive=node.is_alive(one["pid"], one.get("start_ticks")),
        )
        for one in gate.get("clients") or []
    )


def _gpu(gpu: Json, pod_of: Mapping[int, str]) -> GpuSeen:
    gate: dict[str, Any] = node.gate_file(gpu["uuid"]) or {}
    twin: dict[str, Any] = node.twin_file(gpu["uuid"]) or {}
    return GpuSeen(
        uuid=gpu["uuid"],
        memory_mib=gpu.get("memoryMiB", 0),
        health=gpu.get("health", ""),
        mps_state=gpu.get("mps", {}).get("state", ""),
        tenants={one["podUid"]: one.get("share", 0) for one in gpu.get("tenants") or []},
        gate_state=gate.get("state", "silent"),
        gate_age_seconds=_age(gate),
        clients=clients_of_twin(twin, pod_of),
        told=_clients_of_gate(gate),
        twin_age_seconds=_age(twin),
    )


def _age(written: Json) -> float:
    return time.time() - written["written_at"] if "written_at" in written else SILENT
