"""Drift: once the tenants' signatures no longer explain the windows, the tenants are read again.

Pure: windows are arguments, the state is a value; only windows that could be judged count as time.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from gpushare.core.progress import BAD_FIT

DRIFT_SECONDS: Final = 30.0  # of windows that do not fit, less those that do, until drift is suspected
QUIET_SECONDS: Final = 600.0  # after a suspicion; tenants that no reading explains are not read over and over


@dataclass(frozen=True, slots=True)
class DriftWatch:
    """State of the watch over one GPU's tenants; start with `DriftWatch()`.

    Attributes:
        tenants: their uids; the watch restarts when a tenant comes or goes.
        bad_seconds: of windows that did not fit, less those that did.
        quiet_seconds: how long no new suspicion is raised.
        is_suspected: whether the last window raised a suspicion.
    """

    tenants: frozenset[str] = frozenset()
    bad_seconds: float = 0.0
    quiet_seconds: float = 0.0
    is_suspected: bool = False

    def after(self, tenants: Collection[str], misfit: float | None, seconds: float) -> "DriftWatch":
        """Return the state after one more window.

        Args:
            misfit: how badly the window fits, in standard errors; None if it could not be judged.
        """
        present = frozenset(tenants)
        if present != self.tenants:
            return DriftWatch(present)
        quiet = max(0.0, self.quiet_seconds - seconds)
        if misfit is None:
            return DriftWatch(present, self.bad_seconds, quiet)
        bad = max(0.0, self.bad_seconds + (seconds if misfit > BAD_FIT else -seconds))
        if bad < DRIFT_SECONDS:
            return DriftWatch(present, bad, quiet)
        if quiet:
            return DriftWatch(present, DRIFT_SECONDS, quiet)
        return DriftWatch(present, 0.0, QUIET_SECONDS, is_suspected=True)
