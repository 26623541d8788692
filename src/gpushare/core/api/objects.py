"""The two Kubernetes objects of gpushare, `GpuShare` and `GpuNode`, as values (docs/design.md 1).

Their schemas in crds/ are generated from these classes by hack/generate_crds.py. Read a part by
`from_json(GpuNodeStatus, obj.get("status"))`, write it by `to_json(status)`; see `gpushare.core.api.schema`.
Fields that are None are absent on the wire: a figure that could not be measured is left out, never written as
zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Final

from gpushare.core.api.learned import LearnedEffect
from gpushare.core.api.meta import Condition, ConditionStatus, LabelSelector, OwnerReference
from gpushare.core.api.names import API_VERSION, READING_CONDITIONS
from gpushare.core.api.request import FaultDomain, JobClass
from gpushare.core.api.schema import ATOMIC_LIST, ATOMIC_MAP, CelRule, described, from_json, list_map, to_json
from gpushare.core.api.slo import TenantSlo
from gpushare.core.api.trouble import MOST_NEIGHBOURS_ENDED, GroupReplacements, NeighboursEnded, TenantTrouble
from gpushare.core.api.workload_signature import WorkloadSignature
from gpushare.core.gpu import Counters, Health

# Accepts what `gpushare.core.api.request` parses; tests keep the two equal.
FRACTION_PATTERN: Final = r"^(auto|0*0\.(0[1-9]|[1-9][0-9]?)0*|0*([1-9]|1[0-6])(\.0+)?)$"
MEMORY_PATTERN: Final = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T|)$"
FRACTION_SENTENCE: Final = (
    'allowed are 0.01 to 1 in whole percents (such as "0.25"), a whole number of GPUs up to 16 (such as "2"), '
    'or "auto"'
)
_FRACTION_RULE: Final = CelRule(f"self.matches(r'{FRACTION_PATTERN}')", FRACTION_SENTENCE)
_MEMORY_RULE: Final = CelRule(
    f"self.matches(r'{MEMORY_PATTERN}') && self.matches('^[0-9.]*[1-9]')",
    'allowed is an amount of memory above zero such as "8Gi" or "500Mi"',
)
_RATIO: Final[dict[str, Any]] = {"minimum": 0, "maximum": 1}
_MAX_GPUS_PER_NODE: Final = 128  # 16 GPUs of 7 MIG instances, in case each of those becomes a GPU (design.md 7)
_MAX_TENANTS_PER_GPU: Final = 100  # one percent each
_MOST_RETRACTIONS: Final = 32
_RETRACTED_OFTEN: Final = 2  # for each placed pod; then the next pod gets a GPU of its own (`retracted_often`)
_ENDED_OFTEN: Final = 2  # within a day; then the next pods are isolated (docs/adr/0185)
_MAX_PLACEMENTS: Final = 1000  # an etcd object holds 1.5 MiB; the condition has the full count


class Phase(StrEnum):
    """Stage of a GpuShare's life (docs/design.md 4 and 5)."""

    PENDING = "Pending"
    PROBATION = "Probation"
    PROFILED = "Profiled"
    SHARING = "Sharing"
    RETRACTED = "Retracted"


class ProfileMode(StrEnum):
    """Whether a workload is profiled."""

    AUTO = "Auto"
    OFF = "Off"


class MpsState(StrEnum):
    """State of a GPU's MPS daemon and server."""

    STARTING = "Starting"
    ACTIVE = "Active"
    FAULT = "Fault"
    DOWN = "Down"


class Ceilings(StrEnum):
    """Result of the gate's self-test: whether this driver enforces its ceilings (docs/design.md 2.4)."""

    UNTESTED = "Untested"
    ENFORCED = "Enforced"
    NOT_ENFORCED = "NotEnforced"


@dataclass(frozen=True, slots=True)
class ProfileSpec:
    """Settings for profiling the workload."""

    mode: ProfileMode | None = described(
        "Auto profiles an unknown workload: alone on a GPU, or in place, with its neighbours stopped for about a "
        "second at a time; Off never profiles it.",
        default=None,
    )
    window_seconds: int | None = described(
        "How long it runs alone for a profile, in probation too; a profile taken in place does not wait for it.",
        default=None,
        minimum=1,
        maximum=3600,
    )


@dataclass(frozen=True, slots=True)
class GpuShareSpec:
    """The user's wishes for a group of pods; every field is optional, and a pod's annotation overrides it."""

    selector: LabelSelector | None = described(
        "Which annotated pods of this namespace it applies to; an empty selector means all of them. Without one: "
        "the pods of this object's owner, as in the objects that gpushare creates itself. Immutable.",
        default=None,
        **ATOMIC_MAP,
    )
    fraction: str | None = described(
        'Share of one GPU in whole percents ("0.25"), whole GPUs ("2"), or "auto": chosen from the profile.',
        default=None,
        maxLength=16,
        rules=(_FRACTION_RULE,),
    )
    memory: str | None = described(
        'GPU memory of a pod on each of its GPUs ("8Gi"). Default: the GPU\'s memory times the fraction.',
        default=None,
        maxLength=32,
        rules=(_MEMORY_RULE,),
    )
    job_class: JobClass | None = described(
        "What the pods care about: throughput is capped beside others, latency runs uncapped and is protected. "
        "Default: the chart's value defaults.class.",
        default=None,
        name="class",
    )
    max_slowdown: float | None = described(
        "Tolerated slowdown beside neighbours, relative to running alone under the fraction: 1.25 means at most "
        '25% longer. For pods with the fraction "auto" and a profile, relative to running alone on the whole GPU. '
        "Default: the chart's values policy.maxSlowdown and, for class latency, policy.latencyMaxSlowdown.",
        default=None,
        minimum=1,
        maximum=1000,
    )
    fault_domain: FaultDomain | None = described(
        "shared accepts neighbours on the GPU; an illegal memory access of any tenant ends all tenants of a GPU "
        "(a property of MPS). isolated gets a whole GPU and is charged for it; its namespace has to allow it. "
        "Default: shared.",
        default=None,
    )
    profile: ProfileSpec | None = described("How the workload is profiled.", default=None)
    CEL_RULES: ClassVar[tuple[CelRule, ...]] = (
        CelRule(
            "has(self.selector) == has(oldSelf.selector) "
            "&& (!has(self.selector) || self.selector == oldSelf.selector)",
            "the selector cannot be changed; make another GpuShare",
            ".selector",
        ),
        CelRule(
            "!(has(self.fraction) && self.fraction == 'auto' && has(self.profile) && has(self.profile.mode) "
            "&& self.profile.mode == 'Off')",
            'fraction "auto" comes from the profile and cannot go with profile.mode Off; '
            'write a fraction such as "0.25" or set profile.mode to Auto',
            ".fraction",
        ),
    )


@dataclass(frozen=True, slots=True)
class Observed:
    """Current progress of the workload; the worst of its pods."""

    progress_ratio: float | None = described(
        "Progress relative to running alone, 1 is undisturbed.", default=None, name="progress", minimum=0
    )
    slowdown_ratio: float | None = described(
        "How much longer it takes than alone, 1 is undisturbed.", default=None, name="slowdown", minimum=0
    )


@dataclass(frozen=True, slots=True)
class PodPlacement:
    """One pod of the group and where it runs."""

    pod_uid: str = described("The pod's uid.", default="", required=True, maxLength=64)
    pod: str = described("The pod's name.", default="", required=True, maxLength=253)
    node: str | None = described("Its node.", default=None, maxLength=253)
    gpu_uuids: tuple[str, ...] = described(
        "Its GPUs by UUID.", default=(), name="gpus", maxItems=16, **ATOMIC_LIST
    )
    share_percent: int | None = described(
        "Percent of each GPU that it is guaranteed.", default=None, name="share", minimum=1, maximum=100
    )
    thread_percentage: int | None = described(
        "Its MPS thread percentage, the cap.", default=None, minimum=1, maximum=100
    )
    memory_limit_mib: int | None = described(
        "Its memory limit on each GPU, MiB.", default=None, name="memoryLimitMiB", minimum=1
    )
    progress_ratio: float | None = described(
        "Its progress relative to running alone.", default=None, name="progress", minimum=0
    )
    slowdown_ratio: float | None = described(
        "How much longer it takes than alone.", default=None, name="slowdown", minimum=0
    )
    promise_ratio: float | None = described(
        "Promised progress relative to running alone.", default=None, name="promise", **_RATIO
    )
    throttle_ratio: float | None = described(
        "Part of the time that it is stopped to keep a neighbour's promise; absent while it runs freely.",
        default=None,
        name="throttle",
        **_RATIO,
    )
    is_promise_broken: bool | None = described(
        "True from when its progress is below the promise by more than its error until it reaches the promise.",
        default=None,
        name="promiseBroken",
    )


@dataclass(frozen=True, slots=True)
class Retraction:
    """A pod of the group was moved away from these neighbours; for a while none is put beside them."""

    neighbours: tuple[str, ...] = described(
        "GpuShares of the tenants that it left, as namespace/name; the first identifies this retraction. "
        "Empty for a minute once a later retraction from all of them is recorded.",
        default=(),
        items={"maxLength": 317},
        maxItems=_MAX_TENANTS_PER_GPU,
        **ATOMIC_LIST,
    )
    at: str | None = described(
        "When the pod left; until it leaves, when the retraction was decided.", default=None, format="date-time"
    )
    until: str | None = described(
        "Until when no pod of the group is put beside them; absent until the pod leaves.",
        default=None,
        format="date-time",
    )
    count: int = described("How often a pod of the group left each of these neighbours.", default=1, minimum=1)
    pod_uid: str | None = described("The pod's uid.", default=None, maxLength=64)
    gpu: str | None = described("The GPU that it leaves, by UUID.", default=None, maxLength=96)
    retractions: int | None = described(
        "How many retractions of the group this stands for; absent in records of former releases: count.",
        default=None,
        minimum=0,
    )

    @property
    def stands_for(self) -> int:
        """Return for how many retractions of the group it counts; an intended one is one."""
        if self.until is None:
            return 1
        return self.count if self.retractions is None else self.retractions


@dataclass(frozen=True, slots=True)
class GpuShareStatus:
    """Status of the group of pods; written only by the operator."""

    phase: Phase = described("Stage of the group's life.", default=Phase.PENDING)
    observed_generation: int | None = described(
        "The metadata.generation that the status was concluded from.", default=None, minimum=0
    )
    workload: str | None = described(
        "The key gpushare.io/workload that all of its pods have; the last one while it has no pods.",
        default=None,
        maxLength=63,
    )
    profile: WorkloadSignature | None = described("The workload's signature, once taken.", default=None)
    job_class: JobClass | None = described(
        "Class of its pods, from annotations, this object and the chart's default; latency if any pod is.",
        default=None,
        name="class",
    )
    recommended_fraction: str | None = described(
        'What "auto" means: the smallest fraction whose slowdown alone is at most the square root of maxSlowdown.',
        default=None,
        maxLength=16,
        rules=(_FRACTION_RULE,),
    )
    observed: Observed | None = described("Current progress of the workload.", default=None)
    promise_ratio: float | None = described(
        "Promised progress relative to running alone; the smallest promise of its pods.",
        default=None,
        name="promise",
        **_RATIO,
    )
    learned: tuple[LearnedEffect, ...] = described(
        "Effects that were learnt of it beside others, by GPU model.",
        default=(),
        maxItems=16,
        **ATOMIC_LIST,
    )
    retractions: tuple[Retraction, ...] = described(
        "Pods of it that were moved away to keep a neighbour's promise; the newest for each neighbour.",
        default=(),
        maxItems=_MOST_RETRACTIONS,
        **ATOMIC_LIST,
    )
    neighbours_ended: tuple[NeighboursEnded, ...] = described(
        "When pods of it were killed within a kernel in the last day, which ended their neighbours. After two, "
        "its next pods are isolated: they get whole GPUs and are charged for them.",
        default=(),
        maxItems=MOST_NEIGHBOURS_ENDED,
        **ATOMIC_LIST,
    )
    replacements: GroupReplacements | None = described("Pods in trouble that were replaced lately.", default=None)
    placements: tuple[PodPlacement, ...] = described(
        "The group's pods and where they run.", default=(), maxItems=_MAX_PLACEMENTS, **ATOMIC_LIST
    )
    conditions: tuple[Condition, ...] = described(
        "Conditions in the usual form.", default=(), maxItems=32, **ATOMIC_LIST
    )

    @property
    def needs_own_gpu(self) -> bool:
        """Return whether its pods were retracted so often that the next one gets a GPU of its own.

        An intended retraction counts as one: the pod's successor may arrive before the record is complete. One
        without neighbours is counted in the record that replaced it.
        """
        retractions = sum(one.stands_for for one in self.retractions if one.neighbours)
        return retracted_often(retractions, len(self.placements))

    @property
    def lists_all_pods(self) -> bool:
        """Return whether `placements` surely names every placed pod; a full list may lack some."""
        return len(self.placements) < _MAX_PLACEMENTS

    @property
    def ends_neighbours(self) -> bool:
        """Return whether its pods ended their neighbours so often that they are isolated (docs/adr/0185)."""
        return len(self.neighbours_ended) >= _ENDED_OFTEN


def retracted_often(retractions: int, pods: int) -> bool:
    """Return whether a group's next pod gets a GPU of its own: at least two retractions for each placed pod.

    The operator forgets a retraction a day after its back-off has ended. The threshold grows with the number of
    pods; otherwise a group of many jobs soon gets a whole GPU for each of them (docs/measurements/jobs.md).

    Args:
        retractions: of the group that are remembered.
        pods: of the group that are placed now.
    """
    return retractions >= _RETRACTED_OFTEN * max(1, pods)


@dataclass(frozen=True, slots=True)
class MpsFault:
    """A fault of a GPU's MPS server, which ended every client."""

    at: str = described("When it was noticed.", default="", required=True, format="date-time")
    begun_by: str | None = described(
        "The pod that caused it, by uid: a process of it was killed within a kernel. Absent if not known.",
        default=None,
        maxLength=64,
    )


@dataclass(frozen=True, slots=True)
class MpsStatus:
    """The MPS daemon, server and gate of one GPU."""

    state: MpsState = described("State of the daemon and its server.", default=MpsState.STARTING)
    clients: int = described("Processes connected now; one server takes 48.", default=0, minimum=0)
    waiting_connections: int = described("Connections waiting at the gate.", name="held", default=0, minimum=0)
    ceilings: Ceilings = described(
        "Result of the gate's self-test: whether this driver enforces its ceilings.", default=Ceilings.UNTESTED
    )
    message: str | None = described("What is wrong, for people.", default=None, maxLength=1024)
    last_fault: MpsFault | None = described("Its last fault; absent without one.", default=None)


@dataclass(frozen=True, slots=True)
class Utilization:
    """Use of each pipe of a GPU over the last window, tensor pipes included; 0 to 1, absent if not measured."""

    fp16: float | None = described("FP16 and half-precision tensor pipes.", default=None, **_RATIO)
    fp32: float | None = described("FP32 pipe.", default=None, **_RATIO)
    fp64: float | None = described("FP64 and double-precision tensor pipes.", default=None, **_RATIO)
    int8: float | None = described("Integer tensor pipe.", default=None, **_RATIO)
    integer: float | None = described("Integer pipe.", default=None, **_RATIO)
    dram: float | None = described("Bandwidth of device memory.", default=None, **_RATIO)
    sm: float | None = described("Time an SM had work, mean over SMs.", default=None, **_RATIO)
    sm_occupancy: float | None = described("Resident warps over the most possible.", default=None, **_RATIO)
    nvml: float | None = described("What nvidia-smi calls utilisation.", default=None, **_RATIO)

    @classmethod
    def of(cls, counters: Counters, nvml_ratio: float | None = None) -> "Utilization":
        """Return the utilization of one window's counters."""
        return cls(**counters.pipes(), sm=counters.sm_util, sm_occupancy=counters.sm_occupancy, nvml=nvml_ratio)


@dataclass(frozen=True, slots=True)
class TenantStatus:
    """One pod on one GPU."""

    pod_uid: str = described("The pod's uid.", default="", required=True, maxLength=64)
    namespace: str | None = described("The pod's namespace.", default=None, maxLength=63)
    pod: str | None = described("The pod's name.", default=None, maxLength=253)
    share_percent: int = described(
        "Percent of the GPU that it is guaranteed.", default=0, name="share", minimum=0, maximum=100
    )
    thread_percentage: int | None = described(
        "The cap in force for its next process.", default=None, minimum=1, maximum=100
    )
    memory_limit_mib: int | None = described(
        "Memory limit of all its processes together, MiB.", default=None, name="memoryLimitMiB", minimum=1
    )
    memory_used_mib: int | None = described(
        "Device memory in use, MiB.", default=None, name="memoryUsedMiB", minimum=0
    )
    clients: int | None = described("Its processes connected to MPS.", default=None, minimum=0)
    progress_ratio: float | None = described(
        "Inferred progress relative to running alone; absent where tenants cannot be distinguished.",
        default=None,
        name="progress",
        minimum=0,
    )
    progress_error_ratio: float | None = described(
        "One standard deviation of the inferred progress.", default=None, name="progressError", minimum=0
    )
    slowdown_ratio: float | None = described(
        "How much longer it takes than alone.", default=None, name="slowdown", minimum=0
    )
    promise_ratio: float | None = described(
        "Promised progress relative to running alone.", default=None, name="promise", **_RATIO
    )
    throttle_ratio: float | None = described(
        "Part of the time that it is stopped to keep a neighbour's promise; absent while it runs freely.",
        default=None,
        name="throttle",
        **_RATIO,
    )
    is_asleep: bool | None = described(
        "True while it has processes that do no work, and not because of its neighbours; then it has no progress, "
        "and no promise of it is broken.",
        default=None,
        name="asleep",
    )
    retract: str | None = described(
        "Why the node asks to move this pod away, with figures; absent while it may stay.",
        default=None,
        maxLength=1024,
    )
    slo: TenantSlo | None = described("State of its own target, gpushare.io/slo.", default=None)
    trouble: TenantTrouble | None = described("What is wrong with it; absent while nothing is.", default=None)
    profile: WorkloadSignature | None = described(
        "Its workload's signature as this node measured it alone on a GPU with all threads; absent once its "
        "GpuShare has one that is as good.",
        default=None,
    )
    phase: int | None = described(
        "Which of its program's kinds of work explains the last window: 0 is the usual one, others are numbered "
        "by this node; absent while its progress is not inferred beside others.",
        default=None,
        minimum=0,
    )
    thread_percentage_in_force: int | None = described(
        "The cap that its present processes run under, all together; absent without processes or if the gate does "
        "not know it of each.",
        default=None,
        minimum=1,
        maximum=100,
    )

    @property
    def work_ratio(self) -> float | None:
        """Return its progress as a part of a sum: 0 while it sleeps; None if it is unknown."""
        return 0.0 if self.is_asleep else self.progress_ratio


@dataclass(frozen=True, slots=True)
class GpuStatus:
    """One GPU of the node."""

    uuid: str = described("The GPU's UUID.", default="", required=True, maxLength=96)
    index: int = described("Its index on the node.", default=0, minimum=0)
    model: str = described("Its model as the driver names it.", default="", maxLength=128)
    memory_mib: int = described("Its memory, MiB.", default=0, name="memoryMiB", minimum=0)
    sm_count: int = described("Its streaming multiprocessors.", default=0, minimum=0)
    health: Health = described("Whether it may take tenants.", default=Health.HEALTHY)
    health_reason: str | None = described("Why it is unhealthy, for people.", default=None, maxLength=1024)
    mps: MpsStatus = described("Its MPS daemon, server and gate.", default_factory=MpsStatus)
    utilization: Utilization | None = described("Its use over the last window.", default=None)
    memory_used_mib: int | None = described(
        "Device memory in use, MiB.", default=None, name="memoryUsedMiB", minimum=0
    )
    tenants: tuple[TenantStatus, ...] = described(
        "The pods that share it.", default=(), maxItems=_MAX_TENANTS_PER_GPU, **list_map("podUid")
    )


@dataclass(frozen=True, slots=True)
class GpuNodeSummary:
    """Sums for `kubectl get gpunodes`."""

    gpus: int = described("GPUs of the node.", default=0, minimum=0)
    healthy: int = described("Healthy GPUs of the node.", default=0, minimum=0)
    shares_used: int = described("Percent of one GPU in use, summed over all GPUs.", default=0, minimum=0)
    clients: int = described("Processes connected to MPS on all GPUs.", default=0, minimum=0)
    tenants: int = described("Pods on all GPUs; a pod on several GPUs counts once.", default=0, minimum=0)


@dataclass(frozen=True, slots=True)
class GpuNodeStatus:
    """The observations of the node's agent, written only by it. Make it with `of`, which adds the summary."""

    summary: GpuNodeSummary | None = described("Sums over the GPUs.", default=None)
    gpus: tuple[GpuStatus, ...] = described(
        "The node's GPUs.", default=(), maxItems=_MAX_GPUS_PER_NODE, **list_map("uuid")
    )
    driver_version: str | None = described("Version of the NVIDIA driver.", default=None, maxLength=64)
    observed_at: str | None = described("When the agent looked.", default=None, format="date-time")
    conditions: tuple[Condition, ...] = described(
        "Conditions in the usual form.", default=(), maxItems=32, **list_map("type")
    )

    @property
    def can_read(self) -> bool:
        """Return whether workloads can be profiled in place, beside others, as far as is known."""
        return not any(
            one.type in READING_CONDITIONS and one.status is ConditionStatus.FALSE for one in self.conditions
        )

    @classmethod
    def of(
        cls,
        gpus: tuple[GpuStatus, ...],
        *,
        driver_version: str | None = None,
        observed_at: str | None = None,
        conditions: tuple[Condition, ...] = (),
    ) -> "GpuNodeStatus":
        """Return a status with its summary computed; a pod on several GPUs counts as one tenant."""
        summary = GpuNodeSummary(
            gpus=len(gpus),
            healthy=sum(gpu.health is Health.HEALTHY for gpu in gpus),
            shares_used=sum(tenant.share_percent for gpu in gpus for tenant in gpu.tenants),
            clients=sum(gpu.mps.clients for gpu in gpus),
            tenants=len({tenant.pod_uid for gpu in gpus for tenant in gpu.tenants}),
        )
        return cls(summary, gpus, driver_version, observed_at, conditions)


@dataclass(frozen=True, slots=True)
class GpuShare:
    """A GpuShare read from the API."""

    namespace: str
    name: str
    uid: str
    generation: int
    owners: tuple[OwnerReference, ...]
    spec: GpuShareSpec
    status: GpuShareStatus

    @classmethod
    def from_object(cls, obj: Mapping[str, Any]) -> "GpuShare":
        """Read a GpuShare from the API's JSON object."""
        metadata = obj.get("metadata") or {}
        owners = tuple(
            OwnerReference(
                str(owner.get("apiVersion", "")),
                str(owner.get("kind", "")),
                str(owner.get("name", "")),
                str(owner.get("uid", "")),
                bool(owner.get("controller")),
            )
            for owner in metadata.get("ownerReferences") or ()
        )
        return cls(
            namespace=str(metadata.get("namespace", "")),
            name=str(metadata.get("name", "")),
            uid=str(metadata.get("uid", "")),
            generation=int(metadata.get("generation") or 0),
            owners=owners,
            spec=from_json(GpuShareSpec, obj.get("spec")),
            status=from_json(GpuShareStatus, obj.get("status")),
        )


@dataclass(frozen=True, slots=True)
class GpuNode:
    """A GpuNode; it has the name of its node.

    Attributes:
        silent_since: when its agent last reported, if its reader found that to be too long ago; not in the API.
    """

    name: str
    status: GpuNodeStatus
    silent_since: str | None = None

    @classmethod
    def from_object(cls, obj: Mapping[str, Any]) -> "GpuNode":
        """Read a GpuNode from the API's JSON object."""
        metadata = obj.get("metadata") or {}
        return cls(str(metadata.get("name", "")), from_json(GpuNodeStatus, obj.get("status")))

    def to_object(self) -> dict[str, Any]:
        """Return the API's JSON object without server-side metadata."""
        return {
            "apiVersion": API_VERSION,
            "kind": "GpuNode",
            "metadata": {"name": self.name},
            "status": to_json(self.status),
        }
