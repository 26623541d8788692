"""A simulation of jobs as a history, for the same page as a cluster's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from gpushare.cli.errors import UsageError
from gpushare.cli.report.usage import Figures, Tenancy, UsageHistory
from gpushare.sim.jobs import Job, JobCluster, Outcome

_POINTS: Final = 288
_EPSILON: Final = 1e-6


@dataclass(frozen=True, slots=True)
class _Stay:
    """One job on one GPU during a stretch of constant rates."""

    gpu: int
    job: int
    share_ratio: float
    progress_ratio: float
    throttle_ratio: float


class JobRecorder:
    """Records what `simulate` reports about each stretch of constant rates."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs
        self._begins: list[float] = []
        self._until = 0.0
        self._stays: list[tuple[_Stay, ...]] = []

    def on_span(self, cluster: JobCluster, rates: Mapping[int, float], until: float) -> None:
        """Record one stretch; a job's share is its part of the caps on its GPU, never above its own cap."""
        self._begins.append(cluster.now_seconds)
        self._until = until
        stays = []
        for gpu, tenants in enumerate(cluster.gpus):
            caps = max(100, sum(tenant.thread_percentage for tenant in tenants))
            for tenant in tenants:
                share, running = tenant.thread_percentage / caps, 1.0 - tenant.duty_ratio
                stays.append(_Stay(gpu, tenant.job, share, rates.get(tenant.job, 0.0), running))
        self._stays.append(tuple(stays))

    def history(self, outcome: Outcome, source: str) -> UsageHistory:
        """Return the whole simulation.

        Raises:
            UsageError: the policy splits time itself and places no job on a GPU, so there are no figures of GPUs.
        """
        if not any(self._stays):
            raise UsageError(
                f"policy {outcome.policy} splits time itself and places nothing, so there is no report of GPUs; "
                "sim compare sets it beside the others"
            )
        begin = self._begins[0]
        step = (self._until - begin) / _POINTS
        times = begin + step * np.arange(1, _POINTS + 1, dtype=np.float64)
        # a sample covers the step before it, represented by the middle of that step
        spans = np.searchsorted(np.array(self._begins), times - step / 2, side="right") - 1
        figures: dict[tuple[int, int], dict[str, Figures]] = {}
        for at, span in enumerate(spans):
            for stay in self._stays[span]:
                known = figures.setdefault((stay.gpu, stay.job), _nothing())
                least = self._jobs[stay.job].least_progress
                known["share_ratio"][at] = stay.share_ratio
                known["progress_ratio"][at] = stay.progress_ratio
                known["promise_ratio"][at] = least
                known["broken_ratio"][at] = stay.progress_ratio < least * (1 - _EPSILON)
                known["throttle_ratio"][at] = stay.throttle_ratio
        return UsageHistory(
            source=source,
            times=times,
            step_seconds=step,
            gpus=np.full(_POINTS, float(outcome.gpus)),
            healthy=np.full(_POINTS, float(outcome.gpus)),
            tenancies=tuple(
                Tenancy(
                    namespace="",
                    pod=self._jobs[job].name,
                    workload=self._jobs[job].workload,
                    gpu_uuid=str(gpu),
                    **known,
                )
                for (gpu, job), known in sorted(figures.items())
            ),
            retractions=float(sum(job.retractions for job in outcome.jobs)),
            notes=(
                "Given is a job's part of the thread percentages on its GPU; what jobs asked for is not kept.",
            ),
            is_simulated=True,
        )


def _nothing() -> dict[str, Figures]:
    names = (
        "share_ratio",
        "progress_ratio",
        "progress_error_ratio",
        "promise_ratio",
        "broken_ratio",
        "throttle_ratio",
        "busiest_ratio",
        "clients",
    )
    return {name: np.full(_POINTS, np.nan) for name in names}
