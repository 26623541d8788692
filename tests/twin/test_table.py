"""The table's programs as the twin's tenants: progress and counters are what was measured."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.core.gpu import COUNTERS, Counters
from gpushare.data.measured import LacksProgramError, MeasuredSets, MeasuredWindow
from gpushare.twin.contention import WORKLOADS, TwinLoad, contended_progress, counters_of
from gpushare.twin.mps.tenant import main
from gpushare.twin.table import GPU_MODEL, TableProgress, table, workload_named

NAMES = tuple(table().workloads)


def load(name: str, cap: int = 100) -> TwinLoad:
    program = workload_named(name)
    return TwinLoad(program.solo, cap, program.iterations_per_s, name)


def nobody(loads: object) -> tuple[float, ...]:
    raise AssertionError(f"the table holds {loads}")


def test_alone_on_the_whole_gpu_each_program_makes_what_it_makes_and_draws_what_was_read():
    assert len(NAMES) == 10
    truth = TableProgress(nobody, GPU_MODEL)
    for name in NAMES:
        assert truth([load(name)]) == pytest.approx((1.0,))
        read, alone = truth.counters([load(name)], (1.0,)).as_dict(), workload_named(name).solo.as_dict()
        assert read == pytest.approx(alone)
        assert read["sm_util"] > 0.01
        assert workload_named(name).memory_mib > 500


@given(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True), st.data())
def test_any_set_of_different_programs_is_as_measured_whatever_its_order(names: list[str], data: st.DataObject):
    caps = data.draw(st.lists(st.integers(1, 100), min_size=len(names), max_size=len(names)))
    truth = TableProgress(nobody, GPU_MODEL)
    loads = [load(name, cap) for name, cap in zip(names, caps, strict=True)]
    progress = truth(loads)
    assert tuple(reversed(truth(loads[::-1]))) == pytest.approx(progress)
    counters = truth.counters(loads, progress)
    assert counters.as_dict() == pytest.approx(truth.counters(loads[::-1], progress[::-1]).as_dict())
    for each, made in zip(loads, progress, strict=True):
        assert 0 < made <= 1
        if len(loads) == 1:
            assert made == pytest.approx(max(1e-3, table().alone(each.workload, each.thread_percentage)))
    assert all(0 <= value <= 1 for value in counters.as_dict().values())


def test_a_set_that_the_table_lacks_is_another_models():
    asked: list[int] = []

    def other(loads):
        asked.append(len(loads))
        return contended_progress(loads)

    truth = TableProgress(other, GPU_MODEL)
    five = [load(name, 20) for name in NAMES[:5]]
    stream = WORKLOADS["stream"]
    mixed = [load(NAMES[0]), TwinLoad(stream.solo, 50, stream.iterations_per_s, "stream")]
    for loads in (five, mixed, []):
        assert truth(loads) == contended_progress(loads)
        assert truth.counters(loads, truth(loads)) == counters_of(loads, contended_progress(loads))
    elsewhere = TableProgress(other, "NVIDIA A100-SXM4-80GB")
    pair = [load(NAMES[0]), load(NAMES[1])]
    assert elsewhere(pair) == contended_progress(pair) != truth(pair)
    assert len(asked) == 7


def test_a_program_beside_itself_is_the_models_until_it_is_measured(monkeypatch: pytest.MonkeyPatch):
    truth = TableProgress(contended_progress, GPU_MODEL)
    loads = [load(NAMES[0], 75), load(NAMES[0], 25)]
    rate = table().rate_alone(NAMES[0])
    before, after = made_of([]), made_of([((75, 25), (0.5, 0.25))])
    monkeypatch.setattr("gpushare.twin.table.table", lambda: before)
    assert truth(loads) == contended_progress(loads)
    monkeypatch.setattr("gpushare.twin.table.table", lambda: after)
    assert truth(loads) == pytest.approx((0.5, 0.25))
    assert truth(loads[::-1]) == pytest.approx((0.25, 0.5))
    assert truth.counters(loads, (0.5, 0.25)).sm_util == pytest.approx(0.4)
    assert truth(loads[:1]) == pytest.approx((after.alone(NAMES[0], 75),)), "while the other is frozen"
    assert after.rate_alone(NAMES[0]) == rate


def made_of(twins: list[tuple[tuple[int, int], tuple[float, float]]]) -> MeasuredSets:
    """Return the first program alone as the shipped table has it, and beside itself as in a later session."""
    name, rate = NAMES[0], table().rate_alone(NAMES[0])
    windows = [MeasuredWindow((name,), (cap,), (rate * table().alone(name, cap),)) for cap in (25, 50, 100)]
    windows.append(MeasuredWindow((name,), (100,), (3 * rate,), session="later"))
    for caps, progress in twins:
        rates = 3 * rate * progress[0], 3 * rate * progress[1]
        windows.append(MeasuredWindow((name, name), caps, rates, Counters(sm_util=0.4), session="later"))
    return MeasuredSets(windows)


WHOLE = Counters(sm_util=0.6, dram_bw_util=0.2)


def made_table() -> MeasuredSets:
    def window(*tenants: tuple[str, int, float], **counters: float) -> MeasuredWindow:
        names, caps, rates = zip(*tenants, strict=True)
        return MeasuredWindow(names, caps, rates, Counters(**counters))

    return MeasuredSets(
        [
            window(("a", 100, 10.0), sm_util=0.6, dram_bw_util=0.2),
            window(("a", 50, 8.0), sm_util=0.5, dram_bw_util=0.16),
            window(("b", 100, 4.0), sm_util=0.3, dram_bw_util=0.7),
            window(("b", 50, 3.0), sm_util=0.2, dram_bw_util=0.6),
            window(("b", 50, 2.0), ("a", 50, 5.0), sm_util=0.55, dram_bw_util=0.5),
            window(("a", 100, 6.0), ("b", 100, 3.0), sm_util=0.8, dram_bw_util=0.6),
        ]
    )


def test_under_measured_caps_progress_and_counters_are_the_windows_own():
    sets = made_table()
    assert sets.under(["a", "b"], [[50, 50], [100, 100]]).tolist() == [[0.5, 0.5], [0.6, 0.75]]
    joint = sets.counters(["b", "a"], [50, 50])
    assert (joint.sm_util, joint.dram_bw_util) == pytest.approx((0.55, 0.5))
    alone = sets.counters(["a"], [50])
    assert (alone.sm_util, alone.dram_bw_util) == pytest.approx((0.5, 0.16))
    assert sets.counters_alone("a").sm_util == WHOLE.sm_util


def test_between_measured_caps_counters_lie_between_and_follow_progress():
    sets = made_table()
    between = sets.counters(["a", "b"], [70, 70])
    assert between.sm_util is not None
    assert 0.55 < between.sm_util < 0.8
    assert sets.counters(["a", "b"], [10, 10]).sm_util < 0.55
    assert sorted(sets.caps_of(["b", "a"])) == [(50, 50), (100, 100)]
    assert not sets.offers(["a", "a"])
    assert all(len(each.as_dict()) == len(COUNTERS) for each in (between,))


def test_counters_alone_below_the_measured_caps_fall_with_the_progress_and_never_before_it():
    """A sum of what it used with all threads and what it lacked under 50% would be 0 below 7%."""
    sets = made_table()
    under = sets.counters(["b"], [5])
    slower = sets.alone("b", 5) / sets.alone("b", 50)
    assert (under.sm_util, under.dram_bw_util) == pytest.approx((0.2 * slower, 0.6 * slower))
    between = sets.counters(["b"], [75])
    assert (between.sm_util, between.dram_bw_util) == pytest.approx((0.25, 0.65))
    truth = TableProgress(nobody, GPU_MODEL)
    for name in NAMES:
        few, more = (truth.counters([load(name, cap)], truth([load(name, cap)])) for cap in (10, 25))
        assert few.sm_util > 0.2 * more.sm_util, "it still makes 0.3 to 0.6 of that progress"
        assert few.graphics_util == pytest.approx(more.graphics_util), "a kernel is longer, not rarer"


def test_a_program_that_was_never_alone_is_named():
    with pytest.raises(LacksProgramError, match="the table lacks c alone on the whole GPU"):
        MeasuredSets([MeasuredWindow(("c",), (50,), (1.0,))])


def test_every_pair_of_the_table_is_there_and_somebody_always_pays():
    truth = TableProgress(nobody, GPU_MODEL)
    sums = [sum(truth([load(one), load(other)])) for one, other in itertools.combinations(NAMES, 2)]
    assert len(sums) == 45
    assert max(sums) <= 2.0
    assert sum(sums) / len(sums) == pytest.approx(1.556, abs=0.001), "1.60 where progress above 1 counts as such"


def test_an_unknown_program_is_refused_with_the_known_names(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["--workload", "resnet-50"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "resnet-50 is none of bert-infer" in told
    assert "cg-fp64-poisson-224" in told
