"""The truth of measured sets: measured points come out exactly, others lie between what was measured."""

import itertools
import json
from collections import Counter
from importlib.resources import files

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare.core.api import JobClass
from gpushare.data import H200_TABLE
from gpushare.mps.asks import ThrottleAsk, ThrottleAsks
from gpushare.mps.duty import MIN_DUTY_RATIO, NOBODY, schedule
from gpushare.research.dataset import Mechanism, parse
from gpushare.research.shipped_table import complete_table, different_programs, joined
from gpushare.sim.jobs import Job, SimulationError, mixture, simulate
from gpushare.sim.table_hindsight import Asker, TableSearch
from gpushare.sim.table_policies import HardCaps
from gpushare.sim.table_truth import TableTruth
from gpushare.sim.truth import TenantKind

MPS = Mechanism.MPS


def line(tenants, rates):
    return json.dumps(
        {
            "tenants": [{"workload": w, "thread_percentage": p} for w, p in tenants],
            "iterations_per_s": rates,
            "device": {"sm_util": 0.5, "graphics_util": 0.6},
            "window_s": 0.4,
            "memory_mib": [100] * len(tenants),
        }
    )


LINES = [
    '{"schema": "gpushare.io/colocation/v1", "gpu_model": "X", "driver": "1", "mechanism": "mps"}',
    line([("a", 100)], [10.0]),
    line([("a", 50)], [8.0]),
    line([("a", 25)], [4.0]),
    line([("b", 100)], [100.0]),
    line([("b", 100)], [80.0]),
    line([("b", 50)], [96.0]),  # above the mean of 90 at 100%: noise, pooled with it to 92
    line([("b", 25)], [46.0]),
    line([("a", 100), ("b", 100)], [6.0, 69.0]),
    line([("a", 50), ("b", 50)], [6.0, 46.0]),
    line([("b", 25), ("a", 25)], [23.0, 4.0]),
]


@pytest.fixture(scope="module")
def small() -> TableTruth:
    return TableTruth(parse(LINES), gpu_memory_mib=1000)


@pytest.fixture(scope="module")
def shipped():
    dataset = parse((files("gpushare.data") / H200_TABLE).read_bytes().splitlines())
    return dataset, TableTruth(dataset, gpu_memory_mib=143771)


def kinds(*tenants):
    return tuple(TenantKind(name, cap) for name, cap in tenants)


def test_alone_is_the_mean_window_and_never_falls_as_the_cap_rises(small):
    assert [small.alone("a", cap) for cap in (25, 50, 75, 100)] == pytest.approx([0.4, 0.8, 0.9, 1.0])
    assert [small.alone("b", cap) for cap in (25, 50, 75, 100)] == pytest.approx([0.5, 1.0, 1.0, 1.0])


def test_below_the_lowest_cap_progress_falls_between_what_was_last_measured_and_in_proportion(small):
    assert 0.4 * 10 / 25 <= small.alone("a", 10) < 0.4
    assert small.alone("a", 12.5) == pytest.approx(0.2)  # measured in proportion from 50 to 25, so below it too
    assert small.alone("b", 10) < small.alone("b", 20) < 0.5


def test_measured_sets_come_out_as_measured_in_any_order(small):
    assert small.progress(kinds(("a", 50), ("b", 50)), MPS) == pytest.approx((0.6, 0.5))
    assert small.progress(kinds(("b", 50), ("a", 50)), MPS) == pytest.approx((0.5, 0.6))
    assert small.progress(kinds(("b", 25), ("a", 25)), MPS) == pytest.approx((0.25, 0.4))
    assert small.is_measured(kinds(("b", 50), ("a", 50)), MPS)
    assert not small.is_measured(kinds(("b", 50), ("a", 25)), MPS)


def test_other_caps_of_a_measured_set_keep_the_mean_of_what_was_kept_nearby(small):
    # (50, 25) is as far from (50, 50) as from (25, 25), ln 2, and ln 8 / ln 2 squared = 5 times as far from
    # (100, 100): a keeps 0.75 and 1 and 0.6 there, of 0.8 alone; b keeps 0.5 and 0.5 and 0.75, of 0.5 alone.
    a, b = small.progress(kinds(("a", 50), ("b", 25)), MPS)
    assert a == pytest.approx(0.8 * (0.75 + 1.0 + 0.6 / 5) / 2.2)
    assert b == pytest.approx(0.5 * (0.5 + 0.5 + 0.75 / 5) / 2.2)


def test_a_program_beside_itself_and_an_unknown_set_are_not_offered(small):
    assert small.offers(["a", "b"])
    assert small.offers(["a"])
    assert not small.offers(["a", "a"])
    with pytest.raises(SimulationError, match="no set of a, a"):
        small.progress(kinds(("a", 50), ("a", 50)), MPS)


def test_a_table_without_a_program_alone_is_refused():
    with pytest.raises(SimulationError, match="lacks b alone"):
        TableTruth(parse([*LINES[:4], LINES[6]]), gpu_memory_mib=1000)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([], "no program alone on the whole GPU"),
        ([line([("a", 100), ("b", 100)], [6.0, 69.0])], "no program alone on the whole GPU"),
        ([line([("a", 100)], [10.0])], "a alone under 100% only"),
        (
            [line([("a", 100)], [10.0]), line([("a", 50)], [8.0]), line([("b", 100)], [1.0])],
            "b alone under 100% only",
        ),
    ],
)
def test_a_table_that_knows_too_little_of_a_program_alone_is_refused(lines, why):
    """Before: a ValueError of numpy's or of an unpacking, once the simulation ran."""
    with pytest.raises(SimulationError, match=f"the table has {why}"):
        TableTruth(parse([LINES[0], *lines]), gpu_memory_mib=1000)


def test_the_shipped_table_offers_every_set_of_up_to_four_different_programs(shipped):
    _, truth = shipped
    for size, count in ((1, 10), (2, 45), (3, 120), (4, 210)):
        assert sum(truth.offers(names) for names in itertools.combinations(truth.workloads, size)) == count
    assert not truth.offers(truth.workloads[:5])


def test_every_window_of_the_shipped_table_comes_out(shipped):
    dataset, truth = shipped
    whole = {name: max(truth.alone(name, cap) for cap in (25, 50, 100)) for name in truth.workloads}
    assert set(whole.values()) == {1.0}
    seen = 0
    windows = Counter(tuple(sorted(run.tenants, key=repr)) for run in dataset.runs)
    for run in dataset.runs:
        if run.is_solo or windows[tuple(sorted(run.tenants, key=repr))] > 1:
            continue
        found = truth.progress(kinds(*((t.workload, t.thread_percentage) for t in run.tenants)), MPS)
        ratios = [
            rate / each / truth.rate_alone(tenant.workload)
            for rate, each, tenant in zip(run.iterations_per_s, found, run.tenants, strict=True)
            if each < 1.0
        ]
        assert ratios == pytest.approx([1.0] * len(ratios))
        seen += 1
    assert seen > 1000


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_interpolated_progress_stays_within_what_the_set_kept(shipped, data):
    _, truth = shipped
    names = data.draw(st.lists(st.sampled_from(truth.workloads), min_size=2, max_size=4, unique=True))
    caps = [data.draw(st.integers(10, 100)) for _ in names]
    measured = truth.caps_of(names)
    found = truth.progress(kinds(*zip(names, caps, strict=True)), MPS)
    for at, name in enumerate(names):
        clipped = min(caps[at], max(each[at] for each in measured))
        kept = [
            truth.progress(kinds(*zip(names, each, strict=True)), MPS)[at] / truth.alone(name, each[at])
            for each in measured
        ]
        lower, upper = min(kept) * truth.alone(name, clipped), max(kept) * truth.alone(name, clipped)
        assert min(1.0, lower) - 1e-9 <= found[at] <= upper + 1e-9


# A later session on another host, on which a is twice as fast: only its own windows alone say what its sets make.
LATER = [
    LINES[0],
    line([("a", 100)], [20.0]),
    line([("b", 100)], [90.0]),
    line([("a", 50), ("a", 50)], [8.0, 12.0]),
    line([("a", 75), ("a", 25)], [14.0, 3.0]),
    line([("b", 50), ("a", 50), ("a", 50)], [27.0, 8.0, 4.0]),
    line([("b", 50), ("b", 50), ("a", 50)], [27.0, 27.0, 8.0]),
]


@pytest.fixture(scope="module")
def twice() -> TableTruth:
    return TableTruth(joined({"": parse(LINES), "later": parse(LATER)}), gpu_memory_mib=1000)


def test_a_later_session_adds_its_sets_and_moves_nothing_else(small, twice):
    for name in "ab":
        assert twice.rate_alone(name) == small.rate_alone(name)
        assert twice.profiles[name] == small.profiles[name]
        assert [twice.alone(name, cap) for cap in range(1, 101)] == [
            small.alone(name, cap) for cap in range(1, 101)
        ]
    for caps in ((50, 50), (25, 25), (100, 100), (60, 30)):
        pair = kinds(*zip("ab", caps, strict=True))
        assert twice.progress(pair, MPS) == small.progress(pair, MPS)


def test_twins_are_exchangeable(twice):
    assert twice.offers(["a", "a"])
    assert twice.progress(kinds(("a", 50), ("a", 50)), MPS) == pytest.approx((0.5, 0.5)), "the mean of both"
    assert twice.progress(kinds(("a", 75), ("a", 25)), MPS) == pytest.approx((0.7, 0.15))
    assert twice.progress(kinds(("a", 25), ("a", 75)), MPS) == pytest.approx((0.15, 0.7))
    assert set(twice.caps_of(["a", "a"])) == {(25, 75), (50, 50), (75, 25)}
    assert twice.is_measured(kinds(("a", 25), ("a", 75)), MPS)
    one, other = twice.progress(kinds(("a", 60), ("a", 60)), MPS)
    assert one == pytest.approx(other), "between measured caps too"
    for order in itertools.permutations([("a", 50), ("b", 50), ("a", 50)]):
        assert twice.progress(kinds(*order), MPS) == pytest.approx((0.3, 0.3, 0.3))


def test_a_set_without_one_of_its_subsets_is_not_offered(twice):
    assert twice.offers(["b", "a", "a"])
    assert not twice.offers(["b", "b", "a"]), "b beside itself was not measured, and is left while a is frozen"


def test_freezing_one_of_two_twins_is_the_mixture_with_the_other_alone(twice):
    def rates(of):
        return twice.progress(of, MPS)

    pair = kinds(("a", 75), ("a", 25))
    frozen = mixture(rates, pair, (0.25, 1.0))
    assert frozen == pytest.approx((0.25 * 0.7, 0.25 * 0.15 + 0.75 * twice.alone("a", 25)))
    other = mixture(rates, pair, (1.0, 0.25))
    assert other == pytest.approx((0.25 * 0.7 + 0.75 * twice.alone("a", 75), 0.25 * 0.15))
    three = mixture(rates, kinds(("a", 50), ("b", 50), ("a", 50)), (0.5, 1.0, 1.0))
    assert three == pytest.approx((0.5 * 0.3, 0.5 * 0.3 + 0.5 * 0.5, 0.5 * 0.3 + 0.5 * 0.6))


def test_hindsight_knows_twins_and_jobs_of_one_program_share_a_gpu_once_it_is_measured(small, twice):
    askers = [Asker("a", 0.4, True), Asker("a", 0.4, True)]
    assert TableSearch(small).best(askers, [None, None]) is None
    best = TableSearch(twice).best(askers, [50, 50])
    assert best is not None
    assert best.summed_progress >= 1.0
    jobs = [Job(name, "a", 0.0, 100.0, 3.0, "0.5", JobClass.THROUGHPUT) for name in ("one", "other")]
    alone = simulate(jobs, 1, HardCaps(), small)
    both = simulate(jobs, 1, HardCaps(), twice)
    assert [job.end_seconds for job in alone.jobs] == pytest.approx([125.0, 250.0])  # 0.8 under 50%
    assert [job.end_seconds for job in both.jobs] == pytest.approx([200.0, 200.0])


def test_what_the_package_ships_is_the_first_session_and_what_later_ones_measured():
    table = complete_table()
    assert table.runs[: len(different_programs().runs)] == different_programs().runs
    later = table.runs[len(different_programs().runs) :]
    assert all(run.session and run.window_seconds >= 0.35 for run in later)
    shared = [run for run in later if not run.is_solo]
    assert all(len({each.workload for each in run.tenants}) < len(run.tenants) for run in shared)
    truth = TableTruth(table, gpu_memory_mib=143_771)
    sets = [
        names for size in (2, 3, 4) for names in itertools.combinations_with_replacement(truth.workloads, size)
    ]
    assert len(sets) == 55 + 220 + 715
    assert not [names for names in sets if not truth.offers(names)], "a trace forms no set that the table lacks"


def test_sessions_of_two_gpus_are_not_one_table():
    other = parse([LINES[0].replace('"X"', '"Y"'), *LATER[1:]])
    with pytest.raises(ValueError, match="Y under mps is not X"):
        joined({"": parse(LINES), "later": other})


def test_freezing_is_the_mixture_of_the_sets_with_and_without_the_frozen(small):
    def rates(of):
        return small.progress(of, MPS)

    pair = kinds(("a", 50), ("b", 50))
    assert mixture(rates, pair, (1.0, 1.0)) == pytest.approx((0.6, 0.5))
    # b runs a quarter of the time: a makes 0.6 beside it and 0.8 alone under its cap
    assert mixture(rates, pair, (1.0, 0.25)) == pytest.approx((0.25 * 0.6 + 0.75 * 0.8, 0.25 * 0.5))
    # both half of the time: in turn
    assert mixture(rates, pair, (0.5, 0.5)) == pytest.approx((0.5 * 0.8, 0.5 * 1.0))
    # in turn as far as it goes: a tenth of the time nobody runs
    assert mixture(rates, pair, (0.5, 0.4)) == pytest.approx((0.5 * 0.8, 0.4 * 1.0))
    assert mixture(rates, pair, (0.5, 0.7)) == pytest.approx((0.2 * 0.6 + 0.3 * 0.8, 0.2 * 0.5 + 0.5 * 1.0))
    assert mixture(rates, pair, (1.0, 0.0)) == pytest.approx((0.8, 0.0))
    assert mixture(rates, pair, (0.0, 0.0)) == (0.0, 0.0)
    assert mixture(rates, (), ()) == ()


@settings(max_examples=30)
@given(
    st.lists(st.floats(MIN_DUTY_RATIO, 1.0), min_size=2, max_size=2)
    | st.lists(st.floats(0.7, 1.0), min_size=3, max_size=3)
)
def test_as_many_run_at_a_time_as_under_the_throttle(duties):
    def those_who_run(of):
        return (float(len(of)),) * len(of)

    pods = {str(index): ThrottleAsk(duty) for index, duty in enumerate(duties)}
    state, now, total = NOBODY, 0.0, 0.0
    while now < 60.0:
        state = schedule(state, ThrottleAsks(pods, now), now)
        after = min(state.look_at, now + 1.0, 60.0)
        if now >= 10.0:  # until then they find their order
            total += (after - now) / 50.0 * (len(duties) - len(state.frozen)) ** 2
        now = after
    assert sum(mixture(those_who_run, ("x",) * len(duties), duties)) == pytest.approx(total, abs=0.25)
