"""The promise of a pod, as progress relative to running alone (docs/design.md 5)."""

from gpushare.core.interference.profile import Profile, cap_progress
from gpushare.core.progress import promise_of


def promised_progress(
    profile: Profile | None, share_percent: int, max_slowdown: float, *, is_auto: bool = False
) -> float:
    """Return the progress that a pod is promised on each of its GPUs (`gpushare.core.progress.promise_of`).

    For a workload with phases it is the least over its phases, because it must hold in each of them.

    Args:
        profile: of its workload; None if unknown.
        share_percent: percent of each of its GPUs, 1 to 100.
        max_slowdown: tolerated slowdown, 1 or more.
        is_auto: whether the share was chosen by `auto`.

    Raises:
        ValueError: the share or the slowdown is out of range.
    """
    if profile is None:
        return promise_of(None, share_percent, max_slowdown, is_auto=is_auto)
    alone = min(cap_progress(each, share_percent / 100) for each in (profile, *profile.phases))
    return promise_of(alone, share_percent, max_slowdown, is_auto=is_auto)
