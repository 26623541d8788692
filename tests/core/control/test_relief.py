"""Which duties relieve whom: the one furthest above its own promise gives first, and nobody below its own."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare.core.api import JobClass
from gpushare.core.control import FREE, WatchedTenant, WatchSettings
from gpushare.core.control.freeze_turns import presence
from gpushare.core.control.relief import LEAST_EFFECT, KnownTenants, given_back, let_go, may_be_throttled, relieved
from gpushare.core.control.response import Response

SETTINGS = WatchSettings()


def known(promises, alone, effects, latency=(), duties=None):
    """Tenants by uid, with exact beliefs: what each makes alone, and what its neighbours' running costs it."""
    tenants = {
        uid: WatchedTenant(
            uid, JobClass.LATENCY if uid in latency else JobClass.THROUGHPUT, promise, 0.5, 0.03, order=0.0
        )
        for uid, promise in promises.items()
    }
    responses = {}
    for uid in tenants:
        others = tuple(other for other in tenants if other != uid)
        mean = (alone[uid], *(effects.get((uid, other), 0.0) for other in others))
        responses[uid] = Response(others, mean, tuple(tuple([0.0] * len(mean)) for _ in mean))
    return KnownTenants(tenants, tenants, responses, duties or dict.fromkeys(tenants, FREE))


def relief(scene, broken, margin=0.0, max_step=1.0):
    return relieved(scene, scene.duties, broken, SETTINGS, margin=margin, max_step=max_step)


def test_who_is_furthest_above_its_promise_gives_first_and_several_end_equally_far():
    scene = known(
        {"a": 0.5, "b": 0.4, "c": 0.3}, {"a": 1.0, "b": 0.8, "c": 0.9}, {("a", "b"): 0.4, ("a", "c"): 0.4}
    )
    duties = relief(scene, ["a"])
    assert scene.progress("a", duties) >= 0.5
    assert duties["c"] < duties["b"] or duties["b"] == FREE
    deeper = relief(
        known({"a": 0.7, "b": 0.4, "c": 0.3}, {"a": 1.0, "b": 0.8, "c": 0.9}, {("a", "b"): 0.4, ("a", "c"): 0.4}),
        ["a"],
    )
    assert scene.height("b", deeper) == pytest.approx(scene.height("c", deeper), abs=0.1)


def test_a_neighbour_that_costs_nothing_is_left_alone():
    scene = known(
        {"a": 0.5, "b": 0.1, "c": 0.4}, {"a": 0.9, "b": 1.0, "c": 0.8}, {("a", "b"): 0.01, ("a", "c"): 0.6}
    )
    duties = relief(scene, ["a"])
    assert duties["b"] == FREE
    assert duties["c"] < FREE


def test_a_broken_tenant_that_is_throttled_itself_gets_time_back():
    scene = known({"a": 0.5, "b": 0.3}, {"a": 0.9, "b": 0.9}, {}, duties={"a": 0.4, "b": 1.0})
    assert given_back(scene, scene.duties, [], margin=0.03)["a"] == pytest.approx(0.53 / 0.9, abs=0.01)


def test_a_throttle_is_let_go_where_everyone_who_feels_it_keeps_room():
    scene = known({"a": 0.5, "b": 0.3}, {"a": 0.95, "b": 0.9}, {("a", "b"): 0.5}, duties={"a": 1.0, "b": 0.5})
    assert let_go(scene, scene.duties, SETTINGS, margin=0.05)["b"] == pytest.approx(0.7)
    assert let_go(scene, scene.duties, SETTINGS, margin=0.14)["b"] == pytest.approx(0.6)
    assert let_go(scene, scene.duties, SETTINGS, margin=0.2)["b"] == pytest.approx(0.5)


RATIO = st.floats(0.0, 1.0)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.fixed_dictionaries(dict.fromkeys("abc", RATIO)),
    st.dictionaries(st.tuples(st.sampled_from("abc"), st.sampled_from("abc")), RATIO),
    st.fixed_dictionaries(dict.fromkeys("abc", st.floats(0.1, 1.0))),
)
def test_progress_is_the_response_to_who_is_present_for_the_time_that_it_runs(alone, effects, duties):
    scene = known(dict.fromkeys("abc", 0.5), alone, effects, duties=duties)
    for uid, response in scene.responses.items():
        assert scene.progress(uid, duties) == pytest.approx(duties[uid] * response.running(presence(duties, uid)))


def test_more_time_of_its_own_is_time_beside_all_who_run_then():
    scene = known(dict.fromkeys("abc", 0.5), dict.fromkeys("abc", 1.0), {("a", "b"): 0.3, ("a", "c"): 0.2})
    assert scene.slope("a", {"a": 0.5, "b": 0.6, "c": 1.0}) == pytest.approx(1.0 - 0.3 - 0.2)
    assert scene.slope("a", {"a": 0.5, "b": 0.4, "c": 1.0}) == pytest.approx(1.0 - 0.2), "b runs while a is frozen"
    duties = {"a": 0.5, "b": 0.6, "c": 1.0}
    more = scene.progress("a", {**duties, "a": 0.6}) - scene.progress("a", duties)
    assert more == pytest.approx(0.1 * scene.slope("a", duties))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.fixed_dictionaries(dict.fromkeys("abcd", RATIO)),
    st.fixed_dictionaries(dict.fromkeys("abcd", RATIO)),
    st.dictionaries(st.tuples(st.sampled_from("abcd"), st.sampled_from("abcd")), RATIO),
    st.sets(st.sampled_from("abcd"), min_size=1),
    st.floats(0.05, 1.0),
)
def test_relief_never_costs_anyone_its_own_promise_and_stops_when_nobody_lacks(
    promises, alone, effects, broken, max_step
):
    scene = known(promises, alone, effects, latency={"d"})
    duties = relief(scene, sorted(broken), margin=0.02, max_step=max_step)
    for uid, duty in duties.items():
        if duty < FREE:
            assert uid not in broken | {"d"}
            assert duty >= max(SETTINGS.min_duty, 1 - max_step) - 1e-3
            assert scene.room(uid, duties) >= 0.02 - 2e-3
    if all(scene.room(uid, scene.duties) >= 0.02 for uid in broken):
        assert duties == scene.duties


def relieved_plainly(scene, broken, *, margin, max_step, step=0.02):
    """The same search as its description reads: who lacks, who could give and who helps is sorted at each step."""
    found = dict(scene.duties)

    def lower(uid):
        return max(SETTINGS.min_duty, scene.duties[uid] - max_step, found[uid] - step)

    def height(uid):
        return scene.progress(uid, found) / max(step, scene.tenants[uid].promise), uid

    def can_give(uid):
        is_asked = uid not in broken and may_be_throttled(scene.tenants[uid], SETTINGS)
        is_left = scene.progress(uid, {**found, uid: lower(uid)}) >= scene.tenants[uid].promise + margin
        return is_asked and lower(uid) < found[uid] and is_left

    def lacks(uid):
        return scene.progress(uid, found) < scene.tenants[uid].promise + margin

    while lacking := sorted(filter(lacks, broken), key=height):
        donors = sorted(filter(can_give, scene.tenants), key=height, reverse=True)
        pairs = ((victim, donor) for victim in lacking for donor in donors)
        helping = (donor for victim, donor in pairs if scene.responses[victim].effect(donor) >= LEAST_EFFECT)
        donor = next(helping, None)
        if donor is None:
            break
        found[donor] = lower(donor)
    return {uid: round(duty, 3) for uid, duty in found.items()}


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.fixed_dictionaries(dict.fromkeys("abcde", RATIO)),
    st.fixed_dictionaries(dict.fromkeys("abcde", RATIO)),
    st.dictionaries(st.tuples(st.sampled_from("abcde"), st.sampled_from("abcde")), RATIO, max_size=20),
    st.fixed_dictionaries(dict.fromkeys("abcde", st.sampled_from((1.0, 1.0, 0.75, 0.5, 0.1)))),
    st.sets(st.sampled_from("abcde"), min_size=1),
    st.sampled_from((0.0, 0.01, 0.03)),
    st.sampled_from((1.0, 0.5)),
)
def test_the_search_finds_what_the_plain_one_finds(promises, alone, effects, duties, broken, margin, max_step):
    scene = known(promises, alone, effects, latency={"e"}, duties=duties)
    found = relief(scene, sorted(broken), margin, max_step)
    assert found == relieved_plainly(scene, sorted(broken), margin=margin, max_step=max_step)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.fixed_dictionaries(dict.fromkeys("abcd", RATIO)),
    st.fixed_dictionaries(dict.fromkeys("abcd", RATIO)),
    st.dictionaries(st.tuples(st.sampled_from("abcd"), st.sampled_from("abcd")), RATIO),
)
def test_who_came_or_left_is_never_remembered(promises, alone, effects):
    scene = known(promises, alone, effects)
    relief(scene, ["a"])
    three = {uid: tenant for uid, tenant in scene.tenants.items() if uid != "d"}
    responses = {uid: scene.responses[uid].beside(o for o in three if o != uid) for uid in three}
    left = KnownTenants(three, three, responses, dict.fromkeys(three, FREE))
    fresh = known(
        {uid: promises[uid] for uid in three},
        alone,
        {pair: cost for pair, cost in effects.items() if "d" not in pair},
    )
    assert relief(left, ["a"]) == relief(fresh, ["a"])


def test_a_throttle_that_helps_a_broken_promise_stays_and_one_that_does_not_is_let_go():
    duties = {"a": 1.0, "b": 0.5, "c": 0.5}
    scene = known(
        {"a": 0.9, "b": 0.3, "c": 0.3},
        {"a": 0.95, "b": 0.9, "c": 0.9},
        {("a", "b"): 0.5, ("a", "c"): 0.01},
        duties=duties,
    )
    assert let_go(scene, duties, SETTINGS, margin=0.05, broken=["a"]) == {"a": 1.0, "b": 0.5, "c": 0.7}
