from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare.core.interference import Profile, cap_progress
from gpushare.data import default_model
from gpushare.twin.contention import WORKLOADS, TwinLoad
from gpushare.twin.drawn import DrawnProgress

kinds = st.tuples(st.sampled_from(sorted(WORKLOADS)), st.integers(1, 100))
sets = st.lists(kinds, min_size=1, max_size=6)


def load(kind):
    name, cap = kind
    return TwinLoad(WORKLOADS[name].solo, cap, WORKLOADS[name].iterations_per_s)


@settings(max_examples=40, deadline=None)
@given(sets, st.randoms())
def test_a_set_has_one_truth_whatever_the_order_and_the_process(tenants, random):
    shuffled = tenants.copy()
    random.shuffle(shuffled)
    first, second = DrawnProgress(default_model), DrawnProgress(default_model)
    assert sorted(zip(tenants, first([load(k) for k in tenants]), strict=True)) == sorted(
        zip(shuffled, second([load(k) for k in shuffled]), strict=True)
    )


@settings(max_examples=40, deadline=None)
@given(sets)
def test_nobody_runs_faster_beside_others_than_alone_under_its_cap(tenants):
    loads = [load(kind) for kind in tenants]
    for each, progress in zip(loads, DrawnProgress(default_model)(loads), strict=True):
        alone = min(1.0, cap_progress(Profile(each.solo), each.thread_percentage / 100))
        assert 0 < progress <= max(0.01, alone)


def test_alone_and_uncapped_everything_runs_at_its_own_speed_and_the_model_is_not_even_read():
    def unread():
        raise AssertionError("read")

    for name in WORKLOADS:
        assert DrawnProgress(unread)([load((name, 100))]) == (1.0,)


def test_the_noise_is_the_models_residual():
    model = default_model()
    pairs = [[load((a, 50)), load((b, 50))] for a in WORKLOADS for b in WORKLOADS if a <= b]
    misses = []
    for pair in pairs:
        drawn = DrawnProgress(lambda: model)(pair)
        forecasts = model.predict([(Profile(each.solo, each.iterations_per_s), 50) for each in pair])
        misses += [(d - s.progress) / (s.upper - s.lower) for d, s in zip(drawn, forecasts, strict=True)]
    spread = sum(miss * miss for miss in misses) / len(misses)
    assert 0.15 < spread**0.5 < 0.4  # 1/3.29 of the interval's width is one standard deviation


@settings(max_examples=40, deadline=None)
@given(sets.filter(lambda tenants: len(tenants) > 1))
def test_tenants_that_are_alike_run_alike(tenants):
    progress = DrawnProgress(default_model)([load(kind) for kind in tenants])
    assert len(set(zip(tenants, progress, strict=True))) == len(set(tenants))


def test_two_that_fill_the_memory_bus_slow_each_other_even_under_caps():
    drawn = DrawnProgress(default_model)
    [alone], (one, other) = drawn([load(("stream", 50))]), drawn([load(("stream", 50))] * 2)
    assert one == other < 0.85 * alone


@settings(max_examples=40, deadline=None)
@given(sets)
def test_no_set_draws_more_of_the_memory_bus_than_there_is(tenants):
    loads = [load(kind) for kind in tenants]
    drawn = [
        each.solo.dram_bw_util * progress
        for each, progress in zip(loads, DrawnProgress(default_model)(loads), strict=True)
    ]
    most = max(each.solo.dram_bw_util for each in loads)
    # a tenant that hardly moves is given LEAST_PROGRESS
    assert sum(drawn) <= max(default_model().capacity[0], most) + 0.01 * len(loads)


def test_a_set_is_computed_once():
    calls = []

    def model():
        calls.append(1)
        return default_model()

    drawn = DrawnProgress(model)
    pair = [load(("stream", 50)), load(("bert-infer", 100))]
    assert drawn(pair) == tuple(reversed(drawn(pair[::-1])))
    assert len(calls) == 1


def test_a_types_new_name_draws_the_same_truth():
    """The draw once hung on a repr: a rename of the type changed what the twin's GPUs do."""

    class AnotherName(TwinLoad):
        __slots__ = ()

    pair = [load(("stream", 50)), load(("stream", 50))]
    renamed = [AnotherName(each.solo, each.thread_percentage, each.iterations_per_s) for each in pair]
    assert DrawnProgress(default_model)(renamed) == DrawnProgress(default_model)(pair)
