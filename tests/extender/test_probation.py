"""The extender puts unknown workloads on probation, and a restarted one ends in the same state."""

from typing import Any

import pytest

from gpushare.core.api import GpuShare, PodView, Reason, Rejection, names
from gpushare.core.placement import Candidates, Placement, PlacementRequest, Settings
from gpushare.extender.ledger import ShareLedger
from gpushare.extender.reduce import NodeView, reduce_gpunode
from gpushare.kube import Change
from gpushare.twin.contention import WORKLOADS

DECIDED = 1_795_402_800.0  # 2026-11-23T03:00:00Z
MODEL = "NVIDIA H200"


class Cluster:
    """Two nodes of one GPU each; the API's objects, and an extender that can be started anew on them."""

    def __init__(self) -> None:
        self.now = DECIDED
        self.clock_set = 0.0
        """By how much the wall clock was set."""
        self.rooms = 0
        self.pods: dict[str, dict[str, Any]] = {}
        self.shares: dict[str, dict[str, Any]] = {}
        self.conditions: list[dict[str, str]] = []
        self.ledger = self.start()

    def start(self) -> ShareLedger:
        """A fresh extender with everything that the API holds."""
        self.ledger = ledger = ShareLedger(
            Settings("bestfit"),
            on_room=self.room,
            now=lambda: self.now + self.clock_set,
            monotonic=lambda: self.now,
        )
        for node in ("n1", "n2"):
            ledger.node_changed(Change.ADDED, node, NodeView(node, 64_000, 500_000))
            self.write(node)
        for key, share in self.shares.items():
            ledger.share_changed(Change.ADDED, key, GpuShare.from_object(share))
        for pod in self.pods.values():
            ledger.pod_changed(Change.ADDED, f"default/{pod['metadata']['name']}", PodView.from_object(pod))
        return ledger

    def room(self) -> None:
        self.rooms += 1

    def write(self, node: str, conditions: tuple[dict[str, str], ...] = ()) -> None:
        gpu = {"uuid": f"GPU-{node}", "index": 0, "model": MODEL, "memoryMiB": 81920, "health": "Healthy"}
        obj = {"metadata": {"name": node}, "status": {"gpus": [gpu], "conditions": list(conditions)}}
        self.ledger.gpunode_changed(Change.MODIFIED, node, reduce_gpunode(obj))

    def make(self, name: str, owner: str = "", fraction: str = "0.25", **annotations: str) -> PodView:
        asked = {names.FRACTION: fraction} | {f"gpushare.io/{key}": text for key, text in annotations.items()}
        references = [{"kind": "Job", "name": owner, "uid": f"uid-{owner}", "controller": True}] if owner else []
        self.pods[name] = {
            "metadata": {
                "name": name,
                "namespace": "default",
                "uid": f"uid-{name}",
                "annotations": asked,
                "ownerReferences": references,
            },
            "spec": {},
            "status": {},
        }
        return self.tell(name)

    def tell(self, name: str) -> PodView:
        view = PodView.from_object(self.pods[name])
        self.ledger.pod_changed(Change.MODIFIED, f"default/{name}", view)
        return view

    def bind(self, name: str, node: str) -> dict[str, str]:
        """What the binder does; return the decision's annotations."""
        view = PodView.from_object(self.pods[name])
        request = self.ledger.request_of(view)
        assert isinstance(request, PlacementRequest)
        chosen = self.ledger.choose(view, request, node)
        assert isinstance(chosen, Placement), chosen
        self.ledger.reserve(request, chosen)
        decision = self.ledger.decision(view.uid, "2026-11-23T03:00:00Z").to_annotations()
        self.pods[name]["metadata"]["annotations"] |= decision
        self.pods[name]["spec"]["nodeName"] = node
        self.tell(name)
        return decision

    def put_share(self, name: str, owner: str, **status: Any) -> None:
        self.shares[f"default/{name}"] = {
            "metadata": {
                "name": name,
                "namespace": "default",
                "uid": f"share-{name}",
                "ownerReferences": [
                    {"apiVersion": "batch/v1", "kind": "Job", "name": owner, "uid": f"uid-{owner}"}
                ],
            },
            "spec": {},
            "status": status,
        }
        share = GpuShare.from_object(self.shares[f"default/{name}"])
        self.ledger.share_changed(Change.MODIFIED, f"default/{name}", share)

    def refusals(self, name: str) -> dict[str, Rejection]:
        found = self.ledger.candidates(PodView.from_object(self.pods[name]), ["n1", "n2"])
        assert not isinstance(found, Rejection)
        return found.rejections()

    def scores(self, name: str) -> dict[str, float]:
        found = self.ledger.candidates(PodView.from_object(self.pods[name]), ["n1", "n2"])
        assert not isinstance(found, Rejection)
        return dict(zip(found.nodes, found.scores.tolist(), strict=True))


@pytest.fixture
def cluster() -> Cluster:
    """A latency pod holds most of n1, and a new workload has n2's GPU to itself."""
    made = Cluster()
    made.make("web", "web", "0.5", **{"class": "latency"})
    made.bind("web", "n1")
    made.make("new-1", "new")
    return made


def test_it_prefers_the_empty_gpu_and_the_decision_says_so(cluster: Cluster) -> None:
    scores = cluster.scores("new-1")
    assert scores["n2"] > scores["n1"]
    cluster.make("late", "late")
    assert names.PROBATION_SECONDS not in cluster.bind("late", "n1"), "kube-scheduler sent it there all the same"
    assert cluster.bind("new-1", "n2")[names.PROBATION_SECONDS] == "60"
    cluster.make("other", "other", "0.3")
    refused = cluster.refusals("other")
    assert refused["n2"].reason is Reason.PROBATION
    assert "GPU-n2, which is on probation by pod default/new-1 until 03:05:00 UTC at the latest" in str(
        refused["n2"]
    )
    assert cluster.make("new-2", "new").uid not in cluster.ledger.state.reservations
    assert names.PROBATION_SECONDS not in cluster.bind("new-2", "n1"), "its workload has its turn"


@pytest.mark.parametrize(
    ("accepted", "started", "seen_after", "until"),
    [
        ("02:50:00", "02:50:20", 20, "03:01:20"),
        ("03:10:00", "03:10:20", 20, "03:01:20"),
        ("03:01:00", "03:01:20", 80, "03:02:20"),
    ],
    ids=["the node's clock is behind", "it is ahead", "kubelet takes the pod up late"],
)
def test_a_window_begins_with_the_container(
    cluster: Cluster, accepted: str, started: str, seen_after: float, until: str
) -> None:
    """Before: a pod that kubelet took up a minute after the decision had what was left of its window."""
    cluster.bind("new-1", "n2")
    cluster.now = DECIDED + seen_after
    cluster.pods["new-1"]["status"] = {
        "startTime": f"2026-11-23T{accepted}Z",
        "containerStatuses": [{"state": {"running": {"startedAt": f"2026-11-23T{started}Z"}}}],
    }
    cluster.tell("new-1")
    cluster.make("other", "other", "0.3")
    assert f"until {until} UTC" in str(cluster.refusals("other")["n2"])
    cluster.start()
    assert f"until {until} UTC" in str(cluster.refusals("other")["n2"]), "to a restarted extender too"


def test_a_restarted_extender_knows_who_is_on_probation_until_when(cluster: Cluster) -> None:
    cluster.bind("new-1", "n2")
    cluster.now = DECIDED + 21
    cluster.pods["new-1"]["status"] = {
        "containerStatuses": [{"state": {"running": {"startedAt": "2026-11-23T03:00:20Z"}}}]
    }
    cluster.tell("new-1")
    cluster.make("other", "other", "0.3")
    before = str(cluster.refusals("other")["n2"])
    assert "until 03:01:20 UTC" in before, "a minute after its container started"
    cluster.start()
    assert str(cluster.refusals("other")["n2"]) == before
    cluster.now = DECIDED + 81
    assert cluster.refusals("other") == {}
    cluster.start()
    assert cluster.refusals("other") == {}


def test_waiting_pods_are_told_when_a_window_ends(cluster: Cluster) -> None:
    cluster.bind("new-1", "n2")
    cluster.ledger.end_probations()
    told = cluster.rooms
    cluster.now = DECIDED + 299
    cluster.ledger.end_probations()
    assert cluster.rooms == told
    cluster.now = DECIDED + 300
    cluster.ledger.end_probations()
    assert cluster.rooms == told + 1
    cluster.ledger.end_probations()
    assert cluster.rooms == told + 1


def test_the_profile_opens_the_gpu_and_its_gpushare_may_come_late(cluster: Cluster) -> None:
    cluster.bind("new-1", "n2")
    cluster.ledger.end_probations()
    cluster.make("other", "other", "0.3")
    cluster.put_share("job-new", "new")
    assert cluster.refusals("other")["n2"].reason is Reason.PROBATION
    counters = WORKLOADS["latency-probe"].solo.as_dict()
    cluster.put_share("job-new", "new", profile={"gpuModel": MODEL, "counters": counters, "windowSeconds": 10.0})
    assert "n2" not in cluster.refusals("other")
    told = cluster.rooms
    cluster.ledger.end_probations()
    assert cluster.rooms == told + 1
    cluster.start()
    assert "n2" not in cluster.refusals("other")


def test_a_pod_that_is_gone_leaves_no_closed_gpu(cluster: Cluster) -> None:
    cluster.bind("new-1", "n2")
    cluster.make("other", "other", "0.3")
    cluster.ledger.pod_changed(Change.DELETED, "default/new-1", PodView.from_object(cluster.pods["new-1"]))
    assert cluster.refusals("other") == {}


@pytest.mark.parametrize("condition", names.READING_CONDITIONS)
def test_a_node_where_nobody_can_be_stopped_or_not_for_a_reading_is_none_to_be_read_on(condition: str) -> None:
    cluster = Cluster()
    cluster.make("batch", "batch", "0.3")
    cluster.bind("batch", "n1")
    cluster.make("new-1", "new")
    assert cluster.scores("new-1")["n1"] > cluster.scores("new-1")["n2"]
    cluster.write("n1", ({"type": condition, "status": "False"},))
    assert cluster.scores("new-1")["n1"] < cluster.scores("new-1")["n2"]
    assert names.PROBATION_SECONDS in cluster.bind("new-1", "n2")


@pytest.mark.parametrize("by", [86_400.0, 3600.0, -3600.0, -86_400.0])
def test_a_wall_clock_that_is_set_opens_a_gpu_neither_early_nor_late(cluster: Cluster, by: float) -> None:
    """Before: set ahead, at once; set back, later by as much."""
    cluster.bind("new-1", "n2")
    cluster.make("other", "other", "0.3")
    cluster.now += 10.0
    cluster.clock_set = by
    assert cluster.refusals("other")["n2"].reason is Reason.PROBATION
    cluster.tell("new-1")
    cluster.now += 289.0
    assert cluster.refusals("other")["n2"].reason is Reason.PROBATION, "4 minutes to start, and one alone"
    cluster.now += 2.0
    assert cluster.refusals("other") == {}


@pytest.mark.parametrize("by", [3600.0, -3600.0])
def test_a_container_that_starts_after_the_wall_clock_was_set_has_its_whole_window(
    cluster: Cluster, by: float
) -> None:
    cluster.bind("new-1", "n2")
    cluster.make("other", "other", "0.3")
    cluster.clock_set = by
    cluster.now += 20.0
    cluster.pods["new-1"]["status"] = {
        "containerStatuses": [{"state": {"running": {"startedAt": "2026-11-23T03:00:20Z"}}}]
    }
    cluster.tell("new-1")
    cluster.clock_set = 0.0
    for seconds, is_closed in ((59.0, True), (2.0, False)):
        cluster.now += seconds
        assert ("n2" in cluster.refusals("other")) is is_closed


def test_a_wall_clock_that_was_set_back_before_the_extender_started_keeps_a_gpu_closed_for_its_window(
    cluster: Cluster,
) -> None:
    """Before: for as long as the clock took to come back, and the window."""
    cluster.bind("new-1", "n2")
    cluster.make("other", "other", "0.3")
    cluster.clock_set = -3600.0
    cluster.start()
    assert cluster.refusals("other")["n2"].reason is Reason.PROBATION
    cluster.now += 301.0
    cluster.tell("new-1")
    assert cluster.refusals("other") == {}


def test_a_profile_opens_a_gpu_after_the_wall_clock_was_set_too(cluster: Cluster) -> None:
    cluster.bind("new-1", "n2")
    cluster.make("other", "other", "0.3")
    cluster.clock_set = -3600.0
    assert cluster.refusals("other")["n2"].reason is Reason.PROBATION
    counters = WORKLOADS["latency-probe"].solo.as_dict()
    cluster.put_share("job-new", "new", profile={"gpuModel": MODEL, "counters": counters, "windowSeconds": 10.0})
    assert "n2" not in cluster.refusals("other")


@pytest.mark.parametrize("by", [3600.0, -3600.0])
def test_a_pod_that_is_asked_about_while_the_clock_is_set_keeps_its_window(cluster: Cluster, by: float) -> None:
    """Before: whoever was asked about just then had no reservation for a moment, so its window did not move."""
    unbound = PodView.from_object(cluster.pods["new-1"])
    cluster.bind("new-1", "n2")
    cluster.make("other", "other", "0.3")
    cluster.now += 10.0
    cluster.clock_set = by
    found = cluster.ledger.candidates(unbound, ["n1", "n2"])  # kube-scheduler's watch is late
    assert isinstance(found, Candidates)
    assert cluster.refusals("other")["n2"].reason is Reason.PROBATION
    cluster.now += 291.0
    assert cluster.refusals("other") == {}


def test_who_was_asked_about_is_told_by_no_wall_clock(cluster: Cluster) -> None:
    """Before: after a jump ahead, who was just being bound counted as never seen by kube-scheduler."""
    assert [each.name for each in cluster.ledger.untried()] == ["new-1"]
    cluster.refusals("new-1")
    cluster.now += 3600.0
    assert list(cluster.ledger.untried()) == []
