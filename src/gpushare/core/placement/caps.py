"""The thread percentage of a tenant (docs/design.md 5, docs/facts.md 8)."""

from typing import Final

from gpushare.core.api import SHARES_PER_GPU, JobClass

UNCAPPED_PERCENT: Final = 100


def thread_percentage(share_percent: int, job_class: JobClass) -> int:
    """The MPS thread percentage of a tenant, 1 to 100: its share; a latency tenant and a whole GPU are uncapped.

    Shares of a GPU sum to at most 100, so throughput tenants capped at their shares leave a latency tenant's share
    of the SMs free: beside them its p50 is as alone (0.016 ms), beside one uncapped tenant 0.640 ms
    (docs/facts.md 8).
    """
    if job_class is JobClass.LATENCY or share_percent >= SHARES_PER_GPU:
        return UNCAPPED_PERCENT
    return max(1, share_percent)
