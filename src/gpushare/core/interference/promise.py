"""The promise: what a pod may count on, as progress relative to running alone (docs/design.md 5)."""

from gpushare.core.interference.profile import Profile, cap_progress


def promised_progress(profile: Profile | None, share_percent: int, max_slowdown: float) -> float:
    """Return the progress that a pod is promised on each of its GPUs, relative to running alone, 0 to 1.

    It is what its workload makes alone under a cap of its share, divided by the tolerated slowdown; where that cap
    costs it less than the tolerated slowdown, 1 / max_slowdown (docs/adr/0091). A workload that is not known is
    bounded by its share: a cap of a quarter of the threads never leaves less than a quarter of the progress.

    Args:
        share_percent: of each of its GPUs, 1 to 100.
        max_slowdown: tolerated, 1 or more.

    Raises:
        ValueError: a share or a slowdown out of range.
    """
    if not 1 <= share_percent <= 100 or not max_slowdown >= 1:
        raise ValueError(f"no promise for {share_percent}% and a slowdown of {max_slowdown}")
    share = share_percent / 100
    alone = share if profile is None else min(1.0, cap_progress(profile, share))
    if profile is not None and alone >= 1.0 / max_slowdown:
        return 1.0 / max_slowdown
    return alone / max_slowdown
