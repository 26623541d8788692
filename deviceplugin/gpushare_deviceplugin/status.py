"""GpuNode of this node: built from the agent's state, written rarely, but at once when it matters."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Final, Protocol

from gpushare.core.api import (
    Condition,
    ConditionStatus,
    GpuNodeStatus,
    GpuStatus,
    TenantSlo,
    TenantStatus,
    TenantTrouble,
    Utilization,
    WorkloadSignature,
    names,
)
from gpushare.core.gpu import FITTED_ON, GpuHealth, GpuSample, Health, calibration_warning
from gpushare.mps.status import GateStatus
from gpushare.runtime.wakeups import JointWakeups
from gpushare_deviceplugin.gates import mps_status
from gpushare_deviceplugin.pods import ManagedPod
from gpushare_deviceplugin.state import AgentPart, NodeState

_log = logging.getLogger(__name__)

QUIET_SECONDS: Final = 10.0  # docs/design.md 1: at most one write per 10 s
HEARTBEAT_SECONDS: Final = 60.0  # so that a reader can tell a quiet node from a dead agent
RETRY_SECONDS: Final = 2.0
LOOK_SECONDS: Final = 1.0  # for what is due, unless the state changes before
DIGITS: Final = 3  # of ratios on the wire


@dataclass(frozen=True, slots=True)
class TenantMeasure:
    """Measures of one pod on one GPU; None if unknown.

    Attributes:
        progress_ratio: relative to running alone at 100% threads; progress_error_ratio: one standard deviation.
        pipes: its own use of each pipe, 0 to 1.
        alone_ratio: its progress if every neighbour were stopped, under its cap.
        predicted_progress_ratio: the interference model's prediction beside these neighbours;
            predicted_error_ratio: its standard deviation.
        is_asleep: it makes no progress, and not because of neighbours.
        profile: its workload's signature, if its GpuShare has none as good.
        phase: which of its signatures explains the window beside others; 0 is the usual one.
        threads_in_force: the cap that its processes run under, percent; None if the gate does not know it of each.
    """

    clients: int | None = None
    memory_used_mib: int | None = None
    progress_ratio: float | None = None
    progress_error_ratio: float | None = None
    pipes: Mapping[str, float] = field(default_factory=dict)
    profile: WorkloadSignature | None = None
    alone_ratio: float | None = None
    is_asleep: bool = False
    predicted_progress_ratio: float | None = None
    predicted_error_ratio: float | None = None
    phase: int | None = None
    threads_in_force: int | None = None

    @property
    def slowdown_ratio(self) -> float | None:
        """Return how many times longer it takes than alone; None if unknown or without progress."""
        return 1.0 / self.progress_ratio if self.progress_ratio else None


@dataclass(frozen=True, slots=True)
class GpuMeasure:
    """The last window of one GPU, and its tenants by pod uid."""

    sample: GpuSample | None = None
    tenants: Mapping[str, TenantMeasure] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Keeping:
    """The loop's report on one pod on one GPU.

    Attributes:
        promise_ratio: promised progress.
        throttle_ratio: part of the time that it is stopped; None if it is not throttled.
        retract: why it should leave; None if it may stay.
        slo: status against its own target.
        trouble: its trouble, if any.
    """

    promise_ratio: float | None = None
    throttle_ratio: float | None = None
    retract: str | None = None
    slo: TenantSlo | None = None
    trouble: TenantTrouble | None = None


KeepingOf = Callable[[str, ManagedPod, int], Keeping]  # GPU's uuid, pod, its percent of it


def nothing_kept(uuid: str, pod: ManagedPod, share_percent: int) -> Keeping:  # noqa: ARG001 - a KeepingOf
    """Report nothing, for use without a loop."""
    return Keeping()


def build_status(
    state: NodeState,
    gates: Mapping[str, GateStatus | None],
    measures: Mapping[str, GpuMeasure],
    driver_version: str | None = None,
    keeping: KeepingOf = nothing_kept,
) -> GpuNodeStatus:
    """Return the whole status of this node, without a time of observation."""
    gpus = []
    for gpu in sorted(state.gpus.values(), key=lambda each: (each.index, each.uuid)):
        health = state.health.get(gpu.uuid, GpuHealth(Health.UNHEALTHY, "not looked at yet"))
        measure = measures.get(gpu.uuid, GpuMeasure())
        sample = measure.sample
        gpus.append(
            GpuStatus(
                uuid=gpu.uuid,
                index=gpu.index,
                model=gpu.model,
                memory_mib=gpu.memory_mib,
                sm_count=gpu.sm_count,
                health=health.health,
                health_reason=health.reason[:1024] or None,
                mps=mps_status(gates.get(gpu.uuid)),
                utilization=_utilization(sample) if sample else None,
                memory_used_mib=sample.memory_used_mib if sample else None,
                tenants=tuple(_tenants(state, gpu.uuid, measure, keeping)),
            )
        )
    return GpuNodeStatus.of(tuple(gpus), driver_version=driver_version)


def tenants_of(state: NodeState, uuid: str) -> list[tuple[ManagedPod, int]]:
    """Return the pods with device ids of a GPU, with their percent of it."""
    found = []
    for pod in sorted(state.pods.values(), key=lambda each: each.uid):
        share = (state.allocated(pod) or {}).get(uuid)
        if share and not pod.is_over:
            found.append((pod, share))
    return found


def _tenants(state: NodeState, uuid: str, measure: GpuMeasure, keeping: KeepingOf) -> list[TenantStatus]:
    made = []
    for pod, share in tenants_of(state, uuid):
        measured = measure.tenants.get(pod.uid, TenantMeasure())
        is_asleep = measured.is_asleep
        kept = keeping(uuid, pod, share)
        made.append(
            TenantStatus(
                pod_uid=pod.uid,
                namespace=pod.namespace,
                pod=pod.name,
                share_percent=share,
                thread_percentage=pod.decision.thread_percentage if pod.decision else None,
                thread_percentage_in_force=measured.threads_in_force,
                memory_limit_mib=pod.decision.memory_limit_mib if pod.decision else None,
                memory_used_mib=measured.memory_used_mib,
                clients=measured.clients,
                progress_ratio=None if is_asleep else _rounded(measured.progress_ratio),
                progress_error_ratio=None if is_asleep else _rounded(measured.progress_error_ratio),
                phase=measured.phase,
                slowdown_ratio=None if is_asleep else _rounded(measured.slowdown_ratio),
                promise_ratio=_rounded(kept.promise_ratio),
                throttle_ratio=kept.throttle_ratio,
                is_asleep=is_asleep or None,
                retract=kept.retract,
                slo=kept.slo,
                trouble=kept.trouble,
                profile=measured.profile,
            )
        )
    return made


def _utilization(sample: GpuSample) -> Utilization:
    counters = sample.counters
    figures = {
        **counters.pipes(),
        "sm": counters.sm_util,
        "sm_occupancy": counters.sm_occupancy,
        "nvml": sample.gpu_utilization_ratio,
    }
    return Utilization(**{name: _rounded(min(1.0, v)) for name, v in figures.items() if v is not None})


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, DIGITS)


def conditions_of(
    state: NodeState,
    gates: Mapping[str, GateStatus | None] | None = None,
    *,
    fitted_on: Sequence[str] = (FITTED_ON,),
) -> tuple[Condition, ...]:
    """Return the conditions of the node's GPUs.

    They say whether the driver answers and reads each GPU, every GPU gives counters, the model was fitted on their
    models, and pods can be throttled; the last one is absent until a gate reports it. Another one is present only
    while workloads cannot be read in place, because of the GPUs' counters.

    Args:
        fitted_on: the GPU models that interference models were fitted on.
    """
    uncalibrated = calibration_warning((gpu.model for gpu in state.gpus.values()), fitted_on)
    reports = [gate for _, gate in sorted((gates or {}).items()) if gate is not None]
    problem = next((gate.throttle.problem for gate in reports if gate.throttle.problem), "")
    throttle = _condition(names.THROTTLE_READY, problem, good="Writable", bad="FreezerUnavailable")
    unmeasured = "; ".join(f"GPU {uuid}: {why}" for uuid, why in sorted(state.unmeasured.items()))
    unreadable = "; ".join(f"GPU {uuid}: {why}" for uuid, why in sorted(state.unreadable.items()) if why)
    readings = _condition(names.READINGS_READY, unreadable, good="ShortWindows", bad="LongWindows")
    left_out = "; ".join(
        f"GPU {index} cannot be read and is left out: {why}" for index, why in sorted(state.left_out.items())
    )
    reason = "DriverError" if state.problem else "UnreadableGpu"
    return (
        _condition(names.DEVICES_READY, state.problem or left_out, good="Sampled", bad=reason),
        _condition("CountersReady", unmeasured or state.problem, good="Measured", bad="NoCounters"),
        _condition("ModelCalibrated", uncalibrated, good="Fitted", bad="FittedElsewhere"),
        *((throttle,) if reports else ()),
        *((readings,) if unreadable else ()),
    )


def _condition(kind: str, problem: str, *, good: str, bad: str) -> Condition:
    return Condition(
        type=kind,
        status=ConditionStatus.FALSE if problem else ConditionStatus.TRUE,
        reason=bad if problem else good,
        message=problem[:1024],
    )


def urgent_part(status: GpuNodeStatus) -> object:
    """Return the part whose changes must be written at once: GPUs, health, tenants, and pods that should leave."""
    return tuple(
        (
            gpu.uuid,
            gpu.health,
            gpu.mps.state,
            tuple(
                (t.pod_uid, t.share_percent, t.retract is not None, t.slo and t.slo.met, t.trouble)
                for t in gpu.tenants
            ),
        )
        for gpu in status.gpus
    ), tuple((condition.type, condition.status) for condition in status.conditions)


def has_emptied(before: GpuNodeStatus, after: GpuNodeStatus) -> bool:
    """Return whether a pod's last process has left MPS: the extender chooses its cap anew then (ADR 0193)."""
    had = {tenant.pod_uid for gpu in before.gpus for tenant in gpu.tenants if tenant.clients}
    return any(tenant.clients == 0 and tenant.pod_uid in had for gpu in after.gpus for tenant in gpu.tenants)


def has_new_profile(before: GpuNodeStatus, after: GpuNodeStatus) -> bool:
    """Return whether a pod's workload was profiled just now: the pod may end before a calm write."""
    had = {tenant.pod_uid for gpu in before.gpus for tenant in gpu.tenants if tenant.profile is not None}
    return any(
        tenant.profile is not None and tenant.pod_uid not in had for gpu in after.gpus for tenant in gpu.tenants
    )


def _is_hurried(before: GpuNodeStatus, after: GpuNodeStatus) -> bool:
    return has_emptied(before, after) or has_new_profile(before, after)


class StatusSink(Protocol):
    """Destination of a GpuNode's status; False when it could not be written now."""

    async def write(self, status: GpuNodeStatus) -> bool:
        """Write the whole status."""
        ...


class StatusWriter:
    """Writer of the GpuNode: at once if its urgent part changed, else at most every ten seconds.

    It is also written at once if a pod's last process has left or its workload was profiled, but for these reasons
    at most every ten seconds too.
    """

    def __init__(
        self,
        state: NodeState,
        build: Callable[[], GpuNodeStatus],
        sink: StatusSink,
        clock: Callable[[], float],
        wakeups: JointWakeups | None = None,
    ) -> None:
        self._state = state
        self._build = build
        self._sink = sink
        self._clock = clock
        self._wakeups = wakeups or JointWakeups()
        self._last: GpuNodeStatus | None = None
        self._last_at = float("-inf")
        self._hurried_at = float("-inf")

    def due(self, status: GpuNodeStatus) -> bool:
        """Return whether this status should be written now."""
        if self._last is None or urgent_part(status) != urgent_part(self._last):
            return True
        now = self._clock()
        age = now - self._last_at
        if age >= HEARTBEAT_SECONDS or (age >= QUIET_SECONDS and status != self._last):
            return True
        return now - self._hurried_at >= QUIET_SECONDS and _is_hurried(self._last, status)

    async def step(self) -> bool:
        """Write if due; return False when it was due and failed."""
        status = self._build()
        if not self.due(status):
            return True
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        if not await self._sink.write(replace(status, observed_at=now)):
            self._state.counts.error(AgentPart.GPUNODE)
            return False
        if self._last is not None and _is_hurried(self._last, status):
            self._hurried_at = self._clock()
        self._last, self._last_at = status, self._clock()
        return True

    async def run(self) -> None:
        """Write what is due at every change of the state and every second, until cancelled."""
        changed = self._state.subscribe()
        try:
            while True:
                changed.clear()
                if not await self.step():
                    await asyncio.sleep(RETRY_SECONDS)
                    continue
                await self._wakeups.wait(changed, LOOK_SECONDS)
        finally:
            self._state.unsubscribe(changed)
