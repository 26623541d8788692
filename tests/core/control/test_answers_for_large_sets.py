"""How far the predictions for sets of more tenants than all subsets are asked about differ from those of fewer."""

import itertools
import random
from importlib.resources import files
from statistics import mean

from gpushare.core.control.model_answers import ModelAnswer, Question, _mixture
from gpushare.core.interference import expectation
from gpushare.core.progress import TenantLoad
from gpushare.data import default_model
from gpushare.research.dataset import parse
from gpushare.research.solo_profiles import profile_of

SETS, TENANTS = 20, 5


def test_two_tenants_as_if_never_stopped_at_once_are_near_the_mixture_of_all_subsets() -> None:
    """On sets of five programs drawn from the shipped dataset, of which every subset can be asked about."""
    data = parse((files("gpushare.data") / "h200-colocation.jsonl").read_bytes().splitlines())
    profiles = [profile_of(data, workload) for workload in data.solo]
    predict = expectation(default_model().for_gpu(data.gpu_model))
    draw = random.Random(1)
    differences, surpluses = [], []
    for _ in range(SETS):
        chosen = draw.choices(profiles, k=TENANTS)
        loads = tuple(TenantLoad(p.counters, 20, p.cap_curve, p.capped, p.iterations_per_s) for p in chosen)
        question = Question(data.gpu_model, tuple(map(str, range(TENANTS))), loads)
        parts = {each: tuple(predict(question.of(each).loads)) for each in question.parts()}
        answer = ModelAnswer(question, tuple(predict(loads)), parts)
        for throttled in itertools.combinations(range(TENANTS), 2):
            duties = [draw.choice((0.05, 0.2, 0.5, 0.8)) if at in throttled else 1.0 for at in range(TENANTS)]
            weighted = _mixture(duties, throttled)
            for at in range(TENANTS):
                exact, near = answer._mixed(at, weighted), answer._nearly(at, duties, throttled)
                assert exact is not None
                assert near is not None
                differences.append(abs(near.mean - exact.mean))
                surpluses.append(near.error - exact.error)
    assert mean(differences) < 0.001
    assert max(differences) < 0.02
    assert -0.005 < mean(surpluses) < 0.005
