"""The record of processes that the MPS server did not take although it had no fault, for events.

While the server handles a fault it turns newcomers away; their pods hear of the fault. It does so without one too,
for example when it has as many clients as it takes, and only the process hears of it, by a CUDA error.
"""

import math
from collections.abc import Collection
from typing import Final

from gpushare.mps.ledger import ClientLedger
from gpushare.mps.status import TurnedAway

TURNED_AWAY_SECONDS: Final = 2.0
"""Longest time between a fault and a process that was turned away for it: the server writes its report within
milliseconds, but may call itself ACTIVE too soon."""
KEPT_TURNED_AWAY: Final = 50  # only the latest; the agent turns each into an event once


class TurnedAwayRecord:
    """The latest processes that were turned away without a fault.

    Attributes:
        latest: the oldest first.
    """

    def __init__(self, ledger: ClientLedger) -> None:
        self.latest: tuple[TurnedAway, ...] = ()
        self._ledger = ledger
        self._settled_at = -math.inf

    def settle(self, read_at: float, unix_now: float, faulted_at: float, fault_pods: Collection[str]) -> None:
        """Take in who was turned away so long ago that a fault would be known by now.

        Args:
            read_at: when the server's log was read, without a new fault in it, in seconds of the ledger's clock.
            unix_now: the same moment in Unix time.
            faulted_at: when the last fault was published.
            fault_pods: the pods that hear of that fault.
        """
        until = read_at - TURNED_AWAY_SECONDS
        found = self._ledger.turned_away(self._settled_at, until)
        self._settled_at = max(self._settled_at, until)
        news = (
            TurnedAway(each.pid, each.pod_uid, each.cuda_error, unix_now - (read_at - at))
            for each in found
            if each.pod_uid is not None
            and (at := each.turned_away_at) is not None
            and not (faulted_at >= at - TURNED_AWAY_SECONDS and each.pod_uid in fault_pods)
        )
        self.latest = (*self.latest, *news)[-KEPT_TURNED_AWAY:]
