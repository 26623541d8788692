"""Counters at another clock: the same work each second, and what inference makes of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.core.gpu import Counters
from gpushare.core.progress import at_clock
from gpushare.core.progress.attribution import TenantEvidence, attribute

TENSOR = Counters(hmma_tensor_util=0.9, fp32_util=0.0, integer_util=0.02, dram_bw_util=0.15, sm_util=0.95)
PLAIN = Counters(hmma_tensor_util=0.0, fp32_util=0.3, integer_util=0.2, dram_bw_util=0.2, sm_util=0.7)


def test_pipes_read_less_at_a_higher_clock_and_dram_reads_the_same() -> None:
    faster = at_clock(TENSOR, 1400.0, 1750.0)
    assert faster.hmma_tensor_util == pytest.approx(0.9 * 0.8)
    assert faster.dram_bw_util == TENSOR.dram_bw_util
    assert faster.sm_util is not None
    assert 0.8 * 0.95 <= faster.sm_util <= 0.95
    assert faster.fp64_util is None


@given(st.floats(0, 4000) | st.none(), st.floats(0, 4000) | st.none())
def test_an_unknown_or_idle_clock_changes_nothing_or_at_most_by_half(
    taken: float | None, now: float | None
) -> None:
    changed = at_clock(PLAIN, taken, now)
    if not taken or not now or taken == now:
        assert changed == PLAIN
    for name, value in PLAIN.as_dict().items():
        assert 0.5 * value <= getattr(changed, name) <= 2.0 * value


def test_progress_is_of_work_each_second() -> None:
    """The product runs at its power limit alone; beside a light neighbour it does not."""
    at_1400, at_1900 = 1400.0, 1900.0
    product = TenantEvidence(TENSOR, sm_clock_mhz=at_1400)
    plain = TenantEvidence(PLAIN, sm_clock_mhz=at_1900)
    counters = {
        name: 0.4 * getattr(at_clock(TENSOR, at_1400, at_1900), name) + 0.6 * value
        for name, value in PLAIN.as_dict().items()
    }
    told = attribute(Counters(**counters), [product, plain], at_1900)
    assert [each.progress_ratio for each in told] == pytest.approx([0.4, 0.6], abs=0.02)
    blind = attribute(Counters(**counters), [product, plain])
    assert blind[0].progress_ratio is not None
    assert blind[0].progress_ratio < 0.35
    assert told[0].pipes["fp16"] == pytest.approx(counters["hmma_tensor_util"], abs=0.02)


def test_a_signature_without_a_clock_is_taken_as_it_is() -> None:
    evidence = [TenantEvidence(TENSOR), TenantEvidence(PLAIN)]
    device = Counters(**{name: 0.5 * (value + getattr(PLAIN, name)) for name, value in TENSOR.as_dict().items()})
    assert attribute(device, evidence, 1400.0) == attribute(device, evidence)
