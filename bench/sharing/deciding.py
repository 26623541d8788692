"""Decide which waiting job starts under gpushare, and under which cap, as the live extender does, on one GPU."""

from collections.abc import Mapping, Sequence
from typing import Any

from bench.sharing.trace import MEMORY_MIB, TraceJob
from gpushare.core.api import Rejection, WorkloadSignature, from_json
from gpushare.core.gpu import GpuInfo
from gpushare.core.interference import InterferenceModel, Profile, as_profile
from gpushare.core.placement import (
    MILLI_PER_PERCENT,
    ClusterState,
    DecisionContext,
    GpuSpec,
    Judge,
    KnownWorkload,
    NodeSpec,
    PlacementRequest,
    Settings,
    WaitingPod,
    decide,
)

_NODE = "bench"


class Decider:
    """Decider about the jobs of one run; ended jobs have to be released.

    Args:
        known: signatures of programs, as GpuShares have them.
    """

    def __init__(
        self, gpu: GpuInfo, known: Mapping[str, Any], model: InterferenceModel, settings: Settings | None = None
    ) -> None:
        node = NodeSpec(_NODE, (GpuSpec(gpu.uuid, gpu.model, gpu.memory_mib),))
        self._settings = settings or Settings()
        self._context = DecisionContext.of(
            ClusterState([node]),
            self._settings,
            Judge(lambda: model.for_gpu(gpu.model), headroom_ratio=self._settings.slowdown_headroom_ratio),
        )
        self._gpu_model = gpu.model
        self._known: dict[str, KnownWorkload] = {}
        self.learn(known)

    def learn(self, known: Mapping[str, Any]) -> None:
        """Decide by these signatures from now on, as by GpuShares that have changed."""
        new = {program: self._workload(program, self._gpu_model, kept) for program, kept in known.items()}
        self._known = {**self._known, **new}  # another thread may be reading the former

    def start(self, waiting: Sequence[TraceJob], now: float) -> list[tuple[TraceJob, int]]:
        """Decide about all that wait, in the order in which they came; return who starts, under which cap."""
        context = self._context.at(now).keeping([WaitingPod(self._request(job), job.name) for job in waiting])
        started = []
        for job in sorted(waiting, key=lambda each: (each.arrives, each.number)):
            request = self._request(job)
            decided = decide(request, context)
            if isinstance(decided, Rejection):
                continue
            assert decided.thread_percentage is not None, "a job asks for a GPU"
            context.state.reserve(request.pod_uid, decided, request)
            started.append((job, decided.thread_percentage))
        return started

    def profiles(self) -> dict[str, Profile]:
        """Return what it knows of programs, by name."""
        return {program: known.profile for program, known in self._known.items() if known.profile is not None}

    def release(self, job: TraceJob) -> None:
        """Record that a job is gone."""
        self._context.state.release(job.name)

    def _request(self, job: TraceJob) -> PlacementRequest:
        return PlacementRequest(
            job.name,
            job.share_percent * MILLI_PER_PERCENT,
            1,
            MEMORY_MIB,
            job_class=job.job_class,
            workload=job.program,
            known=self._known.get(job.program),
            max_slowdown=self._settings.defaults.max_slowdown_of(job.job_class),
            queued_at=job.arrives,
        )

    @staticmethod
    def _workload(program: str, gpu_model: str, kept: Any) -> KnownWorkload:
        profile = as_profile(from_json(WorkloadSignature, kept))
        return KnownWorkload(program if profile else "", gpu_model, None, profile, f"shop/{program}")
