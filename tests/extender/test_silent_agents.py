"""A node whose agent fell silent gets no new pods until the agent writes again; what it has stays."""

import logging

import pytest

from gpushare.core.api import PodView, Reason, Rejection, names
from gpushare.core.control import SILENT_SECONDS
from gpushare.core.placement import NO_PROBATION, PlacementRequest, Settings, decide
from gpushare.extender.ledger import ShareLedger
from gpushare.extender.reduce import NodeView, reduce_gpunode
from gpushare.extender.verbs import UNRESOLVABLE
from gpushare.kube import Change

LONG = SILENT_SECONDS + 1


class Nodes:
    """Two nodes with a GPU each, as their agents write them."""

    def __init__(self) -> None:
        self.rooms = 0
        self.ledger = ShareLedger(Settings("bestfit", probation=NO_PROBATION), on_room=self.room)
        for name in ("n1", "n2"):
            self.ledger.node_changed(Change.ADDED, name, NodeView(name, 64_000, 500_000))
            self.write(name, "T0")

    def room(self) -> None:
        self.rooms += 1

    def write(self, node: str, observed_at: str, health: str = "Healthy") -> None:
        gpus = [{"uuid": f"GPU-{node}", "index": 0, "model": "H200", "memoryMiB": 81920, "health": health}]
        obj = {"metadata": {"name": node}, "status": {"gpus": gpus, "observedAt": observed_at}}
        self.ledger.gpunode_changed(Change.MODIFIED, node, reduce_gpunode(obj))

    def rejections(self, fraction: str = "0.25") -> dict[str, Rejection]:
        metadata = {"uid": "p", "name": "p", "namespace": "default", "annotations": {names.FRACTION: fraction}}
        candidates = self.ledger.candidates(PodView.from_object({"metadata": metadata}), ["n1", "n2"])
        assert not isinstance(candidates, Rejection)
        return candidates.rejections()

    def refused(self) -> dict[str, Reason]:
        return {node: rejection.reason for node, rejection in self.rejections().items()}

    def details(self) -> dict[str, str]:
        return {node: rejection.detail for node, rejection in self.rejections().items()}


@pytest.fixture
def nodes() -> Nodes:
    return Nodes()


def test_a_silent_nodes_gpus_are_refused_until_its_agent_writes_again(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    nodes.ledger.listen(100.0)
    assert nodes.refused() == {}
    nodes.write("n2", "T1")
    nodes.ledger.listen(200.0)
    with caplog.at_level(logging.WARNING):
        for second in range(5):
            nodes.ledger.listen(100.0 + LONG + second)
    assert nodes.ledger.silent == {"n1"}
    assert nodes.refused() == {"n1": Reason.AGENT_SILENT}
    assert nodes.details() == {"n1": "the node's agent has not reported for more than 150 s"}
    assert caplog.text.count("the agent of node n1 has been silent") == 1
    rooms = nodes.rooms
    nodes.write("n1", "T1")
    nodes.ledger.listen(300.0)
    assert nodes.ledger.silent == frozenset()
    assert nodes.refused() == {}
    assert nodes.rooms > rooms, "who waits is tried again"


def test_another_writers_change_is_no_word_of_the_agent(nodes: Nodes) -> None:
    nodes.ledger.listen(0.0)
    nodes.write("n1", "T0", health="Unhealthy")
    nodes.write("n1", "T0")
    nodes.ledger.listen(LONG)
    assert nodes.ledger.silent == {"n1", "n2"}


def test_an_unhealthy_gpu_stays_so_when_its_agent_is_heard_again(nodes: Nodes) -> None:
    nodes.ledger.listen(0.0)
    nodes.ledger.listen(LONG)
    nodes.write("n1", "T1", health="Unhealthy")
    nodes.write("n2", "T1")
    nodes.ledger.listen(LONG + 1)
    assert nodes.refused() == {"n1": Reason.GPU_UNHEALTHY}


def test_a_silent_node_is_refused_for_its_silence_whatever_else_is_wrong(nodes: Nodes) -> None:
    """Nothing else is known of a node without news."""
    nodes.write("n1", "T1", health="Unhealthy")
    nodes.ledger.listen(0.0)
    nodes.write("n2", "T1")
    nodes.ledger.listen(LONG)
    assert nodes.refused() == {"n1": Reason.AGENT_SILENT}
    nodes.ledger.node_changed(Change.MODIFIED, "n1", NodeView("n1", 32_000, 500_000))
    assert nodes.refused() == {"n1": Reason.AGENT_SILENT}, "its row was made anew"
    nodes.write("n1", "T1", health="Healthy")
    assert nodes.refused() == {"n1": Reason.AGENT_SILENT}, "not its agent's word"
    nodes.ledger.listen(2 * LONG)
    assert nodes.refused() == {"n1": Reason.AGENT_SILENT, "n2": Reason.AGENT_SILENT}
    assert Reason.AGENT_SILENT in UNRESOLVABLE, "no victim's end mends it"


def test_for_the_cluster_a_silent_node_is_farther_than_a_full_one(nodes: Nodes) -> None:
    nodes.ledger.listen(0.0)
    nodes.ledger.listen(LONG)
    request = PlacementRequest("p", share_milli=250)
    told = decide(request, nodes.ledger.context)
    assert isinstance(told, Rejection)
    assert told == Rejection(
        Reason.AGENT_SILENT,
        "fits on none of 2 nodes; on the 2 closest: the node's agent has not reported for more than 150 s",
    )
    nodes.write("n2", "T1", health="Unhealthy")
    nodes.ledger.listen(LONG + 1)
    told = decide(request, nodes.ledger.context)
    assert isinstance(told, Rejection)
    assert told.reason is Reason.GPU_UNHEALTHY


def test_a_started_extender_takes_every_agent_for_alive_first(nodes: Nodes) -> None:
    nodes.ledger.listen(1e6)
    assert nodes.ledger.silent == frozenset()


def test_a_gpunode_without_a_time_and_one_that_is_gone_are_not_judged(nodes: Nodes) -> None:
    nodes.write("n1", "")
    nodes.ledger.listen(0.0)
    gone = reduce_gpunode({"metadata": {"name": "n2"}})
    nodes.ledger.gpunode_changed(Change.DELETED, "n2", gone)
    nodes.ledger.listen(LONG)
    assert nodes.ledger.silent == frozenset()
