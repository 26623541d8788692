"""How far the counters that a source does not measure are estimated from the others, over the shipped dataset."""

from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files

import numpy as np
import pytest

from gpushare.core.gpu import COUNTERS, Counters
from gpushare.core.interference.profile import vector
from gpushare.research.dataset import parse
from gpushare.research.solo_profiles import profile_of


@pytest.fixture(scope="module")
def measured() -> tuple[list[Counters], list[Counters]]:
    """The counters of each program alone with all threads, and under each cap that was measured."""
    data = parse((files("gpushare.data") / "h200-colocation.jsonl").read_bytes().splitlines())
    profiles = [profile_of(data, workload) for workload in data.solo]
    capped = [counters for each in profiles for cap, counters in each.capped.items() if cap < 100]
    return [each.counters for each in profiles], capped


def errors(name: str, counters: list[Counters]) -> Iterator[float]:
    for each in counters:
        estimated = vector(replace(each, **{name: None}))[COUNTERS.index(name)]
        yield float(estimated) - float(getattr(each, name))


def mean(found: list[float]) -> float:
    return float(np.mean(found))


def spread(found: list[float]) -> float:
    return float(np.mean(np.abs(found)))


@pytest.mark.parametrize(
    ("name", "alone", "under_caps"),
    [("graphics_util", 0.06, 0.28), ("sm_occupancy", 0.15, 0.06), ("integer_util", 0.10, 0.05)],
)
def test_the_mean_errors_are_those_that_the_code_states(
    measured: tuple[list[Counters], list[Counters]], name: str, alone: float, under_caps: float
) -> None:
    whole, capped = measured
    assert (len(whole), len(capped)) == (53, 138)
    assert spread(list(errors(name, whole))) == pytest.approx(alone, abs=0.005)
    assert spread(list(errors(name, capped))) == pytest.approx(under_caps, abs=0.005)


def test_under_a_cap_the_busy_part_is_estimated_too_low(
    measured: tuple[list[Counters], list[Counters]],
) -> None:
    assert mean(list(errors("graphics_util", measured[0]))) == pytest.approx(0.01, abs=0.005)
    assert mean(list(errors("graphics_util", measured[1]))) == pytest.approx(-0.25, abs=0.005)
