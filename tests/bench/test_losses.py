"""Where ours loses against hindsight: what the variants know is the truth, and ours is what is compared with."""

import numpy as np
import pytest
from bench.losses import HINDSIGHT, OURS, FearlessModel, TrueModel, report, true_profiles
from bench.retractions import GPU_MEMORY_MIB
from bench.table_plant import read_table

from gpushare.core.interference import promised_progress
from gpushare.data import default_model
from gpushare.sim.table_truth import TableTruth

CG, LU, PPO = "cg-fp64-poisson-224", "lu-refine-fp32-4096", "ppo-app-fp32-e8192"


@pytest.fixture(scope="module")
def truth():
    return TableTruth(read_table(), gpu_memory_mib=GPU_MEMORY_MIB)


def predicted(model, profiles, tenants):
    forecasts = model.predict([(profiles[name], cap) for name, cap in tenants])
    return [(each.lower, each.progress, each.upper) for each in forecasts]


def test_true_predictions_are_the_tables_own_rates(truth):
    profiles = true_profiles(truth)
    for tenants in ([(CG, 40)], [(CG, 50), (LU, 25)], [(PPO, 33), (LU, 33), (CG, 33)]):
        rates = truth.progress_under([name for name, _ in tenants], [[cap for _, cap in tenants]])[0]
        sure = predicted(TrueModel.of(default_model(), truth, is_sure=True), profiles, tenants)
        assert np.allclose(np.array(sure), rates[:, None])
        bounded = predicted(TrueModel.of(default_model(), truth, is_sure=False), profiles, tenants)
        assert np.allclose([progress for _, progress, _ in bounded], rates)
        assert all(lower < progress for lower, progress, _ in bounded)


def test_a_set_that_the_table_lacks_is_the_models_word(truth):
    profiles, twice = true_profiles(truth), [(CG, 50), (CG, 50)]
    true = TrueModel.of(default_model(), truth, is_sure=True)
    assert predicted(true, profiles, twice) == predicted(default_model(), profiles, twice)


def test_without_intervals_places_are_chosen_by_what_is_expected_and_learning_goes_on_by_the_model(truth):
    profiles, tenants = true_profiles(truth), [(CG, 50), (LU, 50)]
    fearless = FearlessModel.of(default_model())
    assert predicted(fearless, profiles, tenants) == predicted(default_model(), profiles, tenants)
    table = fearless.table([profiles[name] for name, _ in tenants], [cap for _, cap in tenants])
    prediction = fearless.predict_sets(table, np.array([[0, 1]]))
    assert np.array_equal(prediction.lower, prediction.progress)


def test_true_profiles_tell_the_promises_that_the_table_tells(truth):
    for name, profile in true_profiles(truth).items():
        assert promised_progress(profile, 30, 1.5) == promised_progress(truth.true_profiles[name], 30, 1.5)


@pytest.mark.compute
def test_gains_are_told_against_ours():
    variant = "true predictions and progress"
    lines = list(report([3], 3.0, 30, 4, [variant]))
    assert [line[:44].strip() for line in lines[1:]] == [HINDSIGHT, OURS, variant]
    throughput, of, gain = zip(*(map(float, line[44:].split()[:3]) for line in lines[1:]), strict=True)
    assert gain[1] == 0.0
    assert of[0] == 1.0
    assert gain[2] == pytest.approx(throughput[2] - throughput[1], abs=0.0011)
    assert of[1] == pytest.approx(throughput[1] / throughput[0], abs=0.0011)
