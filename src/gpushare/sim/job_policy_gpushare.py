"""The live system's own decision in the job-level simulator: what `helm install` would do with the same jobs.

Jobs become the requests that their pods would make, with the share that `auto` means once a workload has a
profile. `gpushare.core.placement.decide` says where they run and under which cap, by a release's settings. There
is no search, cap rule or tolerance test in this module.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from gpushare.core.admission import resolve, tenant_memories_mib
from gpushare.core.api import AUTO, Rejection, names
from gpushare.core.interference import InterferenceModel, Profile, auto_share
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
    Unprofiled,
    WaitingPod,
    decide,
)
from gpushare.research.dataset import Mechanism
from gpushare.sim.jobs import Job, JobCluster, SimulationError
from gpushare.sim.truth import Truth

_NODE: Final = "node"


@dataclass(slots=True)
class GpuSharePolicy:
    """Every waiting job in turn goes where the live extender would put its pod.

    Attributes:
        model: the interference model that the release ships.
        gpu_model: model of all GPUs, as NVML names it.
        profiles: profile of each workload, by name.
        rejections: by number in the trace, why each waiting job did not start when it was last tried.
    """

    model: InterferenceModel
    gpu_model: str
    profiles: Mapping[str, Profile]
    settings: Settings = field(default_factory=Settings)
    name: str = "gpushare"
    mechanism: Mechanism = Mechanism.MPS
    rejections: dict[int, Rejection] = field(default_factory=dict)
    _context: DecisionContext | None = None

    def schedule(self, cluster: JobCluster) -> None:
        """Forget the jobs that have ended, then decide about the waiting ones, in order of submission."""
        self._context = self._context or self.new_context(cluster)
        context = self._context.at(cluster.now_seconds)
        state = context.state
        running = {self._uid(cluster, tenant.job) for tenants in cluster.gpus for tenant in tenants}
        for uid in [uid for uid in state.reservations if uid not in running]:
            state.release(uid)
        context = self.keeping(context, cluster, self.request_of)
        refused: dict[object, Rejection] = {}
        self.rejections = {}
        for job in list(cluster.queue):
            request = self.request_of(cluster.jobs[job], cluster.truth)
            stands_back = tuple(each.before(request) for each in context.kept)  # a younger one for more jobs
            kind = (request.shape, request.known, request.is_auto, stands_back)
            decided = refused.get(kind) or decide(request, context)
            if isinstance(decided, Rejection):
                self.rejections[job] = refused[kind] = decided
                continue
            refused.clear()  # with one more tenant, other jobs may fit the set
            state.reserve(request.pod_uid, decided, request)
            assert decided.thread_percentage is not None, "a job asks for a GPU"
            cluster.start(job, int(decided.gpu_uuids[0]), decided.thread_percentage)
        for closed in state.closed_gpus.at(cluster.now_seconds):  # from then on it takes other jobs again
            cluster.wake_at(closed.term.until)

    def keeping(
        self, context: DecisionContext, cluster: JobCluster, request_of: Callable[[Job, Truth], PlacementRequest]
    ) -> DecisionContext:
        """Return the context with GPUs kept for the jobs that have waited long."""
        after = self.settings.reserve_after_seconds
        waiting = []
        for job in cluster.queue if after else ():
            asked = cluster.jobs[job]
            if cluster.now_seconds - asked.submit_seconds >= after:
                request = request_of(asked, cluster.truth)
                waiting.append(WaitingPod(request, asked.name, joins=partial(self._joins, cluster, asked)))
        return context.keeping(waiting)

    @staticmethod
    def _joins(cluster: JobCluster, job: Job, names_there: Collection[str]) -> bool:
        """Return whether the truth offers a job beside others."""
        workloads = [cluster.jobs[cluster.number_of(name)].workload for name in names_there]
        return cluster.truth.offers([*workloads, job.workload])

    def request_of(self, job: Job, truth: Truth) -> PlacementRequest:
        """Return the request of a job's pod, charged as admission would charge it.

        Raises:
            SimulationError: the job's fraction is invalid.
        """
        profile = self.profiles.get(job.workload)
        known = (
            KnownWorkload(job.workload, self.gpu_model, job.max_slowdown, profile) if profile is not None else None
        )
        fraction, is_auto = job.fraction, job.is_auto or job.fraction == AUTO
        if fraction == AUTO and profile is not None:
            share = auto_share(profile, max_slowdown=job.max_slowdown, job_class=job.job_class)
            fraction = f"{share / 100:g}"
        annotations = {names.FRACTION: fraction, names.CLASS: job.job_class.value}
        memory_mib = truth.memory_mib(job.workload)
        if memory_mib:  # 0 if it was not measured
            annotations[names.MEMORY] = f"{memory_mib}Mi"
        memories = tenant_memories_mib([truth.gpu_memory_mib], self.settings.gpu_memory_reserve_mib)
        needs = resolve(annotations, None, self.settings.defaults, gpu_memories_mib=memories)
        if isinstance(needs, Rejection):
            raise SimulationError(f'job "{job.name}": {needs}')
        return PlacementRequest(
            job.name,
            needs.share_percent * MILLI_PER_PERCENT,
            needs.gpu_count,
            memory_mib,
            job_class=needs.job_class,
            workload=needs.workload,
            clients=needs.clients,
            known=known,
            max_slowdown=job.max_slowdown,
            unprofiled=Unprofiled(frozenset({job.workload}), job.name, namespace="jobs")
            if profile is None
            else None,
            queued_at=job.submit_seconds,
            is_auto=is_auto,
        )

    def new_context(self, cluster: JobCluster) -> DecisionContext:
        """Return the context of an empty cluster of nodes with one GPU each, with the release's settings."""
        gpus = tuple(
            GpuSpec(str(gpu), self.gpu_model, cluster.truth.gpu_memory_mib) for gpu in range(len(cluster.gpus))
        )
        return DecisionContext.of(
            ClusterState(
                (NodeSpec(self.node_of(int(gpu.uuid)), (gpu,)) for gpu in gpus),
                gpu_memory_reserve_mib=self.settings.gpu_memory_reserve_mib,
            ),
            self.settings,
            Judge(lambda: self.model, headroom_ratio=self.settings.slowdown_headroom_ratio),
        )

    @staticmethod
    def node_of(gpu: int) -> str:
        """Return the name of a GPU's node."""
        return f"{_NODE}-{gpu}"

    @staticmethod
    def _uid(cluster: JobCluster, job: int) -> str:
        return cluster.jobs[job].name
