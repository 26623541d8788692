"""The agent's state as figures for the exporter."""

from collections import Counter
from collections.abc import Mapping

from gpushare.core.api import Ceilings, ConditionStatus, GpuStatus
from gpushare.core.control import SLO_TROUBLES, processes_of
from gpushare.core.gpu import Health, OutsideWatch
from gpushare.exporter import DeviceFigures, NodeFigures, TenantFigures
from gpushare.mps.status import GateStatus, RefuseReason
from gpushare_deviceplugin.loop import Loop, LoopCounts
from gpushare_deviceplugin.readings import ReadingCounts
from gpushare_deviceplugin.state import AgentPart, NodeState
from gpushare_deviceplugin.status import GpuMeasure, KeepingOf, build_status

_ENFORCED = {Ceilings.ENFORCED: True, Ceilings.NOT_ENFORCED: False}
_MET = {ConditionStatus.TRUE: True, ConditionStatus.FALSE: False, ConditionStatus.UNKNOWN: None}


def node_figures(
    node: str,
    state: NodeState,
    gates: Mapping[str, GateStatus | None],
    measures: Mapping[str, GpuMeasure],
    outside: Mapping[str, OutsideWatch],
    *,
    ended: Mapping[str, int],
    loop: Loop,
    keeping: KeepingOf,
    readings: Mapping[str, ReadingCounts],
    slo_failures: Mapping[str, int],
    is_registered: bool,
) -> NodeFigures:
    """Return the present figures, from the same status as the GpuNode so that the two never differ."""
    status = build_status(state, gates, measures, keeping=keeping)
    return NodeFigures(
        node=node,
        devices=tuple(
            _device(
                gpu,
                gates.get(gpu.uuid),
                measures.get(gpu.uuid, GpuMeasure()),
                outside=outside.get(gpu.uuid),
                ended=ended.get(gpu.uuid, 0),
                counts=loop.counts.get(gpu.uuid),
                readings=readings.get(gpu.uuid),
            )
            for gpu in status.gpus
        ),
        tenants=tuple(
            tenant for gpu in status.gpus for tenant in _tenants(gpu, measures.get(gpu.uuid, GpuMeasure()), loop)
        ),
        errors=dict.fromkeys(map(str, AgentPart), 0) | {str(part): n for part, n in state.counts.errors.items()},
        allocation_mismatches=state.counts.mismatches,
        refused_allocations=state.counts.refused_allocations,
        refused_starts=state.counts.refused_starts,
        bad_pods=state.counts.bad_pods,
        slo_failures=dict.fromkeys(SLO_TROUBLES, 0) | dict(slo_failures),
        is_registered=is_registered,
        is_driver_ready=bool(state.gpus) and not state.problem,
    )


def _device(
    gpu: GpuStatus,
    gate: GateStatus | None,
    measure: GpuMeasure,
    *,
    outside: OutsideWatch | None,
    ended: int,
    counts: LoopCounts | None,
    readings: ReadingCounts | None,
) -> DeviceFigures:
    sample = measure.sample
    return DeviceFigures(
        uuid=gpu.uuid,
        index=gpu.index,
        model=gpu.model,
        memory_mib=gpu.memory_mib,
        is_healthy=gpu.health is Health.HEALTHY,
        pipes=sample.counters.pipes() if sample else {},
        sm_activity_ratio=sample.counters.sm_util if sample else None,
        sm_occupancy_ratio=sample.counters.sm_occupancy if sample else None,
        nvml_utilization_ratio=sample.gpu_utilization_ratio if sample else None,
        memory_used_mib=sample.memory_used_mib if sample else None,
        share_used_ratio=sum(tenant.share_percent for tenant in gpu.tenants) / 100,
        mps_state=gpu.mps.state.value,
        is_ceilings_enforced=_ENFORCED.get(gpu.mps.ceilings),
        clients=len(gate.clients) if gate else None,
        waiting_connections=Counter(waiting.reason.value for waiting in gate.waiting_connections) if gate else {},
        refused=dict.fromkeys(RefuseReason, 0) | dict(gate.refused) if gate else {},
        mismatches=Counter(mismatch.kind.value for mismatch in gate.mismatches) if gate else {},
        faults=gate.faults if gate else None,
        daemon_restarts=gate.daemon_restarts if gate else None,
        turns=gate.turns.count if gate else None,
        turn_seconds_sum=gate.turns.durations_seconds_sum if gate else None,
        outside=len(outside.present) if outside else None,
        outside_found=outside.found if outside else None,
        outside_ended=ended if outside else None,
        promises_broken=counts.broken if counts else None,
        throttles=counts.throttled if counts else None,
        retractions_asked=counts.retractions if counts else None,
        readings=readings.taken if readings else None,
        reading_failures=readings.failed if readings else None,
        reading_seconds=readings.stopped_seconds if readings else None,
    )


def _tenants(gpu: GpuStatus, measure: GpuMeasure, loop: Loop) -> list[TenantFigures]:
    found = []
    for tenant in gpu.tenants:
        measured = measure.tenants.get(tenant.pod_uid)
        found.append(
            TenantFigures(
                gpu_uuid=gpu.uuid,
                namespace=tenant.namespace or "",
                pod=tenant.pod or "",
                pod_uid=tenant.pod_uid,
                share_ratio=tenant.share_percent / 100,
                thread_percentage=tenant.thread_percentage,
                memory_limit_mib=tenant.memory_limit_mib,
                memory_used_mib=tenant.memory_used_mib,
                clients=processes_of(tenant),
                progress_ratio=tenant.work_ratio,
                progress_error_ratio=tenant.progress_error_ratio,
                slowdown_ratio=tenant.slowdown_ratio,
                promise_ratio=tenant.promise_ratio,
                throttle_ratio=tenant.throttle_ratio or 0.0,
                is_promise_broken=loop.is_broken(gpu.uuid, tenant.pod_uid),
                pipes=measured.pipes if measured else {},
                predicted_progress_ratio=measured.predicted_progress_ratio if measured else None,
                slo_target_seconds=tenant.slo.target_seconds if tenant.slo else None,
                slo_measured_seconds=tenant.slo.measured_seconds if tenant.slo else None,
                slo_target_per_second=tenant.slo.target_per_second if tenant.slo else None,
                slo_measured_per_second=tenant.slo.measured_per_second if tenant.slo else None,
                trouble=tenant.trouble.kind.value if tenant.trouble else "",
                is_slo_met=_MET[tenant.slo.met] if tenant.slo else None,
            )
        )
    return found
