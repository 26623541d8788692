"""What is told of tenants near a threshold: three ways, each with what it costs."""

import numpy as np
import pytest

from gpushare.research.studies.read_above import lower, score, silence, straddling

TRUTH = np.array([0.40, 0.45, 0.55, 0.90])
INFERRED = np.array([0.52, 0.47, 0.58, 0.88])
ERRORS = np.array([0.05, 0.05, 0.05, 0.05])


def test_a_lower_figure_is_lower_for_everybody_and_never_below_nothing() -> None:
    assert lower(INFERRED, ERRORS, 0.5, 2.0).tolist() == pytest.approx([0.42, 0.37, 0.48, 0.78])
    assert lower(np.array([0.03]), np.array([0.05]), 0.5, 1.0).tolist() == [0.0]


def test_a_figure_just_above_the_threshold_is_told_as_the_threshold() -> None:
    assert straddling(INFERRED, ERRORS, 0.5, 1.0).tolist() == [0.5, 0.47, 0.58, 0.88]
    assert straddling(INFERRED, ERRORS, 0.5, 2.0).tolist() == [0.5, 0.47, 0.5, 0.88]
    assert straddling(INFERRED, ERRORS, 0.5, 0.0).tolist() == INFERRED.tolist()


def test_silence_is_kept_on_both_sides_of_the_threshold() -> None:
    told = silence(INFERRED, ERRORS, 0.5, 1.0)
    assert np.isnan(told).tolist() == [True, True, False, False]


def test_scores_count_the_truly_lower_that_are_told_above_and_only_what_is_told() -> None:
    plain = score(TRUTH, INFERRED, 0.5)
    assert (plain.above, plain.told) == (0.5, 1.0)
    assert plain.error == pytest.approx((0.12 + 0.02 + 0.03 + 0.02) / 4)
    silent = score(TRUTH, silence(INFERRED, ERRORS, 0.5, 1.0), 0.5)
    assert (silent.above, silent.told) == (0.0, 0.5)
    assert silent.error == pytest.approx((0.03 + 0.02) / 2)
