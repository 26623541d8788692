"""A place that was chosen is lost when its node or a GPU is, or when others hold more than is left."""

from collections.abc import Callable

import pytest

from gpushare.core.placement import (
    AGENT_AWAY,
    ClusterState,
    GpuSpec,
    NodeSpec,
    Placement,
    PlacementRequest,
    lost_place,
)

GPUS = tuple(GpuSpec(f"g{slot}", "H200", 80_000) for slot in range(2))
FULL = "GPU g1 has been filled by others meanwhile"
SILENT = "node n1: the node's agent has not reported for more than 90 s"


def reserve(state: ClusterState, name: str, share_milli: int, memory_mib: int, clients: int = 24) -> None:
    request = PlacementRequest(name, share_milli, memory_mib=memory_mib, clients=clients)
    state.reserve(name, Placement("n1", ("g1",), memory_mib), request)


@pytest.mark.parametrize(
    ("happens", "why"),
    [
        (lambda state: None, ""),
        (lambda state: reserve(state, "fits", 500, 40_000), ""),
        (lambda state: reserve(state, "big", 600, 10_000), FULL),
        (lambda state: reserve(state, "large", 200, 50_000), FULL),
        (lambda state: reserve(state, "many", 250, 20_000, clients=25), FULL),
        (lambda state: state.set_health("g0", healthy=False), ""),
        (lambda state: state.set_health("g1", healthy=False), "GPU g1 has become unhealthy"),
        (lambda state: state.set_silence("n1", 90), SILENT),
        (lambda state: state.set_silence("n1", AGENT_AWAY), "node n1: the node's agent is not running"),
        (lambda state: state.update_node(NodeSpec("n1", GPUS[:1])), "node n1 has lost one of its GPUs"),
        (lambda state: state.remove_node("n1"), "node n1 has no GPUs any more"),
    ],
)
def test_a_lost_place_is_told(happens: Callable[[ClusterState], None], why: str) -> None:
    state = ClusterState([NodeSpec("n1", GPUS)])
    reserve(state, "p", 500, 40_000)
    happens(state)
    reservation = state.reservation("p")
    assert reservation is not None
    found = lost_place(state, reservation)
    assert found.startswith(why)
    assert bool(found) == bool(why)
