"""The promise: what a pod may count on, as progress relative to running alone (docs/design.md 5)."""

from gpushare.core.interference.profile import Profile, cap_progress
from gpushare.core.progress import promise_of


def promised_progress(
    profile: Profile | None, share_percent: int, max_slowdown: float, *, is_auto: bool = False
) -> float:
    """Return the progress that a pod is promised on each of its GPUs (`gpushare.core.progress.promise_of`).

    Of a workload with phases it is the least of theirs, as it is to hold in each of them.

    Args:
        share_percent: of each of its GPUs, 1 to 100.
        max_slowdown: tolerated, 1 or more.
        is_auto: whether the share is what `auto` stands for.

    Raises:
        ValueError: a share or a slowdown out of range.
    """
    if profile is None:
        return promise_of(None, share_percent, max_slowdown, is_auto=is_auto)
    alone = min(cap_progress(each, share_percent / 100) for each in (profile, *profile.phases))
    return promise_of(alone, share_percent, max_slowdown, is_auto=is_auto)
