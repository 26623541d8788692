"""Probation: an unknown workload gets an empty GPU for a while where it cannot be read beside others."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare.core.api import GpuShare, JobClass, PodView, Reason, Rejection, names
from gpushare.core.interference import Profile
from gpushare.core.placement import (
    ClusterState,
    DecisionContext,
    GpuSpec,
    Judge,
    KnownWorkload,
    NodeSpec,
    Placement,
    PlacementRequest,
    ProbationSettings,
    Settings,
    SettingsError,
    Unprofiled,
    clock_time,
    closed_places,
    decide,
    parse_settings,
    survey,
    term_of,
    unprofiled_of,
)
from gpushare.core.placement.policies import BestFit
from gpushare.data import default_model
from gpushare.twin.contention import WORKLOADS

H200 = "NVIDIA H200"
LATENCY, THROUGHPUT = JobClass.LATENCY, JobClass.THROUGHPUT
SOLO = WORKLOADS["stream"]


class Cluster:
    """Nodes of one GPU each, named n0, n1 and so on."""

    def __init__(self, gpus: int = 3, probation: ProbationSettings | None = None) -> None:
        self.state = ClusterState(NodeSpec(f"n{n}", (GpuSpec(f"g{n}", H200),)) for n in range(gpus))
        self.profiled: set[str] = set()
        judge = Judge(default_model, self.known, lambda: bool(self.profiled))
        self.context = DecisionContext(self.state, BestFit(), judge, probation=probation or ProbationSettings())
        self.uids = (f"p{number}" for number in itertools.count())
        self.now = 1000.0

    def known(self, uid: str) -> KnownWorkload | None:
        reservation = self.state.reservation(uid)
        if reservation is None or reservation.request.unprofiled is None:
            return None
        if not reservation.request.unprofiled.workloads & self.profiled:
            return None
        return KnownWorkload("stream", H200, None, Profile(SOLO.solo, SOLO.iterations_per_s), "stream")

    def ask(self, workload: str | None, percent: int = 25, job_class: JobClass = THROUGHPUT, **more: object):
        unprofiled = None
        if workload is not None and workload not in self.profiled:
            unprofiled = Unprofiled(frozenset({workload}), f"default/{workload}")
        request = PlacementRequest(
            next(self.uids), percent * 10, job_class=job_class, unprofiled=unprofiled, **more
        )
        return request, decide(request, self.context.at(self.now))

    def put(self, workload: str | None, percent: int = 25, job_class: JobClass = THROUGHPUT) -> Placement:
        request, decided = self.ask(workload, percent, job_class)
        assert isinstance(decided, Placement), decided
        self.state.reserve(request.pod_uid, decided, request)
        return decided

    def put_at(self, gpu: int, job_class: JobClass = THROUGHPUT, percent: int = 25) -> None:
        request = PlacementRequest(next(self.uids), percent * 10, job_class=job_class)
        self.state.reserve(request.pod_uid, Placement(f"n{gpu}", (f"g{gpu}",)), request)

    def closed(self) -> set[str]:
        context = self.context.at(self.now)
        return {each.closed.gpu_uuid for each in closed_places(self.state, context.judge, context.now)}


def test_beside_latency_pods_it_gets_an_empty_gpu_which_is_closed_for_the_window():
    cluster = Cluster()
    cluster.put_at(0, LATENCY)
    assert cluster.ask(None)[1].gpu_uuids == ("g0",), "packing, for who is known or wants no profile"
    decided = cluster.put("new")
    assert decided.gpu_uuids == ("g1",)
    assert decided.thread_percentage == 25, "its share is its cap"
    assert decided.probation is not None
    assert decided.probation.until == 1060.0
    assert cluster.closed() == {"g1"}

    cluster.put_at(0, percent=75)
    assert cluster.put(None, 80).gpu_uuids == ("g2",)
    _, refused = cluster.ask(None, 50)
    assert isinstance(refused, Rejection)
    assert refused.reason is Reason.PROBATION
    assert "GPU g1, which is on probation by pod default/new until 00:17:40 UTC at the latest" in refused.detail

    cluster.now += 61
    assert cluster.closed() == set()
    assert cluster.put(None, 50).gpu_uuids == ("g1",)


def test_the_profile_ends_it_early():
    cluster = Cluster(2)
    cluster.put_at(0, LATENCY, 90)
    cluster.put("new")
    assert isinstance(cluster.ask(None, 50)[1], Rejection)
    cluster.profiled.add("new")
    cluster.context.judge.forget()
    assert cluster.closed() == set()
    assert isinstance(cluster.ask(None, 20)[1], Placement)


def test_it_is_read_in_place_beside_pods_that_can_be_stopped():
    cluster = Cluster()
    cluster.put_at(0, LATENCY)
    cluster.put_at(1, THROUGHPUT, 10)
    decided = cluster.put("new")
    assert (decided.gpu_uuids, decided.probation) == (("g1",), None)
    cluster.state.set_reading("n1", works=False)
    decided = cluster.put("newer")
    assert decided.gpu_uuids == ("g2",)
    assert decided.probation is not None


def test_where_nobody_has_to_be_avoided_nothing_changes():
    cluster = Cluster()
    assert cluster.put("new").probation is None
    cluster.put_at(2, LATENCY)
    off = Cluster(probation=ProbationSettings(seconds=0.0, freezes=False))
    assert off.put("new").probation is None
    assert off.put("newer").gpu_uuids == ("g0",), "they gather"


def test_where_freezing_is_off_every_unknown_workload_has_its_turn():
    cluster = Cluster(4, ProbationSettings(freezes=False))
    assert [cluster.put(name).gpu_uuids for name in ("a", "a", "b", "b")] == [("g0",), ("g1",), ("g2",), ("g1",)]
    assert cluster.closed() == {"g0", "g2"}
    assert cluster.put("c").gpu_uuids == ("g1",), "two at a time"
    cluster.now += 61
    assert cluster.put("d").gpu_uuids == ("g3",)
    assert cluster.put("a").probation is None, "it had its turn, and that pod still runs"


@pytest.mark.parametrize(
    ("asked", "longest", "lasts"),
    [
        (None, 300, 60),
        (20, 300, 60),
        (200, 300, 230),
        (3600, 300, 300),
        (3600, 3600, 3600),
        (200, 0, 60),
    ],
)
def test_a_profile_that_takes_longer_gets_a_longer_window_up_to_a_ceiling(asked, longest, lasts):
    cluster = Cluster(probation=ProbationSettings(freezes=False, longest_seconds=longest))
    request = PlacementRequest("p", 250, unprofiled=Unprofiled(frozenset({"a"}), window_seconds=asked))
    decided = decide(request, cluster.context.at(1000.0))
    assert isinstance(decided, Placement)
    assert decided.probation is not None
    assert decided.probation.until == 1000.0 + lasts


def test_a_namespace_has_one_gpu_at_a_time_whatever_its_workloads_are_called():
    cluster = Cluster(4, ProbationSettings(freezes=False, most=4))

    def placed(namespace: str, workload: str) -> Placement:
        uid = next(cluster.uids)
        unprofiled = Unprofiled(frozenset({workload}), namespace=namespace)
        request = PlacementRequest(uid, 250, unprofiled=unprofiled)
        decided = decide(request, cluster.context.at(cluster.now))
        assert isinstance(decided, Placement)
        cluster.state.reserve(uid, decided, request)
        return decided

    assert placed("evil", "a").probation is not None
    assert placed("evil", "b").probation is None, "another name is of no use"
    assert placed("evil", "c").probation is None
    good = placed("good", "a-of-good")
    assert good.probation is not None
    assert good.probation.namespace == "good"
    cluster.now += 61
    assert placed("evil", "d").probation is not None, "one after the other"


def test_whole_gpus_and_survey_agree():
    cluster = Cluster(2, ProbationSettings(freezes=False))
    cluster.put("a")
    request = PlacementRequest("p", 500)
    found = survey(request, cluster.context.at(cluster.now))
    assert found.nodes == ["n1"]
    assert found.rejections()["n0"].reason is Reason.PROBATION
    assert isinstance(decide(request, cluster.context.at(cluster.now), node="n0"), Rejection)
    preferred = decide(request, cluster.context.at(cluster.now), node="n0", preferred_gpus=("g0",))
    assert isinstance(preferred, Rejection)
    whole = decide(PlacementRequest("w", 1000), cluster.context.at(cluster.now))
    assert isinstance(whole, Placement)
    assert whole.gpu_uuids == ("g1",)


def test_released_and_undone():
    cluster = Cluster(2, ProbationSettings(freezes=False))
    cluster.put("a")
    snapshot = cluster.state.snapshot()
    cluster.state.release("p0")
    assert cluster.closed() == set()
    cluster.state.undo(snapshot)
    assert cluster.closed() == {"g0"}
    cluster.state.release("p0")
    assert cluster.put("a").probation is not None, "no pod of it is left that had its turn"


def pod(workload: str | None = None, **more: object) -> PodView:
    metadata = {
        "uid": "u",
        "name": "web-1",
        "namespace": "shop",
        "annotations": {
            names.FRACTION: "0.25",
            names.GPU: "g0",
            names.THREAD_PERCENTAGE: "25",
            names.MEMORY_LIMIT: "0=100M",
            names.DECIDED_AT: "2026-11-23T03:00:00Z",
            names.PROBATION_SECONDS: "60",
            **({} if workload is None else {names.WORKLOAD: workload}),
        },
        "ownerReferences": [{"kind": "ReplicaSet", "name": "web", "uid": "r", "controller": True}],
    }
    return PodView.from_object({"metadata": metadata, "spec": {"nodeName": "n0"}, **more})


def test_the_term_ends_a_window_after_its_begin():
    unprofiled = unprofiled_of(pod(), None)
    assert unprofiled is not None
    term = term_of(pod(), unprofiled, 1000.0)
    assert term is not None
    assert (term.until, term.namespace) == (1060.0, "shop")
    assert term_of(pod(), None, 1000.0) is None, "its profile is there"


def test_when_the_first_container_started():
    running = [{"state": {"running": {"startedAt": f"2026-11-23T03:00:0{n}Z"}}} for n in (4, 2)]
    waiting = {"state": {"waiting": {"reason": "ContainerCreating"}}}
    assert pod(status={"containerStatuses": [waiting]}).started_at == ""
    assert pod(status={"containerStatuses": [waiting, *running]}).started_at == "2026-11-23T03:00:02Z"


def share(spec: dict[str, object], status: dict[str, object] | None = None) -> GpuShare:
    return GpuShare.from_object(
        {"metadata": {"name": "web", "namespace": "shop"}, "spec": spec, "status": status or {}}
    )


def test_who_may_be_on_probation():
    early, late = unprofiled_of(pod(), None), unprofiled_of(pod(), share({}))
    assert early is not None
    assert late is not None
    assert early.workloads < late.workloads, "its GpuShare may come after the pod"
    windowed = unprofiled_of(pod(), share({"profile": {"mode": "Auto", "windowSeconds": 20}}))
    assert windowed is not None
    assert windowed.window_seconds == 20
    assert unprofiled_of(pod(), share({"profile": {"mode": "Off"}})) is None
    assert unprofiled_of(pod(), share({"selector": {}})) is None, "pods of several kinds"
    assert unprofiled_of(pod(workload="web"), share({"selector": {}})) is not None
    counters = SOLO.solo.as_dict()
    profile = {"gpuModel": H200, "counters": counters, "windowSeconds": 10.0}
    assert unprofiled_of(pod(), share({}, {"profile": profile})) is None
    assert unprofiled_of(pod(), share({}, {"profile": {**profile, "counters": {"sm_util": 1.5}}})) is not None


def test_clock_time():
    assert clock_time(1_795_402_805.9) == "03:00:05 UTC"


def test_settings_are_read_back():
    made = Settings(probation=ProbationSettings(90.0, 5, freezes=False, longest_seconds=120.0))
    assert parse_settings(made.to_mapping()) == made


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("GPUSHARE_PROBATION_SECONDS", "4000"),
        ("GPUSHARE_PROBATION_SECONDS", "long"),
        ("GPUSHARE_LONGEST_PROBATION_SECONDS", "3601"),
        ("GPUSHARE_MOST_PROBATIONS", "0"),
        ("GPUSHARE_FREEZES", "maybe"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(name: str, wrong: str) -> None:
    with pytest.raises(SettingsError, match=name):
        parse_settings({name: wrong})


STEPS = st.one_of(
    st.tuples(st.just("put"), st.sampled_from("abcd"), st.sampled_from([10, 25, 60]), st.sampled_from(JobClass)),
    st.tuples(st.just("leave"), st.integers(0, 9)),
    st.tuples(st.just("wait"), st.sampled_from([5.0, 30.0, 61.0])),
    st.tuples(st.just("profile"), st.sampled_from("abcd")),
)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(STEPS, max_size=25),
    gpus=st.integers(1, 5),
    probation=st.builds(
        ProbationSettings, st.sampled_from([20.0, 60.0]), st.integers(1, 3), freezes=st.booleans()
    ),
)
def test_a_window_ends_no_workload_has_two_and_no_gpu_is_closed_without_an_unknown_pod(steps, gpus, probation):
    cluster = Cluster(gpus, probation)
    for step in steps:
        if step[0] == "wait":
            cluster.now += step[1]
        elif step[0] == "profile":
            cluster.profiled.add(step[1])
            cluster.context.judge.forget()
        elif step[0] == "leave":
            uids = sorted(cluster.state.reservations)
            if uids:
                cluster.state.release(uids[step[1] % len(uids)])
        else:
            closed = cluster.closed()
            request, decided = cluster.ask(*step[1:])
            if isinstance(decided, Placement):
                assert decided.gpu_uuids[0] not in closed
                if decided.probation is not None:
                    assert not cluster.state.tenants(decided.gpu_uuids[0])
                cluster.state.reserve(request.pod_uid, decided, request)
        places = closed_places(cluster.state, cluster.context.judge, cluster.now)
        assert len(places) <= probation.most
        closed_gpus = [each.closed for each in places]
        assert len({each.gpu_uuid for each in closed_gpus}) == len(closed_gpus)
        assert len({name for each in closed_gpus for name in each.term.workloads}) == len(closed_gpus), (
            "one a workload"
        )
        for each in closed_gpus:
            reservation = cluster.state.reservations[each.pod_uid]
            assert reservation.placement.gpu_uuids == (each.gpu_uuid,)
            assert [tenant.pod_uid for tenant in cluster.state.tenants(each.gpu_uuid)] == [each.pod_uid]
            assert not each.term.workloads & cluster.profiled
            assert cluster.now < each.term.until <= cluster.now + probation.seconds
    cluster.now += probation.seconds
    assert cluster.closed() == set()
