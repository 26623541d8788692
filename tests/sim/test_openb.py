"""Traces: what is read, and what bad input gets: one sentence with file, line and column."""

import pytest

from gpushare.core.placement import GpuSpec, NodeSpec, Placement, PlacementRequest
from gpushare.sim.openb import TraceError, format_nodes, format_pods, parse_nodes, parse_placed_pods, parse_pods

NODES = "sn,cpu_milli,memory_mib,gpu,model\na,64000,262144,2,P100\nb,8000,1024,0,\n"
PODS = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
    "p0,12000,16384,1,460,V100|T4,LS,Running,0,10,0\n"
    "p1,100,1,0,0,,BE,Running,0,10,0\n"
)
POD_HEADER = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\n"


def test_nodes_and_pods_are_read() -> None:
    a, b = parse_nodes(NODES, "nodes.csv")
    assert a == NodeSpec("a", (GpuSpec("a/0", "P100"), GpuSpec("a/1", "P100")), 64000, 262144)
    assert b.gpus == ()
    first, second = parse_pods(PODS, "pods.csv")
    assert (first.share_milli, first.gpu_count, first.models) == (460, 1, {"V100", "T4"})
    assert (second.gpu_count, second.cpu_milli) == (0, 100)


def test_a_published_trace_without_models_runs_its_pods_on_any() -> None:
    text = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,qos\np,1000,1,1,500,LS\nq,1000,1,0,0,BE\n"
    first, second = parse_pods(text, "p.csv")
    assert (first.models, first.gpu_count, second.gpu_count) == (frozenset(), 1, 0)
    assert parse_pods(text.replace("LS", "").replace("qos", "gpu_spec"), "p.csv")[0] == first


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "n.csv is empty"),
        ("sn,cpu_milli,memory_mib,gpu\na,1,1,1\n", "n.csv, line 1: column model is missing"),
        (NODES.replace("model", "model,rack", 1), "n.csv, line 1: column 'rack' is not known"),
        (NODES.replace("sn", "gpu", 1), "n.csv, line 1: column sn is missing"),
        (NODES.replace("64000", "-1"), "n.csv, line 2, column cpu_milli: '-1' is not between 0 and"),
        (NODES.replace("262144", "nan"), "n.csv, line 2, column memory_mib: 'nan' is not a finite number"),
        (NODES.replace("262144", "1e999"), "n.csv, line 2, column memory_mib: '1e999' is not a finite number"),
        (NODES.replace("64000", "many"), "n.csv, line 2, column cpu_milli: 'many' is not a number"),
        (NODES.replace("64000", "1.5"), "n.csv, line 2, column cpu_milli: '1.5' is not a whole number"),
        (NODES.replace("P100", ""), "n.csv, line 2, column model: '' is empty on a node with GPUs"),
        (NODES + "a,1,1,1,T4\n", "n.csv, line 4, column sn: 'a' names a node a second time"),
        (
            NODES + "c,1,1",
            "n.csv, line 4, column memory_mib: the line has 3 fields, the header 5 (a truncated file?)",
        ),
        (NODES.replace(",2,P100", ",0,"), "n.csv describes an empty cluster: no node has a GPU"),
        ('sn,cpu_milli,memory_mib,gpu,model\n"a,1,1,1,T4\n', "n.csv, line 2: not a CSV table"),
    ],
)
def test_bad_nodes(text: str, says: str) -> None:
    with pytest.raises(TraceError) as refused:
        parse_nodes(text, "n.csv")
    assert str(refused.value).startswith(says)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ("p,1,1,0,0,\n", "p.csv holds no GPU pods (column num_gpu)"),
        ("", "p.csv holds no GPU pods (column num_gpu)"),
        ("p,1,1,1,0,\n", "p.csv, line 2, column gpu_milli: '0' asks for nothing on 1 GPUs"),
        ("p,1,1,0,500,\n", "p.csv, line 2, column gpu_milli: '500' asks for a share of no GPU"),
        ("p,1,1,2,500,\n", "p.csv, line 2, column gpu_milli: '500' asks for parts of several GPUs"),
        ("p,1,1,1,1001,\n", "p.csv, line 2, column gpu_milli: '1001' is not between 0 and 1000"),
        ("p,1,-5,1,1000,\n", "p.csv, line 2, column memory_mib: '-5' is not between 0 and"),
        ("p,1,1,1,1000,\np,1,1,1,1000,\n", "p.csv, line 3, column name: 'p' names a pod a second time"),
        (",1,1,1,1000,\n", "p.csv, line 2, column name: '' is empty"),
    ],
)
def test_bad_pods(rows: str, says: str) -> None:
    with pytest.raises(TraceError) as refused:
        parse_pods(POD_HEADER + rows, "p.csv")
    assert str(refused.value).startswith(says)


def test_a_snapshot_reads_back_as_it_was() -> None:
    nodes = [NodeSpec("a", (GpuSpec("a/0", "H200", 140_000), GpuSpec("a/1", "H200", 140_000)), 64_000, 1024)]
    pods = [
        (PlacementRequest("ns/p", 250, 1, None, 500, 64), Placement("a", ("a/1",), 35_000)),
        (
            PlacementRequest("ns/q", 1000, 2, 9_000, 0, 0, frozenset({"H200"})),
            Placement("a", ("a/0", "a/1"), 9_000),
        ),
        (PlacementRequest("ns/r", 1000, 1), None),
    ]
    read = parse_nodes(format_nodes(nodes), "nodes.csv")
    assert read == nodes
    assert parse_placed_pods(format_pods(pods, nodes), "pods.csv", read) == pods
    with pytest.raises(ValueError, match="does not fit"):
        format_nodes([NodeSpec("x", (GpuSpec("0", "A"), GpuSpec("1", "B")), 1, 1)])


def test_a_pod_whose_node_has_lost_gpus_reads_back_with_the_others() -> None:
    """Also one whose lost GPU another node has by now, and one that has none left."""
    gpus = [GpuSpec(f"{node}/{slot}", "H200", 140_000) for node in "ab" for slot in range(2)]
    nodes = [NodeSpec("a", tuple(gpus[:2]), 64_000, 1024), NodeSpec("b", tuple(gpus[2:]), 64_000, 1024)]
    several, one = PlacementRequest("ns/p", 1000, 2, 9_000), PlacementRequest("ns/q", 500, 1, 9_000)
    pods = [(several, Placement("a", ("b/0", "a/1"), 9_000)), (one, Placement("b", ("gone",), 9_000))]
    read = parse_placed_pods(format_pods(pods, nodes), "pods.csv", parse_nodes(format_nodes(nodes), "nodes.csv"))
    assert read == [(several, Placement("a", ("a/1",), 9_000)), (one, Placement("b", (), 9_000))]


def test_a_table_of_placed_pods_has_their_gpus() -> None:
    text = POD_HEADER.replace("gpu_spec", "gpu_spec,node") + "p,1,1,1,500,,a\n"
    with pytest.raises(TraceError, match="column gpu_index is missing"):
        parse_placed_pods(text, "p.csv", parse_nodes(NODES, "n.csv"))


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("z,0", "p.csv, line 2, column node: 'z' is not a node of the cluster"),
        ("a,7", "p.csv, line 2, column gpu_index: '7' does not name at most 1 of the 2 GPUs of a"),
        ("a,0|1", "p.csv, line 2, column gpu_index: '0|1' does not name at most 1 of the 2 GPUs of a"),
        ("a,0|0", "p.csv, line 2, column gpu_index: '0|0' does not name at most 1 of the 2 GPUs of a"),
    ],
)
def test_a_pod_of_a_snapshot_runs_on_what_is_there(where: str, says: str) -> None:
    text = POD_HEADER.replace("gpu_spec", "gpu_spec,node,gpu_index") + f"p,1,1,1,500,,{where}\n"
    with pytest.raises(TraceError) as refused:
        parse_placed_pods(text, "p.csv", parse_nodes(NODES, "n.csv"))
    assert str(refused.value) == says
