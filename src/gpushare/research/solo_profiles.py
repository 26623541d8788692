"""Profiles of workloads from the solo runs of a dataset."""

from typing import Final

from gpushare.core.gpu import MIN_SIGNATURE_SECONDS
from gpushare.core.interference import Profile, ProfileError
from gpushare.research.dataset import Dataset

# Solo windows of one program that differ by more than this were disturbed; the workload then gets no profile.
MAX_REPEAT_SPREAD: Final = 0.5


def profile_of(dataset: Dataset, workload: str) -> Profile:
    """Make a workload's profile from a dataset's solo runs.

    Raises:
        ProfileError: no solo run at 100%, no counters, windows too short, or repeats that disagree.
    """
    whole = dataset.solo.get(workload, {}).get(100, ())
    if not whole:
        raise ProfileError(f"{workload} has no solo run at 100%")
    windows = [run.window_seconds for run in whole if run.window_seconds > 0]
    if windows and max(windows) < MIN_SIGNATURE_SECONDS:
        raise ProfileError(
            f"{workload}: its solo windows of {max(windows):g} s are shorter than {MIN_SIGNATURE_SECONDS} s"
        )
    rates = [run.iterations_per_s[0] for run in whole]
    if min(rates) < (1 - MAX_REPEAT_SPREAD) * max(rates):
        raise ProfileError(
            f"{workload}: its solo rates differ by more than {MAX_REPEAT_SPREAD:.0%}, too noisy to use"
        )
    counters = dataset.solo_counters(workload)
    if counters is None or counters.sm_util is None:
        raise ProfileError(f"{workload} was measured alone without counters (sm_util)")
    memory = [run.memory_mib[0] for run in whole if run.memory_mib[0] is not None]
    capped = {cap: dataset.solo_counters(workload, cap) for cap in dataset.solo[workload]}
    return Profile(
        counters=counters,
        iterations_per_s=sum(rates) / len(rates),
        memory_mib=max(memory) if memory else None,
        cap_curve=dataset.cap_curve(workload),
        capped={cap: each for cap, each in capped.items() if each is not None and each.sm_util is not None},
        probes=dataset.probed.get(workload, {}),
    )
