"""Values by node are kept while they are of use, and of pods that are gone only for a while."""

import numpy as np

from gpushare.core.placement.node_cache import kept_by_row
from gpushare.core.placement.row_changes import CHANGES_PER_ROW, LEAST_CHANGES, RowChanges
from gpushare.core.placement.shapes import GpuSpec, NodeSpec, Placement, PlacementRequest
from gpushare.core.placement.state import MAX_TABLES, ClusterState


class CountedRows:
    """A cluster, and how many rows were evaluated."""

    def __init__(self, nodes: int = 1) -> None:
        self.state = ClusterState(NodeSpec(f"n{n}", (GpuSpec(f"g{n}", "H200"),)) for n in range(nodes))
        self.evaluated = 0

    def ask(self, number: int) -> None:
        """Ask about a pod of a size of its own."""
        kept_by_row(self.state, "what", self.request(number).shape, None, self.evaluate)

    def evaluate(self, rows):
        self.evaluated += len(rows)
        return np.zeros(len(rows))

    def come_and_go(self, number: int) -> None:
        self.state.reserve("pod", Placement("n0", ("g0",)), self.request(number))
        self.state.release("pod")

    @staticmethod
    def request(number: int) -> PlacementRequest:
        return PlacementRequest("pod", 100, memory_mib=number)


def test_pods_of_ever_other_sizes_that_come_and_go_leave_as_many_tables_after_ten_times_as_many():
    cluster, counts = CountedRows(), []
    for number in range(4000):
        cluster.ask(number)
        cluster.come_and_go(number)
        counts.append(len(cluster.state.row_tables))
    assert max(counts[400:]) <= max(counts[:400]) < 400


def test_a_size_that_is_asked_for_again_and_again_is_evaluated_only_where_something_has_changed():
    cluster = CountedRows(nodes=20)
    cluster.ask(0)
    begun = cluster.evaluated
    for number in range(1000):
        cluster.come_and_go(number)
        cluster.ask(0)
    assert cluster.evaluated - begun == 1000


def test_where_nothing_changes_the_tables_that_were_asked_for_last_are_kept():
    cluster = CountedRows()
    for number in range(MAX_TABLES):
        cluster.ask(number)
    cluster.ask(0)
    cluster.ask(MAX_TABLES)
    begun = cluster.evaluated
    assert len(cluster.state.row_tables) == MAX_TABLES
    cluster.ask(0)
    assert cluster.evaluated == begun
    cluster.ask(1)
    assert cluster.evaluated > begun, "it was the one that nobody had asked for longest"


def test_changes_are_listed_until_there_are_too_many():
    changes, most = RowChanges(), CHANGES_PER_ROW * 3 + LEAST_CHANGES
    for number in range(most):
        changes.add(number % 3, of_rows=3)
    assert changes.since(0).tolist() == [0, 1, 2]
    assert changes.since(most - 1).tolist() == [(most - 1) % 3]
    changes.add(0, of_rows=3)
    assert changes.is_forgotten(0)
    assert changes.since(0) is None
    assert changes.count == most + 1
    assert changes.since(most).tolist() == [0]
    assert changes.since(most + 1).tolist() == []
