"""A live cluster as input of the packing engine: nodes, their free resources, and where pods run or wait."""

import math
import os
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from gpushare.cli.access import EXPLAINER, list_ours
from gpushare.cli.errors import UsageError
from gpushare.cli.release import read_release
from gpushare.cli.scheduler_filters import SchedulerNode
from gpushare.core.admission import Defaults, ShareIndex, refuse_container, tenant_memories_mib, tolerations_of
from gpushare.core.api import (
    Decision,
    GpuNode,
    GpuShare,
    NodeRules,
    PodView,
    Rejection,
    names,
    parse_bytes,
    parse_cpu_milli,
    parse_quantity,
    reduced_object,
    taints_of,
)
from gpushare.core.control import SILENT_SECONDS
from gpushare.core.gpu import Health
from gpushare.core.interference import InterferenceModel
from gpushare.core.placement import (
    AGENT_AWAY,
    MILLI_PER_PERCENT,
    GpuSpec,
    NodeSpec,
    NominatedPod,
    Placement,
    PlacementRequest,
    Settings,
    SettingsError,
    WaitingPod,
    WindowStarts,
    bound_request,
    in_order_of_claim,
    in_order_of_end,
    known_of,
    nodes_by_decision,
    parse_settings,
    request_of,
    term_of,
    with_joint_profile,
)
from gpushare.data import default_model, model_beside, usable_models
from gpushare.kube import GPUNODES, GPUSHARES, NODES, PODS, Api, Json
from gpushare.runtime.models import MODELS_VARIABLE
from gpushare.runtime.moments import unix_seconds

_MIB: Final = 2**20
_OFFERED: Final = ("cpu", "memory", names.SHARE_RESOURCE)
_ADDED_TOLERATIONS: Final = tuple(
    {"key": f"node.kubernetes.io/{trouble}", "operator": "Exists", "effect": "NoExecute"}
    for trouble in ("not-ready", "unreachable")
)
"""Tolerations that the API server adds to every pod by default (its plugin DefaultTolerationSeconds)."""


@dataclass(frozen=True, slots=True)
class Objects:
    """A cluster's objects that decisions depend on.

    Attributes:
        settings: data of the release's ConfigMap; None if there is none.
        nodes, gpunodes, gpushares, pods: raw objects.
        read_at: when they were read, Unix time; None if that is not known, so that no agent is late.
        models: text of each model artefact of the release by its file's name; empty if it has none, None if that
            is not known: they may not be read, or an older gpushare wrote the snapshot.
    """

    settings: Mapping[str, str] | None
    nodes: Sequence[Json] = ()
    gpunodes: Sequence[Json] = ()
    gpushares: Sequence[Json] = ()
    pods: Sequence[Json] = ()
    read_at: float | None = None
    models: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class UndecidedPod:
    """A pod that runs with a share but without a decision; it is counted by its limit, as in the extender.

    Attributes:
        gpu_uuids: the GPUs on which its node's agent lists it.
    """

    key: str
    node: str
    limit_percent: int
    gpu_uuids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LiveCluster:
    """The state of a cluster from which a plan starts.

    Attributes:
        nodes: with the CPU and memory left by pods without our annotation or without a decision; below 0 if they
            request more than the node has.
        pods: pods with our annotation; the placement is None for waiting ones. `pod_uid` is "namespace/name".
        unhealthy: uuids of GPUs that take no tenants.
        notes: sentences on what was left out and why.
        settings: the release's settings of decisions.
        shares: every GpuShare.
        unreadable: nodes on which no workload can be profiled in place.
        waiting: pods for which kube-scheduler found no node, so that a GPU may be kept for them.
        undecided: pods with a share that gpushare did not place.
        silent: by node, the least seconds since its agent's last report; `AGENT_AWAY` if kubelet has no shares of
            healthy GPUs to give.
        read_at: when it was read, Unix time; None if that is not known.
        scheduler_nodes: by name, the nodes as kube-scheduler sees them.
        since: by pod that runs, when its place was decided, Unix time; the oldest are expected to leave first.
        models: the release's models of other GPUs than the shipped one's; None if they are not known.
        nominated: waiting pods that are nominated to nodes, where they have room kept.
        leaving: by node, its pods with our annotation that are being deleted, in the order in which kubelet kills
            them.
    """

    nodes: tuple[NodeSpec, ...]
    pods: tuple[tuple[PlacementRequest, Placement | None], ...]
    unhealthy: frozenset[str] = frozenset()
    notes: tuple[str, ...] = field(default=())
    settings: Settings = field(default_factory=Settings)
    shares: ShareIndex = field(default_factory=ShareIndex, compare=False)
    unreadable: frozenset[str] = frozenset()
    waiting: tuple[WaitingPod, ...] = field(default=(), compare=False)
    undecided: tuple[UndecidedPod, ...] = ()
    silent: Mapping[str, int] = field(default_factory=dict)
    read_at: float | None = None
    scheduler_nodes: Mapping[str, SchedulerNode] = field(default_factory=dict)
    since: Mapping[str, float] = field(default_factory=dict)
    models: tuple[InterferenceModel, ...] | None = field(default=None, compare=False)
    nominated: tuple[NominatedPod, ...] = field(default=(), compare=False)
    leaving: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def model(self) -> InterferenceModel:
        """Return the model that the release decides by; if that is not known, the user's (`default_model`)."""
        return default_model() if self.models is None else model_beside(self.models)

    def request_of(self, pod: Mapping[str, Any]) -> PlacementRequest | Rejection:
        """Return what a pod requests here, merged with its GpuShare and the release's defaults, or its refusal."""
        spec = pod.get("spec") or {}
        tolerations = tolerations_of(spec, self.settings.defaults.taints)
        spec = {**spec, "tolerations": [*tolerations, *_ADDED_TOLERATIONS]}
        view = PodView.from_object({**pod, "metadata": {"uid": "", **pod["metadata"]}, "spec": spec})
        sizes_mib = (gpu.memory_mib for node in self.nodes for gpu in node.gpus)
        memories = tenant_memories_mib(sizes_mib, self.settings.gpu_memory_reserve_mib)
        request = _request_of(view, self.shares, self.settings.defaults, memories)
        return request if isinstance(request, Rejection) else refuse_container(pod) or request

    def share_of(self, pod: PodView) -> GpuShare | None:
        """Return the GpuShare that applies to a pod, with the profile of its joined workload if it has none."""
        return _share_of(pod, self.shares, self.settings.defaults)


async def read_cluster(api: Api) -> LiveCluster:
    """Read the release's settings and models, nodes, GpuNodes, GpuShares and pods."""
    return cluster_of(await read_objects(api))


async def read_objects(api: Api) -> Objects:
    """Read everything that decisions depend on, each object reduced to the parts that matter.

    Raises:
        CommandError: the cluster has no gpushare, or another version.
        Forbidden: a part of it may not be read.
    """
    gpunodes = await list_ours(api, GPUNODES, _whole)
    gpushares = await list_ours(api, GPUSHARES, _whole)
    nodes = (await api.list(NODES, _reduced_node)).items
    pods = (await api.list(PODS, reduced_object)).items
    release = await read_release(api)
    return Objects(release.settings, nodes, gpunodes, gpushares, pods, time.time(), release.models)


def _whole(obj: Json) -> Json:
    return obj


def _reduced_node(obj: Json) -> Json:
    allocatable, spec = (obj.get("status") or {}).get("allocatable") or {}, obj.get("spec") or {}
    return {
        "metadata": {"name": obj["metadata"]["name"], "labels": obj["metadata"].get("labels") or {}},
        "spec": {"taints": spec.get("taints") or [], "unschedulable": bool(spec.get("unschedulable"))},
        "status": {"allocatable": {key: allocatable[key] for key in _OFFERED if key in allocatable}},
    }


def cluster_of(objects: Objects) -> LiveCluster:
    """Return the cluster that the API's objects describe, at the time when they were read.

    Raises:
        UsageError: the release's settings cannot be used.
    """
    notes: list[str] = []
    pods = [PodView.from_object(pod) for pod in objects.pods]
    gpunodes = _with_own_gpus(objects, pods, notes)
    if objects.settings is None:
        notes.append("no settings of a gpushare release are here: the chart's defaults are assumed")
    try:
        settings = parse_settings(objects.settings or {})
    except SettingsError as error:
        raise UsageError(f"the settings of the release: {error}") from error
    shares = ShareIndex((GpuShare.from_object(each) for each in objects.gpushares), settings.joined)
    models = _models_of(objects, notes)
    ours: list[tuple[PlacementRequest, Placement | None]] = []
    waiting: list[WaitingPod] = []
    nominated: list[NominatedPod] = []
    leaving: dict[str, list[PodView]] = {}
    others: dict[str, list[int]] = {}
    since: dict[str, float] = {}
    undecided: list[UndecidedPod] = []
    listed = _listed(gpunodes)
    for pod in pods:
        if pod.finished:
            continue
        request = _request_of(pod, shares, settings.defaults) if pod.fraction is not None else None
        if pod.node is not None and pod.leaving and pod.fraction is not None:
            leaving.setdefault(pod.node, []).append(pod)
        if pod.node is not None and request is not None and pod.decision is not None:
            since[pod.key] = unix_seconds(pod.decision.decided_at)
            ours.append(_bound(request, pod, pod.node, pod.decision, objects.read_at))
        elif pod.node is not None:
            taken = others.setdefault(pod.node, [0, 0])
            taken[0] += pod.cpu_milli
            taken[1] += pod.memory_mib
            if pod.limit_percent:
                undecided.append(UndecidedPod(pod.key, pod.node, pod.limit_percent, listed.get(pod.uid, ())))
                notes.append(f"pod {pod.key} runs on {pod.node} without a decision: counted by its limit")
            elif request is not None:
                notes.append(f"pod {pod.key} is left out: it runs on {pod.node} without a decision or a limit")
        elif isinstance(request, Rejection):
            notes.append(f"pod {pod.key} is left out: {request}")
        elif request is not None:
            ours.append((request, None))
            if pod.waits_for_room and pod.rules is not None and not pod.rules.is_too_large:
                waiting.append(WaitingPod(request, pod.key, _allowed(pod.rules, objects.nodes)))
            if pod.is_nominated:
                nominated_at = unix_seconds(pod.nominated_at) if pod.nominated_at else math.inf
                nominated.append(NominatedPod(WaitingPod(request, pod.key), pod.nominated_node, nominated_at))
    offered = {
        node["metadata"]["name"]: (node.get("status") or {}).get("allocatable") or {} for node in objects.nodes
    }
    says_shares = _says_shares(objects)
    found: list[NodeSpec] = []
    unhealthy: set[str] = set()
    silent: dict[str, int] = {}
    for gpunode in gpunodes:
        allocatable = offered[gpunode.name]
        cpu_taken, memory_taken = others.get(gpunode.name, [0, 0])
        gpus = sorted(gpunode.status.gpus, key=lambda gpu: gpu.index)
        unhealthy.update(gpu.uuid for gpu in gpus if gpu.health is not Health.HEALTHY)
        if seconds := _silence(gpunode, allocatable, objects.read_at, says_shares=says_shares):
            silent[gpunode.name] = seconds
        found.append(
            NodeSpec(
                gpunode.name,
                tuple(GpuSpec(gpu.uuid, gpu.model, gpu.memory_mib or None) for gpu in gpus),
                parse_cpu_milli(allocatable.get("cpu", "0")) - cpu_taken,
                parse_bytes(allocatable.get("memory", "0")) // _MIB - memory_taken,
            )
        )
    present = {node.name: {gpu.uuid for gpu in node.gpus} for node in found}
    kept = []
    uncounted: Counter[str] = Counter()
    for request, placement in ours:
        if placement is not None:
            if placement.node not in present:
                notes.append(f"pod {request.pod_uid} is left out: its node {placement.node} has no GPUs here")
                continue
            lost = [uuid for uuid in placement.gpu_uuids if uuid not in present[placement.node]]
            notes += [
                f"pod {request.pod_uid} is counted without GPU {uuid}, which {placement.node} does not have"
                for uuid in lost
            ]
            uncounted[placement.node] += len(lost) * request.share_milli // MILLI_PER_PERCENT
        kept.append((request, placement))
    unreadable = frozenset(node.name for node in gpunodes if not node.status.can_read)
    now = time.time() if objects.read_at is None else objects.read_at
    return LiveCluster(
        tuple(found),
        tuple(kept),
        frozenset(unhealthy),
        tuple(notes),
        settings,
        shares,
        unreadable,
        tuple(waiting),
        tuple(undecided),
        silent,
        objects.read_at,
        _scheduler_nodes(objects, found, uncounted),
        since,
        models,
        tuple(nominated),
        {node: [pod.key for pod in in_order_of_end(pods, now, unix_seconds)] for node, pods in leaving.items()},
    )


def _models_of(objects: Objects, notes: list[str]) -> tuple[InterferenceModel, ...] | None:
    """Return the release's models as the extender takes them; add a note on each that it refuses, or on all."""
    if objects.models is not None:
        named = sorted((name, text) for name, text in objects.models.items() if name.endswith(".json"))
        return tuple(usable_models(named, notes.append))
    stand_in = "the shipped model is used"
    if os.environ.get(MODELS_VARIABLE):
        stand_in += f", with those of ${MODELS_VARIABLE}"
    notes.append(
        f"the release's models of other GPUs are not known, so {stand_in}: you may not read their ConfigMap (ask "
        f"for the ClusterRole {EXPLAINER}), or an older gpushare wrote the snapshot (take it again)"
    )
    return None


def _says_shares(objects: Objects) -> bool:
    """Return whether the nodes' objects say which shares kubelet offers; an old snapshot's may not."""
    return objects.read_at is not None or any(_shares_of(node) is not None for node in objects.nodes)


def _shares_of(node: Json) -> int | None:
    """Return the shares that kubelet offers on a node; None if its object names none."""
    offered = ((node.get("status") or {}).get("allocatable") or {}).get(names.SHARE_RESOURCE)
    return None if offered is None else int(parse_quantity(offered))


def _scheduler_nodes(
    objects: Objects, gpu_nodes: Sequence[NodeSpec], uncounted: Mapping[str, int]
) -> dict[str, SchedulerNode]:
    """Return the GPU nodes as kube-scheduler sees them.

    Args:
        uncounted: by node, the limits of pods on GPUs that it has lost.
    """
    by_name = {node["metadata"]["name"]: node for node in objects.nodes}
    says_shares = _says_shares(objects)
    found = {}
    for spec in gpu_nodes:
        node = by_name[spec.name]
        found[spec.name] = SchedulerNode(
            node["metadata"].get("labels") or {},
            taints_of(node.get("spec") or {}),
            _shares_of(node) if says_shares else len(spec.gpus) * names.SHARES_PER_GPU,
            uncounted.get(spec.name, 0),
        )
    return found


def _with_own_gpus(objects: Objects, pods: Sequence[PodView], notes: list[str]) -> list[GpuNode]:
    """Return the cluster's GpuNodes without GPUs that belong to another node; add a note on what is left out.

    So does an extender that has just started; one that has run for longer knows which node listed a GPU first.
    For both, a node makes no claim without a Node that has shares.
    """
    says_shares = _says_shares(objects)
    nodes = {node["metadata"]["name"]: _shares_of(node) is not None or not says_shares for node in objects.nodes}
    gpunodes = {node.name: node for node in map(GpuNode.from_object, objects.gpunodes)}
    for name in sorted(gpunodes.keys() - nodes.keys()):
        notes.append(f"node {name} is left out: it has a GpuNode but is not in the cluster")
        del gpunodes[name]
    created_at = {
        str(each["metadata"]["name"]): each["metadata"].get("creationTimestamp") or "" for each in objects.gpunodes
    }
    offering = {name for name, offers in nodes.items() if offers}
    decided = nodes_by_decision(pods)
    claimants: dict[str, set[str]] = {}
    for name, node in gpunodes.items():
        for gpu in node.status.gpus:
            claimants.setdefault(gpu.uuid, decided.get(gpu.uuid, set()) & gpunodes.keys()).add(name)
    owners = {
        uuid: in_order_of_claim(claiming & offering or claiming, decided.get(uuid, set()), created_at)[0]
        for uuid, claiming in claimants.items()
    }
    for name in sorted(gpunodes, key=lambda name: (created_at[name], name)):
        node = gpunodes[name]
        for gpu in node.status.gpus:
            if (owner := owners[gpu.uuid]) != name:
                why = "where a pod uses it" if owner in decided.get(gpu.uuid, ()) else "whose GpuNode is older"
                notes.append(f"GPU {gpu.uuid} is left out on node {name}: {owner}, {why}, has it")
        own = tuple(gpu for gpu in node.status.gpus if owners[gpu.uuid] == name)
        gpunodes[name] = replace(node, status=replace(node.status, gpus=own))
    return list(gpunodes.values())


def _silence(gpunode: GpuNode, allocatable: Mapping[str, Any], read_at: float | None, *, says_shares: bool) -> int:
    """Return the least seconds since the agent's last report, as the extender counts them; 0 if it reports.

    The extender watches the agent's pod; here kubelet's count of shares stands for it. Nor does the extender count
    a node where kubelet has never had shares.
    """
    offered = allocatable.get(names.SHARE_RESOURCE)
    is_any_healthy = any(gpu.health is Health.HEALTHY for gpu in gpunode.status.gpus)
    if (offered is None and says_shares) or (is_any_healthy and str(offered) == "0"):
        return AGENT_AWAY
    observed_at = gpunode.status.observed_at
    is_late = read_at is not None and observed_at and read_at - unix_seconds(observed_at) > SILENT_SECONDS
    return int(SILENT_SECONDS) if is_late else 0


def _listed(gpunodes: Sequence[GpuNode]) -> dict[str, tuple[str, ...]]:
    """Return by pod uid the GPUs on which agents list the pod."""
    found: dict[str, tuple[str, ...]] = {}
    for gpunode in gpunodes:
        for gpu in sorted(gpunode.status.gpus, key=lambda gpu: gpu.index):
            for tenant in gpu.tenants:
                found[tenant.pod_uid] = (*found.get(tenant.pod_uid, ()), gpu.uuid)
    return found


def _allowed(rules: NodeRules, nodes: Sequence[Json]) -> frozenset[str]:
    """Return the names of the nodes that a pod's own rules allow."""
    return frozenset(
        node["metadata"]["name"]
        for node in nodes
        if rules.allow(
            node["metadata"]["name"], node["metadata"].get("labels") or {}, taints_of(node.get("spec") or {})
        )
    )


def _request_of(
    pod: PodView, shares: ShareIndex, defaults: Defaults, gpu_memories_mib: Collection[int] = ()
) -> PlacementRequest | Rejection:
    """Return what a pod requests, under the name by which people know the pod."""
    share = _share_of(pod, shares, defaults)
    found = request_of(
        pod,
        share,
        known_of(share, unix_seconds) if share is not None else None,
        defaults,
        queued_at=unix_seconds(pod.created_at) if pod.created_at else math.inf,
        gpu_memories_mib=gpu_memories_mib,
    )
    return found if isinstance(found, Rejection) else replace(found, pod_uid=pod.key, rules=pod.rules)


def _share_of(pod: PodView, shares: ShareIndex, defaults: Defaults) -> GpuShare | None:
    share = shares.of(pod.namespace, pod.labels, (*pod.owner_uids, pod.uid))
    return with_joint_profile(share, pod.namespace, pod.annotations, shares, defaults)


def own_place(
    pod: PodView, shares: ShareIndex, read_at: float | None
) -> tuple[PlacementRequest, Placement | None] | Rejection:
    """Return what one pod requests by the chart's defaults, and its placement; None while it waits.

    Args:
        read_at: when the pod was read, Unix time; None if that is not known.
    """
    request = _request_of(pod, shares, Defaults())
    if pod.node is not None and pod.decision is not None:
        return _bound(request, pod, pod.node, pod.decision, read_at)
    return request if isinstance(request, Rejection) else (request, None)


def _bound(
    request: PlacementRequest | Rejection, pod: PodView, node: str, decision: Decision, read_at: float | None
) -> tuple[PlacementRequest, Placement]:
    """Return what a placed pod holds, by its decision, and its placement."""
    running = bound_request(request, pod, decision)
    return replace(running, pod_uid=pod.key), _placement(pod, node, decision, running, read_at)


def _placement(
    pod: PodView, node: str, decision: Decision, request: PlacementRequest, read_at: float | None
) -> Placement:
    """Return where a pod runs, from its decision."""
    starts = WindowStarts(unix_seconds)
    starts.look(None, pod, math.inf if read_at is None else read_at)
    term = term_of(pod, request.unprofiled, starts.of(pod))
    return Placement(node, decision.gpu_uuids, decision.memory_limit_mib, decision.thread_percentage, term)
