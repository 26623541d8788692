"""The thread percentage of a tenant (docs/design.md 5, docs/facts.md 8)."""

from typing import Final

from gpushare.core.api import SHARES_PER_GPU, JobClass

UNCAPPED_PERCENT: Final = 100
CHOICES: Final = (25, 33, 50, 75, UNCAPPED_PERCENT)
"""Caps above its share that a throughput tenant may start under."""


def thread_percentage(share_percent: int, job_class: JobClass) -> int:
    """Return the MPS thread percentage of a tenant without a profile, 1 to 100: its share.

    A latency tenant and a whole GPU are uncapped. Shares of a GPU sum to at most 100, so throughput tenants capped
    at their shares leave a latency tenant's share of the SMs free: beside them its p50 is as alone (0.016 ms),
    beside one uncapped tenant 0.640 ms (docs/facts.md 8).
    """
    if job_class is JobClass.LATENCY or share_percent >= SHARES_PER_GPU:
        return UNCAPPED_PERCENT
    return max(1, share_percent)


def cap_choices(share_percent: int, job_class: JobClass, *, is_known: bool) -> tuple[int, ...]:
    """Return the caps that a tenant may start under, ascending; only a workload with a profile has a choice."""
    least = thread_percentage(share_percent, job_class)
    return (least, *(cap for cap in CHOICES if cap > least)) if is_known else (least,)
