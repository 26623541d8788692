"""Agents' reports in GpuNodes, reduced to what the operator uses, and whether each agent is alive."""

from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Final, Self

from gpushare.core.api import GpuNode, GpuStatus, NeighboursEnded, TenantStatus, TenantTrouble
from gpushare.core.control import PodReport, ReplacementAsk, RetractionAsk, pod_reports_of
from gpushare.kube import Json
from gpushare.runtime.moments import unix_seconds

DEAF_SECONDS: Final = 75.0
"""After this time without an answer of the API server nothing can be heard of any agent; a watch brings a bookmark
about every 60 s."""
_SHARED: Final = 2  # tenants that make a GPU shared


@dataclass(frozen=True, slots=True)
class ReportedTenant:
    """One tenant of a GPU whose progress is known, and the cap that its processes run under."""

    pod_uid: str
    thread_percentage: int
    progress: float
    error: float


@dataclass(frozen=True, slots=True)
class ReportedSet:
    """The tenants of one GPU, none of them throttled, each one's progress known and its work the usual one.

    Attributes:
        tenants: sorted by uid.
    """

    gpu: str
    gpu_model: str
    tenants: tuple[ReportedTenant, ...]

    @property
    def members(self) -> tuple[tuple[str, int], ...]:
        """Return each tenant's uid and cap."""
        return tuple((tenant.pod_uid, tenant.thread_percentage) for tenant in self.tenants)


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One GpuNode.

    Attributes:
        sets: tenants of each GPU that is shared and undisturbed.
        pod_reports: progress of each pod, by uid.
        asks: pod, GPU and reason of each pod that the agent wants moved away.
        troubles: pod, GPU and trouble of each pod that has any.
        faults: each GPU's last fault, if it is known which pod caused it.
        observed_at: time of the observation by the agent's clock; comparable only with times of the same agent.
    """

    pod_reports: dict[str, PodReport]
    asks: tuple[tuple[str, str, str], ...] = ()
    observed_at: str = ""
    sets: tuple[ReportedSet, ...] = ()
    troubles: tuple[tuple[str, str, TenantTrouble], ...] = ()
    faults: tuple[NeighboursEnded, ...] = ()

    @classmethod
    def of(cls, obj: Json) -> Self:
        """Reduce the API's JSON object."""
        status = GpuNode.from_object(obj).status
        asks = tuple(
            (tenant.pod_uid, gpu.uuid, tenant.retract)
            for gpu in status.gpus
            for tenant in gpu.tenants
            if tenant.retract
        )
        sets = tuple(found for gpu in status.gpus if (found := _set_of(gpu)) is not None)
        troubles = tuple(
            (tenant.pod_uid, gpu.uuid, tenant.trouble)
            for gpu in status.gpus
            for tenant in gpu.tenants
            if tenant.trouble is not None
        )
        faults = tuple(
            NeighboursEnded(fault.at, fault.begun_by, gpu.uuid)
            for gpu in status.gpus
            if (fault := gpu.mps.last_fault) is not None
            and fault.begun_by is not None
            and isfinite(unix_seconds(fault.at))
        )
        return cls(pod_reports_of([status]), asks, status.observed_at or "", sets, troubles, faults)


def _set_of(gpu: GpuStatus) -> ReportedSet | None:
    found = []
    for tenant in gpu.tenants:
        cap, progress, error = _cap_in_force(tenant), tenant.progress_ratio, tenant.progress_error_ratio
        if cap is None or progress is None or error is None or tenant.throttle_ratio:
            return None
        if tenant.phase:  # effects are of the usual work (ADR 0156); an agent of before tells no phase
            return None
        found.append(ReportedTenant(tenant.pod_uid, cap, progress, error))
    if len(found) < _SHARED or not gpu.model:
        return None
    return ReportedSet(gpu.uuid, gpu.model, tuple(sorted(found, key=lambda each: each.pod_uid)))


def _cap_in_force(tenant: TenantStatus) -> int | None:
    """Return the cap under which its progress was inferred; None if its agent does not know it.

    An agent of before tells neither phases nor this cap: the one of the next process stands for it.
    """
    if tenant.thread_percentage_in_force is None and tenant.phase is None:
        return tenant.thread_percentage
    return tenant.thread_percentage_in_force


@dataclass(frozen=True, slots=True)
class _Heard:
    """A node's last report.

    Attributes:
        at: time of the agent's last write, by our monotonic clock.
        deaf_seconds: part of the time since then in which it could not be heard.
        is_alive: whether it has written since we first saw its GpuNode.
    """

    report: NodeReport
    at: float
    is_alive: bool
    deaf_seconds: float = 0.0


class Reports:
    """Last report of each node; nodes' clocks are never compared with ours.

    Times are seconds of one monotonic clock: a wall clock that is set would make every agent silent, or a dead one
    alive.

    Time in which the API server answered nothing is no agent's silence: none could be heard, or write. Requests of
    agents grow old meanwhile nevertheless, since nobody is to be evicted by what was true before.
    """

    def __init__(self) -> None:
        self._heard: dict[str, _Heard] = {}
        self._answered_at = -inf
        self._asking: set[str] = set()
        self._troubled: set[str] = set()

    def put(self, node: str, report: NodeReport | None, now: float) -> None:
        """Record a new or changed GpuNode; None: it is gone."""
        self.answered(now)
        if report is None:
            self._heard.pop(node, None)
            self._asking.discard(node)
            self._troubled.discard(node)
            return
        before = self._heard.get(node)
        if before is None:
            self._heard[node] = _Heard(report, now, is_alive=False)
        elif before.report.observed_at == report.observed_at:  # the same report, or another writer's change
            self._heard[node] = replace(before, report=report)
        else:
            self._heard[node] = _Heard(report, now, is_alive=True)
        (self._asking.add if report.asks else self._asking.discard)(node)
        (self._troubled.add if report.troubles else self._troubled.discard)(node)

    def answered(self, now: float) -> None:
        """Record that a list of GpuNodes or anything of their watch has come, a bookmark at the least."""
        missed, self._answered_at = now - self._answered_at, now
        if DEAF_SECONDS < missed < inf:
            self._heard = {
                node: replace(heard, deaf_seconds=heard.deaf_seconds + missed)
                for node, heard in self._heard.items()
            }

    def asks(self, now: float) -> tuple[tuple[str, RetractionAsk], ...]:
        """Return every agent's request to move a pod away, with its node."""
        return tuple(
            (node, RetractionAsk(uid, gpu, reason, max(0.0, now - heard.at), heard.is_alive))
            for node in sorted(self._asking)
            for heard in (self._heard[node],)
            for uid, gpu, reason in heard.report.asks
        )

    def troubles(self, now: float) -> tuple[tuple[str, ReplacementAsk], ...]:
        """Return every pod in trouble, with the node that reports it."""
        return tuple(
            (node, ReplacementAsk(uid, gpu, one.kind, one.message, max(0.0, now - heard.at), heard.is_alive))
            for node in sorted(self._troubled)
            for heard in (self._heard[node],)
            for uid, gpu, one in heard.report.troubles
        )

    def silent(self, now: float, seconds: float) -> frozenset[str]:
        """Return the nodes whose agent has not written for this many seconds in which it could be heard."""
        until = min(now, self._answered_at + DEAF_SECONDS)
        return frozenset(
            node for node, heard in self._heard.items() if until - heard.at - heard.deaf_seconds > seconds
        )
