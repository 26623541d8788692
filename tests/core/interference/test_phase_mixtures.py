"""What is promised and predicted of workloads with phases holds in each mixture of their kinds of work."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare.core.api import JobClass
from gpushare.core.interference import Profile, auto_share, mixtures, predict_worst, promised_progress
from gpushare.core.interference.phase_mixtures import MOST_MIXTURES, phase_rows
from gpushare.data import default_model
from gpushare.twin.contention import WORKLOADS

SOLO = {name: Profile(each.solo, each.iterations_per_s) for name, each in WORKLOADS.items()}
NAMES = st.sampled_from(sorted(SOLO))
TENANT = st.tuples(NAMES, st.lists(NAMES, max_size=3, unique=True), st.sampled_from((25, 50, 100)))


def program(usual, others):
    return replace(SOLO[usual], phases=tuple(SOLO[name] for name in others))


def works(profile):
    return [replace(profile, phases=()), *profile.phases]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(0, 2))
def test_every_mixture_of_a_few_comes_once_and_of_many_each_work_of_each_and_all_at_once(counts, empty):
    profiles = [program("stream", sorted(SOLO)[:count]) for count in counts]
    others, rows = phase_rows(profiles, len(profiles), 0)
    rows = np.concatenate([rows, np.full((len(others), rows.shape[1]), -1)])
    index = np.array([[*range(len(profiles)), *[-1] * empty]])
    found = [tuple(each) for lines, sets in mixtures(index, rows) for each in sets[lines == 0].tolist()]
    choices = [[at, *(row for row in rows[at].tolist() if row >= 0)] for at in range(len(profiles))]
    every = {(*each, *[-1] * empty) for each in itertools.product(*choices)} - {tuple(index[0].tolist())}
    assert set(found) <= every
    if len(every) + 1 <= MOST_MIXTURES:
        assert sorted(found) == sorted(every)
        return
    seen = {(place, row) for each in found for place, row in enumerate(each)}
    assert seen >= {(place, row) for place, some in enumerate(choices) for row in some}
    assert len(found) <= len(others) + 3


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(TENANT, min_size=1, max_size=3).filter(lambda all_: len(all_) < 3 or len(all_[2][1]) == 0))
def test_what_is_predicted_is_the_worst_of_all_mixtures(tenants):
    model = default_model()
    asked = [(program(usual, others), cap) for usual, others, cap in tenants]
    forecasts = predict_worst(model, asked)
    mixed = [
        model.predict([(work, cap) for work, (_, cap) in zip(each, asked, strict=True)])
        for each in itertools.product(*(works(profile) for profile, _ in asked))
    ]
    for at, forecast in enumerate(forecasts):
        for figure in ("progress", "lower", "upper"):
            least = min(getattr(each[at], figure) for each in mixed)
            assert getattr(forecast, figure) == pytest.approx(least, abs=1e-5)


@given(
    NAMES,
    st.lists(NAMES, max_size=3),
    st.integers(1, 100),
    st.floats(1, 5),
    st.sampled_from(JobClass),
    st.booleans(),
)
def test_the_promise_and_auto_hold_in_every_phase(usual, others, share, slowdown, job_class, is_auto):
    whole = program(usual, others)
    promised = promised_progress(whole, share, slowdown, is_auto=is_auto)
    each_promised = [promised_progress(each, share, slowdown, is_auto=is_auto) for each in works(whole)]
    assert promised == min(each_promised)
    auto = auto_share(whole, max_slowdown=slowdown, job_class=job_class)
    assert auto == max(auto_share(each, max_slowdown=slowdown, job_class=job_class) for each in works(whole))
