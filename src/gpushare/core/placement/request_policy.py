"""The policy for one request: how the installation's policy ranks for it, and what keeps it off GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpushare.core.placement.caution import Cautious
from gpushare.core.placement.closed_gpus import ProbationTerm
from gpushare.core.placement.judge import Judge
from gpushare.core.placement.outlook import best_cap
from gpushare.core.placement.probation import Probationary
from gpushare.core.placement.search import PlacementPolicy
from gpushare.core.placement.standing_back import StandingBack
from gpushare.core.placement.state import ClusterState


@dataclass(frozen=True, slots=True)
class RequestPolicy:
    """The policy for one request, and the parts of it that a decision asks for more than a ranking.

    Each part wraps the ones below it, and is None where it would change nothing.

    Attributes:
        ranking: the outermost part, which ranks nodes and picks GPUs as all parts demand.
        standing_back: avoids GPUs that are kept for pods that have waited longer.
        probationary: avoids GPUs that other pods have to themselves, and may close one for the request.
        cautious: takes only GPUs on which every promise can be kept.
    """

    ranking: PlacementPolicy
    standing_back: StandingBack | None
    probationary: Probationary | None
    cautious: Cautious | None

    @classmethod
    def of(
        cls,
        policy: PlacementPolicy,
        cautious: Cautious | None,
        probationary: Probationary | None,
        standing_back: StandingBack | None,
    ) -> "RequestPolicy":
        """Return the parts together, with the outermost that exists as the ranking."""
        return cls(standing_back or probationary or cautious or policy, standing_back, probationary, cautious)

    def takes(self, state: ClusterState, row: int, slots: Sequence[int]) -> bool:
        """Return whether GPUs that fit can be taken as they are, whatever the ranking would pick."""
        parts = [each for each in (self.standing_back, self.probationary, self.cautious) if each is not None]
        return all(each.takes(state, row, slot) for each in parts for slot in slots)

    def cap(self, judge: Judge, state: ClusterState, row: int, slot: int) -> int | None:
        """Return the cap with the most expected progress on a GPU; None if nothing is known to expect it by."""
        return None if self.cautious is None else best_cap(judge, state, self.cautious.newcomer, slot, row)

    def term(self, state: ClusterState, row: int, slot: int) -> ProbationTerm | None:
        """Return during which term the request has a GPU to itself; None if it shares it from the beginning."""
        return None if self.probationary is None else self.probationary.term(state, row, slot)
