"""Placement by gain, caps by the model, and what retractions keep apart."""

from dataclasses import replace

from gpushare.core.api import JobClass, Reason, Rejection
from gpushare.core.interference import Profile, promised_progress
from gpushare.core.placement.caps import cap_choices
from gpushare.core.placement.decide import DecisionContext, decide, survey
from gpushare.core.placement.judge import Judge
from gpushare.core.placement.known import KeptApart, KnownWorkload
from gpushare.core.placement.policies import GpuShareFit
from gpushare.core.placement.shapes import GpuSpec, NodeSpec, Placement, PlacementRequest
from gpushare.core.placement.state import ClusterState
from gpushare.data import default_model
from gpushare.twin.contention import WORKLOADS

H200 = "NVIDIA H200"


def known(workload, max_slowdown=None, **more):
    solo = WORKLOADS[workload]
    return KnownWorkload(workload, H200, max_slowdown, Profile(solo.solo, solo.iterations_per_s), workload, **more)


class Cluster:
    """Nodes of one GPU each under the default policy."""

    def __init__(self, gpus):
        self.state = ClusterState(NodeSpec(f"n{n}", (GpuSpec(f"g{n}", H200),)) for n in range(gpus))
        self.context = DecisionContext(self.state, GpuShareFit(), Judge(default_model))

    def decide(self, percent, what, job_class=JobClass.THROUGHPUT, now=0.0, **more):
        uid = f"p{len(self.state.reservations)}"
        request = PlacementRequest(uid, percent * 10, job_class=job_class, known=what, **more)
        return request, decide(request, self.context.at(now))

    def put(self, percent, what, job_class=JobClass.THROUGHPUT, at=None, cap=None, **more):
        request, decided = self.decide(percent, what, job_class, **more)
        if at is not None:
            decided = Placement(f"n{at}", (f"g{at}",), 0, cap)
        assert isinstance(decided, Placement), decided
        self.state.reserve(request.pod_uid, decided, request)
        return decided


def test_known_pods_spread_over_an_idle_cluster_and_unknown_ones_gather():
    for what, used in ((known("bert-infer"), 4), (None, 1)):
        cluster = Cluster(8)
        assert len({cluster.put(25, what).node for _ in range(4)}) == used


def test_a_full_cluster_packs_so_that_what_asks_for_much_still_fits():
    """Between two GPUs where the newcomer gains alike, the one whose gap it fills is taken."""
    light = known("latency-probe")
    cluster = Cluster(2)
    cluster.put(60, light, at=0, cap=60)
    cluster.put(40, light, at=1, cap=40)
    assert cluster.put(40, light).node == "n0"
    assert cluster.put(60, light).node == "n1"


def test_a_pod_that_is_likely_to_stay_alone_is_not_capped_and_one_with_company_is():
    heavy = known("bert-infer", 3.0)
    assert Cluster(16).put(25, heavy).thread_percentage == 100
    cluster = Cluster(2)
    cluster.put(25, heavy, at=0, cap=50)
    cluster.put(50, heavy, at=1, cap=50)
    caps = [cluster.put(25, heavy).thread_percentage for _ in range(3)]
    assert all(25 <= cap < 100 for cap in caps)


def test_caps_are_never_below_the_share_and_leave_latency_tenants_theirs():
    assert cap_choices(30, JobClass.THROUGHPUT, is_known=True) == (30, 33, 50, 75, 100)
    assert cap_choices(30, JobClass.THROUGHPUT, is_known=False) == (30,)
    assert cap_choices(30, JobClass.LATENCY, is_known=True) == (100,)
    cluster = Cluster(1)
    cluster.put(40, known("latency-probe", 3.0), JobClass.LATENCY)
    assert cluster.state.tenants("g0")[0].thread_percentage == 100
    assert 20 <= cluster.put(20, known("gemm-fp64", 9.0)).thread_percentage <= 60


def test_a_cap_above_the_share_keeps_a_promise_that_the_share_would_break():
    """Who tolerates hardly any neighbour keeps its promise beside one only under more than its share."""
    what, share = known("bert-train", 1.02), 40
    cluster = Cluster(1)
    cluster.put(20, known("latency-probe", 9.0), cap=20, at=0)
    promise = promised_progress(what.profile, share, 1.02)
    [under_share, _] = default_model().predict([(what.profile, share), (known("latency-probe").profile, 20)])
    assert under_share.lower < promise
    assert cluster.put(share, what).thread_percentage > share


def test_classes_have_promises_of_their_own():
    """1.5 for throughput and 1.1 for latency by default, unless the request or its workload says otherwise."""
    strict = []
    for more in ({}, {"max_slowdown": 9.0}):
        cluster = Cluster(1)
        cluster.put(50, known("stream", 9.0), at=0, cap=50)
        decided = cluster.decide(50, known("stream"), JobClass.LATENCY, **more)[1]
        strict.append(isinstance(decided, Rejection))
    assert strict == [True, False]


def test_a_retraction_keeps_both_apart_until_it_ends():
    apart = known("dlrm-infer", 9.0, apart=(KeptApart(frozenset({"bert-infer"}), 100.0),))
    other = known("bert-infer", 9.0)
    for resident, comes in ((other, apart), (apart, other)):
        cluster = Cluster(1)
        cluster.put(25, resident, at=0, cap=25)
        refused = cluster.decide(25, comes, now=99.0)[1]
        assert isinstance(refused, Rejection)
        assert refused.reason is Reason.SLOWDOWN
        assert "not tried again yet" in refused.detail
        assert isinstance(cluster.decide(25, comes, now=100.0)[1], Placement)
        assert isinstance(cluster.decide(25, known("latency-probe", 9.0), now=99.0)[1], Placement)


def test_a_workload_without_a_profile_is_kept_apart_too():
    cluster = Cluster(2)
    apart = KnownWorkload("", "", None, None, "ns/new", (KeptApart(frozenset({"ns/old"}), 100.0),))
    old = replace(known("bert-infer", 9.0), name="ns/old")
    cluster.put(25, old, at=0, cap=25)
    assert cluster.decide(25, apart, now=99.0)[1].node == "n1"
    found = survey(PlacementRequest("x", 250, known=apart), cluster.context.at(99.0))
    assert found.nodes == ["n1"]


def test_who_was_retracted_twice_has_a_gpu_of_its_own():
    own, other = known("stream", 9.0, wants_own=True), known("bert-infer", 9.0)
    cluster = Cluster(2)
    cluster.put(25, other, at=0, cap=25)
    placed = cluster.put(25, own)
    assert (placed.node, placed.thread_percentage) == ("n1", 100)
    assert cluster.put(25, other).node == "n0"
    refused = cluster.decide(80, other)[1]
    assert isinstance(refused, Rejection)
    assert (
        "a GPU of its own"
        in survey(PlacementRequest("x", 250, known=own), cluster.context).rejections()["n0"].detail
    )
