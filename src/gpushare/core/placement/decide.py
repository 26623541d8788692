"""The decision: on which node and GPU a pod runs, and under which cap; or why it runs nowhere.

Everything that asks where a pod goes calls `decide` or `survey`: filter, prioritize, bind and preemption of the
extender, `gpushare plan`, and both simulators. They differ only in where the state comes from.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from gpushare.core.api import Rejection
from gpushare.core.placement.caps import thread_percentage
from gpushare.core.placement.caution import cautious
from gpushare.core.placement.fitting import refusals, summarize, usable_slots
from gpushare.core.placement.judge import Judge
from gpushare.core.placement.keeping import KeptGpus, keep
from gpushare.core.placement.policies import make
from gpushare.core.placement.probation import NO_PROBATION, Probationary, ProbationSettings, on_probation
from gpushare.core.placement.request_policy import RequestPolicy
from gpushare.core.placement.search import UNKNOWN_NODE, Candidates, NodeList, PlacementPolicy, fit, scores
from gpushare.core.placement.settings import DEFAULT_RESERVE_AFTER_SECONDS, Settings
from gpushare.core.placement.shapes import GPU_MILLI, MILLI_PER_PERCENT, Placement, PlacementRequest, Shape
from gpushare.core.placement.standing_back import Barred, StandingBack, barred_for
from gpushare.core.placement.state import ClusterState, IntArray
from gpushare.core.placement.whatif import WaitingPod, WhatIf


@dataclass(frozen=True, slots=True)
class DecisionContext:
    """Inputs of a decision: the cluster's state, the ranking policy, and the judge of effects between tenants.

    Attributes:
        now: present time in seconds, by the clock of retractions and probations (Unix time on a live cluster); 0
            if none has ended yet.
        probation: whether unknown workloads get a GPU to themselves for a while.
        reserve_after_seconds: a GPU is kept for a pod that has waited longer than this; 0 for never.
        kept: GPUs kept for pods that have waited long.
        nominated: GPUs kept for pods that kube-scheduler has nominated to their nodes; of one node, the highest
            priority first.
        in_vain: uids of the pods for which a GPU to keep was searched and none was found, of those examined last.
    """

    state: ClusterState
    policy: PlacementPolicy
    judge: Judge
    now: float = 0.0
    probation: ProbationSettings = NO_PROBATION
    reserve_after_seconds: float = DEFAULT_RESERVE_AFTER_SECONDS
    kept: tuple[KeptGpus, ...] = ()
    nominated: tuple[KeptGpus, ...] = ()
    in_vain: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        state: ClusterState,
        settings: Settings,
        judge: Judge,
        *,
        now: float = 0.0,
        history: Mapping[Shape, float] | None = None,
        rng: "np.random.Generator | None" = None,
        learns_aside: bool = False,
    ) -> Self:
        """Return a context with the settings of an installation: the only way in which the views make one.

        Args:
            history: frequency of each request, for policies that know the mix in advance (fgd).
            rng: for the policy that chooses at random.
            learns_aside: whether the caller lets a `LearningPolicy` learn, so that no decision waits for it.
        """
        policy = make(settings.policy, history or {}, rng, learns_aside=learns_aside)
        return cls(state, policy, judge, now, settings.probation, settings.reserve_after_seconds)

    def at(self, now: float) -> Self:
        """Return a copy of this context at `now`."""
        return replace(self, now=now)

    def keeping(self, waiting: Iterable[WaitingPod], *, goes_on: bool = False) -> Self:
        """Return a copy that keeps GPUs for those of these pods that have waited long.

        Args:
            goes_on: leave GPUs that are already kept mostly as they are, which is cheaper.
        """
        before = self.kept if goes_on and self.kept else None
        kept, in_vain = keep(waiting, self._what_if, self.reserve_after_seconds, before, self.nominated)
        return replace(self, kept=kept, in_vain=in_vain)

    @property
    def _what_if(self) -> WhatIf:
        return WhatIf(self.state, self.judge, self.now)

    def barred(self, request: PlacementRequest, probationary: Probationary | None = None) -> Barred:
        """Return the GPUs kept for other pods that this request would set back.

        Args:
            probationary: part of the request's policy; it tells which GPUs the request would close for others.
        """
        if not self.kept and not self.nominated:
            return {}

        def closes(row: int, slot: int) -> bool:
            return probationary is not None and probationary.term(self.state, row, slot) is not None

        return barred_for(request, (*self.nominated, *self.kept), self._what_if, closes)

    def policy_for(self, request: PlacementRequest) -> RequestPolicy:
        """Return the policy for one request.

        It is kept off GPUs where a promise could not be kept, that are closed, or where the request would set back
        a pod that has waited longer or is nominated to the node.
        """
        careful = cautious(self.policy, self.judge, self.state, request, self.now)
        within = careful or self.policy
        probationary = on_probation(within, self.judge, self.state, request, self.probation, now=self.now)
        barred = self.barred(request, probationary)
        standing_back = StandingBack(probationary or within, barred) if barred else None
        return RequestPolicy.of(self.policy, careful, probationary, standing_back)


def decide(
    request: PlacementRequest,
    context: DecisionContext,
    *,
    node: str | None = None,
    preferred_gpus: Sequence[str] | None = None,
    excluded: Mapping[str, Rejection] | None = None,
) -> Placement | Rejection:
    """Decide where a pod goes in the present state; reserve nothing.

    Args:
        node: the node that kube-scheduler chose; None for the best of all nodes.
        preferred_gpus: taken instead of the policy's choice if they fit and every promise on them can be kept.
        excluded: by node, why kube-scheduler would not ask about it; for views that kube-scheduler has not asked.
    """
    state, shape = context.state, request.shape
    # 1. What fits: health, share, memory, clients, model, fault domain; the node's CPU and memory (fitting.py).
    # 2. Which promises it would break: GPUs are excluded where a promise could not be kept even with throttling
    #    (judge.py), that another pod has to itself while its workload is profiled (probation.py), or that are kept
    #    for a pod that has waited longer or is nominated and would be set back (keeping.py, nominated.py,
    #    standing_back.py).
    # 3. How nodes rank: the gain in summed progress less the loss by fragmentation (caution.py, policies/).
    policy = context.policy_for(request)
    ranking = policy.ranking
    row = (
        _best_row(state, ranking, shape, excluded or {}) if node is None else _row_of(state, ranking, shape, node)
    )
    if isinstance(row, Rejection):
        return row
    # 4. Which GPU: the policy's choice among the node's GPUs that passed 1 and 2.
    uuids = state.uuids(row)
    slots: Sequence[int] = ()
    if shape.gpu_count:
        slots = _preferred(state, policy, shape, row, preferred_gpus or ()) or ranking.pick(
            state, shape, row, usable_slots(state, shape, row)
        )
    # 5. Which cap: the one with the most expected progress, or the share if nothing is known; a latency pod and a
    #    whole GPU have none (outlook.py, caps.py).
    cap = (policy.cap(context.judge, state, row, slots[0]) or cap_of(request)) if slots else None
    # 6. The decision; for a pod on probation, with the term during which it has the GPU to itself.
    return Placement(
        state.node_name(row),
        tuple(uuids[slot] for slot in slots),
        _memory_mib(state, shape, row, slots),
        cap,
        policy.term(state, row, slots[0]) if slots else None,
    )


def survey(
    request: PlacementRequest,
    context: DecisionContext,
    node_names: Iterable[str] | NodeList | None = None,
    *,
    excluded: Mapping[str, Rejection] | None = None,
) -> Candidates:
    """Take steps 1 to 3 of the decision for many nodes: return those that fit with scores, and why others do not.

    Args:
        node_names: the nodes to consider; default: all but the excluded ones.
        excluded: by node, why kube-scheduler would not ask about it; without effect on `node_names`.
    """
    state, shape = context.state, request.shape
    policy = context.policy_for(request).ranking
    found = scores(state, policy, shape)
    if node_names is None:
        rows = _considered(state, excluded or {})
        return Candidates(state, policy, shape, rows, found[rows], excluded=excluded)
    asked = node_names if isinstance(node_names, NodeList) else NodeList(list(node_names))
    rows, unknown = asked.rows(state)
    return Candidates(state, policy, shape, rows, found.take(rows), unknown=unknown)


def cap_of(request: PlacementRequest) -> int:
    """Return the thread percentage of a pod whose decision names none, 1 to 100."""
    return thread_percentage(request.share_milli // MILLI_PER_PERCENT, request.job_class)


def _considered(state: ClusterState, excluded: Mapping[str, Rejection]) -> IntArray:
    """Return the rows of all nodes that are not excluded."""
    if not excluded:
        return np.flatnonzero(state.alive)
    considered = state.alive.copy()
    considered[_rows_of(state, excluded)] = False
    return np.flatnonzero(considered)


def _rows_of(state: ClusterState, names: Iterable[str]) -> IntArray:
    """Return the rows of those of these nodes that the state knows."""
    return np.array([row for row in state.rows(names) if row is not None], np.int64)


def _best_row(
    state: ClusterState, policy: PlacementPolicy, shape: Shape, excluded: Mapping[str, Rejection]
) -> int | Rejection:
    """Return the row that the policy chooses among all that fit, or one refusal for the whole cluster."""
    found = scores(state, policy, shape)
    if excluded:
        found = found.copy()
        found[_rows_of(state, excluded)] = -np.inf
    if len(found):
        row = policy.select(found)
        if found[row] > -np.inf:
            return row
    return _nowhere(state, policy, shape, excluded)


def _row_of(state: ClusterState, policy: PlacementPolicy, shape: Shape, node: str) -> int | Rejection:
    """Return the row of a given node, or why the pod does not fit there."""
    row = state.row(node)
    if row is None:
        return UNKNOWN_NODE
    rows = np.array([row])
    fitting, gpu_fits = fit(state, shape, rows)
    if not fitting[0]:
        return refusals(state, shape, rows)[0]
    if policy.is_choosy and policy.rank(state, shape, rows, gpu_fits)[0] == -np.inf:
        return policy.refusals(state, shape, rows)[0][0]
    return row


def _nowhere(
    state: ClusterState, policy: PlacementPolicy, shape: Shape, excluded: Mapping[str, Rejection]
) -> Rejection:
    """Return one refusal for a request that fits no node.

    It is the judge's if there is room on a node that is not excluded, else by the figures of those nodes, and the
    commonest reason of the excluded ones if there are no others.
    """
    rows = _considered(state, excluded)
    nodes = len(rows) + len(excluded)
    if excluded and not len(rows):
        why, count = Counter(excluded.values()).most_common(1)[0]
        return Rejection(why.reason, f"fits on none of {nodes} nodes; on {count} of them: {why.detail}")
    if policy.is_choosy and len(rows):
        with_room = rows[fit(state, shape, rows)[0]]
        if len(with_room):
            rejections, groups = policy.refusals(state, shape, with_room)
            # Of equally common ones take the first node's: the groups' order depends on earlier calls of the
            # judge.
            counts = np.bincount(groups)
            commonest = int(groups[int((counts[groups] == counts.max()).argmax())])
            return Rejection(
                rejections[commonest].reason,
                f"fits on none of {nodes} nodes; on {int((groups == commonest).sum())} of the "
                f"{len(with_room)} with room: {rejections[commonest].detail}",
            )
    return summarize(state, shape, nodes, rows)


def _preferred(
    state: ClusterState, policy: RequestPolicy, shape: Shape, row: int, gpu_uuids: Sequence[str]
) -> tuple[int, ...]:
    """Return the slots of the caller's preferred GPUs if all can be taken as they are, else none."""
    uuids = state.uuids(row)
    if len(set(gpu_uuids)) != shape.gpu_count or not set(gpu_uuids) <= set(uuids):
        return ()
    slots = tuple(uuids.index(uuid) for uuid in gpu_uuids)
    gpu_fits = fit(state, shape, np.array([row]))[1]
    if not all(gpu_fits[slot, 0] for slot in slots):
        return ()
    return slots if policy.takes(state, row, slots) else ()


def _memory_mib(state: ClusterState, shape: Shape, row: int, slots: Sequence[int]) -> int:
    """Return the memory that the pod gets on each GPU: what it requests, else its share of the usable memory."""
    if shape.memory_mib is not None:
        return shape.memory_mib
    if not state.tracks_memory or not slots:
        return 0
    return min(int(state.memory_usable_mib[slot, row]) for slot in slots) * shape.share_milli // GPU_MILLI
