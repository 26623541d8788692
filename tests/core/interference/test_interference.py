"""The interference model on small synthetic sets with a known law, and the shipped artefact."""

import dataclasses
import itertools
import json
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.core.api.request import JobClass
from gpushare.core.gpu import ArtefactError
from gpushare.core.gpu.pipes import COUNTERS, Counters
from gpushare.core.interference import (
    Profile,
    ProfileError,
    Wish,
    auto_share,
    best_caps,
    best_number,
    cap_progress,
    model_from_json,
    network,
    recommended_number,
)
from gpushare.core.interference.model import Fill, errors_shape, shortfalls_shape
from gpushare.core.interference.profile import (
    CAP_FEATURES,
    CONSERVED,
    LACKINGS,
    PROBE_FEATURES,
    PROBES,
    Lacking,
    capped_vector,
    features,
    knows_caps,
    knows_probes,
    lacking,
    without,
)
from gpushare.data import default_model
from gpushare.research.dataset import Dataset, parse
from gpushare.research.interference.evaluate import EvaluationProtocol, _choices, _PredictedSet, evaluate, spearman
from gpushare.research.interference.fit import (
    fit_model,
    fitted,
    sets_of,
    split_workloads,
    unfitted,
    with_errors,
)
from gpushare.research.interference.tape import Variable
from gpushare.research.solo_profiles import profile_of


def profile(sm: float, dram: float = 0.1, *, curve: dict[int, float] | None = None) -> Profile:
    counters = Counters(sm_util=sm, sm_occupancy=sm / 3, fp32_util=sm / 4, dram_bw_util=dram, graphics_util=1.0)
    return Profile(counters, 100.0, 1000, curve or {})


def synthetic(workloads: int = 10) -> tuple[Dataset, bytes]:
    """A simple law: alone at 50% a program keeps min(1, 0.5 / use); together each keeps 1 / (sum of use)."""
    lines = [
        {"schema": "gpushare.io/colocation/v1", "gpu_model": "NVIDIA H200", "driver": "1", "mechanism": "mps"}
    ]
    use = {f"w{n}": 0.2 + 0.8 * n / workloads for n in range(workloads)}

    def run(names: list[str], rates: list[float], cap: int = 100) -> dict[str, object]:
        total = min(1.0, sum(use[name] for name in names))
        device = {"sm_util": total, "sm_occupancy": total / 3, "graphics_util": total, "dram_bw_util": total / 2}
        tenants = [{"workload": name, "thread_percentage": cap} for name in names]
        return {
            "tenants": tenants,
            "iterations_per_s": rates,
            "device": device,
            "window_s": 1.0,
            "memory_mib": [100] * len(names),
        }

    for name, drawn in use.items():
        lines += [run([name], [10.0]), run([name], [10.0 * min(1.0, 0.5 / drawn)], 50)]
    names = list(use)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            kept = 1 / max(1.0, use[one] + use[other])
            lines.append(run([one, other], [10 * kept, 10 * kept]))
    source = "\n".join(json.dumps(line) for line in lines).encode()
    return parse(source.splitlines()), source


@pytest.fixture(scope="module")
def fitted_model():
    data, _ = synthetic()
    sets = sets_of(data)
    everything = list(range(len(sets.index)))
    return data, sets, fitted(unfitted(data, sets, 3), sets, everything, seed=3, members=1, done=lambda _: None)


@pytest.mark.slow
@pytest.mark.compute
def test_the_law_is_learned(fitted_model):
    _, sets, model = fitted_model
    score = evaluate(sets, model, EvaluationProtocol.AS_IS, seed=1, members=1, done=lambda *_: None).by_tenants[2]
    assert score.mae < 0.05
    assert score.mae < score.baseline_mae["kace"]
    assert score.rank_correlation > 0.9


@pytest.mark.slow
@pytest.mark.compute
def test_the_same_dataset_and_seed_give_the_same_parameters(fitted_model):
    data, sets, model = fitted_model
    again = fitted(
        unfitted(data, sets, 3), sets, list(range(len(sets.index))), seed=3, members=1, done=lambda _: None
    )
    assert again.to_json() == model.to_json()


@pytest.mark.slow
@pytest.mark.compute
def test_an_evaluation_counts_who_is_inside_and_below_by_the_progress_alone(fitted_model):
    _, sets, bare = fitted_model
    bounds = np.zeros(bare.errors.shape)
    bounds[..., 0], bounds[..., 1] = -1.0, 1.0  # of the progress alone, so everybody is inside
    tenants = sum(map(len, sets.index))

    def counts(model):
        found = evaluate(sets, model, EvaluationProtocol.AS_IS, seed=1, members=1, done=lambda *_: None)
        assert sum(each.n for each in found.by_progress_alone) == tenants
        assert all(one.to == other.above for one, other in itertools.pairwise(found.by_progress_alone))
        return found.by_progress_alone

    assert all(
        (each.inside, each.below) == (1.0, 0.0) for each in counts(dataclasses.replace(bare, errors=bounds))
    )
    nobody = counts(dataclasses.replace(bare, errors=np.zeros(bare.errors.shape)))
    assert sum(each.n * each.below for each in nobody) > 0.2 * tenants


def test_held_out_sets_hold_a_workload_never_fitted_on():
    sets = sets_of(synthetic()[0])
    for fold in range(5):
        training, left_out = split_workloads(sets, fold)
        unseen = set(sets.workloads[fold::5])
        assert not any(unseen & set(sets.names(at)) for at in training)
        assert all(unseen & set(sets.names(at)) for at in left_out)
        assert sorted(training + left_out) == list(range(len(sets.index)))


def test_too_little_to_fit_is_said_in_a_sentence():
    data, source = synthetic(3)
    with pytest.raises(ValueError, match="too few to fit"):
        fit_model(data, seed=1, source=source, progress=lambda *_: None)


def test_the_derivative_is_that_of_finite_differences():
    chance = np.random.default_rng(0)
    shapes = network.shapes(3, 4)
    parameters = {name: chance.normal(size=shape) * 0.5 for name, shape in shapes.items()}
    inputs, caps = chance.normal(size=(4, 3)), np.array([1.0, 0.5, 1.0, 0.25])
    uses = np.array([[0.9, 0.6, 1.1, 0.3]])
    index, present = np.array([[0, 2], [1, 3], [0, 1]]), np.array([[1.0, 1.0], [1.0, 1.0], [0.0, 1.0]])

    def total(values):
        return (
            network.stretch(network.pressure(values, inputs, caps, uses), index, present).sum(axis=1).sum(axis=0)
        )

    variables = {name: Variable(each) for name, each in parameters.items()}
    total(variables).backward()
    for name, at in (("w1", (1, 2)), ("b1", (0,)), ("w2", (2, 6)), ("b2", (0,)), ("b2", (8,))):
        step = np.zeros_like(parameters[name])
        step[at] = 1e-5
        up = total({**parameters, name: parameters[name] + step})
        down = total({**parameters, name: parameters[name] - step})
        assert variables[name].gradient[at] == pytest.approx((up - down) / 2e-5, rel=1e-4, abs=1e-7)


shares = st.floats(0.05, 1.0)
tenants = st.lists(st.tuples(shares, shares, st.sampled_from([25, 40, 50, 75, 100])), min_size=1, max_size=6)


@given(tenants)
def test_predictions_are_ratios_inside_their_interval_and_never_above_alone(drawn):
    model = default_model()
    loads = [(profile(sm, dram), cap) for sm, dram, cap in drawn]
    for (each, cap), forecast in zip(loads, model.predict(loads), strict=True):
        assert 0 <= forecast.lower <= forecast.progress <= forecast.upper <= 1.1
        assert forecast.progress <= cap_progress(each, cap / 100) + 1e-6


@given(tenants)
def test_what_tenants_draw_of_the_memory_bus_is_never_more_than_it_holds(drawn):
    model = default_model()
    loads = [(profile(sm, dram), cap) for sm, dram, cap in drawn]
    each = [dram * forecast.progress for (_, dram, _), forecast in zip(drawn, model.predict(loads), strict=True)]
    alone = [
        dram * cap_progress(known, cap / 100) for (_, dram, _), (known, cap) in zip(drawn, loads, strict=True)
    ]
    assert sum(each) <= max(model.capacity[0], *alone, 0.0) + 1e-4


@given(
    st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.5)), min_size=1, max_size=8),
)
def test_a_full_resource_is_used_to_the_full_and_one_with_room_slows_nobody(drawn):
    kept, uses = np.array(drawn).T[:, :, None]
    left = network.conserved(kept, uses)
    holds = max(1.0, uses.max())
    assert (left <= kept + 1e-9).all()
    assert (left * uses).sum() == pytest.approx(min(holds, (kept * uses).sum()), abs=1e-6)


@given(tenants, st.randoms(use_true_random=False))
def test_the_order_of_the_tenants_does_not_matter(drawn, chance):
    model = default_model()
    order = list(range(len(drawn)))
    chance.shuffle(order)
    loads = [(profile(sm, dram), cap) for sm, dram, cap in drawn]
    straight, mixed = model.predict(loads), model.predict([loads[at] for at in order])
    for place, at in enumerate(order):
        assert mixed[place].progress == pytest.approx(straight[at].progress, abs=1e-4)


def test_a_missing_counter_or_rate_does_not_stop_a_prediction():
    bare = Profile(Counters(sm_util=0.5))
    forecasts = default_model().predict([(bare, 100), (profile(0.9), 50)])
    assert all(0 < forecast.progress <= 1 for forecast in forecasts)


def test_the_artefact_comes_back_as_written_and_says_what_is_wrong_with_others():
    model = default_model()
    assert model_from_json(model.to_json()).to_json() == model.to_json()
    newer = {**json.loads(model.to_json()), "version": 7}
    with pytest.raises(ArtefactError, match="version 7"):
        model_from_json(json.dumps(newer))
    with pytest.raises(ArtefactError, match="not an interference model"):
        model_from_json('{"artefact": "other"}')
    with pytest.raises(ArtefactError, match="damaged"):
        model_from_json(model.to_json()[:-40])
    with pytest.raises(ArtefactError, match="members"):
        model_from_json(json.dumps({**json.loads(model.to_json()), "members": []}))
    with pytest.raises(ArtefactError, match="capacit"):
        model_from_json(json.dumps({**json.loads(model.to_json()), "capacity": {"dram_bw_util": 0.0}}))


def test_the_shapes_of_the_file_are_those_of_the_law():
    """The reader has no numpy and names them itself: a law with others is another version of the artefact."""
    model = default_model()
    inputs = len(features(profile(0.9), 1.0))
    probed = inputs - PROBE_FEATURES
    other = dataclasses.replace(
        model,
        mean=np.zeros(inputs),
        scale=np.ones(inputs),
        members=({name: np.zeros(shape) for name, shape in network.shapes(inputs, hidden=3).items()},),
        errors=np.zeros(errors_shape()),
        shortfalls=np.zeros(shortfalls_shape()),
        fill=Fill(np.zeros((1 + probed - CAP_FEATURES, CAP_FEATURES)), np.zeros((1 + probed, PROBE_FEATURES))),
        capacity=(1.0,) * len(CONSERVED),
    )
    assert model_from_json(other.to_json()).to_json() == other.to_json()


def test_an_artefact_of_an_older_law_is_refused_and_the_way_out_named():
    value = json.loads(default_model().to_json())
    with pytest.raises(ArtefactError, match=r"version 1.*gpushare model fit"):
        model_from_json(json.dumps({**value, "version": 1}))
    narrow = [{**member, "b2": member["b2"][:-1]} for member in value["members"]]
    with pytest.raises(ArtefactError, match="damaged"):
        model_from_json(json.dumps({**value, "members": narrow}))


def test_a_dataset_that_never_fills_the_memory_bus_does_not_bound_it(fitted_model):
    data, sets, model = fitted_model
    assert model.capacity == (0.8,)
    full = dataclasses.replace(
        data, runs=tuple(dataclasses.replace(r, counters=Counters(dram_bw_util=0.9)) for r in data.runs)
    )
    assert unfitted(full, sets, 1).capacity == (0.9,)


def test_another_gpu_widens_the_interval_only():
    model = default_model()
    loads = [(profile(0.8), 50), (profile(0.6), 50)]
    here, elsewhere = model.predict(loads), model.for_gpu("NVIDIA A100-SXM4-80GB").predict(loads)
    assert model.for_gpu("NVIDIA H200") is model
    assert [f.progress for f in here] == [f.progress for f in elsewhere]
    assert all(b.upper - b.lower > a.upper - a.lower for a, b in zip(here, elsewhere, strict=True))


def test_profiles_that_say_too_little_are_refused_with_the_reason():
    data, _ = synthetic()
    with pytest.raises(ProfileError, match="no solo run"):
        profile_of(data, "nobody")
    short = dataclasses.replace(
        data, runs=tuple(dataclasses.replace(run, window_seconds=0.1) for run in data.runs)
    )
    with pytest.raises(ProfileError, match="shorter"):
        profile_of(short, "w3")
    first = next(run for run in data.runs if run.is_solo)
    noisy = dataclasses.replace(
        data, runs=(*data.runs, dataclasses.replace(first, iterations_per_s=(first.iterations_per_s[0] / 4,)))
    )
    with pytest.raises(ProfileError, match="noisy"):
        profile_of(noisy, "w0")


def test_caps_between_the_measured_ones_lie_between():
    measured = profile(0.9, curve={100: 1.0, 50: 0.6, 25: 0.3})
    assert cap_progress(measured, 0.375) == pytest.approx(0.45)
    assert cap_progress(measured, 0.10) == pytest.approx(0.12)
    unmeasured = profile(0.5)
    values = [cap_progress(unmeasured, cap) for cap in (0.1, 0.3, 0.5, 0.8, 1.0)]
    assert values == sorted(values)
    assert values[-1] == 1.0


def test_a_latency_tenant_runs_uncapped_and_tolerances_hold_where_they_can():
    model = default_model()
    heavy = Wish(profile(0.95, curve={100: 1.0, 50: 0.55, 25: 0.28}), max_slowdown=5.0)
    light = Wish(profile(0.05, 0.01, curve={100: 1.0, 50: 1.0, 25: 1.0}), JobClass.LATENCY, 5.0)
    advice = best_caps(model, [light, heavy])
    assert advice.thread_percentages[0] == 100
    assert advice.summed_progress > 1
    if advice.within_tolerance:
        assert all(forecast.lower >= 1 / 5 for forecast in advice.forecasts)
    strict = best_caps(model, [dataclasses.replace(heavy, max_slowdown=1.0)] * 3)
    assert not strict.within_tolerance


def test_the_best_number_is_one_for_tenants_that_tolerate_nothing():
    model = default_model()
    heavy = Wish(profile(0.95, curve={100: 1.0, 50: 0.5, 25: 0.25}), max_slowdown=1.06)
    advices = best_number(model, [heavy] * 3)
    assert [len(advice.forecasts) for advice in advices] == [1, 2, 3]
    assert recommended_number(advices) == 1


@pytest.mark.parametrize(
    ("slowdown", "job_class", "share"),
    [
        (4.0, JobClass.THROUGHPUT, 45),
        (2.0, JobClass.THROUGHPUT, 70),
        (1.0, JobClass.THROUGHPUT, 100),
        (4.0, JobClass.LATENCY, 100),
    ],
)
def test_auto_is_the_least_share_that_costs_the_root_of_what_is_tolerated(slowdown, job_class, share):
    measured = profile(0.9, curve={100: 1.0, 50: 0.55, 25: 0.3})
    assert auto_share(measured, max_slowdown=slowdown, job_class=job_class) == share


def test_spearman_knows_order_only():
    assert spearman([1, 2, 3, 4], [1, 10, 100, 1000]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert np.isnan(spearman([1, 1, 1], [1, 2, 3]))


def test_ten_thousand_sets_are_predicted_within_a_small_part_of_a_second():
    model, chance = default_model(), np.random.default_rng(0)
    table = model.table([profile(x) for x in chance.uniform(0.1, 1, 60)], [50] * 60)
    index = chance.integers(0, 60, (10_000, 3))
    model.predict_sets(table, index)
    began = time.process_time()
    model.predict_sets(table, index)
    # 50 ms on one idle core is the bar, kept by docs/measurements; a loaded machine gets four times that here.
    assert time.process_time() - began < 0.2


def test_a_profile_that_lacks_something_has_an_interval_of_its_own_and_the_law_alone_decides_the_rest():
    shipped = default_model()
    bounds = (
        np.broadcast_to([-0.1, 0.1], shipped.errors.shape)
        * (1 + np.arange(len(LACKINGS)))[:, None, None, None, None]
    )
    model = dataclasses.replace(shipped, errors=bounds)
    full = Profile(
        Counters(sm_util=0.8, sm_occupancy=0.3, integer_util=0.1, dram_bw_util=0.2, graphics_util=1.0),
        100.0,
        1000,
        {50: 0.6},
        {50: Counters(sm_util=0.45)},
        dict.fromkeys(PROBES, (0.6, 0.5)),
    )
    assert [lacking(without(full, what)) for what in LACKINGS] == list(LACKINGS)
    for one, other in itertools.product(LACKINGS, repeat=2):
        pair = [(without(full, one), 50), (without(full, other), 50)]
        forecasts = model.predict(pair)
        assert [each.progress for each in forecasts] == [each.progress for each in shipped.predict(pair)]
        for each, (mine, _) in zip(forecasts, pair, strict=True):
            width = 0.1 * (1 + (one | other)) * cap_progress(mine, 0.5)
            assert each.lower == pytest.approx(max(0.0, each.progress - width))


def test_caps_that_keep_tenants_apart_have_intervals_of_their_own():
    shipped = default_model()
    bounds = np.zeros(shipped.errors.shape)
    bounds[:, 0, ..., 0], bounds[:, 1, ..., 0] = -0.2, -0.1
    model = dataclasses.replace(shipped, errors=bounds)
    for caps, width in (((50, 50), 0.1), ((60, 50), 0.2), ((34, 33, 33), 0.1), ((50, 25, 50), 0.2)):
        forecasts = model.predict([(profile(0.5), cap) for cap in caps])
        relative = [
            (each.progress - each.lower) / cap_progress(profile(0.5), cap / 100)
            for each, cap in zip(forecasts, caps, strict=True)
        ]
        assert relative == pytest.approx([width] * len(caps), abs=1e-6)


def test_intervals_are_relative_to_the_progress_alone():
    model = default_model()
    small = profile(1.0, 0.02, curve={10: 0.1})
    for count in (1, 2, 4, 8):
        for each in model.predict([(small, 10)] * count):
            assert each.progress > 0.08, count
            assert each.lower > 0.6 * each.progress, "not the error of a tenant that has ten times as much to lose"
    wide, narrow = (model.predict([(profile(1.0, 0.02, curve={25: least}), 25)] * 2)[0] for least in (0.5, 0.25))
    assert narrow.upper - narrow.lower < 0.7 * (wide.upper - wide.lower)


def test_a_lone_tenants_interval_says_how_its_cap_is_known():
    measured = profile(0.9, curve={50: 0.6})
    seen = dataclasses.replace(measured, capped={50: Counters(sm_util=0.45)})
    model = default_model()
    for one, cap, width in ((seen, 50, 0.1), (measured, 50, 0.3), (measured, 100, 0.1)):
        [forecast] = model.predict([(one, cap)])
        assert forecast.progress - forecast.lower == pytest.approx(width * cap_progress(one, cap / 100))
        pair = model.predict([(one, cap)] * 2)
        assert pair[0].progress < forecast.progress, "lone tenants and pairs do not disturb each other in one call"


def test_counters_under_caps_that_were_not_measured_are_filled_by_what_other_programs_show(fitted_model):
    _, sets, model = fitted_model
    known = sets.profiles[-1]
    poorer = dataclasses.replace(known, capped={})
    assert knows_caps(known)
    assert not knows_caps(poorer)
    pair = [(sets.profiles[3], 100), (known, 100)]
    told, guessed = model.predict(pair), model.predict([pair[0], (poorer, 100)])
    assert guessed[1].progress == pytest.approx(told[1].progress, abs=0.1)
    fill = dataclasses.replace(model.fill, caps=np.full_like(model.fill.caps, 4.0))
    ignored = dataclasses.replace(model, fill=fill)
    assert ignored.predict(pair) == told
    assert ignored.predict([pair[0], (poorer, 100)]) != guessed


def probed(name: str = "w") -> list[dict[str, object]]:
    """Solo runs of one workload and of the probes, and the workload beside each: it keeps 0.5, the probe 0.25."""
    device = {"sm_util": 0.8, "sm_occupancy": 0.3, "integer_util": 0.1, "dram_bw_util": 0.2, "graphics_util": 1.0}
    alone = {name: 10.0, **dict.fromkeys(PROBES, 100.0)}
    lines = []
    for who in ([name], *([probe] for probe in PROBES), *([name, probe] for probe in PROBES)):
        tenants = [
            {"workload": each, "thread_percentage": 100} | ({"probe": True} if each in PROBES else {})
            for each in who
        ]
        kept = [1.0] if len(who) == 1 else [0.5, 0.25]
        rates = [alone[each] * part for each, part in zip(who, kept, strict=True)]
        lines.append({"tenants": tenants, "iterations_per_s": rates, "device": device, "window_s": 1.0})
    return lines


def test_runs_beside_probes_belong_to_the_profile_and_are_no_sets():
    header = {"schema": "gpushare.io/colocation/v1", "gpu_model": "G", "driver": "1", "mechanism": "mps"}
    data = parse(json.dumps(line) for line in [header, *probed()])
    assert data.notes() == ()
    assert list(data.solo) == ["w"]
    assert list(data.shared_runs()) == []
    found = profile_of(data, "w")
    assert found.probes == dict.fromkeys(PROBES, (0.5, 0.25))
    assert lacking(found) == Lacking.CAP_CURVE
    sets = sets_of(data)
    assert sets.workloads == ("w",)
    assert sets.beside == tuple((0, row, 0.5, 0.25) for row in range(len(PROBES)))


def test_what_a_workload_does_beside_a_probe_decides_and_is_filled_where_it_was_not_measured():
    model = default_model()
    counters = Counters(sm_util=0.9, sm_occupancy=0.5, integer_util=0.1, dram_bw_util=0.3, graphics_util=1.0)
    strong, weak = (
        Profile(counters, 300.0, 1000, probes=dict.fromkeys(PROBES, both)) for both in ((0.9, 0.1), (0.1, 0.9))
    )
    other = profile(0.9, 0.3)
    forecasts = {
        who: model.predict([(each, 100), (other, 100)]) for who, each in (("strong", strong), ("weak", weak))
    }
    assert forecasts["strong"][0].progress > forecasts["weak"][0].progress + 0.1
    assert forecasts["strong"][1].progress < forecasts["weak"][1].progress
    unmeasured = dataclasses.replace(strong, probes={PROBES[0]: (0.9, 0.1)})
    assert not knows_probes(unmeasured)
    assert model.predict([(unmeasured, 100), (other, 100)]) == model.predict(
        [(dataclasses.replace(strong, probes={}), 100), (other, 100)]
    )


def test_a_dataset_without_probes_gives_a_model_that_takes_no_notice_of_them(fitted_model):
    _, sets, model = fitted_model
    known = sets.profiles[-1]
    beside = dataclasses.replace(known, probes=dict.fromkeys(PROBES, (0.9, 0.1)))
    assert not model.fill.probes.any()
    assert model.predict([(known, 100), (known, 100)])[0].progress == pytest.approx(
        model.predict([(beside, 100), (known, 100)])[0].progress, abs=0.1
    )


@pytest.mark.slow
@pytest.mark.compute
def test_programs_measured_at_100_alone_are_enough_to_fit():
    data, _ = synthetic()
    whole = dataclasses.replace(
        data, runs=tuple(run for run in data.runs if all(t.thread_percentage == 100 for t in run.tenants))
    )
    sets = sets_of(whole)
    assert not any(map(knows_caps, sets.profiles))
    model = fitted(unfitted(whole, sets, 3), sets, range(len(sets.index)), seed=3, members=1, done=lambda _: None)
    accuracy = evaluate(sets, model, EvaluationProtocol.AS_IS, seed=1, members=1, done=lambda *_: None).by_tenants[
        2
    ]
    assert accuracy.mae < 0.08


def test_the_gap_between_kernels_is_told_apart_where_the_counter_is_nearly_full():
    cap, before = 1.0, -CAP_FEATURES - PROBE_FEATURES - 1
    short, long = (features(profile(sm), cap) for sm in (0.92, 0.97))
    assert np.abs(short[before] - long[before]) > 0.4


@pytest.mark.slow
@pytest.mark.compute
def test_intervals_of_poorer_profiles_are_calibrated_where_they_err():
    data, _ = synthetic()
    sets = sets_of(data)
    everything = list(range(len(sets.index)))
    model = fitted(unfitted(data, sets, 3), sets, everything, seed=3, members=1, done=lambda _: None)
    exact = [(at, np.array([[true, true, true] for true in sets.progress[at]])) for at in everything]
    alone = np.array([cap_progress(sets.profiles[who], cap / 100) for who, cap in sets.cells])
    off = [(at, true - 0.2 * alone[list(sets.index[at])][:, None]) for at, true in exact]
    high = [(at, true + 0.3 * alone[list(sets.index[at])][:, None]) for at, true in exact]
    fitted_to = with_errors(model, sets, exact, {Lacking.COUNTERS: off, Lacking.CAP_CURVE: high})
    errors, shortfalls = fitted_to.errors, fitted_to.shortfalls
    assert errors[Lacking.COUNTERS] == pytest.approx(np.full_like(errors[Lacking.COUNTERS], 0.2))
    assert not errors[Lacking.COUNTERS | Lacking.CAP_CURVE].any()
    assert not errors[Lacking.NOTHING].any()
    assert shortfalls[Lacking.CAP_CURVE] == pytest.approx(np.full_like(shortfalls[Lacking.CAP_CURVE], -0.3))
    assert not np.delete(shortfalls, Lacking.CAP_CURVE, axis=0).any(), "no shortfall where more was kept"


def test_sets_predicted_in_parts_are_those_predicted_at_once():
    model, chance = default_model(), np.random.default_rng(0)
    table = model.table([profile(x) for x in chance.uniform(0.1, 1, 20)], [50] * 20)
    index = chance.integers(0, 20, (2 * 2048 + 7, 2))
    whole = model.predict_sets(table, index)
    for at in (0, 2047, 2048, 4102):
        assert model.predict_sets(table, index[at : at + 1]).progress[0] == pytest.approx(
            whole.progress[at], abs=1e-5
        )


def test_of_two_choices_alike_the_one_that_surely_keeps_the_tolerance_is_chosen(fitted_model):
    sets = fitted_model[1]
    names = sets.names(0)
    cells = tuple((sets.workloads.index(name), cap) for cap in (100, 50, 25) for name in names)
    three = dataclasses.replace(
        sets, cells=cells, index=((0, 1), (2, 3), (4, 5)), progress=((0.9, 0.4), (0.6, 0.6), (0.3, 0.3))
    )
    promises = {0: (0.8, 0.52, 0.2), 1: (0.65, 0.63, 0.05), 2: (0.3, 0.3, 0.05)}
    judged = [
        _PredictedSet(at, np.array([[p, p - width, p + width, p - width / 2] for p in (one, other)]), {})
        for at, (one, other, width) in promises.items()
    ]
    choices = _choices(three, judged, 1)
    assert (choices.caps_sets, choices.caps_broken) == (1, 0)
    assert choices.caps == pytest.approx(1.0)


@given(st.floats(0.0, 1.0))
def test_counters_under_a_cap_lie_on_the_lines_between_the_measured_ones(cap):
    under = {25: Counters(sm_util=0.2, dram_bw_util=0.3), 50: Counters(sm_util=0.5, dram_bw_util=0.4)}
    known = dataclasses.replace(profile(0.9, 0.5), capped=under)
    now = capped_vector(known, cap)
    assert now[COUNTERS.index("sm_util")] == pytest.approx(
        np.interp(100 * cap, [0, 25, 50, 100], [0, 0.2, 0.5, 0.9])
    )
    assert now[COUNTERS.index("dram_bw_util")] == pytest.approx(
        np.interp(100 * cap, [0, 25, 50, 100], [0, 0.3, 0.4, 0.5])
    )
