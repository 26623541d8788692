"""Drift: windows that the tenants' signatures do not explain any more call for reading the tenants anew.

Pure: windows are arguments, the state is a value; time is counted in windows that could be judged.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from gpushare.core.progress import BAD_FIT

DRIFT_SECONDS: Final = 30.0  # of windows that do not fit, less those that do, until somebody is suspected
QUIET_SECONDS: Final = 600.0  # after a suspicion; what readings could not explain is not read again and again


@dataclass(frozen=True, slots=True)
class DriftWatch:
    """What is remembered of the tenants of one GPU; start with `DriftWatch()`.

    Attributes:
        tenants: their uids; whoever comes or goes begins it anew.
        bad_seconds: of windows that did not fit, less those that did.
        quiet_seconds: for how long nobody is suspected yet.
        is_suspected: whether the last window led to a suspicion.
    """

    tenants: frozenset[str] = frozenset()
    bad_seconds: float = 0.0
    quiet_seconds: float = 0.0
    is_suspected: bool = False

    def after(self, tenants: Collection[str], misfit: float | None, seconds: float) -> "DriftWatch":
        """Return what is remembered after one more window.

        Args:
            misfit: of the window, in errors; None: it could not be judged.
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
