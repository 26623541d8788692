import pytest

from gpushare.core.api.request import JobClass
from gpushare.core.placement.state import MOST_MODELS, ClusterState, GpuSpec, NodeSpec, Placement, PlacementRequest


def node(name: str, gpus: int = 2) -> NodeSpec:
    return NodeSpec(name, tuple(GpuSpec(f"GPU-{name}-{i}", "H100", 80_000) for i in range(gpus)), 64_000, 100_000)


def test_a_pod_known_before_its_node_counts_when_the_node_arrives() -> None:
    state = ClusterState()
    request = PlacementRequest("pod", 300, cpu_milli=1_000, job_class=JobClass.LATENCY)
    state.reserve("pod", Placement("a", ("GPU-a-1",), 9_000), request)
    assert state.tenants("GPU-a-1") == ()
    state.add_node(node("a"))
    (tenant,) = state.tenants("GPU-a-1")
    assert (tenant.pod_uid, tenant.share_milli, tenant.memory_mib) == ("pod", 300, 9_000)
    assert tenant.job_class is JobClass.LATENCY
    row = state.row("a")
    assert row is not None
    assert state.share_free_milli[:, row].tolist()[:2] == [1000, 700]
    assert state.cpu_free_milli[row] == 63_000


def test_a_node_that_changes_keeps_its_tenants() -> None:
    state = ClusterState([node("a"), node("b")])
    state.reserve("pod", Placement("a", ("GPU-a-1",), 9_000), PlacementRequest("pod", 300))
    state.update_node(node("a", gpus=1))
    assert state.tenants("GPU-a-1") == ()
    state.update_node(node("a", gpus=4))
    assert [tenant.pod_uid for tenant in state.tenants("GPU-a-1")] == ["pod"]
    state.remove_node("a")
    assert state.row("a") is None
    assert state.release("pod") is not None
    state.add_node(node("a"))
    assert state.tenants("GPU-a-1") == ()


def test_a_pod_is_counted_once() -> None:
    state = ClusterState([node("a")])
    state.reserve("pod", Placement("a", ("GPU-a-0",)), PlacementRequest("pod", 300))
    with pytest.raises(ValueError, match="holds a reservation"):
        state.reserve("pod", Placement("a", ("GPU-a-1",)), PlacementRequest("pod", 300))
    assert state.release("pod") is not None
    assert state.release("pod") is None


def test_undo_takes_back_what_was_tried_nested() -> None:
    state = ClusterState([node("a")])
    state.reserve("old", Placement("a", ("GPU-a-0",)), PlacementRequest("old", 300))
    outer = state.snapshot()
    state.release("old")
    inner = state.snapshot()
    state.reserve("new", Placement("a", ("GPU-a-0",)), PlacementRequest("new", 1000))
    state.undo(inner)
    assert state.tenants("GPU-a-0") == ()
    with pytest.raises(RuntimeError, match="snapshot"):
        state.add_node(node("b"))
    state.undo(outer)
    assert [tenant.pod_uid for tenant in state.tenants("GPU-a-0")] == ["old"]
    state.add_node(node("b"))


def test_an_agent_that_reports_ever_new_models_does_not_make_the_tables_grow() -> None:
    state = ClusterState([NodeSpec("good", (GpuSpec("GPU-good", "H200", 1000),))])
    epoch = state.epoch
    for write in range(20):
        gpus = tuple(GpuSpec(f"GPU-{number}", f"model {write} {number}", 1000) for number in range(16))
        (state.update_node if write else state.add_node)(NodeSpec("bad", gpus))
    assert len(state.model_names) == MOST_MODELS + 1
    assert state.epoch - epoch < 2 * MOST_MODELS
    row = state.row("bad")
    assert row is not None
    assert {state.model_names[int(model)] for model in state.model_ids[:, row]} == {""}
    assert state.accepted_model_ids(["H200", "model 19 3"]) == [0]
