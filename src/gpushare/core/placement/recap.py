"""The cap chosen anew for a pod that runs no process: MPS fixes a cap when a process connects (docs/adr/0193)."""

import math
from dataclasses import dataclass
from typing import Final

from gpushare.core.api import FaultDomain, JobClass
from gpushare.core.placement.decide import DecisionContext, cap_of
from gpushare.core.placement.judge import Newcomer
from gpushare.core.placement.outlook import SAME, caps_beside, company_of
from gpushare.core.placement.probation import closed_places
from gpushare.core.placement.reservations import Reservation
from gpushare.core.placement.shapes import GPU_MILLI, PlacementRequest

LEAST_CHANGE_PERCENT: Final = 5
"""A cap that would change by less stays. A point of cap is at most 0.01 of a GPU's progress, so this is at most a
throttle's step (duties.py), and less than the distance of two choices above a share (8 points or more)."""


@dataclass(frozen=True, slots=True)
class NewCap:
    """A cap chosen anew.

    Attributes:
        before: thread percentage of the present decision.
        after: the one for the pod's next process, never below its share.
        others: number of other tenants of its GPU.
    """

    before: int
    after: int
    others: int


def cap_anew(request: PlacementRequest, context: DecisionContext) -> NewCap | None:
    """Return the cap that a placed pod should have from its next process on; None if it keeps its present one.

    The caller makes sure that the pod runs no process: the cap of a running one stays in force, and the judge has
    to know the caps in force.

    Args:
        request: what the pod requests by the present knowledge about its workload.
    """
    state, judge = context.state, context.judge
    reservation = state.reservation(request.pod_uid)
    # 1. Whose cap is a choice, where the present state is known: agent not silent, GPU healthy and not overfull.
    if reservation is None or not reservation.slots or not _has_choice(request, reservation):
        return None
    [slot], row = reservation.slots, reservation.row
    if not state.healthy[slot, row] or state.share_free_milli[slot, row] < 0:
        return None
    if any(each.closed.pod_uid == request.pod_uid for each in closed_places(state, judge, context.now)):
        return None
    # 2. Not where a tenant should have a GPU of its own: a retraction is due there.
    newcomer, others = Newcomer.of(request), judge.beside(state, request.pod_uid, slot, row)
    wants_own = newcomer.known is not None and newcomer.known.wants_own
    if others.members and (wants_own or any(member.wants_own for member in others.members)):
        return None
    # 3. The cap that it would start under if it came now (outlook.py). Likely arrivals do not depend on the caps
    #    of present tenants, so all tenants of a GPU compare the same sum, and two cannot change in turns for ever.
    present = reservation.placement.thread_percentage or cap_of(request)
    outlook = caps_beside(judge, state, newcomer, others, company=company_of(state), present=present)
    # 4. Only for a difference that matters, and where every promise can be kept under the new cap.
    if abs(outlook.best - present) < LEAST_CHANGE_PERCENT:
        return None
    if outlook.expected:
        gain = outlook.expected[outlook.best] - outlook.expected.get(present, -math.inf)
        if not gain > SAME:  # neither, if promises can be kept under no cap (nan)
            return None
    return NewCap(present, outlook.best, len(others.members))


def _has_choice(request: PlacementRequest, reservation: Reservation) -> bool:
    """Return whether a pod is of class throughput with a shared part of one GPU, by reservation and request."""
    return all(
        each.gpu_count == 1
        and each.share_milli == reservation.request.share_milli < GPU_MILLI
        and each.job_class is JobClass.THROUGHPUT
        and each.fault_domain is FaultDomain.SHARED
        for each in (reservation.request, request)
    )
