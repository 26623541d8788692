"""Phases and misfits: a window goes to the signatures that explain it, and one that none explains stands out."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.core.gpu import Counters
from gpushare.core.progress import BAD_FIT, PhaseSearch, attribute, attribute_phases, misfit, shape_misfit
from gpushare.core.progress.attribution import TenantEvidence
from gpushare.core.progress.phases import GOOD_FIT, MOST_TRIES, REST_SECONDS

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


PIPES = ("fp32_util", "integer_util", "dram_bw_util", "hmma_tensor_util", "imma_tensor_util", "dfma_tensor_util")
UNKNOWN_WORK = Counters(**dict.fromkeys(PIPES, 0.0), fp64_util=0.9, sm_util=0.9, sm_occupancy=0.5)


def many(count: int) -> list[list[TenantEvidence]]:
    """Tenants with three phases each: of each tenant's and phase's own proportions, none with fp64."""

    def signature(tenant: int, phase: int) -> Counters:
        drawn = {pipe: 0.02 + 0.5 * ((3 * tenant + 5 * phase + 7 * at) % 11) / 11 for at, pipe in enumerate(PIPES)}
        return Counters(**drawn, fp64_util=0.0, sm_util=0.6, sm_occupancy=0.3)

    return [[TenantEvidence(signature(tenant, phase)) for phase in range(3)] for tenant in range(count)]


class Windows:
    """Windows of the same tenants, one after the other; counts the inferences of each."""

    def __init__(self, choices: list[list[TenantEvidence]], patch: pytest.MonkeyPatch) -> None:
        self.choices, self.search, self.inferences = choices, PhaseSearch(), 0
        patch.setattr("gpushare.core.progress.phases.attribute", self._counted)

    def _counted(self, *arguments: object) -> object:
        self.inferences += 1
        return attribute(*arguments)  # type: ignore[arg-type]

    def see(self, windows: Iterable[Counters]) -> list[tuple[int, tuple[int, ...]]]:
        """Return how many inferences each window took, and its phases."""
        seen = []
        for window in windows:
            before = self.inferences
            found = attribute_phases(window, self.choices, None, self.search, 1.0)
            self.search = found.search
            seen.append((self.inferences - before, found.phases))
        return seen

    def work(self, *in_phase: tuple[int, int], each: float = 0.12) -> Counters:
        """Return the sum of the tenants' work, the usual one but of those named."""
        at = dict(in_phase)
        return mix(*((known[at.get(n, 0)].signature or Counters(), each) for n, known in enumerate(self.choices)))


def test_windows_that_no_phase_explains_cost_a_few_inferences_each_and_then_one_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    windows = Windows(many(8), monkeypatch)
    costs = [cost for cost, _ in windows.see(repeat(UNKNOWN_WORK, 70))]
    tries = 8 * 2
    assert costs[:4] == [1 + MOST_TRIES] * 4, "each of the others once, a few in each window"
    assert costs[4 : 3 + int(REST_SECONDS)] == [1] * (int(REST_SECONDS) - 1)
    assert sum(costs) <= 70 + 3 * tries


def test_a_window_that_the_usual_phases_explain_costs_one_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = Windows(many(3), monkeypatch)
    assert windows.see(repeat(windows.work(each=0.3), 40)) == [(1, (0, 0, 0))] * 40


def test_the_phase_that_was_seen_last_is_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = Windows(
        [[TenantEvidence(each) for each in (TRAIN, TRAIN, TRAIN, EVALUATE)], *tenants(OTHER)], monkeypatch
    )
    trains, evaluates = mix((TRAIN, 0.6), (OTHER, 0.3)), mix((EVALUATE, 0.6), (OTHER, 0.3))
    assert windows.see([trains]) == [(1, (0, 0))]
    assert windows.see([evaluates]) == [(4, (3, 0))], "after two others that are no better"
    assert windows.see([trains]) == [(2, (0, 0))]
    assert windows.see([evaluates]) == [(2, (3, 0))]
    assert windows.see([evaluates]) == [(1, (3, 0))], "the next window begins with it"


def test_a_phase_that_comes_while_nothing_is_tried_is_found_by_its_worse_misfit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    windows = Windows([[TenantEvidence(TRAIN), TenantEvidence(EVALUATE)], [TenantEvidence(OTHER)]], monkeypatch)
    strange = replace(mix((TRAIN, 0.6), (OTHER, 0.3)), integer_util=0.19)
    [(cost, found), *rest] = windows.see(repeat(strange, 5))
    assert (cost, found) == (2, (0, 0))
    assert windows.search.misfit > GOOD_FIT
    assert rest == [(1, (0, 0))] * 4
    assert windows.see([mix((EVALUATE, 0.6), (OTHER, 0.3))]) == [(2, (1, 0))]
    assert windows.see([mix((TRAIN, 0.6), (OTHER, 0.3))]) == [(2, (0, 0))]


def test_the_usual_phase_is_tried_again_while_another_explains_the_windows_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    windows = Windows([[TenantEvidence(TRAIN), TenantEvidence(replace(TRAIN, fp32_util=0.31))]], monkeypatch)
    windows.search = PhaseSearch((1,), rest_seconds=REST_SECONDS)
    seen = windows.see(repeat(mix((TRAIN, 0.6)), int(REST_SECONDS) + 1))
    assert {found for _, found in seen[: int(REST_SECONDS) - 1]} == {(1,)}
    assert seen[-1][1] == (0,)


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
