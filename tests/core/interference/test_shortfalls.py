"""What a tenant is likely to keep: the model's shortfalls, by what its neighbours keep busy (docs/adr/0252)."""

import itertools
import json
from dataclasses import replace
from importlib.resources import files

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare.core.gpu import SHORTFALLS, ArtefactError, artefact_from_json
from gpushare.core.interference import Profile, TenantTable, cap_progress, model_from_json
from gpushare.core.interference.model import (
    KEPT_EDGES,
    LOAD_EDGES,
    are_apart,
    likely_below,
    load_strata,
    loads_of,
    shortfalls_shape,
)
from gpushare.data import H200_COLOCATION, default_model
from gpushare.research.dataset import parse
from gpushare.research.interference.fit import predicted, sets_of
from gpushare.twin.contention import WORKLOADS

PROFILES = [Profile(solo.solo, solo.iterations_per_s) for _, solo in sorted(WORKLOADS.items())]
tenants = st.tuples(st.sampled_from(range(len(PROFILES))), st.sampled_from((10, 25, 50, 100)))


def predict(model, chosen):
    table: TenantTable = model.table([PROFILES[at] for at, _ in chosen], [cap for _, cap in chosen])
    return model.predict_sets(table, np.arange(len(chosen))[None]), table


@settings(max_examples=60, deadline=None)
@given(st.lists(tenants, min_size=1, max_size=6))
def test_what_is_likely_lies_between_the_lower_bound_and_what_is_expected(chosen):
    for model in (default_model(), replace(default_model(), widening=2.0)):
        found, _ = predict(model, chosen)
        assert (found.lower <= found.likely).all()
        assert (found.likely <= found.progress).all()


def test_it_is_the_shortfall_of_the_strata_that_the_tenant_is_in():
    model = default_model()
    marked = np.arange(np.prod(shortfalls_shape()), dtype=float).reshape(shortfalls_shape())
    marked = -(marked + 1) / marked.size / 100  # each another, too small to reach a lower stratum's edge
    model = replace(model, shortfalls=marked, errors=model.errors - 1.0)
    for chosen in ([(0, 100), (3, 100)], [(0, 25), (3, 50), (5, 25)], [(2, 50), (4, 100), (5, 100), (1, 100)]):
        found, table = predict(model, chosen)
        kept = found.progress[0] / table.alone
        lacks = int(np.bitwise_or.reduce(table.lacks))
        apart = int(are_apart(np.array(table.caps.sum())))
        loads = [min(PROFILES[at].counters.sm_util, cap / 100) for at, cap in chosen]
        for place, part in enumerate(kept):
            load = np.searchsorted(LOAD_EDGES, sum(loads) - loads[place], side="right")
            expected = part + marked[lacks, apart, load, np.searchsorted(KEPT_EDGES, part, side="right")]
            assert found.likely[0, place] / table.alone[place] == pytest.approx(expected, abs=2e-5)


def test_a_tenant_without_the_counter_is_taken_to_fill_its_cap_and_nobody_counts_itself():
    unknown = replace(PROFILES[0], counters=replace(PROFILES[0].counters, sm_util=None))
    busy = PROFILES[0].counters.sm_util
    assert loads_of([unknown, PROFILES[0], PROFILES[0]], [0.5, 1.0, 0.01]).tolist() == [0.5, busy, 0.01]
    loads = np.array([[0.2, 0.9, 0.0], [1.0, 1.0, 1.0]])
    assert load_strata(loads).tolist() == [[2, 0, 3], [4, 4, 4]]


def test_no_less_is_likely_of_a_tenant_that_is_predicted_to_keep_more():
    """Without it, 0.79 may be likelier kept by who is predicted 0.8 than by who is predicted 0.81."""
    shortfalls = default_model().shortfalls
    kept = np.linspace(0.0, 1.1, 1101)
    strata = np.searchsorted(KEPT_EDGES, kept, side="right")
    own = kept + shortfalls[..., strata]
    likely = np.maximum(own, likely_below(shortfalls)[..., strata])
    assert (np.diff(own) < 0).any(), "the strata alone do not rise"
    assert (np.diff(likely, axis=-1) >= -1e-12).all()
    assert (likely <= kept + 1e-12).all()


@pytest.mark.parametrize("widening", [1.0, 1.5, 2.0])
def test_nor_where_the_intervals_are_widened(widening):
    model = replace(default_model(), widening=widening, errors=default_model().errors - 1.0)  # no bound in the way
    pairs = np.array(list(itertools.product(range(len(PROFILES)), repeat=2)))
    table = model.table(PROFILES, [100] * len(PROFILES))
    found = model.predict_sets(table, pairs)
    kept, likely = found.progress / table.alone[pairs], found.likely / table.alone[pairs]
    lacks = np.bitwise_or.reduce(table.lacks[pairs], axis=1)[:, None]
    strata = lacks * (len(LOAD_EDGES) + 1) + load_strata(table.loads[pairs])
    for stratum in np.unique(strata):
        alike = strata == stratum
        assert (np.diff(likely[alike][np.argsort(kept[alike])]) >= -1e-6).all(), stratum


def test_most_tenants_keep_what_is_likely_however_busy_their_neighbours_are():
    """Of the model's own dataset: no test of its errors, but of where their bounds lie."""
    sets = sets_of(parse((files("gpushare.data") / H200_COLOCATION).read_text().splitlines()))
    loads = loads_of([sets.profiles[who] for who, _ in sets.cells], [cap / 100 for _, cap in sets.cells])
    reached: dict[int, list[bool]] = {}
    for at, each in enumerate(predicted(default_model(), sets, range(len(sets.index)))):
        strata = load_strata(loads[list(sets.index[at])][None])[0]
        for load, true, likely in zip(strata, sets.progress[at], each[:, 3], strict=True):
            reached.setdefault(int(load), []).append(true >= likely - 0.005)
    assert sorted(reached) == list(range(len(LOAD_EDGES) + 1))
    shares = {load: float(np.mean(them)) for load, them in reached.items()}
    assert min(shares.values()) > 0.75, shares
    assert float(np.mean([one for them in reached.values() for one in them])) > 5 / 6


def test_as_few_tenants_fall_below_their_bound_however_little_they_make_alone():
    """Of the model's own dataset: no test of its errors, but of where their bounds lie."""
    sets = sets_of(parse((files("gpushare.data") / H200_COLOCATION).read_text().splitlines()))
    below: dict[int, list[bool]] = {}
    for at, each in enumerate(predicted(default_model(), sets, range(len(sets.index)))):
        for cell, true, (_, lower, *_) in zip(sets.index[at], sets.progress[at], each, strict=True):
            who, cap = sets.cells[cell]
            alone = cap_progress(sets.profiles[who], cap / 100)
            below.setdefault(min(int(alone / 0.3), 2), []).append(true < lower)
    shares = [float(np.mean(below[stratum])) for stratum in sorted(below)]
    assert len(shares) == 3
    assert max(shares) < 0.06, shares
    assert shares[0] > 0.01, "where little is made alone the bound is not so low that nobody could fall below it"


def without_shortfalls(text: str) -> str:
    value = json.loads(text)
    del value[SHORTFALLS], value["checksum"]
    return json.dumps(value)


def test_an_artefact_of_before_is_read_and_judged_by_its_interval():
    before = model_from_json(without_shortfalls(default_model().to_json()))
    assert before.shortfalls is None
    assert SHORTFALLS not in json.loads(before.to_json())
    assert model_from_json(before.to_json()).shortfalls is None
    found, _ = predict(before, [(0, 100), (3, 50)])
    now, _ = predict(default_model(), [(0, 100), (3, 50)])
    assert found.likely == pytest.approx(found.progress - (found.progress - found.lower) / 1.645)
    assert found.progress.tolist() == now.progress.tolist()
    assert found.lower.tolist() == now.lower.tolist()


@pytest.mark.parametrize("wrong", ["shape", "above", "nan"])
def test_shortfalls_that_no_model_has_are_refused(wrong):
    value = json.loads(default_model().to_json())
    del value["checksum"]
    if wrong == "shape":
        value[SHORTFALLS] = value[SHORTFALLS][1:]
    else:
        value[SHORTFALLS][0][0][0][0] = 0.1 if wrong == "above" else float("nan")
    with pytest.raises(ArtefactError, match="shortfalls: not of the shape"):
        artefact_from_json(json.dumps(value))
