"""Phases and misfits: a window goes to the signatures that explain it, and one that none explains stands out."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.core.gpu import Counters
from gpushare.core.progress import BAD_FIT, attribute_phases, misfit, shape_misfit
from gpushare.core.progress.attribution import TenantEvidence

TRAIN = Counters(
    sm_util=0.8, sm_occupancy=0.3, fp32_util=0.3, integer_util=0.2, dram_bw_util=0.2, hmma_tensor_util=0.0
)
EVALUATE = Counters(
    sm_util=0.5, sm_occupancy=0.2, fp32_util=0.05, integer_util=0.1, dram_bw_util=0.1, hmma_tensor_util=0.3
)
OTHER = Counters(
    sm_util=0.9, sm_occupancy=0.7, fp32_util=0.1, integer_util=0.1, dram_bw_util=0.8, hmma_tensor_util=0.0
)
LIGHT = Counters(
    sm_util=0.01, sm_occupancy=0.0, fp32_util=0.0, integer_util=0.0, dram_bw_util=0.0, hmma_tensor_util=0.0
)


def mix(*parts: tuple[Counters, float]) -> Counters:
    sums: dict[str, float] = {}
    for counters, progress in parts:
        for name, value in counters.as_dict().items():
            sums[name] = sums.get(name, 0.0) + value * progress
    return Counters(**sums)


def tenants(*signatures: Counters) -> list[list[TenantEvidence]]:
    return [[TenantEvidence(signature)] for signature in signatures]


@given(st.floats(0.15, 0.9), st.floats(0.15, 0.9))
def test_what_the_signatures_say_fits_and_what_they_do_not_know_of_does_not(one: float, two: float) -> None:
    right = attribute_phases(mix((TRAIN, one), (OTHER, two)), tenants(TRAIN, OTHER))
    assert right.misfit is not None
    assert right.misfit < BAD_FIT / 2
    drifted = attribute_phases(mix((EVALUATE, one), (OTHER, two)), tenants(TRAIN, OTHER))
    assert drifted.misfit is not None
    assert drifted.misfit > BAD_FIT


@given(st.floats(0.2, 0.9), st.floats(0.2, 0.9), st.booleans())
def test_progress_is_told_with_the_phase_that_a_tenant_is_in(one: float, two: float, evaluates: bool) -> None:
    choices = [[TenantEvidence(TRAIN), TenantEvidence(EVALUATE)], [TenantEvidence(OTHER)]]
    found = attribute_phases(mix((EVALUATE if evaluates else TRAIN, one), (OTHER, two)), choices)
    assert found.phases == (int(evaluates), 0)
    assert [each.progress_ratio for each in found.found] == pytest.approx([one, two], abs=0.08)


def test_the_usual_phase_counts_while_it_explains_the_window() -> None:
    nearly = replace(TRAIN, fp32_util=0.31)
    found = attribute_phases(TRAIN, [[TenantEvidence(nearly), TenantEvidence(TRAIN)]])
    assert found.phases == (0,)


@given(st.floats(0.05, 3.0))
def test_a_programs_speed_says_nothing_of_its_phase(speed: float) -> None:
    missed, other = shape_misfit(TRAIN, mix((TRAIN, speed))), shape_misfit(TRAIN, mix((EVALUATE, speed)))
    assert missed is not None
    assert missed < 0.1
    assert other is not None
    assert other > 2 * BAD_FIT or speed < 0.3, "counters near their own floor tell less"


def test_a_clock_is_no_phase() -> None:
    slower = replace(TRAIN, fp32_util=0.4, integer_util=0.2 * 4 / 3, sm_util=0.9, sm_occupancy=0.34)
    told, blind = shape_misfit(TRAIN, slower, 1980.0, 1485.0), shape_misfit(TRAIN, slower)
    assert told is not None
    assert blind is not None
    assert told < 1.0 < BAD_FIT < blind


def test_what_cannot_be_judged_is_not() -> None:
    unknown = attribute_phases(TRAIN, [[TenantEvidence(TRAIN)], [TenantEvidence(None)]])
    assert (unknown.misfit, unknown.phases) == (None, (0, 0))
    assert attribute_phases(Counters(), tenants(TRAIN)).misfit is None
    assert attribute_phases(TRAIN, []).misfit is None
    assert shape_misfit(TRAIN, Counters()) is None
    assert shape_misfit(mix((TRAIN, 0.0)), TRAIN) is None
    pair = [TenantEvidence(TRAIN), TenantEvidence(LIGHT)]
    assert misfit(TRAIN, pair, [1.0, None]) is not None, "one that hardly uses the GPU hides nothing"
    assert misfit(TRAIN, [*pair, TenantEvidence(OTHER)], [1.0, 0.5, None]) is None
