"""What the benches make of their values."""

import sys

import pytest
from bench.figures import interval, percentile, student


def test_intervals_are_students() -> None:
    assert interval([]) is None
    alone = interval([2.0])
    assert alone is not None
    assert (alone.mean, alone.half_width, alone.number) == (2.0, None, 1)
    three = interval([1.0, 2.0, 3.0])
    assert three is not None
    assert three.mean == pytest.approx(2.0)
    assert three.half_width == pytest.approx(4.303 / 3**0.5, rel=1e-3)


def test_students_t_without_scipy_is_the_tables_to_its_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = pytest.importorskip("scipy.stats").t
    assert [student(count) for count in (2, 10, 40)] == pytest.approx([exact.ppf(0.975, n) for n in (1, 9, 39)])
    monkeypatch.setitem(sys.modules, "scipy", None)
    assert student(2) == 12.71
    assert [student(count) for count in (2, 10, 31)] == pytest.approx(
        [exact.ppf(0.975, n) for n in (1, 9, 30)], abs=0.006
    )


def test_a_percentile_is_one_of_the_values() -> None:
    assert percentile([3.0, 1.0, 2.0, 4.0], 0.5) == 2.0
    assert percentile([3.0, 1.0, 2.0, 4.0], 0.99) == 4.0
    assert percentile([5.0], 0.0) == 5.0


@pytest.mark.parametrize("count", [1, 7, 100, 2000, 2001])
def test_a_percentile_is_at_most_one_rank_below_what_the_latency_bench_took_before(count: int) -> None:
    values = [float(each) for each in range(count)]
    for part in (0.5, 0.9, 0.99):
        before = values[min(count - 1, int(count * part))]
        assert 0 <= before - percentile(values, part) <= 1
