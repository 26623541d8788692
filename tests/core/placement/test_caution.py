"""No pod where the model says it would hurt too much; among equals where sharing pays most."""

import contextlib
import re
from dataclasses import replace
from importlib.resources import files

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from gpushare.core.api.rejection import Reason, Rejection
from gpushare.core.api.request import JobClass
from gpushare.core.interference import Profile, ProfileError, cap_progress, promised_progress
from gpushare.core.placement.caution import cautious, distinct
from gpushare.core.placement.decide import DecisionContext, decide, survey
from gpushare.core.placement.duties import first_of_least
from gpushare.core.placement.forecasts import MOST_STOPPING, ForecastTable, Member, SetForecasts
from gpushare.core.placement.judge import Judge, rows_of
from gpushare.core.placement.known import KnownWorkload
from gpushare.core.placement.policies import BestFit, GpuShareFit
from gpushare.core.placement.standin import STAND_IN
from gpushare.core.placement.state import ClusterState, GpuSpec, NodeSpec, Placement, PlacementRequest
from gpushare.data import H200_COLOCATION, default_model
from gpushare.research.dataset import parse
from gpushare.research.solo_profiles import profile_of
from gpushare.twin.contention import WORKLOADS

H200 = "NVIDIA H200"


def known(workload, max_slowdown=1.5, gpu_model=H200):
    solo = WORKLOADS[workload]
    return KnownWorkload(workload, gpu_model, max_slowdown, Profile(solo.solo, solo.iterations_per_s))


def request(uid, percent, job_class=JobClass.THROUGHPUT):
    return PlacementRequest(uid, percent * 10, job_class=job_class)


class Cluster:
    """GPUs of one node each, and what is known of the pods there."""

    def __init__(self, nodes=2, gpus=1, policy=None):
        self.state = ClusterState(
            NodeSpec(f"n{n}", tuple(GpuSpec(f"g{n}.{g}", H200) for g in range(gpus))) for n in range(nodes)
        )
        self.known = {}
        self.judge = Judge(default_model, self.known.get)
        self.policy = policy or BestFit()

    def put(self, uid, percent, what, gpu, job_class=JobClass.THROUGHPUT):
        if what is not None:
            self.known[uid] = what
        node = f"n{gpu[1:].split('.')[0]}"
        self.state.reserve(uid, Placement(node, (gpu,)), request(uid, percent, job_class))

    def ask(self, percent, what, job_class=JobClass.THROUGHPUT):
        asked = replace(request("new", percent, job_class), known=what)
        context = DecisionContext(self.state, self.policy, self.judge)
        return survey(asked, context), lambda node: decide(asked, context, node=node)


def test_who_would_hurt_too_much_is_refused_with_figures_and_goes_elsewhere():
    cluster = Cluster()
    cluster.put("a", 50, known("stream", 1.2), "g0.0", JobClass.LATENCY)
    found, choose = cluster.ask(50, known("stream", 1.2))
    assert found.nodes == ["n1"]
    [(node, rejection)] = found.rejections().items()
    assert (node, rejection.reason) == ("n0", Reason.SLOWDOWN)
    figures = re.fullmatch(
        r"has room on 1 GPU, but .* could keep only (.*) of its speed alone, (.*) is promised", rejection.detail
    )
    assert float(figures[1]) < float(figures[2]) <= 1 / 1.2 + 0.005
    assert choose("n0") == rejection
    assert isinstance(choose("n1"), Placement)


def test_with_headroom_a_pod_goes_only_where_less_than_its_tolerated_slowdown_is_likely():
    taken = {}
    for headroom in (0.0, 0.5):
        cluster = Cluster(1)
        cluster.judge = Judge(default_model, cluster.known.get, headroom_ratio=headroom)
        cluster.put("a", 50, known("stream", 9.0), "g0.0")
        for tolerated in (1.2, 1.4, 1.5, 1.6, 1.7, 2.0, 3.0, 6.0):
            found, _ = cluster.ask(50, known("stream", tolerated))
            taken[headroom, tolerated] = bool(found.nodes)
            if headroom and not found.nodes:
                words = found.rejections()["n0"].detail
                figures = re.search(
                    r"could keep only (.*) of its speed alone, (.*) must be likely \(policy.slowdownHeadroom\)",
                    words,
                )
                assert float(figures[1]) < float(figures[2]) <= 1 / (1 + 0.5 * (tolerated - 1)) + 0.005
    assert sum(taken[0.5, each] for _, each in taken) < sum(taken[0.0, each] for _, each in taken)
    for tolerated in (1.2, 1.5, 2.0):  # half of what is above 1 is left
        assert taken[0.5, tolerated] <= taken[0.0, tolerated]
        assert taken[0.5, 2 * tolerated - 1] >= taken[0.0, tolerated], "as one that tolerates half of it"


def test_headroom_refuses_more_and_asks_no_more_of_class_latency():
    names = sorted(WORKLOADS)
    plain, careful = ForecastTable(default_model()), ForecastTable(default_model(), 0.5)
    members = [
        Member(name, 30, job_class, slowdown, 30, profile=Profile(WORKLOADS[name].solo))
        for name in names
        for job_class in JobClass
        for slowdown in (1.1, 1.5, 3.0)
    ]
    pairs = [[one, other] for one in members for other in members[::5]]
    for stops in (False, True):
        kept = [table.forecast(rows_of(table, pairs), stops=stops).kept for table in (plain, careful)]
        assert (kept[1] <= kept[0]).all()
        assert (kept[1] < kept[0]).any()
    rows = plain.rows(members), careful.rows(members)
    for member, less, more in zip(members, plain.floors[rows[0]], careful.floors[rows[1]], strict=True):
        if member.job_class is JobClass.LATENCY:
            assert more == less
        else:
            assert less < more <= 1.0


def test_the_newcomers_own_promise_counts_too():
    cluster = Cluster(1)
    cluster.put("a", 50, known("stream", 3.0), "g0.0")
    found, _ = cluster.ask(50, known("latency-probe", 1.01), JobClass.LATENCY)
    assert "but it could keep only" in found.rejections()["n0"].detail
    assert cluster.ask(50, known("latency-probe", 5.0), JobClass.LATENCY)[0].nodes == ["n0"]


@pytest.mark.parametrize("percent", [5, 10, 20])
def test_small_shares_of_one_program_fit_beside_each_other(percent):
    """Their caps keep their SMs apart: eight tenths of a GPU hold eight tenths of a GPU's pods."""
    solo = Profile(WORKLOADS["montecarlo-fp32"].solo, cap_curve={percent: percent / 100})
    small = KnownWorkload("small", H200, 1.5, solo)
    cluster = Cluster(1)
    for number in range(80 // percent):
        assert cluster.ask(percent, small)[0].nodes == ["n0"], f"{number} of them fill {number * percent}%"
        cluster.put(f"p{number}", percent, small, "g0.0")


def test_throttling_can_keep_promises_but_nobody_of_class_latency_is_stopped():
    names = sorted(WORKLOADS)
    for job_class in JobClass:
        table = ForecastTable(default_model())
        strict, lax = (
            [Member(name, 50, each_class, slowdown, 50, profile=Profile(WORKLOADS[name].solo)) for name in names]
            for slowdown, each_class in ((1.7, JobClass.THROUGHPUT), (9.0, job_class))
        )
        pairs = [[one, other] for one in strict for other in lax]
        index = rows_of(table, pairs)
        without, stopped = table.forecast(index, stops=False).kept, table.forecast(index).kept
        assert (stopped >= without).all()
        assert (stopped & ~without).any() == (job_class is JobClass.THROUGHPUT)


def test_an_unknown_tenant_is_taken_for_one_that_costs_others_much():
    """Whichever of the two comes, and where a profile is of another GPU model."""
    strict = known("stream", 1.02)
    for unknown in (None, known("latency-probe", 1.5, "Tesla T4")):
        for resident, comes in ((unknown, strict), (strict, unknown)):
            cluster = Cluster(1)
            cluster.put("a", 50, resident, "g0.0")
            assert cluster.ask(50, comes)[0].nodes == []
            cluster = Cluster(1)
            cluster.put("a", 30, replace(resident, max_slowdown=9.0) if resident else None, "g0.0")
            assert cluster.ask(30, replace(comes, max_slowdown=9.0) if comes else None)[0].nodes == ["n0"]


def test_where_nobody_is_known_the_model_is_not_asked():
    cluster = Cluster(1)
    cluster.judge = Judge(lambda: pytest.fail("asked"), cluster.known.get)
    cluster.put("a", 50, None, "g0.0")
    found, choose = cluster.ask(50, None)
    assert found.nodes == ["n0"]
    assert choose("n0").thread_percentage == 50


def test_the_stand_in_costs_others_more_than_nine_of_ten_workloads_do():
    """Of the shipped dataset, both under a cap of half of the GPU; and it suffers more than the median."""
    data = parse((files("gpushare.data") / H200_COLOCATION).read_text().splitlines())
    profiles = []
    for workload in data.solo:
        with contextlib.suppress(ProfileError):
            profiles.append(profile_of(data, workload))
    model = default_model()
    bare = [replace(each, cap_curve={}, capped={}, probes={}) for each in profiles]
    table = model.table([*bare, STAND_IN, *profiles], [50] * (2 * len(profiles) + 1))
    count = len(profiles)
    index = np.array([[i, count + 1 + j] for i in range(count + 1) for j in range(count)])
    kept = model.predict_sets(table, index).progress / table.alone[index]
    theirs, own = kept.reshape(count + 1, count, 2).mean(axis=1)[:, ::-1].T
    assert count > 40
    assert (theirs[:-1] < theirs[-1]).mean() < 0.1
    assert own[-1] < np.median(own[:-1])


def test_whole_gpus_and_the_order_of_tenants_do_not_matter():
    asked = PlacementRequest("x", 1000, known=known("stream"))
    cluster = Cluster()
    assert cautious(BestFit(), cluster.judge, cluster.state, asked, 0.0) is None
    one, other = Cluster(1), Cluster(1)
    for cluster, names in ((one, ("stream", "dlrm-infer")), (other, ("dlrm-infer", "stream"))):
        for name in names:
            cluster.put(name, 25, known(name), "g0.0")
    assert list(one.ask(25, known("bert-infer"))[0].scores) == list(other.ask(25, known("bert-infer"))[0].scores)


@pytest.mark.parametrize("policy", [BestFit, GpuShareFit])
def test_of_two_equal_gpus_the_one_where_it_gains_more_is_taken(policy):
    for first, second, best in (("stream", "gemm-fp64", "g0.1"), ("gemm-fp64", "stream", "g0.0")):
        cluster = Cluster(1, gpus=2, policy=policy())
        cluster.put("a", 50, known(first, 9.0), "g0.0")
        cluster.put("b", 50, known(second, 9.0), "g0.1")
        _, choose = cluster.ask(50, known("stream", 9.0))
        assert choose("n0").gpu_uuids == (best,)


def test_what_is_learnt_later_counts_from_then_on():
    cluster = Cluster(1)
    cluster.put("a", 50, None, "g0.0", JobClass.LATENCY)
    assert cluster.ask(50, known("latency-probe", 1.5))[0].nodes == ["n0"]
    cluster.known["a"] = known("stream", 1.2)
    cluster.judge.forget()
    assert cluster.ask(50, known("latency-probe", 1.5))[0].nodes == []
    cluster.state.release("a")
    assert cluster.ask(50, known("latency-probe", 1.5))[0].nodes == ["n0"], "and when the tenant has gone"


def test_a_share_too_small_for_its_tolerance_may_still_have_quiet_neighbours():
    cluster = Cluster(1)
    heavy = known("montecarlo-fp32", 3.0)
    assert cap_progress(heavy.profile, 0.25) < 1 / 3.0, "its own cap costs it more than it tolerates"
    cluster.put("a", 25, heavy, "g0.0")
    assert cluster.ask(10, known("latency-probe", 50.0))[0].nodes == ["n0"]


kinds = st.tuples(
    st.sampled_from(sorted(WORKLOADS)), st.sampled_from([10, 20, 30]), st.sampled_from([1.2, 1.5, 3.0])
)


@pytest.mark.slow
@pytest.mark.compute
@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(kinds, st.integers(0, 2)), max_size=6), kinds)
def test_nobody_is_put_where_the_bound_of_any_tenant_breaks(tenants, comes):
    """Held against the model asked directly, one set at a time."""
    model = default_model()
    cluster = Cluster(1, gpus=3)
    here = [[], [], []]
    for number, ((workload, percent, slowdown), gpu) in enumerate(tenants):
        if sum(share for _, share in here[gpu]) + percent <= 100:
            what = known(workload, slowdown)
            cluster.put(f"p{number}", percent, what, f"g0.{gpu}")
            here[gpu].append((what, percent))
    what, percent = known(comes[0], comes[2]), comes[1]
    _, choose = cluster.ask(percent, what)
    chosen = choose("n0")
    free, throttled, fitting = [], [], 0
    for gpu, members in enumerate(here):
        if sum(share for _, share in members) + percent > 100:
            continue
        fitting += 1
        choices = [cap for cap in (percent, 25, 33, 50, 75, 100) if cap >= percent]
        answers = [feasible(model, [(what, percent, cap), *((w, s, s) for w, s in members)]) for cap in choices]
        free += [f"g0.{gpu}"] * (not members or any(unstopped for unstopped, _ in answers))
        throttled += [f"g0.{gpu}"] * (not members or any(stopped for _, stopped in answers))
    if isinstance(chosen, Rejection):
        assert not free or not fitting
    else:
        assert chosen.gpu_uuids[0] in throttled


def feasible(model, every):
    """Whether all promises are kept five times of six: with nobody stopped, and with one at a time (by an LP)."""

    def judged(tenants):
        if not tenants:
            return []
        table = model.table([what.profile for what, _, _ in tenants], [cap for _, _, cap in tenants])
        return model.predict_sets(table, np.arange(len(tenants))[None]).likely[0].tolist()

    whole = np.array(judged(every))
    floors = [promised_progress(what.profile, share, what.max_slowdown) for what, share, _ in every]
    without = np.array(
        [np.insert(judged([e for e in every if e is not one]), at, 0.0) for at, one in enumerate(every)]
    )
    if len(every) == 1:
        return True, True
    found = linprog(
        np.ones(len(every)),
        A_ub=-(without - whole).T,
        b_ub=whole - np.array(floors) + 1e-5,
        bounds=[(0, 1)] * len(every),
    )
    return bool((whole >= np.array(floors) + 1e-5).all()), bool(found.success and found.fun <= 1.0)


def test_ten_thousand_gpus_cost_milliseconds():
    cluster = Cluster(nodes=1250, gpus=8)
    rng = np.random.default_rng(1)
    names = sorted(WORKLOADS)
    for n in range(1250):
        for g in range(8):
            cluster.put(f"p{n}.{g}", 30, known(names[rng.integers(len(names))], 1.5), f"g{n}.{g}")
    found, _ = cluster.ask(30, known("dlrm-infer"))
    assert 0 < len(found.nodes) <= 1250
    assert len(cluster.judge._sets) == 1 + len(names), "a set is judged once, however many hold it"


def test_a_judge_that_has_seen_much_says_what_a_new_one_says():
    """Members and sets are prepared once and kept while more come, go and are learnt anew."""
    cluster = Cluster(8)
    names = sorted(WORKLOADS)
    for step in range(24):
        gpu, what = f"g{step % 8}.0", known(names[step % len(names)], 1.2 + step % 5)
        cluster.put(f"t{step}", 10 + 5 * (step % 3), what, gpu, list(JobClass)[step % 2])
        if step % 7 == 6:
            cluster.state.release(f"t{step - 3}")
        if step == 15:
            cluster.judge.forget()
        for name in names[:: 1 + step % 3]:
            seen, _ = cluster.ask(20, known(name, 1.5))
            fresh = Cluster(1)
            fresh.state, fresh.judge = cluster.state, Judge(default_model, cluster.known.get)
            fresh.judge.version = -1 - step  # scores are kept in the state by version
            again, _ = fresh.ask(20, known(name, 1.5))
            assert seen.nodes == again.nodes
            assert seen.scores == pytest.approx(again.scores, abs=1e-4)
            assert seen.rejections() == again.rejections()


@pytest.mark.parametrize("places", [2, 3, 5, MOST_STOPPING])
def test_a_set_is_judged_alike_however_large_those_beside_it_are(places):
    names, share = sorted(WORKLOADS), 100 // places
    table = ForecastTable(default_model())
    members = [
        Member(name, share, JobClass.THROUGHPUT, slowdown, share, profile=Profile(WORKLOADS[name].solo))
        for name in names
        for slowdown in (1.5, 3.0, 9.0, 30.0)
    ]
    generator = np.random.default_rng(places)
    sets = [generator.choice(len(members), places).tolist() for _ in range(300)]
    sets = [[members[at] for at in each] for each in sets]
    index = rows_of(table, sets)
    alone, without = table.forecast(index), table.forecast(index, stops=False)
    assert (alone.least > without.least).any()  # somebody is stopped
    large = rows_of(table, [*sets, members[: MOST_STOPPING + 4]])
    among = table.forecast(large)
    for name in SetForecasts.__slots__:
        assert getattr(among, name)[:-1].tolist() == pytest.approx(getattr(alone, name).tolist()), name


def test_of_equals_the_first_is_worst_off():
    least = first_of_least(np.array([[0.8, 0.5 + 1e-7, 0.5], [0.4, 0.3, 0.2], [np.inf, np.inf, np.inf]]))
    assert least.tolist() == [1, 2, 0]


@pytest.mark.parametrize(
    ("one", "other", "texts"),
    [
        (0.52, 0.67, ("0.52", "0.67")),
        (0.2361, 0.2441, ("0.236", "0.244")),
        (0.24012, 0.24021, ("0.2401", "0.2402")),
        (0.5, 0.5, ("0.5000", "0.5000")),
    ],
)
def test_a_refusal_never_shows_two_figures_as_equal_that_are_not(
    one: float, other: float, texts: tuple[str, str]
) -> None:
    assert distinct(one, other) == texts
