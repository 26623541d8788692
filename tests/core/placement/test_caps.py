from hypothesis import given
from hypothesis import strategies as st

from gpushare.core.api.request import JobClass
from gpushare.core.placement.caps import Neighbour, thread_percentage

T, L = JobClass.THROUGHPUT, JobClass.LATENCY


def test_a_throughput_tenant_is_capped_at_its_share_and_a_latency_tenant_is_not():
    assert thread_percentage(25, T) == 25
    assert thread_percentage(25, L) == 100
    assert thread_percentage(100, T) == 100


def test_latency_shares_stay_free_even_where_shares_were_overbooked():
    assert thread_percentage(70, T, [Neighbour(30, L)]) == 70
    assert thread_percentage(80, T, [Neighbour(30, L), Neighbour(10, T)]) == 70
    assert thread_percentage(80, T, [Neighbour(60, L), Neighbour(60, L)]) == 1


@given(
    st.integers(1, 100),
    st.sampled_from(JobClass),
    st.lists(st.builds(Neighbour, st.integers(1, 100), st.sampled_from(JobClass))),
)
def test_always_a_percentage(share, job_class, neighbours):
    assert 1 <= thread_percentage(share, job_class, neighbours) <= 100
