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


def test_a_pod_that_lost_one_of_its_gpus_counts_with_the_others_and_all_its_cpu() -> None:
    """A GPU that fell off the bus is in no later report of its node, and the pod runs on."""
    state = ClusterState([node("a", gpus=4), node("b")])
    request = PlacementRequest("pod", 1000, 3, cpu_milli=40_000, node_memory_mib=60_000)
    latency = PlacementRequest("alone", 500, cpu_milli=1_000, job_class=JobClass.LATENCY)
    state.reserve("pod", Placement("a", ("GPU-a-2", "GPU-a-0", "GPU-a-1"), 9_000), request)
    state.reserve("alone", Placement("a", ("GPU-a-3",), 9_000), latency)

    def free() -> tuple[dict[str, int], int, int]:
        row = state.row("a")
        assert row is not None
        shares = dict(zip(state.uuids(row), state.share_free_milli[:, row].tolist(), strict=False))
        return shares, int(state.cpu_free_milli[row]), int(state.node_memory_free_mib[row])

    whole = {"GPU-a-0": 0, "GPU-a-1": 0, "GPU-a-2": 0, "GPU-a-3": 500}
    assert free() == (whole, 23_000, 40_000)
    for lost in ("GPU-a-0", "GPU-a-3"):
        left = tuple(gpu for gpu in node("a", gpus=4).gpus if gpu.uuid != lost)
        state.update_node(NodeSpec("a", left, 64_000, 100_000))
        assert free() == ({uuid: share for uuid, share in whole.items() if uuid != lost}, 23_000, 40_000), lost
        assert state.latency_count == (lost != "GPU-a-3")
    assert state.release("alone") is not None
    assert state.release("pod") is not None
    assert free() == ({"GPU-a-0": 1000, "GPU-a-1": 1000, "GPU-a-2": 1000}, 64_000, 100_000)
    state.reserve("pod", Placement("a", ("GPU-a-2", "GPU-a-3"), 9_000), request)
    state.reserve("guest", Placement("a", ("GPU-b-0",), 9_000), PlacementRequest("guest", 500))
    assert state.tenants("GPU-b-0") == (), "a GPU of another node"
    state.update_node(node("a", gpus=4))
    assert free() == ({"GPU-a-0": 1000, "GPU-a-1": 1000, "GPU-a-2": 0, "GPU-a-3": 0}, 24_000, 40_000)


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


def test_how_a_node_and_its_gpus_are_is_remembered_while_they_are_in_the_cluster_only() -> None:
    """Before: for ever, and an agent may list other sick GPUs in each write."""
    state = ClusterState([node("a", gpus=2)])
    state.set_health("GPU-a-0", healthy=False)
    state.set_health("GPU-a-1", healthy=False)
    state.set_reading("a", works=False)
    state.update_node(node("a", gpus=1))
    row = state.row("a")
    assert row is not None
    assert not state.healthy[0, row], "it is still listed"
    assert state.unreadable[row]
    state.update_node(node("a", gpus=2))
    assert state.healthy[:, row].tolist()[:2] == [False, True], "whoever lists a GPU again says how it is"
    state.set_silence("a", 150)
    state.remove_node("a")
    state.add_node(node("a", gpus=2))
    row = state.row("a")
    assert row is not None
    assert state.healthy[:, row].tolist()[:2] == [True, True]
    assert not state.unreadable[row]
    assert not state.silent_seconds[row]
