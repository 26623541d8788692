"""When a signature is worth writing down over the one kept: by how long a window it was taken over."""

from typing import Final

from gpushare.core.api.objects import WorkloadSignature

LONGER: Final = 4.0
"""A signature replaces one taken over a window this many times shorter: three writes from 5 s to all of 120 s."""


def replaces(window_seconds: float | None, kept: WorkloadSignature | None) -> bool:
    """Whether a signature of this window is worth writing down over the one kept."""
    if kept is None or not kept.counters:
        return True
    return (window_seconds or 0.0) >= LONGER * max(kept.window_seconds or 0.0, 1.0)
