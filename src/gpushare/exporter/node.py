"""The node's metric families: device and pod figures, each real or absent (docs/metrics.md)."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_MIB: Final = 2**20
_DEVICE: Final = ("node", "gpu_uuid", "gpu_index", "gpu_model")
_POD: Final = ("node", "gpu_uuid", "namespace", "pod", "pod_uid")
MPS_STATES: Final = ("Starting", "Active", "Fault", "Down")


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """One GPU's figures; None and missing keys are what could not be measured.

    Attributes:
        pipes: use by pipe (fp16, fp32, fp64, int8, integer, dram), 0 to 1.
        mps_state: one of MPS_STATES; held: connections that wait at the gate, by reason.
        refused, mismatches: since the gate started, and now, by reason or kind.
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
    held: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[str, int] = field(default_factory=dict)
    mismatches: Mapping[str, int] = field(default_factory=dict)
    faults: int | None = None
    daemon_restarts: int | None = None
    turns: int | None = None
    turn_seconds_sum: float | None = None


@dataclass(frozen=True, slots=True)
class TenantFigures:
    """One pod's figures on one GPU; None and missing keys are what could not be told."""

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


@dataclass(frozen=True, slots=True)
class NodeFigures:
    """Everything of one node at one moment.

    Attributes:
        is_driver_ready: the driver answered the last round.
        errors: trouble since the agent started, by what it hit; allocation_mismatches: kubelet chose another GPU.
    """

    node: str
    devices: tuple[DeviceFigures, ...] = ()
    tenants: tuple[TenantFigures, ...] = ()
    errors: Mapping[str, int] = field(default_factory=dict)
    allocation_mismatches: int = 0
    refused_allocations: int = 0
    bad_pods: int = 0
    is_registered: bool = False
    is_driver_ready: bool = False


class NodeCollector(Collector):
    """Turns the node's figures of the moment of a scrape into families."""

    def __init__(self, figures: Callable[[], NodeFigures]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """All families."""
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
        "gpu_pipe_utilization_ratio", "Use of a pipe of the GPU, tensor pipes counted in.", (*_DEVICE, "pipe"),
        (((*at, pipe), use) for at, d in by_device for pipe, use in sorted(d.pipes.items())),
    )  # fmt: skip
    yield _gauge("gpu_sm_activity_ratio", "Time an SM had work, mean over SMs.", _DEVICE,
                 ((at, d.sm_activity_ratio) for at, d in by_device))  # fmt: skip
    yield _gauge("gpu_sm_occupancy_ratio", "Resident warps of those possible.", _DEVICE,
                 ((at, d.sm_occupancy_ratio) for at, d in by_device))  # fmt: skip
    yield _gauge("gpu_nvml_utilization_ratio", "What nvidia-smi calls utilisation.", _DEVICE,
                 ((at, d.nvml_utilization_ratio) for at, d in by_device))  # fmt: skip
    yield _gauge("gpu_memory_used_bytes", "Device memory in use.", _DEVICE,
                 ((at, _bytes(d.memory_used_mib)) for at, d in by_device))  # fmt: skip
    yield _gauge("gpu_memory_total_bytes", "Device memory.", _DEVICE,
                 ((at, _bytes(d.memory_mib)) for at, d in by_device))  # fmt: skip
    yield _gauge("gpu_share_used_ratio", "Sum of the shares of the GPU's pods.", _DEVICE,
                 ((at, d.share_used_ratio) for at, d in by_device))  # fmt: skip
    yield _gauge("gpu_healthy", "1 when the GPU takes new tenants.", _DEVICE,
                 ((at, float(d.is_healthy)) for at, d in by_device))  # fmt: skip


def _mps_families(now: NodeFigures) -> Iterator[Metric]:
    labels = ("node", "gpu_uuid")
    gpus = [((now.node, d.uuid), d) for d in now.devices]
    yield _gauge(
        "mps_state", "1 for the state that the GPU's MPS is in.", (*labels, "state"),
        (((*at, state), float(d.mps_state == state)) for at, d in gpus for state in MPS_STATES),
    )  # fmt: skip
    enforced = [(at, d.is_ceilings_enforced) for at, d in gpus]
    yield _gauge("mps_ceilings_enforced", "1 when the gate's self-test showed that ceilings bind.", labels,
                 ((at, None if is_so is None else float(is_so)) for at, is_so in enforced))  # fmt: skip
    yield _gauge("mps_clients", "Processes connected to the GPU's MPS server.", labels,
                 ((at, d.clients) for at, d in gpus))  # fmt: skip
    yield _gauge("mps_held_connections", "Processes that wait at the gate, by reason.", (*labels, "reason"),
                 _by_kind((at, d.held) for at, d in gpus))  # fmt: skip
    yield _gauge("mps_mismatches", "Processes that run otherwise than decided, by kind.", (*labels, "kind"),
                 _by_kind((at, d.mismatches) for at, d in gpus))  # fmt: skip
    yield _counter("mps_refused_connections", "Connections that the gate closed.", (*labels, "reason"),
                   _by_kind((at, d.refused) for at, d in gpus))  # fmt: skip
    yield _counter("mps_faults", "Faults of the MPS server since the gate started.", labels,
                   ((at, d.faults) for at, d in gpus))  # fmt: skip
    yield _counter("mps_daemon_restarts", "Restarts of the MPS daemon since the gate started.", labels,
                   ((at, d.daemon_restarts) for at, d in gpus))  # fmt: skip
    yield _counter("mps_turns", "Processes let through the gate since it started.", labels,
                   ((at, d.turns) for at, d in gpus))  # fmt: skip
    yield _counter("mps_turn_seconds", "Time that these turns took in all.", labels,
                   ((at, d.turn_seconds_sum) for at, d in gpus))  # fmt: skip


def _by_kind(rows: Iterable[tuple[tuple[str, ...], Mapping[str, int]]]) -> _Rows:
    for at, counts in rows:
        for kind, count in sorted(counts.items()):
            yield (*at, kind), count


def _pod_families(now: NodeFigures) -> Iterator[Metric]:
    by_pod = [((now.node, t.gpu_uuid, t.namespace, t.pod, t.pod_uid), t) for t in now.tenants]
    yield _gauge("pod_share_ratio", "Share of the GPU that the pod is guaranteed.", _POD,
                 ((at, t.share_ratio) for at, t in by_pod))  # fmt: skip
    yield _gauge("pod_thread_percentage_ratio", "Cap of the pod's next process, of the GPU's SMs.", _POD,
                 ((at, None if t.thread_percentage is None else t.thread_percentage / 100)
                  for at, t in by_pod))  # fmt: skip
    yield _gauge("pod_memory_limit_bytes", "Memory limit of all the pod's processes together.", _POD,
                 ((at, _bytes(t.memory_limit_mib)) for at, t in by_pod))  # fmt: skip
    yield _gauge("pod_memory_used_bytes", "Device memory that the pod's processes use.", _POD,
                 ((at, _bytes(t.memory_used_mib)) for at, t in by_pod))  # fmt: skip
    yield _gauge("pod_clients", "The pod's processes connected to MPS.", _POD,
                 ((at, t.clients) for at, t in by_pod))  # fmt: skip
    yield _gauge("pod_progress_ratio", "Inferred progress relative to running alone.", _POD,
                 ((at, t.progress_ratio) for at, t in by_pod))  # fmt: skip
    yield _gauge("pod_progress_error_ratio", "One standard deviation of the inferred progress.", _POD,
                 ((at, t.progress_error_ratio) for at, t in by_pod))  # fmt: skip
    yield _gauge("pod_slowdown_ratio", "How much longer the pod takes than alone.", _POD,
                 ((at, t.slowdown_ratio) for at, t in by_pod))  # fmt: skip
    yield _gauge("pod_pipe_utilization_ratio", "The pod's own inferred use of a pipe of the GPU.", (*_POD, "pipe"),
                 (((*at, pipe), use) for at, t in by_pod for pipe, use in sorted(t.pipes.items())))  # fmt: skip


def _agent_families(now: NodeFigures) -> Iterator[Metric]:
    at = (now.node,)
    yield _counter("agent_errors", "Trouble that the agent met, by what it hit.", ("node", "part"),
                   (((now.node, part), n) for part, n in sorted(now.errors.items())))  # fmt: skip
    yield _counter("agent_allocation_mismatches", "Pods that kubelet gave another GPU than decided.", ("node",),
                   [(at, now.allocation_mismatches)])  # fmt: skip
    yield _counter("agent_refused_allocations", "Allocations refused as they made no sense.", ("node",),
                   [(at, now.refused_allocations)])  # fmt: skip
    yield _counter("agent_bad_pods", "Pods whose decision annotations are broken.", ("node",),
                   [(at, now.bad_pods)])  # fmt: skip
    yield _gauge("agent_registered", "1 while the device plugin is registered with kubelet.", ("node",),
                 [(at, float(now.is_registered))])  # fmt: skip
    yield _gauge("agent_driver_ready", "1 while the GPUs' driver answers.", ("node",),
                 [(at, float(now.is_driver_ready))])  # fmt: skip


def _bytes(mib: int | None) -> float | None:
    return None if mib is None else float(mib) * _MIB
