"""A workload alone under caps: the law, what is measured, and what is shown by counters under two caps."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpushare import data as gpushare_data
from gpushare.core.gpu import Counters
from gpushare.core.progress import (
    TenantLoad,
    evidence,
    filled_curve,
    predicted_cap_progress,
    progress_alone,
    progress_shown,
    progress_under,
)
from gpushare.research.dataset import Dataset, parse

ratios = st.floats(0.0, 1.0)
counters = st.builds(
    Counters, sm_util=ratios, sm_occupancy=ratios, fp32_util=ratios, dram_bw_util=ratios, graphics_util=ratios
)
curves = st.dictionaries(st.integers(1, 99), st.floats(0.01, 1.0), max_size=5)


@cache
def measured(name: str) -> Dataset:
    return parse((Path(gpushare_data.__file__).parent / name).read_bytes().splitlines())


@example(  # rounds to just above 1
    whole=Counters(sm_util=0.0, sm_occupancy=0.0, fp32_util=0.0, dram_bw_util=0.0, graphics_util=0.0),
    curve={1: 1.0, 2: 1.0, 82: 0.017007146947246494},
    cap=1.0,
)
@given(counters, curves, st.floats(0.01, 1.0))
def test_what_was_measured_stays_and_nothing_between_lies_beyond_it(
    whole: Counters, curve: dict[int, float], cap: float
) -> None:
    filled = filled_curve(whole, curve)
    assert curve.items() <= filled.items()
    found = progress_alone(whole, curve, cap)
    assert 0 <= found <= 1
    known = {100: 1.0, **curve}
    ends = [known[max(c for c in known if c <= 100 * cap)]] if 100 * cap >= min(known) else [0.0]
    ends.append(known[min(c for c in known if c >= 100 * cap)])
    if curve:
        assert min(ends) - 1e-9 <= found <= max(ends) + 1e-9


@given(counters, st.floats(0.05, 1.0), st.floats(0.05, 1.0), st.floats(0.01, 1.0))
def test_where_measured_caps_are_near_each_other_lines_connect_them(
    whole: Counters, half: float, quarter: float, cap: float
) -> None:
    curve = {25: quarter, 50: half}
    assert filled_curve(whole, curve) == curve
    lines = np.interp(cap, [0, 0.25, 0.5, 1.0], [0, quarter, half, 1.0])
    assert progress_alone(whole, curve, cap) == pytest.approx(float(lines))


def test_between_caps_far_apart_the_law_says_where_the_curve_bends() -> None:
    flat = Counters(sm_util=0.3, sm_occupancy=0.1, dram_bw_util=0.1, graphics_util=0.95)
    law = predicted_cap_progress(flat, 0.5)
    found = progress_alone(flat, {20: 0.3}, 0.5)
    assert 0.3 + 0.7 * 30 / 80 < found <= law
    load = TenantLoad(flat, 50, {20: 0.3})
    assert evidence(load).bound == pytest.approx(found), "inference allows it as much"
    assert evidence(TenantLoad(flat, 10, {20: 0.3})).bound == 0.3, "and does not guess below what was seen"


def test_counters_under_a_cap_and_with_all_threads_show_progress_there_better_than_any_law() -> None:
    """Of programs that no constant was fitted to; docs/measurements/signatures.md has the figures of each."""
    table = measured("h200-table.jsonl")
    shown, under, law = [], [], []
    for program in table.solo:
        whole = table.solo_counters(program)
        assert whole is not None
        for cap, truth in table.cap_curve(program).items():
            seen = table.solo_counters(program, cap)
            if cap < 100 and seen is not None:
                shown.append(abs(progress_shown(whole, seen, cap / 100) - truth))
                under.append(abs(progress_under(seen, cap / 100) - truth))
                law.append(abs(predicted_cap_progress(whole, cap / 100) - truth))
    assert len(shown) == 40
    assert np.mean(shown) < 0.045
    assert np.mean(shown) < 0.45 * min(np.mean(under), np.mean(law))


def test_without_a_counter_in_common_the_law_decides() -> None:
    seen = Counters(sm_util=0.2)
    assert progress_shown(Counters(dram_bw_util=0.5), seen, 0.25) == progress_under(seen, 0.25)


def test_what_falls_with_the_cap_is_not_taken_for_progress_and_a_counter_of_other_kernels_is_outvoted() -> None:
    whole = Counters(sm_util=0.54, sm_occupancy=0.1, fp32_util=0.3, integer_util=0.2, dram_bw_util=0.1)
    seen = Counters(sm_util=0.17, sm_occupancy=0.05, fp32_util=0.24, integer_util=0.16, dram_bw_util=0.08)
    assert progress_under(seen, 0.25) < 0.5
    assert progress_shown(whole, seen, 0.25) == pytest.approx(0.8, abs=0.02)
    other = replace(seen, dram_bw_util=0.4)  # a kernel for fewer SMs that moves five times as much
    assert progress_shown(whole, other, 0.25) == pytest.approx(0.8, abs=0.03)
    assert progress_shown(whole, replace(seen, fp32_util=0.5, integer_util=0.4, dram_bw_util=0.2), 0.25) == 1.0


def test_the_clock_is_taken_into_account() -> None:
    """A pipe's counter is a ratio of cycles, which are more under a cap; DRAM has a clock of its own."""
    whole, seen = Counters(sm_util=0.5, fp32_util=0.4), Counters(sm_util=0.2, fp32_util=0.2)
    slower, same = (progress_shown(whole, seen, 0.5, whole_mhz=1500.0, seen_mhz=each) for each in (1800.0, 1500.0))
    assert (same, slower) == (pytest.approx(0.5, abs=0.02), pytest.approx(0.6, abs=0.02))
