"""The node's metric families: device and pod figures; unmeasured figures are absent (docs/metrics.md)."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_MIB: Final = 2**20
_DEVICE: Final = ("node", "gpu_uuid", "gpu_index", "gpu_model")
_POD: Final = ("node", "gpu_uuid", "namespace", "pod", "pod_uid")
MPS_STATES: Final = ("Starting", "Active", "Fault", "Down")


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """One GPU's figures; None and missing keys mean that a figure was not measured.

    Attributes:
        pipes: use by pipe (fp16, fp32, fp64, int8, integer, dram), 0 to 1.
        mps_state: one of MPS_STATES.
        waiting_connections: at the gate, by reason.
        refused: connections refused since the gate started, by reason.
        mismatches: present mismatches, by kind.
        outside: present processes outside MPS.
        outside_found: processes found outside MPS since the agent started.
        outside_ended: those of them that the agent ended.
        promises_broken: promises found broken since the agent started.
        throttles: throttles since the agent started.
        retractions_asked: retractions asked for since the agent started.
        readings: profiles read in place.
        reading_failures: those of them that yielded nothing.
        reading_seconds: time for which neighbours were stopped for readings.
    """

    uuid: str
    index: int
    model: str
    memory_mib: int
    is_healthy: bool
    pipes: Mapping[str, float] = field(default_factory=dict)
    sm_activity_ratio: float | None = None
    sm_occupancy_ratio: float | None = None
    nvml_utilization_ratio: float | None = None
    memory_used_mib: int | None = None
    share_used_ratio: float = 0.0
    mps_state: str = "Down"
    is_ceilings_enforced: bool | None = None
    clients: int | None = None
    waiting_connections: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[str, int] = field(default_factory=dict)
    mismatches: Mapping[str, int] = field(default_factory=dict)
    faults: int | None = None
    daemon_restarts: int | None = None
    turns: int | None = None
    turn_seconds_sum: float | None = None
    outside: int | None = None
    outside_found: int | None = None
    outside_ended: int | None = None
    promises_broken: int | None = None
    throttles: int | None = None
    retractions_asked: int | None = None
    readings: int | None = None
    reading_failures: int | None = None
    reading_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class TenantFigures:
    """One pod's figures on one GPU; None and missing keys mean that a figure is unknown."""

    gpu_uuid: str
    namespace: str
    pod: str
    pod_uid: str
    share_ratio: float
    thread_percentage: int | None = None
    memory_limit_mib: int | None = None
    memory_used_mib: int | None = None
    clients: int | None = None
    progress_ratio: float | None = None
    progress_error_ratio: float | None = None
    slowdown_ratio: float | None = None
    pipes: Mapping[str, float] = field(default_factory=dict)
    promise_ratio: float | None = None
    throttle_ratio: float | None = None
    is_promise_broken: bool | None = None
    predicted_progress_ratio: float | None = None
    slo_target_seconds: float | None = None
    slo_measured_seconds: float | None = None
    slo_target_per_second: float | None = None
    slo_measured_per_second: float | None = None
    is_slo_met: bool | None = None
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class NodeFigures:
    """All figures of one node at one moment.

    Attributes:
        errors: errors since the agent started, by part.
        allocation_mismatches: how often kubelet chose another GPU than decided.
        is_driver_ready: whether the driver answered in the last round.
        slo_failures: failed readings of own targets since the agent started, by reason.
    """

    node: str
    devices: tuple[DeviceFigures, ...] = ()
    tenants: tuple[TenantFigures, ...] = ()
    errors: Mapping[str, int] = field(default_factory=dict)
    allocation_mismatches: int = 0
    refused_allocations: int = 0
    refused_starts: int = 0
    bad_pods: int = 0
    is_registered: bool = False
    is_driver_ready: bool = False
    slo_failures: Mapping[str, int] = field(default_factory=dict)


def _bytes(mib: int | None) -> float | None:
    return None if mib is None else float(mib) * _MIB


def _flag(is_so: bool | None) -> float | None:
    return None if is_so is None else float(is_so)


def _ratio(percent: int | None) -> float | None:
    return None if percent is None else percent / 100


F = TypeVar("F")
_Table = Sequence[tuple[str, str, Callable[[F], float | None]]]  # family, help, the figure or None

_OF_DEVICES: Final[_Table[DeviceFigures]] = (
    ("gpu_sm_activity_ratio", "Time an SM had work, mean over SMs.", lambda d: d.sm_activity_ratio),
    ("gpu_sm_occupancy_ratio", "Resident warps of those possible.", lambda d: d.sm_occupancy_ratio),
    ("gpu_nvml_utilization_ratio", "What nvidia-smi calls utilisation.", lambda d: d.nvml_utilization_ratio),
    ("gpu_memory_used_bytes", "Device memory in use.", lambda d: _bytes(d.memory_used_mib)),
    ("gpu_memory_total_bytes", "Device memory.", lambda d: _bytes(d.memory_mib)),
    ("gpu_share_used_ratio", "Sum of the shares of the GPU's pods.", lambda d: d.share_used_ratio),
    ("gpu_healthy", "1 when the GPU takes new tenants.", lambda d: float(d.is_healthy)),
)
_OF_MPS: Final[_Table[DeviceFigures]] = (
    (
        "mps_ceilings_enforced",
        "1 when the gate's self-test showed that ceilings bind.",
        lambda d: _flag(d.is_ceilings_enforced),
    ),
    ("mps_clients", "Processes connected to the GPU's MPS server.", lambda d: d.clients),
    ("mps_outside_processes", "Processes that use the GPU outside MPS now.", lambda d: d.outside),
)
_COUNTED_OF_MPS: Final[_Table[DeviceFigures]] = (
    ("mps_faults", "Faults of the MPS server since the gate started.", lambda d: d.faults),
    ("mps_daemon_restarts", "Restarts of the MPS daemon since the gate started.", lambda d: d.daemon_restarts),
    ("mps_turns", "Processes let through the gate since it started.", lambda d: d.turns),
    (
        "mps_outside_processes_found",
        "Processes found outside MPS since the agent started.",
        lambda d: d.outside_found,
    ),
    ("mps_outside_processes_ended", "Of these, those that the agent ended.", lambda d: d.outside_ended),
    ("mps_turn_seconds", "Time that these turns took in all.", lambda d: d.turn_seconds_sum),
)
_OF_PODS: Final[_Table[TenantFigures]] = (
    ("pod_share_ratio", "Share of the GPU that the pod is guaranteed.", lambda t: t.share_ratio),
    (
        "pod_thread_percentage_ratio",
        "Cap of the pod's next process, of the GPU's SMs.",
        lambda t: _ratio(t.thread_percentage),
    ),
    (
        "pod_memory_limit_bytes",
        "Memory limit of all the pod's processes together.",
        lambda t: _bytes(t.memory_limit_mib),
    ),
    (
        "pod_memory_used_bytes",
        "Device memory that the pod's processes use.",
        lambda t: _bytes(t.memory_used_mib),
    ),
    ("pod_clients", "The pod's processes connected to MPS; absent if all are outside.", lambda t: t.clients),
    ("pod_progress_ratio", "Inferred progress relative to running alone.", lambda t: t.progress_ratio),
    (
        "pod_progress_error_ratio",
        "One standard deviation of the inferred progress.",
        lambda t: t.progress_error_ratio,
    ),
    ("pod_slowdown_ratio", "How much longer the pod takes than alone.", lambda t: t.slowdown_ratio),
    (
        "pod_promise_ratio",
        "Progress that the pod may count on, relative to running alone.",
        lambda t: t.promise_ratio,
    ),
    (
        "pod_promise_broken",
        "1 while the pod's progress is below its promise.",
        lambda t: _flag(t.is_promise_broken),
    ),
    (
        "pod_predicted_progress_ratio",
        "Progress that the interference model expects beside these neighbours.",
        lambda t: t.predicted_progress_ratio,
    ),
    ("pod_throttle_ratio", "Part of the time that the pod is kept stopped.", lambda t: t.throttle_ratio),
    ("pod_slo_met", "1 while the pod meets its own target.", lambda t: _flag(t.is_slo_met)),
    ("pod_slo_target_seconds", "The pod's own latency target.", lambda t: t.slo_target_seconds),
    ("pod_slo_measured_seconds", "The quantile of the target, as last read.", lambda t: t.slo_measured_seconds),
    ("pod_slo_target_per_second", "The pod's own target, a rate.", lambda t: t.slo_target_per_second),
    ("pod_slo_measured_per_second", "The rate, as last read.", lambda t: t.slo_measured_per_second),
)
_OF_LOOP: Final[_Table[DeviceFigures]] = (
    ("promises_broken", "Times that a pod's promise was found broken.", lambda d: d.promises_broken),
    ("throttles", "Times that a pod was throttled for another's promise.", lambda d: d.throttles),
    ("retractions_asked", "Times that the agent asked for a pod to leave.", lambda d: d.retractions_asked),
    ("profile_readings", "Times that neighbours were stopped to read a workload.", lambda d: d.readings),
    ("profile_reading_failures", "Of these, those that gave nothing.", lambda d: d.reading_failures),
    ("profile_reading_seconds", "Time that neighbours were stopped for that.", lambda d: d.reading_seconds),
)


class NodeCollector(Collector):
    """Collector that converts the node's current figures into metric families."""

    def __init__(self, figures: Callable[[], NodeFigures]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """Return all families."""
        now = self._figures()
        yield from _device_families(now)
        yield from _mps_families(now)
        yield from _pod_families(now)
        yield from _agent_families(now)


_Rows = Iterable[tuple[tuple[str, ...], float | None]]


def _gauge(name: str, text: str, labels: Iterable[str], rows: _Rows) -> Metric:
    return _filled(GaugeMetricFamily(f"gpushare_{name}", text, labels=tuple(labels)), rows)


def _counter(name: str, text: str, labels: Iterable[str], rows: _Rows) -> Metric:
    return _filled(CounterMetricFamily(f"gpushare_{name}", text, labels=tuple(labels)), rows)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, rows: _Rows) -> Metric:
    for values, figure in rows:
        if figure is not None:
            family.add_metric(values, figure)
    return family


def _device_families(now: NodeFigures) -> Iterator[Metric]:
    by_device = [((now.node, d.uuid, str(d.index), d.model), d) for d in now.devices]
    yield _gauge(
        "gpu_pipe_utilization_ratio",
        "Use of a pipe of the GPU, tensor pipes counted in.",
        (*_DEVICE, "pipe"),
        (((*at, pipe), use) for at, d in by_device for pipe, use in sorted(d.pipes.items())),
    )
    for name, text, figure in _OF_DEVICES:
        yield _gauge(name, text, _DEVICE, ((at, figure(d)) for at, d in by_device))


def _mps_families(now: NodeFigures) -> Iterator[Metric]:
    labels = ("node", "gpu_uuid")
    gpus = [((now.node, d.uuid), d) for d in now.devices]
    yield _gauge(
        "mps_state",
        "1 for the state that the GPU's MPS is in.",
        (*labels, "state"),
        (((*at, state), float(d.mps_state == state)) for at, d in gpus for state in MPS_STATES),
    )
    yield _gauge(
        "mps_held_connections",
        "Processes that wait at the gate, by reason.",
        (*labels, "reason"),
        _by_kind((at, d.waiting_connections) for at, d in gpus),
    )
    yield _gauge(
        "mps_mismatches",
        "Processes that run otherwise than decided, by kind.",
        (*labels, "kind"),
        _by_kind((at, d.mismatches) for at, d in gpus),
    )
    yield _counter(
        "mps_refused_connections",
        "Connections that the gate closed.",
        (*labels, "reason"),
        _by_kind((at, d.refused) for at, d in gpus),
    )
    for name, text, figure in _OF_MPS:
        yield _gauge(name, text, labels, ((at, figure(d)) for at, d in gpus))
    for name, text, figure in (*_COUNTED_OF_MPS, *_OF_LOOP):
        yield _counter(name, text, labels, ((at, figure(d)) for at, d in gpus))


def _by_kind(rows: Iterable[tuple[tuple[str, ...], Mapping[str, int]]]) -> _Rows:
    for at, counts in rows:
        for kind, count in sorted(counts.items()):
            yield (*at, kind), count


def _pod_families(now: NodeFigures) -> Iterator[Metric]:
    by_pod = [((now.node, t.gpu_uuid, t.namespace, t.pod, t.pod_uid), t) for t in now.tenants]
    for name, text, figure in _OF_PODS:
        yield _gauge(name, text, _POD, ((at, figure(t)) for at, t in by_pod))
    yield _gauge(
        "pod_trouble",
        "1 while the pod is in trouble, by kind.",
        (*_POD, "kind"),
        (((*at, t.trouble), 1.0 if t.trouble else None) for at, t in by_pod),
    )
    yield _gauge(
        "pod_pipe_utilization_ratio",
        "The pod's own inferred use of a pipe of the GPU.",
        (*_POD, "pipe"),
        (((*at, pipe), use) for at, t in by_pod for pipe, use in sorted(t.pipes.items())),
    )


def _agent_families(now: NodeFigures) -> Iterator[Metric]:
    at = (now.node,)
    yield _counter(
        "agent_errors",
        "Trouble that the agent met, by what it hit.",
        ("node", "part"),
        (((now.node, part), n) for part, n in sorted(now.errors.items())),
    )
    yield _counter(
        "agent_slo_reading_failures",
        "Readings of pods' own targets that gave nothing.",
        ("node", "reason"),
        (((now.node, reason), n) for reason, n in sorted(now.slo_failures.items())),
    )
    yield _counter(
        "agent_allocation_mismatches",
        "Pods that kubelet gave another GPU than decided.",
        ("node",),
        [(at, now.allocation_mismatches)],
    )
    yield _counter(
        "agent_refused_allocations",
        "Allocations refused: ids that make no sense together, or memory that other pods hold.",
        ("node",),
        [(at, now.refused_allocations)],
    )
    yield _counter(
        "agent_refused_starts",
        "Starts of containers refused because no MPS gate listened on their GPU.",
        ("node",),
        [(at, now.refused_starts)],
    )
    yield _counter(
        "agent_bad_pods", "Pods whose decision annotations are broken.", ("node",), [(at, now.bad_pods)]
    )
    yield _gauge(
        "agent_registered",
        "1 while kubelet has the device plugin.",
        ("node",),
        [(at, float(now.is_registered))],
    )
    yield _gauge(
        "agent_driver_ready", "1 while the GPUs' driver answers.", ("node",), [(at, float(now.is_driver_ready))]
    )
