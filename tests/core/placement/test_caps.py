from hypothesis import given
from hypothesis import strategies as st

from gpushare.core.api.request import JobClass
from gpushare.core.placement.caps import thread_percentage

T, L = JobClass.THROUGHPUT, JobClass.LATENCY


def test_a_throughput_tenant_is_capped_at_its_share_and_a_latency_tenant_is_not():
    assert thread_percentage(25, T) == 25
    assert thread_percentage(25, L) == 100
    assert thread_percentage(100, T) == 100


@given(st.lists(st.tuples(st.integers(1, 100), st.sampled_from(JobClass)), max_size=6))
def test_shares_that_fit_a_gpu_leave_latency_tenants_theirs(tenants):
    caps = [thread_percentage(share, job_class) for share, job_class in tenants]
    assert all(share <= cap <= 100 for cap, (share, _) in zip(caps, tenants, strict=True))
    if sum(share for share, _ in tenants) <= 100:
        latency = sum(share for share, job_class in tenants if job_class is L)
        assert all(
            cap <= 100 - latency for cap, (_, job_class) in zip(caps, tenants, strict=True) if job_class is T
        )
