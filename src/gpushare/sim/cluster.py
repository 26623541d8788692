"""Cluster filling: how well a policy packs arrivals until their demand is a multiple of the cluster's GPUs.

The protocol of "Beware of Fragmentation" (USENIX ATC'23; simulator.go, TunePodsByNodeTotalResource): the pods
of a trace in shuffled order, then pods of it drawn with replacement, until their GPU demand would pass the
target; a pod that fits nowhere is dropped; nothing leaves. Nodes are shuffled too, for equal scores go to the
first one. Draws come from numpy's generator, so single runs differ from the published ones and means over
seeds agree.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from gpushare.core.api import Reason, Rejection
from gpushare.core.interference import InterferenceModel
from gpushare.core.placement import (
    GPU_MILLI,
    ClusterState,
    DecisionContext,
    Judge,
    Mix,
    NodeSpec,
    Placement,
    PlacementRequest,
    Settings,
    decide,
    fragmented_milli,
)
from gpushare.sim.kube_scheduler import KubeSchedulerRule


class CpuPods(StrEnum):
    """Placement of pods without a GPU: by the policy, as in the published protocol, or by kube-scheduler, as live.

    kube-scheduler scores by LeastAllocated, or by BalancedAllocation too.
    """

    POLICY = "policy"
    SCHEDULER = "scheduler"
    SCHEDULER_BALANCED = "scheduler-balanced"


@dataclass(frozen=True, slots=True)
class FillResult:
    """Result of a run.

    Attributes:
        allocated_gpu_percent: GPU in use of all GPU in the cluster.
        fragmented_gpu_percent: free GPU of no use to the trace's typical pods, of all GPU (FGD's measure).
        placed: number of placed pods.
        rejected: number of rejected pods, by reason.
    """

    allocated_gpu_percent: float
    fragmented_gpu_percent: float
    placed: int
    rejected: dict[Reason, int]


def arrivals(
    pods: Sequence[PlacementRequest], cluster_gpu_milli: int, demand_ratio: float, rng: np.random.Generator
) -> list[int]:
    """Return indices into `pods` in order of arrival, with a GPU demand of at most `demand_ratio` of the cluster.

    Raises:
        ValueError: no pod asks for a GPU.
    """
    target = demand_ratio * cluster_gpu_milli
    order: list[int] = rng.permutation(len(pods)).tolist()
    demand = sum(_gpu_milli(pod) for pod in pods)
    if not demand:
        raise ValueError("no pod asks for a GPU, so demand never reaches the target")
    while order and demand > target:
        demand -= _gpu_milli(pods[order.pop(int(rng.integers(len(order))))])
    while True:
        drawn = rng.integers(len(pods), size=1024).tolist()
        for index in drawn:
            asked = _gpu_milli(pods[index])
            if demand + asked > target:
                return order
            demand += asked
            order.append(index)


def fill(
    nodes: Sequence[NodeSpec],
    pods: Sequence[PlacementRequest],
    settings: Settings,
    *,
    model: Callable[[], InterferenceModel],
    demand_ratio: float,
    rng: np.random.Generator,
    cpu_pods: CpuPods = CpuPods.POLICY,
    on_arrival: Callable[[int, int], None] | None = None,
    on_decision: Callable[[int, Placement | Rejection], None] | None = None,
) -> FillResult:
    """Run the protocol once.

    Args:
        settings: the release's settings of decisions. No time passes and no pod waits, so probations do not end
            and no GPU is kept.
        model: returns the interference model, for pods whose workload is known.
        cpu_pods: who places the pods that ask for no GPU.
        on_arrival: called after each arrival with the numbers of arrived and of all pods.
        on_decision: called with the index into `pods` and the decision.
    """
    state = ClusterState(
        (nodes[index] for index in rng.permutation(len(nodes)).tolist()),
        gpu_memory_reserve_mib=settings.gpu_memory_reserve_mib,
    )
    mix = Counter(pod.shape for pod in pods)
    judge = Judge(model, headroom_ratio=settings.slowdown_headroom_ratio)
    context = DecisionContext.of(state, settings, judge, history=mix, rng=rng)
    kube_scheduler = None
    if cpu_pods is not CpuPods.POLICY:
        kube_scheduler = KubeSchedulerRule(state, rng, balanced=cpu_pods is CpuPods.SCHEDULER_BALANCED)
    cluster_gpu_milli = GPU_MILLI * sum(len(node.gpus) for node in nodes)
    rejected: Counter[Reason] = Counter()
    order = arrivals(pods, cluster_gpu_milli, demand_ratio, rng)
    for done, index in enumerate(order):
        uid = f"{pods[index].pod_uid}#{done}"
        if kube_scheduler is not None and not pods[index].gpu_count:
            placed = kube_scheduler.place(pods[index].shape)
        else:
            placed = decide(pods[index], context)
        if on_decision is not None:
            on_decision(index, placed)
        if isinstance(placed, Rejection):
            rejected[placed.reason] += 1
        else:
            state.reserve(uid, placed, replace(pods[index], pod_uid=uid))
        if on_arrival is not None:
            on_arrival(done + 1, len(order))
    used = cluster_gpu_milli - int(state.share_free_milli.sum())
    return FillResult(
        100.0 * used / cluster_gpu_milli,
        100.0 * fragmented_milli(state, Mix.of(mix)) / cluster_gpu_milli,
        len(order) - rejected.total(),
        dict(rejected.most_common()),
    )


def _gpu_milli(pod: PlacementRequest) -> int:
    return pod.share_milli * pod.gpu_count
