"""Cautious packing (docs/design.md 5): put a pod where it gains most, but only where promises can be kept.

`Cautious` wraps any placement policy and keeps it off the GPUs that the judge refuses. A policy that scores the
worth of what its choice leaves free (`WorthPolicy`) is weighed against the gain in summed progress, in one unit.
Other policies rank as they are, and the gain decides between equals.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from gpushare.core.api import Reason, Rejection
from gpushare.core.placement.duties import first_of_least
from gpushare.core.placement.fitting import fitting_gpus
from gpushare.core.placement.judge import Judge, Newcomer, Verdicts
from gpushare.core.placement.outlook import outlook_of
from gpushare.core.placement.search import PlacementPolicy, WorthPolicy
from gpushare.core.placement.shapes import GPU_MILLI, PlacementRequest, Shape
from gpushare.core.placement.state import BoolArray, ClusterState, FloatArray, IntArray

TIE_WEIGHT: Final = 0.4
"""Policies score in whole points, with less than 0.2 between equals, so a gain of -1 to 1 times this decides only
between equals."""
_LEAST: Final = 1e-3  # of a promise, to divide by
_APART: Final = 9e9  # ranks a GPU that a retraction closes to the newcomer behind every GPU with a broken promise


class Cautious:
    """A policy for one newcomer that takes only GPUs that the judge accepts, where it gains most.

    Args:
        request: request of the newcomer.
        now: present time in seconds, to decide which retractions still count.
    """

    is_choosy = True

    def __init__(self, policy: PlacementPolicy, judge: Judge, request: PlacementRequest, now: float) -> None:
        self.newcomer = newcomer = Newcomer.of(request)
        self.name = f"{policy.name} for {newcomer!r}"
        self._policy, self._judge, self._known, self._now = policy, judge, request.known, now
        self._gains = newcomer.known is not None and newcomer.known.profile is not None
        self._weighed = policy if self._gains and isinstance(policy, WorthPolicy) else None

    def rank(self, state: ClusterState, shape: Shape, rows: IntArray, gpu_fits: BoolArray) -> FloatArray:
        """Return the best GPU's score on each node; -inf where every GPU that fits is refused."""
        accepted = gpu_fits & self._accepts(state, rows)
        takes = accepted.any(axis=0)
        scores = np.full(len(rows), -np.inf)
        if not takes.any():
            return scores
        some, fits = rows[takes], accepted[:, takes]
        if not self._gains:
            scores[takes] = self._policy.rank(state, shape, some, fits)
        elif self._weighed is not None:
            worth = self._worth(self._weighed, state, shape, some)
            scores[takes] = np.where(fits, worth, -np.inf).max(axis=0)
        else:
            gains = np.where(fits, self._gains_of(state, some), -1.0).max(axis=0)
            scores[takes] = self._policy.rank(state, shape, some, fits) + TIE_WEIGHT * np.clip(gains, -1.0, 1.0)
        return scores

    def pick(self, state: ClusterState, shape: Shape, row: int, slots: list[int]) -> Sequence[int]:
        """Return the GPU with the best score; without scores, the policy's choice or an equal with more gain."""
        rows = np.array([row])
        accepts = self._accepts(state, rows)[:, 0]
        accepted = [slot for slot in slots if accepts[slot]]
        if not self._gains:
            return self._policy.pick(state, shape, row, accepted)
        if self._weighed is not None:
            return (max(accepted, key=self._worth(self._weighed, state, shape, rows)[:, 0].__getitem__),)
        gains = self._gains_of(state, rows)[:, 0]
        (chosen,) = self._policy.pick(state, shape, row, accepted)
        free = state.share_free_milli[:, row]
        equals = [slot for slot in accepted if free[slot] == free[chosen]]
        return (max(equals, key=lambda slot: (gains[slot], slot == chosen)),)

    def select(self, scores: FloatArray) -> int:
        """Select as the wrapped policy does."""
        return self._policy.select(scores)

    def token(self, state: ClusterState) -> object:
        """Return a value that changes with the policy's token, the known workloads, and the cluster's outlook."""
        inner = self._policy.token(state)
        if inner is None or self._judge.kept_apart(state, self._known, self._now) is not None:
            return None
        outlook = outlook_of(self._judge, state) if self._weighed is not None else None
        return inner, self._judge.version, outlook

    def takes(self, state: ClusterState, row: int, slot: int) -> bool:
        """Return whether the judge accepts a GPU."""
        return bool(self._accepts(state, np.array([row]))[slot, 0])

    def refusals(self, state: ClusterState, shape: Shape, rows: IntArray) -> tuple[list[Rejection], IntArray]:
        """Return one rejection per node of `rows`, for its least-violating GPU, and each row's index into them."""
        sets = self._judge.resident_sets(state).take(rows, 1)
        verdicts = self._judge.verdicts(self.newcomer)
        fits = fitting_gpus(state, shape, rows)
        apart = self._judge.kept_apart(state, self._known, self._now)
        kept = np.zeros(sets.shape, bool) if apart is None else apart.take(rows, 1)
        keeps = verdicts.least / np.maximum(verdicts.promised, _LEAST)
        keeps = np.where(verdicts.crowds, -1.0, keeps)[sets]
        best = first_of_least(np.where(fits, np.where(kept, _APART, -keeps), np.inf).T)
        lines = np.arange(len(rows))
        kinds, groups = np.unique(
            np.stack([sets[best, lines], fits.sum(axis=0), kept[best, lines]]), axis=1, return_inverse=True
        )
        headroom = self._judge.headroom_ratio
        rejections = [_rejection_of(verdicts, *kind, headroom_ratio=headroom) for kind in kinds.T.tolist()]
        return rejections, groups.reshape(-1)

    def _accepts(self, state: ClusterState, rows: IntArray) -> BoolArray:
        """Return which GPUs of rows the newcomer may join, (width, rows)."""
        sets = self._judge.resident_sets(state).take(rows, 1)
        accepts: BoolArray = self._judge.verdicts(self.newcomer).accepts[sets]
        apart = self._judge.kept_apart(state, self._known, self._now)
        return accepts if apart is None else accepts & ~apart.take(rows, 1)

    def _gains_of(self, state: ClusterState, rows: IntArray) -> FloatArray:
        """Return the summed progress that the newcomer adds to the GPUs of rows, (width, rows)."""
        sets = self._judge.resident_sets(state).take(rows, 1)  # first: it may number the sets anew
        gains: FloatArray = self._judge.verdicts(self.newcomer).gains[sets]
        return gains

    def _worth(self, policy: WorthPolicy, state: ClusterState, shape: Shape, rows: IntArray) -> FloatArray:
        """Return gain less loss by fragmentation, in whole grains, plus the policy's tie-breaks; (width, rows).

        A free share is worth what the cluster makes of one, times the likelihood that it is taken.
        """
        points = policy.worth_kept(state, shape, rows)
        whole = np.rint(points)
        gain = self._gains_of(state, rows) * GPU_MILLI / policy.grain_milli
        scores: FloatArray = np.rint(gain + outlook_of(self._judge, state).share_worth * whole) + (points - whole)
        return scores


def _rejection_of(
    verdicts: Verdicts, at: int, count: int, is_apart: int, *, headroom_ratio: float = 0.0
) -> Rejection:
    gpus = "1 GPU" if count == 1 else f"{count} GPUs"
    if is_apart:
        why = "a pod was moved away from this pairing of workloads, which is not tried again yet"
    elif verdicts.crowds[at]:
        why = "it, or a tenant there, was moved away from neighbours repeatedly and gets a GPU of its own"
    else:
        who = "it" if verdicts.newcomer_suffers[at] else "a tenant there"
        least, promised = distinct(verdicts.least[at], verdicts.promised[at])
        wanted = "must be likely (policy.slowdownHeadroom)" if headroom_ratio else "is promised"
        why = f"{who} could keep only {least} of its speed alone, {promised} {wanted}"
    return Rejection(Reason.SLOWDOWN, f"has room on {gpus}, but {why}")


def distinct(one: float, other: float) -> tuple[str, str]:
    """Return two figures as text with two digits, or with up to four where two would make them look equal."""
    for digits in (2, 3, 4):
        texts = f"{one:.{digits}f}", f"{other:.{digits}f}"
        if texts[0] != texts[1]:
            break
    return texts


def cautious(
    policy: PlacementPolicy, judge: Judge, state: ClusterState, request: PlacementRequest, now: float
) -> Cautious | None:
    """Return the cautious policy for a request for a part of a GPU; None if no workload is known."""
    if request.gpu_count != 1 or request.share_milli >= GPU_MILLI:
        return None
    if (request.known is None or not request.known.matters) and not judge.knows_anything(state):
        return None
    return Cautious(policy, judge, request, now)
