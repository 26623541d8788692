"""`gpushare plan` and `explain` on nodes that kube-scheduler refuses before it asks the extender."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakecluster import HttpApiServer, pod_object

from gpushare.core.api import GpuNode, GpuNodeStatus, GpuStatus, names
from gpushare.core.gpu import Health
from gpushare.kube import GPUNODES, NODES, PODS

Call = Callable[..., tuple[int, str, str]]
CORDONED = "it is cordoned"
TAINTED = "it has the taint dedicated=ml:NoSchedule, which the pod does not tolerate"
NO_SHARES = "kubelet offers no gpushare.io/share there: the node's agent has not registered with it"


def node(name: str, shares: int | None = 200, **spec: Any) -> dict[str, Any]:
    offered = {"cpu": "64", "memory": "256Gi"} | ({} if shares is None else {names.SHARE_RESOURCE: str(shares)})
    labels = spec.pop("labels", {})
    return {"metadata": {"name": name, "labels": labels}, "spec": spec, "status": {"allocatable": offered}}


def gpunode(name: str, *failed: int) -> dict[str, Any]:
    gpus = [
        GpuStatus(
            uuid=f"GPU-{name}-{index}",
            index=index,
            model="NVIDIA H200",
            memory_mib=143_155,
            health=Health.UNHEALTHY if index in failed else Health.HEALTHY,
        )
        for index in range(2)
    ]
    return GpuNode(name, GpuNodeStatus.of(gpus)).to_object()


DEDICATED = {"taints": [{"key": "dedicated", "value": "ml", "effect": "NoSchedule"}]}
LABELS = {"labels": {"pool": "a"}}


@pytest.fixture
def ruled(cluster: HttpApiServer) -> HttpApiServer:
    """Four nodes: one is cordoned, one has a taint, one has no shares, one has a label."""
    cluster.put(
        NODES,
        node("cordoned", unschedulable=True),
        node("tainted", **DEDICATED),
        node("unregistered", None),
        node("labelled", **LABELS),
    )
    cluster.put(GPUNODES, *map(gpunode, ("cordoned", "tainted", "unregistered", "labelled")))
    return cluster


class Planner:
    """`gpushare plan` of one manifest, on the live cluster or on a snapshot that was just taken of it."""

    def __init__(self, call: Call, folder: Path, *, by_snapshot: bool) -> None:
        self._call, self._folder, self._by_snapshot = call, folder, by_snapshot

    def __call__(self, *pods: dict[str, Any]) -> tuple[list[str | None], dict[str, str], dict[str, Any]]:
        """Return the nodes of all pods, and of the last one by example why not elsewhere, and its plan."""
        manifest = self._folder / "pods.json"
        manifest.write_text(json.dumps({"kind": "List", "items": list(pods)}))
        where: list[Any] = []
        if self._by_snapshot:
            assert self._call("snapshot", "-o", self._folder)[0] == 0
            where = ["--snapshot", self._folder]
        code, out, err = self._call("plan", "--pods", manifest, "--json", *where)
        assert code in (0, 1), err
        planned = json.loads(out)["pods"]
        last = planned[-1]
        return (
            [each["node"] for each in planned],
            {each["example"]: each["detail"] for each in last["elsewhere"]},
            last,
        )


@pytest.fixture(params=[False, True], ids=["live", "snapshot"])
def plan(ruled: HttpApiServer, call: Call, tmp_path: Path, request: pytest.FixtureRequest) -> Planner:
    return Planner(call, tmp_path, by_snapshot=request.param)


def asks(share: int = 25, name: str = "new", **spec: Any) -> dict[str, Any]:
    pod = pod_object(name, f"u-{name}", share=share)
    return {**pod, "kind": "Pod", "spec": {**pod["spec"], **spec}}


TOLERATES = [{"key": "dedicated", "operator": "Exists"}]


def test_no_pod_is_planned_onto_a_node_that_it_may_not_use(plan: Planner) -> None:
    where, elsewhere, _ = plan(asks())
    assert where == ["labelled"]
    assert elsewhere == {"cordoned": CORDONED, "tainted": TAINTED, "unregistered": NO_SHARES}


def test_the_pods_own_rules_count(plan: Planner) -> None:
    where, elsewhere, planned = plan(asks(nodeSelector={"pool": "b"}, tolerations=TOLERATES))
    assert (where, planned["reason"]) == ([None], "NodeLabels")
    wants = "its labels do not match the pod's nodeSelector, which wants pool=b"
    assert planned["detail"] == f"fits on none of 4 nodes; on 3 of them: {wants}"
    counts = [(each["reason"], each["detail"], each["nodes"]) for each in planned["elsewhere"]]
    assert counts == [("NodeLabels", wants, 3), ("NodeCordoned", CORDONED, 1)]
    assert elsewhere["cordoned"] == CORDONED

    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["tainted"]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    where, _, planned = plan(asks(affinity={"nodeAffinity": required}, tolerations=TOLERATES))
    assert where == ["tainted"]
    assert [(each["reason"], each["nodes"]) for each in planned["elsewhere"]] == [
        ("NodeLabels", 2),
        ("NodeCordoned", 1),
    ]
    assert plan(asks(tolerations=[{"operator": "Exists"}], nodeSelector={}))[1] == {"unregistered": NO_SHARES}


def test_a_pod_will_tolerate_the_taints_of_gpu_nodes_unless_it_has_tolerations_of_its_own(
    plan: Planner, ruled: HttpApiServer
) -> None:
    """Admission adds them when the pod is made (docs/adr/0214)."""
    ruled.put(NODES, node("labelled", taints=[{"key": "nvidia.com/gpu", "effect": "NoSchedule"}], **LABELS))
    assert plan(asks())[0] == ["labelled"]
    _, elsewhere, _ = plan(asks(tolerations=TOLERATES, nodeSelector=LABELS["labels"]))
    assert elsewhere["labelled"] == TAINTED.replace("dedicated=ml", "nvidia.com/gpu")


def test_trouble_of_a_node_that_every_pod_tolerates_for_a_while_counts_as_for_kube_scheduler(
    plan: Planner, ruled: HttpApiServer
) -> None:
    """The API server adds tolerations of NoExecute for not-ready and unreachable nodes, but none of NoSchedule."""
    away = {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}
    ruled.put(NODES, node("labelled", taints=[away], **LABELS))
    assert plan(asks())[0] == ["labelled"]
    ruled.put(NODES, node("labelled", taints=[away, {**away, "effect": "NoSchedule"}], **LABELS))
    where, elsewhere, _ = plan(asks())
    assert where == [None]
    assert "the taint node.kubernetes.io/unreachable:NoSchedule, which" in elsewhere["labelled"]


def test_kubelets_own_count_of_shares_is_kept(plan: Planner, ruled: HttpApiServer) -> None:
    """A GPU has failed under its pod: kube-scheduler counts that pod among the shares of the other GPU."""
    ruled.put(NODES, node("labelled", 100, **LABELS))
    ruled.put(GPUNODES, gpunode("labelled", 0))
    assert plan(asks(90))[0] == ["labelled"]
    ruled.put(PODS, pod_object("old", "u-old", gpu="GPU-labelled-0", share=70, node="labelled"))
    where, elsewhere, planned = plan(asks(20, "a"), asks(20, "b"))
    assert where == ["labelled", None]
    assert elsewhere["labelled"] == "needs 20 of gpushare.io/share, kubelet offers 100 there and 10 are free"
    assert "SharesNotOffered" in {each["reason"] for each in planned["elsewhere"]}
    _, elsewhere, _ = plan(asks(100))
    assert elsewhere["labelled"] == "needs 100 of gpushare.io/share, kubelet offers 100 there and 30 are free"
    ruled.put(PODS, pod_object("lost", "u-lost", gpu="GPU-gone", share=25, node="labelled"))
    _, elsewhere, _ = plan(asks(20))
    assert elsewhere["labelled"] == "needs 20 of gpushare.io/share, kubelet offers 100 there and 5 are free"


def test_a_gpu_with_more_pods_than_it_has_shares_takes_those_of_others(
    plan: Planner, ruled: HttpApiServer
) -> None:
    """As while the decision of a pod differs from the GPU that kubelet gave it."""
    for name in ("one", "two"):
        ruled.put(PODS, pod_object(name, f"u-{name}", gpu="GPU-labelled-0", share=70, node="labelled"))
    assert plan(asks(60))[0] == ["labelled"]
    _, elsewhere, _ = plan(asks(80))
    assert elsewhere["labelled"] == "needs 80 of gpushare.io/share, kubelet offers 200 there and 60 are free"


def test_a_reason_of_the_gpus_is_told_before_kubelets_count(plan: Planner, ruled: HttpApiServer) -> None:
    ruled.put(NODES, node("labelled", 100, **LABELS))
    ruled.put(GPUNODES, gpunode("labelled", 0))
    _, elsewhere, _ = plan(asks(90, "a"), asks(20, "b"))
    assert elsewhere["labelled"] == "needs 20% of one GPU, the freest has 10% free"
    ruled.put(NODES, node("labelled", 0, **LABELS))
    ruled.put(GPUNODES, gpunode("labelled", 0, 1))
    assert plan(asks(20))[1]["labelled"] == "needs 1 GPU, has 0 healthy"


def test_a_trace_tells_no_rules_so_only_cordons_and_shares_count(
    ruled: HttpApiServer, call: Call, tmp_path: Path
) -> None:
    (tmp_path / "p.csv").write_text("name,cpu_milli,memory_mib,num_gpu,gpu_milli\nx,1000,1,1,600\n")
    code, out, _ = call("plan", "--pods", tmp_path / "p.csv", "--json")
    (planned,) = json.loads(out)["pods"]
    assert (code, planned["fits_on"]) == (0, 2)
    assert {each["example"]: each["detail"] for each in planned["elsewhere"]} == {
        "cordoned": CORDONED,
        "unregistered": NO_SHARES,
    }


def test_an_old_snapshot_that_does_not_say_what_kubelet_offers_is_taken_at_the_gpus_word(
    ruled: HttpApiServer, call: Call, tmp_path: Path
) -> None:
    assert call("snapshot", "-o", tmp_path)[0] == 0
    saved = json.loads((tmp_path / "cluster.json").read_text())
    del saved["read_at"]
    for each in saved["nodes"]:
        each["status"]["allocatable"].pop(names.SHARE_RESOURCE, None)
    (tmp_path / "cluster.json").write_text(json.dumps(saved))
    (tmp_path / "pods.json").write_text(json.dumps(asks()))
    code, out, _ = call("plan", "--pods", tmp_path / "pods.json", "--snapshot", tmp_path, "--json")
    (planned,) = json.loads(out)["pods"]
    assert (code, planned["fits_on"]) == (0, 2)
    assert NO_SHARES not in out


def test_the_table_shows_the_reasons(ruled: HttpApiServer, call: Call, tmp_path: Path) -> None:
    (tmp_path / "pods.json").write_text(json.dumps(asks()))
    out = " ".join(call("plan", "--pods", tmp_path / "pods.json")[1].replace("\u2502", " ").split())
    assert "cordoned: it is cordoned" in out


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"nodeSelector": {"gpu": True}}, "pod new: nodeSelector: True is not text: write it in quotes"),
        ({"tolerations": [{"key": "a", "value": 1}]}, "pod new: tolerations: 1 is not text: write it in quotes"),
        (
            {
                "affinity": {
                    "nodeAffinity": {
                        "requiredDuringSchedulingIgnoredDuringExecution": {
                            "nodeSelectorTerms": [
                                {"matchExpressions": [{"key": "cores", "operator": "Gt", "values": [8]}]}
                            ]
                        }
                    }
                }
            },
            "pod new: nodeAffinity: 8 is not text: write it in quotes",
        ),
    ],
)
def test_rules_that_the_api_server_would_refuse_are_one_sentence(
    ruled: HttpApiServer, call: Call, tmp_path: Path, spec: dict[str, Any], says: str
) -> None:
    (tmp_path / "pods.json").write_text(json.dumps(asks(**spec)))
    code, out, err = call("plan", "--pods", tmp_path / "pods.json")
    assert (code, out) == (2, "")
    assert says in " ".join(err.split())


def test_explain_says_why_a_pod_that_waits_may_not_be_on_nodes_with_room(ruled: HttpApiServer, call: Call) -> None:
    waits = asks(name="late", nodeSelector={"pool": "b"}, tolerations=TOLERATES)
    ruled.put(PODS, waits)
    code, out, err = call("explain", "late")
    assert code == 0, err
    told = " ".join(out.split())
    wants = "its labels do not match the pod's nodeSelector, which wants pool=b"
    assert f"Why it waits Fits on none of 4 nodes; on 3 of them: {wants}." in told
    assert f"cordoned: {CORDONED}" in told
    assert "would be on" not in told
    found = json.loads(call("explain", "late", "-o", "json")[1])
    assert (found["standing"], found["nodes"], found["fits_on"]) == ("Waits", 4, 0)
    assert "rules" not in found["request"]

    ruled.put(PODS, asks(name="late"))
    found = json.loads(call("explain", "late", "-o", "json")[1])
    assert (found["standing"], found["now"]["node"], found["nodes"], found["fits_on"]) == (
        "Fits",
        "labelled",
        4,
        1,
    )
    assert {each["example"]: each["rejection"]["detail"] for each in found["elsewhere"]} == {
        "cordoned": CORDONED,
        "tainted": TAINTED,
        "unregistered": NO_SHARES,
    }


def test_explain_ranks_no_node_above_a_running_pods_that_the_pod_may_not_use(
    ruled: HttpApiServer, call: Call
) -> None:
    pod = pod_object("runs", "u-runs", gpu="GPU-labelled-0", share=25, node="labelled")
    ruled.put(PODS, pod)

    def told() -> dict[str, Any]:
        return json.loads(call("explain", "runs", "-o", "json")[1])

    assert (told()["standing"], told()["fits_on"]) == ("Best", 1)
    ruled.put(NODES, node("labelled", unschedulable=True, **LABELS))
    found = told()
    assert (found["standing"], found["fits_on"]) == ("NotNow", 0)
    assert (found["elsewhere"][0]["rejection"]["detail"], found["elsewhere"][0]["nodes"]) == (CORDONED, 2)
