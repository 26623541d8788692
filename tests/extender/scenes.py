"""Clusters, pods and what happens to them, for the test that holds all views to one decision."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import Enum
from functools import cache
from typing import Any

from hypothesis import strategies as st

from gpushare.cli.live import Objects
from gpushare.core.admission import Defaults, Needs, resolve, tenant_memories_mib
from gpushare.core.api import FaultDomain, GpuShare, JobClass, names
from gpushare.core.placement import ProbationSettings, Settings
from gpushare.data import default_model
from gpushare.kube import GPUNODES, GPUSHARES, NODES, PODS, current_namespace
from gpushare.twin.contention import WORKLOADS

MODEL = "NVIDIA H200"
OTHER_MODEL = "NVIDIA A100-SXM4-40GB"
MEMORY_MIB = 80_000
WHOLE = 100


@dataclass(frozen=True)
class Effect:
    """What was learnt of a workload on the model that it was profiled on."""

    sensitivity: float
    pressure: float
    windows: int

    def to_status(self, gpu_model: str) -> dict[str, Any]:
        return {"gpuModel": gpu_model, **asdict(self)}


@dataclass(frozen=True)
class Left:
    """A retraction: a pod of the workload left the workload of another pod of the scene.

    Attributes:
        neighbour: the number of that pod, of as many as there are.
        count: how often it happened; twice earns a GPU of its own.
        is_over: whether the two may be beside each other again.
    """

    neighbour: int
    count: int
    is_over: bool = False


class Ill(Enum):
    """What is wrong with a node, or not any more."""

    GPU_FAILS = 1
    GPU_RECOVERS = 2
    AGENT_SILENT = 3
    AGENT_REPORTS = 4
    AGENT_AWAY = 5
    LISTS_ANOTHERS_GPU = 6
    CORDONED = 7
    UNCORDONED = 8
    GPU_LOST = 9


@dataclass(frozen=True)
class Illness:
    """Something that happens to one node before a decision; `after` counts the decisions made before."""

    after: int
    node: int
    what: Ill
    gpu: int = 0


@dataclass(frozen=True)
class Wanted:
    """One pod: what it asks ("auto", for which `percent` is recommended, or that) and what is known of it.

    With a `pool` it wants nodes of that pool; `tolerates` tells whether it may be on reserved ones.
    None stands for what neither the pod nor its GpuShare says, so that the release's default holds.
    `waited_minutes` is how long before the scene the pod was created, for scenes in which time counts. `key` is
    its `gpushare.io/workload`.
    """

    percent: int
    memory_mib: int | None
    job_class: JobClass | None
    workload: str
    max_slowdown: float | None
    profiled_on: str | None
    is_auto: bool = False
    cpu_milli: int = 0
    node_memory_mib: int = 0
    is_isolated: bool = False
    processes: int = 1
    effect: Effect | None = None
    left: tuple[Left, ...] = ()
    pool: str = ""
    tolerates: bool = False
    waited_minutes: int = 0
    key: str = ""

    def kept_apart(self) -> Wanted:
        """The same with every retraction in force."""
        return replace(self, left=tuple(replace(each, is_over=False) for each in self.left))

    @property
    def learns(self) -> bool:
        return self.effect is not None and self.profiled_on is not None

    @property
    def fraction(self) -> str:
        return f"{self.percent / WHOLE:g}"


@dataclass(frozen=True)
class Machine:
    """One node."""

    gpus: int = 1
    model: str = MODEL
    cpu_milli: int = 64_000
    memory_mib: int = 512 * 1024
    pool: str = ""
    is_reserved: bool = False


@dataclass(frozen=True)
class Foreign:
    """A pod of nobody's on one of the nodes; with a share it was bound by hand, and the node's agent may list it.

    Attributes:
        leaves_after: so many decisions; None: it stays.
    """

    node: int
    cpu_milli: int
    memory_mib: int
    percent: int = 0
    listed: bool = True
    leaves_after: int | None = None


@dataclass(frozen=True)
class Scene:
    """A cluster, who comes, and who leaves: after each decision nobody, or one of the pods that run.

    With `has_models` the release has an interference model of the other GPU model.
    """

    machines: Sequence[Machine]
    wanted: Sequence[Wanted]
    release: Settings
    seed: int = 0
    foreign: Sequence[Foreign] = ()
    leaving: Sequence[int | None] = ()
    best_nodes: int = 0
    illnesses: Sequence[Illness] = ()
    by_snapshot: bool = False
    has_models: bool = False

    @property
    def models(self) -> dict[str, str]:
        """The release's artefacts by file name: of the other GPU model, or none."""
        return {"a100.json": other_models_artefact()} if self.has_models else {}

    @property
    def learns_at_once(self) -> bool:
        """Whether every change of the number of pods counts for those that expect a mix of pods."""
        return self.seed % 2 == 0

    @property
    def simulates(self) -> bool:
        """Whether the simulators can know the mix of pods, which only the default policy expects."""
        return self.learns_at_once or self.release.policy != "gpushare"

    @property
    def is_open(self) -> bool:
        """Whether every pod may be on every node by the rules of both, as the simulators have it."""
        return not any(each.pool for each in self.wanted) and not any(each.is_reserved for each in self.machines)

    @property
    def is_for_jobs(self) -> bool:
        """Whether `sim jobs` can play it."""
        return (
            set(self.machines) == {Machine()}
            and self.is_open
            and not self.foreign
            and not self.illnesses
            and not any(each.left for each in self.wanted)
            and all(
                each.percent <= WHOLE and each.memory_mib is not None and not each.cpu_milli | each.node_memory_mib
                for each in self.wanted
            )
            and not any(each.is_isolated or each.processes > 1 for each in self.wanted)
        )


@cache
def other_models_artefact() -> str:
    """A made-up interference model of the other GPU model, surer of itself than the shipped one is of any GPU."""
    shipped = default_model()
    return replace(shipped, gpu_model=OTHER_MODEL, errors=shipped.errors / 2).to_json()


def annotations_of(wanted: Wanted) -> dict[str, str]:
    found = {names.FRACTION: "auto" if wanted.is_auto else wanted.fraction}
    if wanted.memory_mib is not None:
        found[names.MEMORY] = f"{wanted.memory_mib}Mi"
    if wanted.job_class is not None:
        found[names.CLASS] = wanted.job_class.value
    if wanted.key:
        found[names.WORKLOAD] = wanted.key
    if wanted.processes > 1:
        found[names.PROCESSES] = str(wanted.processes)
    return found


def share_of(number: int, scene: Scene) -> dict[str, Any]:
    """The GpuShare that was made for a pod's owner, without the owner."""
    name, wanted = f"p{number}", scene.wanted[number]
    counters = WORKLOADS[wanted.workload].solo.as_dict()
    profile = {"gpuModel": wanted.profiled_on, "counters": counters, "windowSeconds": 10.0}
    spec: dict[str, Any] = {} if wanted.max_slowdown is None else {"maxSlowdown": wanted.max_slowdown}
    if wanted.is_isolated:
        spec["faultDomain"] = FaultDomain.ISOLATED.value
    return {
        "metadata": {"name": name, "namespace": "default", "uid": f"share-{name}"},
        "spec": spec,
        "status": {
            **({"profile": profile} if wanted.profiled_on else {}),
            **({"learned": [wanted.effect.to_status(wanted.profiled_on)]} if wanted.learns else {}),
            **({"recommendedFraction": wanted.fraction} if wanted.is_auto else {}),
            "retractions": [retraction(each, len(scene.wanted)) for each in wanted.left],
        },
    }


def charged_percent(number: int, scene: Scene) -> int:
    """The limit that admission gives a pod, which covers its memory, threads, processes and isolation."""
    needs = resolve(
        annotations_of(scene.wanted[number]),
        GpuShare.from_object(share_of(number, scene)),
        scene.release.defaults,
        gpu_memories_mib=tenant_memories_mib([MEMORY_MIB], scene.release.gpu_memory_reserve_mib),
    )
    assert isinstance(needs, Needs)
    return needs.limit_percent


def create(cluster: Any, number: int, scene: Scene) -> None:
    """A pod as admission leaves it, and the GpuShare that was made for its owner."""
    name, wanted = f"p{number}", scene.wanted[number]
    asked = annotations_of(wanted)
    fraction = asked.pop(names.FRACTION)
    given = {key.removeprefix("gpushare.io/"): value for key, value in asked.items()}
    raw = cluster.make_pod(name, fraction, limit=charged_percent(number, scene), **given)
    raw["spec"]["containers"][0]["resources"]["requests"] = {
        "cpu": f"{wanted.cpu_milli}m",
        "memory": f"{wanted.node_memory_mib}Mi",
    }
    if wanted.tolerates:
        raw["spec"]["tolerations"] = [{"key": "reserved", "value": "yes", "effect": "NoSchedule"}]
    if wanted.pool and number % 2:
        term = {"matchExpressions": [{"key": "pool", "operator": "In", "values": [wanted.pool]}]}
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
        raw["spec"]["affinity"] = {"nodeAffinity": required}
    elif wanted.pool:
        raw["spec"]["nodeSelector"] = {"pool": wanted.pool}
    cluster.put(PODS, raw)
    share = share_of(number, scene)
    uid = raw["metadata"]["uid"]
    share["metadata"]["ownerReferences"] = [{"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}]
    cluster.put(GPUSHARES, share)


def add_machine(cluster: Any, name: str, machine: Machine) -> None:
    cluster.add_node(name, gpus=machine.gpus, memory_mib=MEMORY_MIB, model=machine.model)
    node = cluster.objects[NODES][name]
    node["status"]["allocatable"] |= {"cpu": f"{machine.cpu_milli}m", "memory": f"{machine.memory_mib}Mi"}
    node["metadata"]["labels"] = {"pool": machine.pool} if machine.pool else {}
    if machine.is_reserved:
        node["spec"] = {"taints": [{"key": "reserved", "value": "yes", "effect": "NoSchedule"}]}
    cluster.put(NODES, node)


def refused_by_scheduler(cluster: Any, node: str, machine: Machine, number: int, scene: Scene) -> str:
    """Why kube-scheduler does not ask the extender about a node for a pod; "shares" if for them, "" if it asks."""
    raw, wanted = cluster.objects[NODES][node], scene.wanted[number]
    if raw.get("spec", {}).get("unschedulable"):
        return "it is cordoned"
    if machine.is_reserved and not wanted.tolerates:
        return "it has the taint reserved=yes:NoSchedule, which the pod does not tolerate"
    if wanted.pool and wanted.pool != machine.pool:
        if number % 2:
            return "it does not match the pod's required node affinity"
        return f"its labels do not match the pod's nodeSelector, which wants pool={wanted.pool}"
    taken = sum(
        int(each["resources"].get("limits", {}).get("gpushare.io/share", "0"))
        for pod in cluster.objects[PODS].values()
        if pod["spec"].get("nodeName") == node and pod["status"]["phase"] == "Running"
        for each in pod["spec"]["containers"]
        if "resources" in each
    )
    offered = int(raw["status"]["allocatable"]["gpushare.io/share"])
    return "shares" if offered - taken < charged_percent(number, scene) else ""


def add_foreign(cluster: Any, name: str, node: str, foreign: Foreign) -> None:
    requests = {"cpu": f"{foreign.cpu_milli}m", "memory": f"{foreign.memory_mib}Mi"}
    limits = {"gpushare.io/share": str(foreign.percent)} if foreign.percent else {}
    cluster.put(
        PODS,
        {
            "metadata": {"name": name, "namespace": "default", "uid": f"uid-{name}"},
            "spec": {"nodeName": node, "containers": [{"resources": {"requests": requests, "limits": limits}}]},
            "status": {"phase": "Running"},
        },
    )
    if foreign.percent and foreign.listed:
        gpunode = cluster.objects[GPUNODES][node]
        for gpu in gpunode["status"]["gpus"][-max(1, foreign.percent // WHOLE) :]:
            gpu["tenants"].append({"podUid": f"uid-{name}", "share": min(foreign.percent, WHOLE)})
        cluster.put(GPUNODES, gpunode)


def retraction(left: Left, pods: int) -> dict[str, Any]:
    now = datetime.now(UTC)
    until = now + timedelta(hours=-1 if left.is_over else 1)
    return {
        "neighbours": [f"default/p{left.neighbour % pods}"],
        "at": (now - timedelta(hours=2)).isoformat(),
        "until": until.isoformat(),
        "count": left.count,
    }


def objects_of(cluster: Any, scene: Scene) -> Objects:
    return Objects(
        scene.release.to_mapping(),
        *(copy.deepcopy(list(cluster.objects[kind].values())) for kind in (NODES, GPUNODES, GPUSHARES, PODS)),
        datetime.now(UTC).timestamp(),
        scene.models,
    )


class Agents:
    """The agents of a cluster, which report the health of their GPUs, or do not."""

    def __init__(self, cluster: Any, names: Sequence[str]) -> None:
        self._cluster, self._names = cluster, names
        self.silent: set[str] = set()
        self.away: set[str] = set()

    def suffer(self, illness: Illness) -> None:
        node = self._names[illness.node % len(self._names)]
        if illness.what is Ill.AGENT_AWAY:
            self._leave(node)
        elif illness.what is Ill.AGENT_SILENT:
            self.silent.add(node)
            self._write(node, datetime.now(UTC) - timedelta(hours=1))
        elif illness.what is Ill.AGENT_REPORTS:
            if node in self.silent:  # it may have fallen silent at the same step
                self.silent.discard(node)
                self._write(node, datetime.now(UTC))
        elif illness.what is Ill.LISTS_ANOTHERS_GPU:
            self._claim(max(self._names), min(self._names))
        elif illness.what in {Ill.CORDONED, Ill.UNCORDONED}:
            raw = copy.deepcopy(self._cluster.objects[NODES][node])
            raw["spec"] = {**raw.get("spec", {}), "unschedulable": illness.what is Ill.CORDONED}
            self._cluster.put(NODES, raw)
        else:
            gpunode = copy.deepcopy(self._cluster.objects[GPUNODES][node])
            gpus = gpunode["status"]["gpus"]
            gpu = gpus[illness.gpu % len(gpus)]
            if illness.what is not Ill.GPU_LOST:
                gpu["health"] = "Unhealthy" if illness.what is Ill.GPU_FAILS else "Healthy"
            elif len(gpus) > 1 and not gpu["tenants"] and self._claimants(gpu["uuid"]) == 1:
                gpus.remove(gpu)  # else the extender knows more than `plan`: who had it, or where a pod was
            self._cluster.put(GPUNODES, gpunode)
            self._offer(node)

    def _claimants(self, uuid: str) -> int:
        return sum(f"'{uuid}'" in str(each["status"]["gpus"]) for each in self._cluster.objects[GPUNODES].values())

    def _offer(self, node: str) -> None:
        """Let kubelet have shares of the healthy GPUs, unless nobody serves it any more."""
        raw = copy.deepcopy(self._cluster.objects[NODES][node])
        gpus = self._cluster.objects[GPUNODES][node]["status"]["gpus"]
        healthy = sum(gpu["health"] == "Healthy" for gpu in gpus if gpu["uuid"].startswith(f"GPU-{node}-"))
        if node not in self.away:
            raw["status"]["allocatable"]["gpushare.io/share"] = str(healthy * WHOLE)
            self._cluster.put(NODES, raw)

    def report(self) -> None:
        """Write the GpuNodes of all agents that are not silent."""
        for node in self._names:
            if node not in self.silent:
                self._write(node, datetime.now(UTC))

    def _write(self, node: str, at: datetime) -> None:
        gpunode = copy.deepcopy(self._cluster.objects[GPUNODES][node])
        gpunode["status"]["observedAt"] = at.isoformat()
        self._cluster.put(GPUNODES, gpunode)

    def _claim(self, thief: str, owner: str) -> None:
        """Let a node list the first GPU of another, whose GpuNode is older, as healthy."""
        theirs = self._cluster.objects[GPUNODES][owner]["status"]["gpus"][0]
        gpunode = copy.deepcopy(self._cluster.objects[GPUNODES][thief])
        gpus = gpunode["status"]["gpus"]
        if all(gpu["uuid"] != theirs["uuid"] for gpu in gpus):
            gpus.append({**copy.deepcopy(theirs), "index": len(gpus), "health": "Healthy", "tenants": []})
            self._cluster.put(GPUNODES, gpunode)

    def _leave(self, node: str) -> None:
        """Let the agent's pod stop serving and kubelet count no shares, as long as a GPU there is healthy."""
        gpus = self._cluster.objects[GPUNODES][node]["status"]["gpus"]
        if all(gpu["health"] != "Healthy" for gpu in gpus if gpu["uuid"].startswith(f"GPU-{node}-")):
            return  # by kubelet's count alone such a node's agent may as well be at work
        self.away.add(node)
        raw = copy.deepcopy(self._cluster.objects[NODES][node])
        raw["status"]["allocatable"]["gpushare.io/share"] = "0"
        self._cluster.put(NODES, raw)
        labels = {"app.kubernetes.io/component": "agent"}
        metadata = {"name": f"agent-{node}", "namespace": current_namespace(), "uid": f"agent-{node}"}
        self._cluster.put(
            PODS,
            {
                "metadata": metadata | {"labels": labels},
                "spec": {"nodeName": node, "containers": [{}]},
                "status": {"phase": "Running"},
            },
        )


CPUS = st.sampled_from([0, 0, 500, 8_000, 24_000])
NODE_MEMORIES = st.sampled_from([0, 0, 1024, 48 * 1024])
WANTED = st.builds(
    Wanted,
    st.sampled_from([3, 10, 20, 30, 50, 60, 100, 200, 300]),
    st.sampled_from([None, 500, 8_000, 30_000]),
    st.sampled_from([None, *JobClass]),
    st.sampled_from(sorted(WORKLOADS)),
    st.sampled_from([None, 1.05, 1.5, 4.0]),
    st.sampled_from([MODEL, MODEL, OTHER_MODEL, None]),
    st.booleans(),
    CPUS,
    NODE_MEMORIES,
).map(lambda each: replace(each, is_auto=each.is_auto and each.percent < WHOLE))
EFFECTS = st.builds(
    Effect, st.sampled_from([-0.4, -0.1, 0.2]), st.sampled_from([-0.3, 0.0, 0.1]), st.integers(1, 40)
)
LEFT = st.builds(Left, st.integers(0, 11), st.integers(1, 2), st.booleans())
LEARNT = st.builds(lambda each, effect: replace(each, effect=effect), WANTED, EFFECTS)
RETRACTED = st.builds(
    lambda each, left, effect: replace(each, left=(left,), effect=effect), WANTED, LEFT, st.none() | EFFECTS
)
ISOLATED = WANTED.map(lambda each: replace(each, is_isolated=True))
SEVERAL_PROCESSES = st.builds(
    lambda each, processes: replace(each, percent=60, is_auto=False, processes=processes),
    WANTED,
    st.sampled_from([2, 4]),
)
ANYWHERE = st.one_of(WANTED, WANTED, WANTED, WANTED, LEARNT, RETRACTED, ISOLATED, SEVERAL_PROCESSES)
PODS_WANTED = st.builds(
    lambda each, pool, tolerates: replace(each, pool=pool, tolerates=tolerates),
    ANYWHERE,
    st.sampled_from(["", "", "", "a", "b"]),
    st.booleans(),
)
JOBS_WANTED = st.one_of(WANTED, LEARNT).map(
    lambda each: replace(
        each,
        percent=min(each.percent, WHOLE),
        memory_mib=each.memory_mib or 1_000,
        profiled_on=MODEL if each.profiled_on else None,
        cpu_milli=0,
        node_memory_mib=0,
    )
)
MACHINES = st.builds(
    Machine,
    st.integers(1, 3),
    st.sampled_from([MODEL, MODEL, OTHER_MODEL]),
    st.sampled_from([16_000, 64_000]),
    st.sampled_from([32 * 1024, 512 * 1024]),
)
RULED_MACHINES = st.builds(
    lambda each, pool, is_reserved: replace(each, pool=pool, is_reserved=is_reserved),
    MACHINES,
    st.sampled_from(["", "a", "b"]),
    st.sampled_from([False, False, True]),
)
FOREIGN = st.builds(
    Foreign,
    st.integers(0, 3),
    st.sampled_from([500, 8_000, 15_500]),
    st.sampled_from([100, 16 * 1024]),
    st.sampled_from([0, 0, 0, 30, 100, 200]),
    st.booleans(),
    st.one_of(st.none(), st.integers(0, 6)),
)
ILLNESSES = st.lists(
    st.builds(Illness, st.integers(0, 6), st.integers(0, 3), st.sampled_from(Ill), st.integers(0, 2)), max_size=4
)
DEFAULTS = st.builds(
    Defaults,
    job_class=st.sampled_from(JobClass),
    max_slowdown_ratio=st.sampled_from([1.05, 1.5, 3.0]),
    latency_max_slowdown_ratio=st.sampled_from([1.02, 1.1, 2.0]),
    charge_memory=st.booleans(),
    charge_threads=st.booleans(),
)
RESERVES = st.sampled_from([0, 512, 21_000])
LEAVING = st.lists(st.one_of(st.none(), st.integers(0, 9)), max_size=9)
SEEDS = st.integers(0, 99)
BEST_NODES = st.sampled_from([0, 8])
"""How many nodes filter answers at most: all that fit, or what the chart sets."""
NOBODY_ON_PROBATION = st.just(ProbationSettings(0.0))
PROBATIONS = st.builds(ProbationSettings, st.just(60.0), st.integers(1, 2), freezes=st.booleans())


def releases(policy: str, probation: st.SearchStrategy[ProbationSettings]) -> st.SearchStrategy[Settings]:
    return st.builds(Settings, st.just(policy), DEFAULTS, RESERVES, probation)


def clusters(
    release: st.SearchStrategy[Settings], foreign: st.SearchStrategy[Foreign], most: int
) -> st.SearchStrategy[Scene]:
    """Nodes that differ, pods of every kind, others' pods, and departures; in half of them nodes for some pods."""
    alike = st.tuples(st.lists(MACHINES, min_size=1, max_size=3), st.lists(ANYWHERE, min_size=1, max_size=most))
    ruled = st.tuples(
        st.lists(RULED_MACHINES, min_size=1, max_size=3), st.lists(PODS_WANTED, min_size=1, max_size=most)
    )
    return st.builds(
        lambda both, *rest: Scene(*both, *rest),
        alike | ruled,
        release,
        SEEDS,
        st.lists(foreign, max_size=3),
        LEAVING,
        BEST_NODES,
        st.one_of(st.just([]), ILLNESSES),
        st.booleans(),
    )


def troubled(release: st.SearchStrategy[Settings], most: int) -> st.SearchStrategy[Scene]:
    """Small pods that would share GPUs, most of them retracted or learnt of, on nodes that fail and recover."""

    def small(each: Wanted) -> Wanted:
        percent = min(each.percent, 50)
        return replace(each, percent=percent, memory_mib=None, max_slowdown=4.0, cpu_milli=0, node_memory_mib=0)

    return st.builds(
        Scene,
        st.lists(MACHINES, min_size=2, max_size=3),
        st.lists(st.one_of(RETRACTED, RETRACTED, LEARNT).map(small), min_size=4, max_size=most),
        release,
        SEEDS,
        leaving=LEAVING,
        best_nodes=BEST_NODES,
        illnesses=ILLNESSES,
        by_snapshot=st.booleans(),
    )


def job_scenes(release: st.SearchStrategy[Settings], most: int) -> st.SearchStrategy[Scene]:
    """What `sim jobs` can play: nodes of one GPU each, alike."""
    return st.builds(
        Scene,
        st.lists(st.just(Machine()), min_size=1, max_size=4),
        st.lists(JOBS_WANTED, min_size=1, max_size=most),
        release,
        SEEDS,
        leaving=LEAVING,
        best_nodes=BEST_NODES,
    )


def with_models(scene: Scene) -> Scene:
    """The same with both GPU models exchanged: most nodes and profiles are of the one with a model of its own."""
    other = {MODEL: OTHER_MODEL, OTHER_MODEL: MODEL}
    return replace(
        scene,
        machines=[replace(each, model=other[each.model]) for each in scene.machines],
        wanted=[replace(each, profiled_on=other.get(each.profiled_on or "")) for each in scene.wanted],
        has_models=True,
    )


def scenes(policy: str, probation: st.SearchStrategy[ProbationSettings], most: int) -> st.SearchStrategy[Scene]:
    release = releases(policy, probation)
    return st.one_of(clusters(release, FOREIGN, most), job_scenes(release, most), troubled(release, most))
