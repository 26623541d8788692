"""`gpushare sim cluster`, `snapshot` and `plan`: what is printed, and the sentence and exit code for bad input."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpushare.cli import root
from gpushare.cli.errors import AbsentError, UsageError
from gpushare.cli.live import Objects, cluster_of
from gpushare.cli.manifests import read_manifests
from gpushare.cli.snapshot import read_snapshot, save
from gpushare.core.admission import AdmissionPolicy, mutate
from gpushare.core.api import Decision, GpuNodeStatus, GpuStatus, Rejection, names, reduced_object, to_json
from gpushare.core.gpu import Health
from gpushare.core.placement import PlacementRequest
from gpushare.sim.openb import parse_nodes, parse_placed_pods

NODES = "sn,cpu_milli,memory_mib,gpu,model\na,64000,262144,2,P100\nb,64000,262144,2,T4\n"
PODS = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\n"
    "x,1000,1024,1,600,\ny,1000,1024,1,600,T4\nz,1000,1,2,1000,\n"
)
POD_YAML = """
apiVersion: v1
kind: Pod
metadata: {name: one, namespace: shop, annotations: {gpushare.io/fraction: "0.25"}}
spec: {containers: [{name: main, resources: {requests: {cpu: 500m, memory: 1Gi}}}]}
---
apiVersion: v1
kind: Pod
metadata: {name: plain}
spec: {containers: [{name: main}]}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 2
  template:
    metadata: {annotations: {gpushare.io/fraction: "2"}}
    spec: {containers: [{name: main}]}
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "nodes.csv").write_text(NODES)
    (tmp_path / "pods.csv").write_text(PODS)
    (tmp_path / "pods.yaml").write_text(POD_YAML)
    return tmp_path


def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object
) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["gpushare", *map(str, words)])
    try:
        root.main()
        code: Any = 0
    except SystemExit as stop:
        code = stop.code or 0
    out, err = capsys.readouterr()
    return code, out, err


def test_sim_cluster_prints_the_agreed_keys(files: Path, monkeypatch: Any, capsys: Any) -> None:
    words = ["sim", "cluster", "--nodes", files / "nodes.csv", "--pods", files / "pods.csv", "--json"]
    code, out, _ = call(monkeypatch, capsys, *words, "--policy", "bestfit", "--seed", 7)
    found = json.loads(out)
    assert code == 0
    assert list(found) == [
        "policy",
        "seed",
        "allocated_gpu_percent",
        "fragmented_gpu_percent",
        "placed",
        "rejected",
        "seconds",
    ]
    assert (found["policy"], found["seed"]) == ("bestfit", 7)
    code, out, _ = call(monkeypatch, capsys, *words, "--runs", 3)
    several = json.loads(out)
    assert [run["seed"] for run in several["runs"]] == [42, 43, 44]
    mean = sum(run["allocated_gpu_percent"] for run in several["runs"]) / 3
    assert several["allocated_gpu_percent"] == pytest.approx(mean, abs=1e-3)
    _, out, _ = call(monkeypatch, capsys, *words[:-1], "--runs", 2)
    assert "mean" in out


def test_sim_cluster_gives_pods_without_a_gpu_to_the_rule_that_is_asked_for(
    files: Path, monkeypatch: Any, capsys: Any
) -> None:
    """On the node with the GPU, which is emptier, by kube-scheduler's; so the GPU's pod finds no CPU there."""
    (files / "nodes.csv").write_text(
        "sn,cpu_milli,memory_mib,gpu,model\na,8000,8000,1,P100\nb,4000,4000,0,\nc,4000,4000,0,\n"
    )
    (files / "pods.csv").write_text(
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli\ncpu,3000,3000,0,0\ngpu,7000,7000,1,1000\n"
    )
    words = ["sim", "cluster", "--nodes", files / "nodes.csv", "--pods", files / "pods.csv", "--json"]
    words += ["--policy", "bestfit", "--demand", 1, "--runs", 12]
    allocated = {}
    for rule in ("policy", "scheduler", "scheduler-balanced"):
        code, out, _ = call(monkeypatch, capsys, *words, "--cpu-pods", rule)
        assert code == 0
        allocated[rule] = json.loads(out)["allocated_gpu_percent"]
    assert allocated["policy"] == 100
    assert allocated["scheduler"] < 100
    assert allocated["scheduler-balanced"] < 100
    code, _, err = call(monkeypatch, capsys, *words, "--cpu-pods", "nobody")
    assert code == 2
    assert "nobody" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "say which nodes: either --nodes or --snapshot"),
        (["--nodes", "nodes.csv", "--snapshot", "."], "say which nodes: either --nodes or --snapshot"),
        (["--snapshot", "."], "an older gpushare wrote it"),
    ],
)
def test_sim_cluster_wants_its_nodes_from_one_place(
    files: Path, monkeypatch: Any, capsys: Any, words: list[str], says: str
) -> None:
    monkeypatch.chdir(files)
    code, out, err = call(monkeypatch, capsys, "sim", "cluster", "--pods", "pods.csv", *words)
    assert (code, out) == (2, "")
    assert says in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--nodes", "absent.csv"], "cannot be read: No such file or directory"),
        (["--policy", "magic"], 'policy "magic" is not known; there are random, dotprod'),
        (["--pods", "nodes.csv"], "line 1: column name is missing"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(
    files: Path, monkeypatch: Any, capsys: Any, words: list[str], says: str
) -> None:
    monkeypatch.chdir(files)
    code, out, err = call(
        monkeypatch, capsys, "sim", "cluster", "--nodes", "nodes.csv", "--pods", "pods.csv", *words
    )
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1


def test_a_plan_for_empty_nodes_says_where_and_why_not(files: Path, monkeypatch: Any, capsys: Any) -> None:
    words = ["plan", "--pods", files / "pods.csv", "--nodes", files / "nodes.csv"]
    code, out, _ = call(monkeypatch, capsys, *words, "--json", "--policy", "bestfit")
    x, y, z = json.loads(out)["pods"]
    assert code == 1, "one pod fits nowhere"
    assert (x["node"], x["gpus"], x["fits_on"]) == ("a", ["a/0"], 2)
    assert (y["node"], y["fits_on"]) == ("b", 1)
    assert y["elsewhere"] == [
        {"reason": "GpuModel", "detail": "needs 1 GPU of T4, has 0 healthy", "nodes": 1, "example": "a"}
    ]
    assert (z["node"], z["reason"]) == (None, "NotEnoughShare")
    code, out, _ = call(monkeypatch, capsys, *words)
    assert code == 1
    assert "nowhere: NotEnoughShare" in out


def test_manifests_are_planned(files: Path, monkeypatch: Any, capsys: Any) -> None:
    words = ["plan", "--nodes", files / "nodes.csv", "--json", "--pods"]
    code, out, _ = call(monkeypatch, capsys, *words, files / "pods.yaml")
    assert code == 1
    assert [pod["pod"] for pod in json.loads(out)["pods"]] == ["shop/one", "default/web-0", "default/web-1"]
    for broken, says in (
        (
            POD_YAML.replace("0.25", "1.5"),
            'pod one: annotation gpushare.io/fraction: "1.5" asks for more than one GPU',
        ),
        (POD_YAML.replace("500m", "lots"), "pod one: cpu: 'lots' is not a quantity"),
        (POD_YAML.replace("500m", '"-5"'), "pod one: cpu: '-5' is negative"),
        (
            POD_YAML.replace("spec: {containers", "spec: {resources: {requests: {cpu: -5}}, containers", 1),
            "pod one: cpu: -5 is negative",
        ),
        ("a: [", "is not YAML"),
        ("- 1", "a document is not a Kubernetes object"),
        ("kind: Pod\nmetadata: {name: x}\nspec: {}", "holds no pod with the annotation"),
        (
            "kind: CronJob\nmetadata: {name: x}\nspec: {jobTemplate: {spec: [3]}}",
            "holds no pod with the annotation",
        ),
        ("kind: Pod\nmetadata: {name: x, annotations: 3}\nspec: {}", "pod x: "),
        (
            "kind: Job\nmetadata: {name: x}\nspec: {template: {metadata: 3}}",
            "Job x has metadata that is no object",
        ),
        (POD_YAML.replace("spec: {", "spec: {affinity: {nodeAffinity: 3}, ", 1), "pod one: "),
        (
            POD_YAML.replace("metadata: {", "metadata: {ownerReferences: [{controller: true}], ", 1),
            "pod one lacks the required field 'uid'",
        ),
        ("[" * 5_000, "is not YAML"),
    ):
        (files / "broken.yaml").write_text(broken)
        code, out, err = call(monkeypatch, capsys, *words, files / "broken.yaml")
        assert (code, out) == (2, "")
        assert says in err


def gpu(index: int, health: Health = Health.HEALTHY) -> GpuStatus:
    return GpuStatus(uuid=f"GPU-{index}", index=index, model="H200", memory_mib=100_512, health=health)


def gpunode(name: str, *gpus: GpuStatus) -> dict[str, Any]:
    return {"metadata": {"name": name}, "status": to_json(GpuNodeStatus.of(gpus))}


def pod(
    name: str, node: str | None, gpus: tuple[str, ...] = (), fraction: str | None = "0.5", cpu: str = "1"
) -> dict:
    annotations = {names.FRACTION: fraction} if fraction else {}
    if gpus:
        annotations |= Decision(gpus, 50, 50_000, "2026-11-21T12:00:00Z").to_annotations()
    return {
        "metadata": {"name": name, "namespace": "shop", "uid": f"uid-{name}", "annotations": annotations},
        "spec": {"nodeName": node, "containers": [{"resources": {"requests": {"cpu": cpu, "memory": "1Gi"}}}]},
        "status": {"phase": "Running" if node else "Pending"},
    }


def test_a_live_cluster_becomes_files_that_a_plan_starts_from(files: Path, monkeypatch: Any, capsys: Any) -> None:
    node = {"metadata": {"name": "n"}, "status": {"allocatable": {"cpu": "32", "memory": "64Gi"}}}
    objects = Objects(
        {"GPUSHARE_GPU_MEMORY_RESERVE": "512"},
        [node],
        [
            gpunode("n", gpu(1), gpu(0)),
            gpunode("gone", gpu(2, Health.UNHEALTHY)),
        ],
        [],
        [
            pod("a", "n", ("GPU-1",)),
            pod("b", None),
            pod("system", "n", fraction=None, cpu="2"),
            pod("lost", "n", ("GPU-9",)),
            pod("away", "gone", ("GPU-2",)),
            pod("byhand", "n", cpu="4"),
            pod("wrong", None, fraction="7.5"),
            pod("done", "n", ("GPU-0",)) | {"status": {"phase": "Succeeded"}},
        ],
        models={},
    )
    cluster = cluster_of(objects)
    (spec,) = cluster.nodes
    assert (spec.cpu_milli, spec.memory_mib) == (26_000, 62 * 1024), "what system and byhand leave"
    assert [one.memory_mib for one in spec.gpus] == [100_512, 100_512]
    assert [(request.pod_uid, where and where.gpu_uuids) for request, where in cluster.pods] == [
        ("shop/a", ("GPU-1",)),
        ("shop/b", None),
        ("shop/lost", ("GPU-9",)),
    ]
    running = cluster.pods[0][1]
    assert running is not None
    assert running.thread_percentage == 50, "the cap that it runs under, whatever a pod of its share would get"
    assert [note.split(" is left out")[0] for note in cluster.notes] == [
        "node gone",
        "pod shop/byhand",
        "pod shop/wrong",
        "pod shop/lost is counted without GPU GPU-9, which n does not have",
        "pod shop/away",
    ]
    save(objects, files / "snap")
    assert cluster_of(read_snapshot(files / "snap")) == cluster
    (files / "p.csv").write_text("name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\nnew,1000,1,1,1000,\n")
    code, out, _ = call(
        monkeypatch, capsys, "plan", "--snapshot", files / "snap", "--pods", files / "p.csv", "--json"
    )
    assert code == 0
    assert json.loads(out)["pods"][0]["gpus"] == ["GPU-0"], "GPU 1 has a tenant"


def test_a_pod_that_lost_one_of_its_gpus_still_has_the_others_and_its_cpu(
    files: Path, monkeypatch: Any, capsys: Any
) -> None:
    node = {"metadata": {"name": "n"}, "status": {"allocatable": {"cpu": "32", "memory": "64Gi"}}}
    train = pod("train", "n", ("GPU-0", "GPU-1"), fraction="2", cpu="20")
    save(Objects({}, [node], [gpunode("n", gpu(1), gpu(2), gpu(3))], [], [train], models={}), files / "snap")
    assert (files / "snap" / "pods.csv").read_text().splitlines()[1].endswith(",2,1000,,,n,0")
    words = ["plan", "--snapshot", files / "snap", "--pods", files / "p.csv", "--json"]
    for cpu, goes_to in ((12_000, "GPU-2"), (13_000, None)):
        (files / "p.csv").write_text(f"name,cpu_milli,memory_mib,num_gpu,gpu_milli\nnew,{cpu},1,1,1000\n")
        _, out, err = call(monkeypatch, capsys, *words)
        assert json.loads(out)["pods"][0].get("gpus") == (goes_to and [goes_to])
        assert "pod shop/train is counted without GPU GPU-0, which n does not have" in " ".join(err.split())


def test_a_gpu_that_two_nodes_list_belongs_to_who_has_pods_on_it_then_to_the_older(
    files: Path, monkeypatch: Any, capsys: Any
) -> None:
    """As for an extender that has just started (tests/extender/test_claims.py)."""
    offered = {"status": {"allocatable": {"cpu": "32", "memory": "64Gi"}}}
    nodes = [{"metadata": {"name": name}, **offered} for name in ("a", "b")]
    thief = gpunode("a", gpu(0), gpu(1))
    owner = gpunode("b", gpu(0, Health.UNHEALTHY))
    for each, hour in ((thief, 2), (owner, 1)):
        each["metadata"]["creationTimestamp"] = f"2026-11-21T0{hour}:00:00Z"
    save(Objects({}, nodes, [thief, owner]), files / "snap")
    (files / "p.csv").write_text("name,cpu_milli,memory_mib,num_gpu,gpu_milli\none,1,1,1,1000\ntwo,1,1,1,1000\n")
    words = ["plan", "--snapshot", files / "snap", "--pods", files / "p.csv", "--json"]
    code, out, err = call(monkeypatch, capsys, *words)
    assert code == 1, err
    assert [each.get("gpus") for each in json.loads(out)["pods"]] == [["GPU-1"], None]
    assert "GPU GPU-0 is left out on node a: b, whose GpuNode is older, has it" in " ".join(err.split())
    save(Objects({}, nodes[:1], [thief, owner]), files / "gone")
    words[2] = files / "gone"
    code, out, err = call(monkeypatch, capsys, *words)
    assert [each.get("gpus") for each in json.loads(out)["pods"]] == [["GPU-0"], ["GPU-1"]], (
        "b has no Node any more"
    )
    unregistered = {"metadata": {"name": "b"}, **offered}
    nodes[0] = {
        "metadata": {"name": "a"},
        "status": {"allocatable": {"cpu": "32", "memory": "64Gi", names.SHARE_RESOURCE: "200"}},
    }
    save(Objects({}, [nodes[0], unregistered], [thief, owner]), files / "new")
    words[2] = files / "new"
    code, out, err = call(monkeypatch, capsys, *words)
    assert [each.get("gpus") for each in json.loads(out)["pods"]] == [["GPU-0"], ["GPU-1"]], "b has no shares yet"
    nodes[0] = {"metadata": {"name": "a"}, **offered}
    in_use = [pod("runs", "a", ("GPU-0",))]
    save(Objects({}, nodes, [thief, owner], [], in_use), files / "used")
    words[2] = files / "used"
    code, out, err = call(monkeypatch, capsys, *words)
    assert code == 1, err
    assert [each.get("gpus") for each in json.loads(out)["pods"]] == [["GPU-1"], None]
    assert "GPU GPU-0 is left out on node b: a, where a pod uses it, has it" in " ".join(err.split())


def test_a_pod_with_a_share_and_no_decision_is_counted_by_its_limit(
    files: Path, monkeypatch: Any, capsys: Any
) -> None:
    """As the extender counts it: on the GPU where its agent lists it, else on the one with the most room."""
    node = {"metadata": {"name": "n"}, "status": {"allocatable": {"cpu": "32", "memory": "64Gi"}}}
    byhand = pod("byhand", "n", fraction=None)
    byhand["spec"]["containers"][0]["resources"]["limits"] = {"gpushare.io/share": "60"}
    stale = pod("stale", "n", ("GPU-1",), fraction="2")  # its annotation was changed since it was decided
    stale["spec"]["containers"][0]["resources"]["limits"] = {"gpushare.io/share": "50"}
    agents = gpunode("n", gpu(0), gpu(1))
    (files / "p.csv").write_text("name,cpu_milli,memory_mib,num_gpu,gpu_milli\nnew,1000,1,1,500\n")

    def plan(*pods: dict[str, Any]) -> tuple[list[str] | None, str]:
        save(Objects({}, [node], [agents], [], list(pods), models={}), files / "snap")
        words = ["plan", "--snapshot", files / "snap", "--pods", files / "p.csv", "--policy", "bestfit", "--json"]
        _, out, err = call(monkeypatch, capsys, *words)
        return json.loads(out)["pods"][0].get("gpus"), err

    assert plan() == (["GPU-0"], "")
    gpus, err = plan(byhand)
    assert gpus == ["GPU-1"]
    assert "pod shop/byhand runs on n without a decision: counted by its limit" in err
    agents["status"]["gpus"][1]["tenants"] = [{"podUid": "uid-byhand"}]
    assert plan(byhand)[0] == ["GPU-0"]
    assert plan(byhand, stale)[0] == ["GPU-0"]
    assert plan(stale)[0] == ["GPU-1"], "the fullest that has room"


def test_a_saved_cluster_is_filled_by_the_settings_of_its_release(
    files: Path, monkeypatch: Any, capsys: Any
) -> None:
    node = {"metadata": {"name": "n"}, "status": {"allocatable": {"cpu": "32", "memory": "64Gi"}}}
    settings = {"GPUSHARE_GPU_MEMORY_RESERVE": "20512", "GPUSHARE_POLICY": "bestfit"}
    (files / "p.csv").write_text(
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_memory_mib\na,1,1,1,500,50000\nb,1,1,1,500,50000\n"
    )
    for release, placed, policy in ((settings, 1, "bestfit"), ({}, 2, "gpushare"), (None, 2, "gpushare")):
        save(Objects(release, [node], [gpunode("n", gpu(0))], [], []), files / "snap")
        words = [
            "sim",
            "cluster",
            "--snapshot",
            files / "snap",
            "--pods",
            files / "p.csv",
            "--json",
            "--demand",
            1,
        ]
        code, out, err = call(monkeypatch, capsys, *words)
        found = json.loads(out)
        assert (code, found["policy"], found["placed"]) == (0, policy, placed)
        assert ("the chart's defaults are assumed" in err) == (release is None)


def test_settings_that_cannot_be_used_are_one_sentence(files: Path, monkeypatch: Any, capsys: Any) -> None:
    (files / "cluster.json").write_text(json.dumps({"settings": {"GPUSHARE_MAX_SLOWDOWN": "fast"}}))
    words = ["plan", "--snapshot", files, "--pods", files / "pods.csv"]
    code, out, err = call(monkeypatch, capsys, *words)
    assert (code, out) == (2, "")
    assert 'the settings of the release: GPUSHARE_MAX_SLOWDOWN: "fast" is not a number' in err
    for damaged in ("[1]", '{"settings": {}, "read_at": "noon"}', '{"settings": {}, "read_at": NaN}'):
        (files / "cluster.json").write_text(damaged)
        code, out, err = call(monkeypatch, capsys, *words)
        assert (code, out) == (2, "")
        assert "is not what gpushare snapshot writes" in err


@pytest.mark.parametrize(
    "objects",
    [
        {"settings": 3},
        {"settings": None, "pods": [{}]},
        {"settings": None, "pods": [pod("a", None, cpu="lots")]},
        {"settings": None, "nodes": [3]},
        {"settings": None, "gpunodes": 3},
        {"settings": None, "gpunodes": [[]]},
        {"settings": None, "pods": [{"metadata": 3}]},
        {"settings": None, "models": 3},
        {"settings": None, "models": {"a.json": 3}},
    ],
)
@pytest.mark.parametrize("command", ["plan", "report"])
def test_a_damaged_snapshot_is_one_sentence(
    files: Path, monkeypatch: Any, capsys: Any, objects: Any, command: str
) -> None:
    (files / "cluster.json").write_text(json.dumps(objects))
    given = ("--pods", files / "pods.csv") if command == "plan" else ("-o", files / "page.html")
    code, out, err = call(monkeypatch, capsys, command, "--snapshot", files, *given)
    assert out == ""
    if command == "report" and "gpunodes" not in objects:
        assert (code, "no GPU that gpushare manages" in err) == (3, True)
    else:
        assert (code, "is not what gpushare snapshot writes" in err) == (2, True), err
    assert not (files / "page.html").exists()


def test_a_snapshots_numbers_beyond_any_machine_are_one_sentence(
    files: Path, monkeypatch: Any, capsys: Any
) -> None:
    gpu = {"uuid": "GPU-0", "index": 0, "model": "NVIDIA H200", "memoryMiB": 10**30}
    objects = {
        "settings": None,
        "nodes": [{"metadata": {"name": "n"}, "status": {"allocatable": {"cpu": "8", "memory": "8Gi"}}}],
        "gpunodes": [{"metadata": {"name": "n"}, "status": {"gpus": [gpu]}}],
    }
    (files / "cluster.json").write_text(json.dumps(objects))
    code, out, err = call(monkeypatch, capsys, "plan", "--snapshot", files, "--pods", files / "pods.csv")
    assert (code, out) == (2, "")
    assert "is not what gpushare snapshot writes: OverflowError" in err


def test_a_snapshot_of_an_older_version_says_what_to_do(files: Path, monkeypatch: Any, capsys: Any) -> None:
    assert (files / "nodes.csv").is_file()
    code, out, err = call(monkeypatch, capsys, "plan", "--snapshot", files, "--pods", files / "pods.csv")
    assert (code, out) == (2, "")
    assert "has no cluster.json: an older gpushare wrote it" in err
    assert "--nodes" in err


def test_a_cluster_without_gpus_writes_nothing(files: Path) -> None:
    with pytest.raises(AbsentError, match="no node has a GPU that gpushare manages"):
        save(Objects(None), files / "snap")
    assert not (files / "snap").exists()


@pytest.mark.parametrize(
    ("spec", "count"),
    [
        ({"parallelism": 8, "completions": 2}, 2),
        ({"parallelism": 8, "completions": 1_000_000}, 8),
        ({"parallelism": 4, "completions": None}, 4),
        ({"parallelism": None, "completions": 3}, 1),
        ({"replicas": None}, 1),
        ({"replicas": 3}, 3),
        ({}, 1),
    ],
)
def test_a_workload_has_as_many_pods_at_once_as_its_controller_makes(
    tmp_path: Path, spec: dict[str, Any], count: int
) -> None:
    template = {"metadata": {"annotations": {names.FRACTION: "0.5"}}, "spec": {"containers": [{"name": "main"}]}}
    workload = {"kind": "Job", "metadata": {"name": "w"}, "spec": {**spec, "template": template}}
    (tmp_path / "w.json").write_text(json.dumps(workload))
    assert len(read_manifests(tmp_path / "w.json", planned_pod)) == count


@pytest.mark.parametrize(
    "spec", [{"replicas": "3"}, {"parallelism": -1}, {"completions": "2"}, {"replicas": 10**6}]
)
def test_a_number_of_pods_that_is_none_is_refused(tmp_path: Path, spec: dict[str, Any]) -> None:
    (tmp_path / "w.json").write_text(
        json.dumps({"kind": "Job", "metadata": {"name": "w"}, "spec": {**spec, "template": {}}})
    )
    with pytest.raises(UsageError, match="Job w asks for "):
        read_manifests(tmp_path / "w.json", planned_pod)


def planned_pod(pod: Any) -> PlacementRequest:
    return PlacementRequest(pod["metadata"]["name"], 500, 1)


@pytest.mark.parametrize(
    ("annotations", "why"),
    [
        ("{gpushare.io/fraction: 0.5}", "annotation gpushare.io/fraction: 0.5 is not text: write it in quotes"),
        ("{gpushare.io/fraction: true}", "annotation gpushare.io/fraction: True is not text: write it in quotes"),
        (
            "{gpushare.io/fraction: '1', gpushare.io/processes: 4}",
            "annotation gpushare.io/processes: 4 is not text",
        ),
        ("{gpushare.io/fraction: '1', mine: [a]}", "annotation mine: ['a'] is not text"),
        ("[gpushare.io/fraction]", "its annotations are no mapping"),
    ],
)
def test_an_annotation_without_quotes_is_told_so(files: Path, call: Any, annotations: str, why: str) -> None:
    """Before: "object of type 'float' has no len()" of the fraction that everybody forgets to quote."""
    pod = files / "pod.yaml"
    spec = "{containers: [{name: main}]}"
    pod.write_text(f"{{kind: Pod, metadata: {{name: p, annotations: {annotations}}}, spec: {spec}}}")
    code, out, err = call("plan", "--pods", pod, "--nodes", files / "nodes.csv")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"pod p: {why}" in err


def test_a_node_of_two_gpu_models_is_saved_too(files: Path) -> None:
    """The tables have one model and memory size for a node; before, nothing was saved at all."""
    odd = [replace(gpu(1), model="NVIDIA A100-SXM4-80GB"), replace(gpu(2), model="NVIDIA T4")]
    nodes = [
        {"metadata": {"name": name}, "status": {"allocatable": {"cpu": "8", "memory": "8Gi"}}} for name in "no"
    ]
    pods = [pod("even", "n", ("GPU-0",)), pod("uneven", "o", ("GPU-1",)), pod("waits", None)]
    objects = Objects({}, nodes, [gpunode("n", gpu(0)), gpunode("o", *odd)], (), pods)
    (note,) = save(objects, files / "snap")
    assert note.startswith("nodes.csv and pods.csv leave out node o and its pods")
    read = parse_nodes((files / "snap" / "nodes.csv").read_text(), "nodes.csv")
    assert [node.name for node in read] == ["n"]
    placed = parse_placed_pods((files / "snap" / "pods.csv").read_text(), "pods.csv", read)
    assert [request.pod_uid for request, _ in placed] == ["shop/even", "shop/waits"]
    assert cluster_of(read_snapshot(files / "snap")).nodes == cluster_of(objects).nodes


def test_brackets_in_names_are_letters_like_others(files: Path, monkeypatch: Any, capsys: Any) -> None:
    """Rich would take [/x] for the end of a style, and [red] for its beginning."""
    (files / "odd.csv").write_text(PODS.replace("\nx,", "\n[/x],").replace("\ny,", "\n[red]y:on:,"))
    code, out, err = call(monkeypatch, capsys, "plan", "--nodes", files / "nodes.csv", "--pods", files / "odd.csv")
    assert (code, err) == (1, "")
    assert "[/x]" in out
    assert "[red]y:on:" in out


def planned(reserve: int = 0, **annotations: str) -> Any:
    """What a pod that admission has not seen requests in a cluster of one GPU, or the refusal."""
    node = {"metadata": {"name": "n"}, "status": {"allocatable": {"cpu": "32", "memory": "64Gi"}}}
    settings = {"GPUSHARE_GPU_MEMORY_RESERVE": str(reserve)}
    cluster = cluster_of(Objects(settings, [node], [gpunode("n", gpu(0))], [], [], models={}))
    asked = pod("new", None)
    asked["metadata"]["annotations"] = {f"gpushare.io/{name}": text for name, text in annotations.items()}
    return cluster.request_of(asked)


def test_a_pod_that_admission_has_not_seen_is_charged_and_refused_as_admission_would() -> None:
    assert planned(fraction="auto", processes="16").share_milli == 960
    assert planned(fraction="0.12", processes="2").share_milli == 120
    assert "too many for 10% of a GPU" in str(planned(fraction="0.1", processes="2"))
    assert planned(fraction="0.01", memory="50256Mi").share_milli == 500
    assert planned(512, fraction="0.01", memory="50001Mi").share_milli == 510, "of the 100000 MiB for tenants"


@pytest.mark.parametrize(
    "spec",
    ["{containers: [{name: main}]}", "{containers: [{name: main}, {name: side}]}", "{containers: []}", "{}"],
)
def test_a_pod_without_the_container_that_is_to_get_the_gpu_is_refused_as_admission_would(
    files: Path, call: Any, spec: str
) -> None:
    """Before, plan found it a GPU."""
    pod_yaml = files / "pod.yaml"
    annotations = "{gpushare.io/fraction: '0.5', gpushare.io/container: trainer}"
    pod_yaml.write_text(f"{{kind: Pod, metadata: {{name: p, annotations: {annotations}}}, spec: {spec}}}")
    refusal = mutate(yaml.safe_load(pod_yaml.read_text()), AdmissionPolicy())
    assert isinstance(refusal, Rejection)
    code, out, err = call("plan", "--pods", pod_yaml, "--nodes", files / "nodes.csv")
    assert (code, out) == (2, "")
    assert f"pod p: {refusal}" in err


def test_what_pods_request_as_a_whole_is_planned_for() -> None:
    """Before: 60 of a node's 64 CPUs that a pod requests in `spec.resources` were free for ours."""
    node = {"metadata": {"name": "n"}, "status": {"allocatable": {"cpu": "64", "memory": "64Gi"}}}
    other = pod("db", "n", fraction=None)
    other["spec"]["resources"] = {"requests": {"cpu": "60"}}
    cluster = cluster_of(Objects({}, [node], [gpunode("n", gpu(0))], [], [reduced_object(other)], models={}))
    assert (cluster.nodes[0].cpu_milli, cluster.nodes[0].memory_mib) == (4_000, 63 * 1024)
    asked = pod("new", None)
    asked["spec"]["resources"] = {"requests": {"cpu": "8"}}
    assert cluster.request_of(asked).cpu_milli == 8_000  # type: ignore[union-attr]
