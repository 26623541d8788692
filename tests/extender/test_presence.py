"""A node without a running agent gets no new pods: kubelet would reject them, and a bare pod is lost then."""

import copy
from typing import Any

import pytest

from gpushare.core.api import PodView, Reason, Rejection, names
from gpushare.core.placement import NO_PROBATION, Settings
from gpushare.extender.ledger import ShareLedger
from gpushare.extender.others import reduce_other_pod
from gpushare.extender.presence import HOLD_SECONDS
from gpushare.extender.reduce import NodeView, reduce_gpunode
from gpushare.kube import Change

AWAY = "the node's agent is not running, so kubelet has no shares to give there now"
REJECTED = (
    "Pod was rejected: Allocate failed due to no healthy devices present; "
    "cannot allocate unhealthy devices gpushare.io/share, which is unexpected"
)
KEY = "gpushare-system/agent-x"


def agent(uid: str = "u", node: str = "n1", *, started: bool = True, **metadata: Any) -> dict[str, Any]:
    labels = {"app.kubernetes.io/component": "agent"}
    container = {"name": "agent", "started": started, "state": {"running": {}}}
    return {
        "metadata": {"uid": uid, "name": "agent-x", "namespace": "gpushare-system", "labels": labels, **metadata},
        "spec": {"nodeName": node, "containers": [{}]},
        "status": {"phase": "Running", "containerStatuses": [container]},
    }


def standby(*, runs: bool = True, started: bool = True, name: str = "standby") -> dict[str, Any]:
    state: dict[str, Any] = {"running": {}} if runs else {"terminated": {"exitCode": 137}}
    return {"name": name, "started": started, "state": state}


class Cluster:
    """Two nodes with a GPU each."""

    def __init__(self) -> None:
        self.rooms = 0
        self.ledger = ShareLedger(Settings("bestfit", probation=NO_PROBATION), on_room=self.room)
        for name in ("n1", "n2"):
            self.ledger.node_changed(Change.ADDED, name, NodeView(name, 64_000, 500_000))
            self.gpunode(name)

    def room(self) -> None:
        self.rooms += 1

    def gpunode(self, node: str, change: Change = Change.ADDED) -> None:
        gpus = [{"uuid": f"GPU-{node}", "index": 0, "model": "H200", "memoryMiB": 81920, "health": "Healthy"}]
        obj = {"metadata": {"name": node}, "status": {"gpus": gpus, "observedAt": "T0"}}
        self.ledger.gpunode_changed(change, node, reduce_gpunode(obj))

    def see(self, obj: dict[str, Any], change: Change = Change.MODIFIED) -> None:
        view = reduce_other_pod(obj, "gpushare-system")
        assert view is not None
        self.ledger.other_pod_changed(change, KEY, view)

    def pod(self, phase: str, **status: str) -> None:
        obj = {
            "metadata": {"uid": "p", "name": "p", "namespace": "shop", "annotations": {names.FRACTION: "0.25"}},
            "spec": {"nodeName": "n1", "containers": [{"resources": {"limits": {names.SHARE_RESOURCE: "25"}}}]},
            "status": {"phase": phase, **status},
        }
        self.ledger.pod_changed(Change.MODIFIED, "shop/p", PodView.from_object(obj))

    def refused(self) -> dict[str, str]:
        metadata = {"uid": "q", "name": "q", "namespace": "shop", "annotations": {names.FRACTION: "0.25"}}
        candidates = self.ledger.candidates(PodView.from_object({"metadata": metadata}), ["n1", "n2"])
        assert not isinstance(candidates, Rejection)
        found = candidates.rejections()
        assert {one.reason for one in found.values()} <= {Reason.AGENT_SILENT}
        return {node: one.detail for node, one in found.items()}


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_a_node_is_left_out_from_when_its_agent_leaves_until_the_next_has_registered(cluster: Cluster) -> None:
    cluster.see(agent("old"), Change.ADDED)
    assert cluster.refused() == {}
    cluster.see(agent("old", deletionTimestamp="now"))
    assert cluster.refused() == {"n1": AWAY}
    cluster.see(agent("old"), Change.DELETED)
    assert cluster.refused() == {"n1": AWAY}, "no agent at all is no better"
    cluster.see(agent("new", started=False))
    assert cluster.refused() == {"n1": AWAY}
    rooms = cluster.rooms
    cluster.see(agent("new"))
    assert cluster.refused() == {}
    assert cluster.rooms > rooms, "who waits is tried again"


def test_an_agent_whose_container_ended_is_away(cluster: Cluster) -> None:
    cluster.see(agent())
    ended = agent(started=False)
    ended["status"]["containerStatuses"][0]["state"] = {"terminated": {"exitCode": 137}}
    cluster.see(ended)
    assert cluster.refused() == {"n1": AWAY}
    cluster.gpunode("n1", Change.MODIFIED)
    cluster.ledger.node_changed(Change.MODIFIED, "n1", NodeView("n1", 32_000, 500_000))
    assert cluster.refused() == {"n1": AWAY}, "its row was made anew"


@pytest.mark.parametrize("first_started", [True, False])
def test_either_container_is_enough_and_a_stranger_is_not(cluster: Cluster, first_started: bool) -> None:
    pod = agent(started=first_started)
    ended = agent(started=False)["status"]["containerStatuses"][0] | {"state": {"terminated": {"exitCode": 137}}}
    for statuses, is_away in (
        ([ended, standby()], False),
        ([ended, standby(started=False)], True),
        ([ended, standby(runs=False)], True),
        ([ended, standby(name="mesh-proxy")], True),
        ([*pod["status"]["containerStatuses"], standby(runs=False)], not first_started),
        ([], True),
    ):
        cluster.see({**pod, "status": {"phase": "Running", "containerStatuses": statuses}})
        assert cluster.refused() == ({"n1": AWAY} if is_away else {}), statuses


def test_a_pod_in_place_of_another_of_its_name_counts_alone(cluster: Cluster) -> None:
    cluster.see(agent("old", deletionTimestamp="now"))
    cluster.see(agent("new"))  # the watch was down meanwhile
    assert cluster.refused() == {}


@pytest.mark.parametrize(
    "change",
    [{"namespace": "shop"}, {"labels": {"app.kubernetes.io/component": "mps"}}, {"labels": None}],
    ids=lambda change: next(iter(change)),
)
def test_other_pods_are_no_agents_whatever_they_say(cluster: Cluster, change: dict[str, Any]) -> None:
    foreign = agent(started=False)
    foreign["metadata"] |= change
    cluster.see(foreign)
    assert cluster.refused() == {}


def test_an_agent_that_came_before_its_gpunode_is_known_to_be_away(cluster: Cluster) -> None:
    cluster.see(agent(node="n3", started=False))
    cluster.ledger.node_changed(Change.ADDED, "n3", NodeView("n3", 64_000, 500_000))
    cluster.gpunode("n3")
    assert cluster.ledger.away == {"n3"}
    assert not cluster.ledger.state.healthy[0, cluster.ledger.state.row("n3")]


def test_a_node_that_is_no_longer_ours_is_forgotten(cluster: Cluster) -> None:
    cluster.see(agent())
    cluster.see(agent(), Change.DELETED)
    cluster.gpunode("n1", Change.DELETED)
    cluster.gpunode("n1")
    assert cluster.refused() == {}
    assert cluster.ledger.away == set()


def test_a_rejected_pod_keeps_others_from_its_node_for_a_while(cluster: Cluster) -> None:
    cluster.ledger.listen(0.0)
    cluster.pod("Pending")
    cluster.pod("Failed", reason="UnexpectedAdmissionError", message=REJECTED)
    assert cluster.refused() == {"n1": AWAY}
    cluster.ledger.listen(1.0)
    cluster.ledger.listen(1.0 + HOLD_SECONDS)
    assert cluster.refused() == {"n1": AWAY}
    rooms = cluster.rooms
    cluster.ledger.listen(1.5 + HOLD_SECONDS)
    assert cluster.refused() == {}
    assert cluster.rooms > rooms
    cluster.pod("Failed", reason="UnexpectedAdmissionError", message=REJECTED)
    assert cluster.refused() == {}, "the same pod again is no news"


def test_a_pod_that_was_rejected_before_this_extender_began_tells_nothing(cluster: Cluster) -> None:
    cluster.pod("Failed", reason="UnexpectedAdmissionError", message=REJECTED)
    assert cluster.refused() == {}


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("UnexpectedAdmissionError", "Allocate failed due to rpc error: kubelet chose ids of two GPUs"),
        ("UnexpectedAdmissionError", REJECTED.replace("gpushare.io/share", "nvidia.com/gpu")),
        ("Evicted", REJECTED),
        ("", ""),
    ],
)
def test_other_ends_of_a_pod_say_nothing_of_the_plugin(cluster: Cluster, reason: str, message: str) -> None:
    cluster.pod("Pending")
    cluster.pod("Failed", reason=reason, message=message)
    assert cluster.refused() == {}


def test_a_rejection_does_not_end_a_longer_absence(cluster: Cluster) -> None:
    cluster.see(agent(started=False))
    cluster.pod("Pending")
    cluster.pod("Failed", reason="UnexpectedAdmissionError", message=REJECTED)
    cluster.ledger.listen(0.0)
    cluster.ledger.listen(HOLD_SECONDS + 1)
    assert cluster.refused() == {"n1": AWAY}


def test_an_agents_pod_is_counted_like_any_other(cluster: Cluster) -> None:
    view = reduce_other_pod(copy.deepcopy(agent()), "gpushare-system")
    assert view is not None
    assert view.serves
    assert (view.cpu_milli, view.limit_percent) == (0, 0)


@pytest.mark.parametrize("agent_first", [True, False])
def test_nothing_is_remembered_of_a_node_that_is_gone(agent_first: bool) -> None:
    cluster = Cluster()
    cluster.see(agent(started=False))
    assert cluster.ledger.away == {"n1"}
    steps = [
        lambda: cluster.see(agent(started=False), Change.DELETED),
        lambda: cluster.gpunode("n1", Change.DELETED),
    ]
    for step in steps if agent_first else reversed(steps):
        step()
    assert not cluster.ledger.away
    assert not cluster.ledger._presence._agents
