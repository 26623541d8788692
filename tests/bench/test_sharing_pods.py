"""What bench/sharing sends to a cluster, and which clusters it refuses."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench.sharing import pods, podstate
from bench.sharing.launching import Ended, Order
from bench.sharing.machine import NotReadyError
from bench.sharing.manifests import (
    CODE_PATH,
    NAMESPACE,
    NODE_PATH,
    PERCENT,
    REPLICA,
    ROOT,
    Json,
    Place,
    Tenants,
    capacity_patch,
    code,
    daemon_pod,
    gpushare_of,
    job_pod,
)
from bench.sharing.pods import place_of
from bench.sharing.policies import EQUAL, FIFO, HARD, OURS, PAIRS, POLICIES, SLICING
from bench.sharing.trace import TraceJob, profile, table_signatures

from gpushare.core.api import JobClass
from gpushare.core.gpu import GpuInfo

GPU = GpuInfo("GPU-1", 0, "NVIDIA H200", 143_771, 132)
REAL = Place("gpu-a", GPU, Tenants("tenant:1", "/opt/python", ("/opt/torch",)))
TWIN = Place("gpu-a", GPU, Tenants("gpushare:1", "python", simulated=True))
JOB = TraceJob(7, "chat-app-bf16-b8", 1.0, 5.0, 30, JobClass.LATENCY, 0.9)
TRAINING = TraceJob(8, "unet3d-app-fp16-b2", 1.0, 5.0, 30, JobClass.THROUGHPUT, 0.6)


def env(pod: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in pod["spec"]["containers"][0]["env"]}


def test_a_pod_of_ours_asks_for_a_fraction_and_for_nothing_else() -> None:
    pod = job_pod(OURS, Order(JOB, 70, 20.0), REAL)
    assert pod["metadata"]["annotations"] == {
        "gpushare.io/fraction": "0.3",
        "gpushare.io/memory": "6144Mi",
        "gpushare.io/class": "latency",
        "gpushare.io/workload": "chat-app-bf16-b8",
    }
    container = pod["spec"]["containers"][0]
    assert "resources" not in container
    assert not any(name.startswith(("CUDA", "NVIDIA")) for name in env(pod))
    assert "runtimeClassName" not in pod["spec"]
    assert container["command"][:4] == ["/opt/python", "-u", "-m", "bench.sharing.gpujob"]
    assert gpushare_of(JOB.program)["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]


@pytest.mark.parametrize("policy", [each for each in POLICIES.values() if each is not OURS], ids=lambda p: p.name)
def test_pods_of_the_others_see_the_gpu_and_are_counted_by_kube_scheduler(policy: Any) -> None:
    pod = job_pod(policy, Order(TRAINING, 70), REAL)
    assert "annotations" not in pod["metadata"]
    assert pod["spec"]["runtimeClassName"] == "nvidia"
    assert env(pod)["NVIDIA_VISIBLE_DEVICES"] == GPU.uuid
    limits = pod["spec"]["containers"][0]["resources"]["limits"]
    offered = {
        each["path"].rpartition("/")[2].replace("~1", "/"): each["value"] for each in capacity_patch(policy)
    }
    (asked,) = limits
    assert int(offered[asked]) >= int(limits[asked]) > 0
    assert limits[asked] == ("30" if policy is HARD else "1")
    assert set(offered) == {REPLICA, PERCENT}
    assert offered[PERCENT if asked == REPLICA else REPLICA] == "0"


def test_who_runs_under_mps_finds_the_daemon_and_who_does_not_finds_none() -> None:
    pipes = {
        policy.name: env(job_pod(policy, Order(TRAINING, 7), REAL))["CUDA_MPS_PIPE_DIRECTORY"]
        for policy in (FIFO, SLICING, EQUAL, PAIRS, HARD)
    }
    assert pipes["mps-equal"] == pipes["mps-pairs"] == pipes["hard-caps"] == f"{NODE_PATH}/mps/pipe"
    assert pipes["fifo"] == pipes["time-slicing"]
    assert not Path(pipes["fifo"]).exists()
    caps = [
        env(job_pod(HARD, Order(job, 7), REAL)).get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE") for job in (TRAINING, JOB)
    ]
    assert caps == ["30", None]


def test_the_daemon_is_told_what_nvidias_device_plugin_tells_its_own(tmp_path: Path) -> None:
    pod = daemon_pod(EQUAL, REAL)
    assert pod["spec"]["hostPID"]
    command = pod["spec"]["containers"][0]["command"]
    assert command[-1] == "nvidia-cuda-mps-control"
    # the script itself, with a control program that writes down what it is told
    told = tmp_path / "told"
    control = tmp_path / "control"
    control.write_text(f'#!/bin/sh\nif [ "$1" = -d ]; then echo "$@" >>{told}; else cat >>{told}; fi\n')
    control.chmod(0o755)
    script = command[2].replace("while :; do sleep 1; done", "kill -TERM $$")
    done = subprocess.run(
        ["sh", "-c", script, "daemon", str(control)],
        env={
            "PATH": "/usr/bin:/bin",
            "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(tmp_path / "log"),
        },
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "ready" in done.stdout
    assert told.read_text().splitlines() == [
        "-d -multiuser-server",
        "set_default_device_pinned_mem_limit 0 35942M",
        "set_default_active_thread_percentage 25",
        "start_server -uid 0",
        "quit",
    ]


@pytest.mark.parametrize("is_simulated", [True, False])
def test_the_code_in_the_config_map_is_all_that_a_job_needs(is_simulated: bool, tmp_path: Path) -> None:
    pod = job_pod(FIFO, Order(TRAINING, 70), TWIN if is_simulated else REAL)
    (volume,) = [each for each in pod["spec"]["volumes"] if each["name"] == "code"]
    data = code(is_simulated)["data"]
    assert sum(map(len, data.values())) < 500_000
    for item in volume["configMap"]["items"]:
        path = tmp_path / item["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(data[item["key"]])
    folders = [place.replace(CODE_PATH, str(tmp_path)) for place in env(pod)["PYTHONPATH"].split(":")]
    if is_simulated:  # gpushare is in the image
        folders.append(str(ROOT / "src"))
    else:  # of PyTorch only the names are here
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "__init__.py").write_text(STAND_IN)
        (tmp_path / "torch" / "nn.py").write_text("class Module: pass\nfunctional = None\n")
    program = "twinjob" if is_simulated else "gpujob"
    imports = f"import bench.sharing.{program}"
    if not is_simulated:
        imports += "\nfrom gpushare.research.calibration.table_suite import TABLE\nassert len(TABLE) == 10"
    script = f"import sys\nsys.path[:0] = {folders!r}\n{imports}\n"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


STAND_IN = "from torch import nn\n"


def test_pods_mount_what_the_program_needs_and_simulated_ones_take_turns() -> None:
    real = job_pod(SLICING, Order(TRAINING, 70), REAL)
    places = {
        each["mountPath"]: each["readOnly"]
        for each in real["spec"]["containers"][0]["volumeMounts"]
        if "readOnly" in each
    }
    assert places["/opt/torch"] is True
    assert "--turns" not in real["spec"]["containers"][0]["command"]
    twin = job_pod(SLICING, Order(TRAINING, 70), TWIN)
    assert twin["spec"]["containers"][0]["command"][-2:] == ["--turns", f"{NODE_PATH}/turns"]
    assert "runtimeClassName" not in twin["spec"]


def gpu_node(count: int = 1, **values: object) -> list[dict[str, Any]]:
    gpu = {
        "uuid": "GPU-1",
        "index": 0,
        "model": "NVIDIA H200",
        "memoryMiB": 143771,
        "smCount": 132,
        "health": "Healthy",
    }
    return [{"metadata": {"name": "n1"}, "status": {"gpus": [{**gpu, **values}] * count}}]


def test_a_cluster_with_one_free_gpu_is_taken_and_others_are_told_why_not(tmp_path: Path) -> None:
    file = tmp_path / "tenants.json"
    file.write_text(json.dumps({"image": "i", "python": "p", "mounts": ["/opt/a"], "simulated": False, "more": 1}))
    tenants = Tenants.read(file)
    assert tenants == Tenants("i", "p", ("/opt/a",))
    assert place_of(gpu_node(), tenants).gpu == GPU
    for nodes, words in (
        ([], "has 0"),
        (gpu_node(2), "has 2"),
        (gpu_node(health="Unhealthy"), "is Unhealthy"),
        (gpu_node(tenants=[{"podUid": "u"}]), "has 1 pods already"),
    ):
        with pytest.raises(NotReadyError, match=words):
            place_of(nodes, tenants)


class OneNode:
    """The namespace of a cluster, as far as kubectl shows it to the launcher; what ends pods is the test."""

    def __init__(self) -> None:
        self.pods: dict[str, Json] = {}
        self.logs: dict[str, str] = {}
        self.patches: list[list[Json]] = []
        self.lost: set[str] = set()
        self.agents: list[Json] = []
        self.answers: dict[str, str] = {}
        self.shares: list[Json] = []
        self.events: list[Json] = []
        self.gpu_nodes: list[list[Json]] = []
        self.learnt: dict[str, Json] = {}
        self.overwritten = 0  # patches of a status that the operator's own write replaces

    def __call__(self, *arguments: str, stdin: str | None = None, seconds: float = 60.0) -> str:
        words = [word for word in arguments if word not in ("-n", NAMESPACE)]
        if words[0] in self.lost:
            raise pods.KubectlError("no answer")
        match words:
            case ["create", "-f", "-"]:
                pod = json.loads(str(stdin))
                self.pods[pod["metadata"]["name"]] = pod | {"status": {"phase": "Pending"}}
            case ["get", "serviceaccount", _]:
                return "default"
            case ["get", "--raw", path]:
                return self.answers[path]
            case ["get", "gpushares", *_]:
                return json.dumps({"items": self.shares})
            case ["get", "pods", "-A", *words]:
                assert "app.kubernetes.io/component=agent" in words
                assert f"--field-selector=spec.nodeName={TWIN.node}" in words
                return json.dumps({"items": self.agents})
            case ["get", "pods,events", *_]:
                of_kind = [*({"kind": "Pod"} | pod for pod in self.pods.values()), *self.events]
                return json.dumps({"items": of_kind})
            case ["get", "events", selector, *_]:
                told = [each for each in self.events if selector == f"--field-selector=reason={each['reason']}"]
                return json.dumps({"items": told})
            case ["get", "gpunodes", *_]:
                shown = self.gpu_nodes.pop(0) if len(self.gpu_nodes) > 1 else self.gpu_nodes[0]
                return json.dumps({"items": shown})
            case ["delete", "pods", "--all", *_]:
                self.pods.clear()
            case ["patch", "gpushare", name, "--subresource=status", "--type=merge", "-p", patch]:
                self.learnt[name] = json.loads(patch)
                if self.overwritten:
                    self.overwritten -= 1
                else:
                    next(each for each in self.shares if each["metadata"]["name"] == name)["status"] |= json.loads(
                        patch
                    )["status"]
            case ["get", "pods", *_]:
                return json.dumps({"items": list(self.pods.values())})
            case ["logs", name]:
                return self.logs.get(name, "")
            case ["patch", "node", *_, patch]:
                self.patches.append(json.loads(patch))
        return ""

    def status(self, name: str, phase: str, code: int | None = None) -> None:
        states = [] if code is None else [{"state": {"terminated": {"exitCode": code}}}]
        self.pods[name]["status"] = {"phase": phase, "containerStatuses": states}


def look(launcher: pods.PodLauncher) -> dict[int, Ended]:
    launcher._next_look = 0.0
    return launcher.poll()


def test_a_pod_that_is_taken_away_did_not_fail_and_its_first_start_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    node = OneNode()
    monkeypatch.setattr(pods, "kubectl", node)
    launcher = pods.PodLauncher(TWIN)
    order = Order(TRAINING, 70)
    launcher.begin(OURS, [order])
    launcher._began_wall -= 100.0
    launcher.submit(order)
    name = TRAINING.name
    node.status(name, "Running")
    assert look(launcher) == {}
    node.status(name, "Failed", 137)  # SIGKILL at the end of its grace period
    node.pods[name]["metadata"]["deletionTimestamp"] = "2026-11-23T00:00:00Z"
    assert look(launcher) == {}
    del node.pods[name]
    assert look(launcher) == {}
    assert node.pods[name]["status"]["phase"] == "Pending"  # made anew
    launcher._began_wall -= 1000.0  # much later
    node.status(name, "Running")
    assert look(launcher) == {}
    node.status(name, "Succeeded", 0)
    ended = look(launcher)[TRAINING.number]
    assert (ended.status, ended.restarts) == (0, 1)
    assert ended.first_started is not None
    assert 100.0 <= ended.first_started < 1000.0


@pytest.mark.parametrize(("phase", "code"), [("Failed", 1), ("Succeeded", 0)])
def test_a_pod_that_ends_by_itself_ends_its_job(phase: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    node = OneNode()
    monkeypatch.setattr(pods, "kubectl", node)
    launcher = pods.PodLauncher(TWIN)
    order = Order(TRAINING, 70)
    launcher.begin(OURS, [order])
    launcher.submit(order)
    node.status(TRAINING.name, "Running")
    assert look(launcher) == {}
    node.status(TRAINING.name, phase, code)
    ended = look(launcher)[TRAINING.number]
    assert (ended.status, ended.restarts, ended.first_started) == (code, 0, None)


def test_what_the_node_offers_is_taken_back_though_its_pods_do_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    node = OneNode()
    monkeypatch.setattr(pods, "kubectl", node)
    launcher = pods.PodLauncher(TWIN)
    launcher.begin(OURS, [])
    launcher.submit(Order(TRAINING, 70))
    node.lost.add("delete")
    with pytest.raises(pods.KubectlError):
        launcher.close()
    (patch,) = node.patches
    assert {each["op"] for each in patch} == {"remove"}
    assert {each["path"].rpartition("/")[2].replace("~1", "/") for each in patch} == {REPLICA, PERCENT}


def test_a_kubectl_that_hangs_is_an_error_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "kubectl"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(pods.KubectlError, match=r"kubectl get pods: no answer within 0\.2 s"):
        pods.kubectl("get", "pods", seconds=0.2)


def agent_pod(name: str, **about: str) -> Json:
    ports = [{"name": "health", "containerPort": 1}, {"name": "metrics", "containerPort": 9400}]
    return {"metadata": {"name": name, "namespace": "gs", **about}, "spec": {"containers": [{"ports": ports}]}}


def test_the_nodes_agent_is_asked_through_the_api_server_and_found_again_after_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = OneNode()
    monkeypatch.setattr(pods, "kubectl", node)
    launcher = pods.PodLauncher(TWIN)
    assert launcher.witness() is None  # nothing of ours has begun
    launcher.begin(OURS, [])
    witness = launcher.witness()
    assert witness is not None
    with pytest.raises(pods.KubectlError, match="no node agent on gpu-a"):
        witness.metrics()
    node.agents = [agent_pod("leaves", deletionTimestamp="now"), agent_pod("agent-1")]
    node.answers = {"/api/v1/namespaces/gs/pods/agent-1:9400/proxy/metrics": "one"}
    assert witness.metrics() == "one"
    node.agents, node.answers = [agent_pod("agent-2")], {}
    with pytest.raises(KeyError):
        witness.metrics()
    node.answers = {"/api/v1/namespaces/gs/pods/agent-2:9400/proxy/metrics": "two"}
    assert witness.metrics() == "two"


def test_programs_are_known_by_their_gpushares_with_what_was_learnt_on_this_model_of_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = OneNode()
    monkeypatch.setattr(pods, "kubectl", node)
    launcher = pods.PodLauncher(TWIN)
    launcher.begin(OURS, [])
    signatures = table_signatures(GPU.model)
    learned = [{"gpuModel": GPU.model, "sensitivity": -0.2, "pressure": 0.0, "windows": 9}]
    node.shares = [
        {"metadata": {"name": JOB.program}, "status": {"profile": signatures[JOB.program], "learned": learned}},
        {"metadata": {"name": TRAINING.program}, "status": {"profile": table_signatures("L4")[TRAINING.program]}},
        {"metadata": {"name": "new"}},
    ]
    witness = launcher.witness()
    assert witness is not None
    (known,) = witness.profiles().items()
    assert known[0] == JOB.program
    assert known[1].effects.sensitivity == -0.2
    assert known[1].counters.sm_util == pytest.approx(profile(JOB.program).counters.sm_util, abs=1e-4)


def begun(node: OneNode, monkeypatch: pytest.MonkeyPatch, *orders: Order) -> pods.PodLauncher:
    monkeypatch.setattr(pods, "kubectl", node)
    monkeypatch.setattr(pods, "_PAUSE_SECONDS", 0.0)
    launcher = pods.PodLauncher(TWIN)
    launcher.begin(OURS, orders)
    for order in orders:
        launcher.submit(order)
    return launcher


@pytest.mark.parametrize("verb", ["get", "logs"])
def test_a_look_that_fails_is_repeated_and_no_end_is_lost(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    node = OneNode()
    launcher = begun(node, monkeypatch, Order(TRAINING, 70), Order(JOB, 70, 20.0))
    node.status(TRAINING.name, "Succeeded", 0)
    node.status(JOB.name, "Running")
    node.lost.add(verb)
    assert look(launcher) == {}
    node.lost.clear()
    assert set(look(launcher)) == {TRAINING.number}
    assert look(launcher) == {}
    node.lost.add("get")
    monkeypatch.setattr(pods, "TROUBLE_SECONDS", -1.0)
    with pytest.raises(pods.KubectlError):
        look(launcher)


def test_a_pod_that_ended_counts_though_it_cannot_be_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    node = OneNode()
    launcher = begun(node, monkeypatch, Order(TRAINING, 70))
    node.status(TRAINING.name, "Succeeded", 0)
    node.lost.add("delete")
    assert look(launcher)[TRAINING.number].status == 0
    launcher.end()  # the run is over, and counts


def test_a_pod_is_created_again_where_the_api_server_did_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ["no answer within 20 s", 'pods "job-008" already exists (AlreadyExists)']

    def created(*_: str, **__: object) -> str:
        raise pods.KubectlError(answers.pop(0))

    monkeypatch.setattr(pods, "kubectl", created)
    monkeypatch.setattr(pods, "_PAUSE_SECONDS", 0.0)
    assert pods.patiently("create", "-f", "-", stdin="{}") == ""
    answers = ["a pod of another run (AlreadyExists)", "no", "no"]
    with pytest.raises(pods.KubectlError, match=r"^no$"):
        pods.patiently("create", "-f", "-", stdin="{}")


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (
            {"state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}},
            "OOMKilled exit status 137\nlast words",
        ),
        (
            {"state": {"waiting": {"reason": "CreateContainerError", "message": "no such folder"}}},
            "CreateContainerError no such folder",
        ),
    ],
)
def test_a_pod_that_failed_says_why(status: Json, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    node = OneNode()
    launcher = begun(node, monkeypatch, Order(TRAINING, 70))
    node.logs[TRAINING.name] = "last words"
    pod = node.pods[TRAINING.name]
    is_over = "terminated" in status["state"]
    pod["status"] = {"phase": "Failed" if is_over else "Pending", "containerStatuses": [status]}
    pod["metadata"]["creationTimestamp"] = "2026-11-25T00:00:00Z"  # a container is tried for a while
    ended = look(launcher)[TRAINING.number]
    assert ended.status != 0
    assert ended.tail == words


def test_a_container_that_was_asked_for_just_now_is_not_given_up() -> None:
    waiting = {"state": {"waiting": {"reason": "ErrImagePull"}}}
    pod = {
        "metadata": {"creationTimestamp": "2026-11-25T00:00:00Z"},
        "status": {"phase": "Pending", "containerStatuses": [waiting]},
    }
    created = 1_795_564_800.0
    assert not podstate.is_hopeless(pod, created + 5.0)
    assert podstate.is_hopeless(pod, created + 25.0)
    pod["status"]["containerStatuses"] = [{"state": {"waiting": {"reason": "ContainerCreating"}}}]
    assert not podstate.is_hopeless(pod, created + 25.0)


def test_jobs_that_have_not_ended_say_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    node = OneNode()
    launcher = begun(node, monkeypatch, Order(TRAINING, 70))
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
    node.pods[TRAINING.name]["status"] = {"phase": "Pending", "conditions": [condition]}
    about = {"kind": "Event", "involvedObject": {"name": TRAINING.name}}
    node.events = [about | {"reason": "FailedScheduling", "message": "no GPU fits", "lastTimestamp": "t"}]
    node.events.append(about | {"involvedObject": {"name": "another"}, "reason": "Pulled", "message": "yes"})
    assert launcher.unfinished() == {
        TRAINING.number: "Pending; PodScheduled is False: 0/1 nodes; FailedScheduling: no GPU fits"
    }


def test_what_a_stopped_call_has_left_is_removed_and_the_gpu_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = OneNode()
    node.pods["job-001"] = {"metadata": {"name": "job-001"}, "status": {"phase": "Running"}}
    node.gpu_nodes = [gpu_node(tenants=[{"podUid": "u"}]), gpu_node()]
    monkeypatch.setattr(pods, "kubectl", node)
    monkeypatch.setattr(pods, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(pods.shutil, "which", lambda _: "kubectl")
    (tmp_path / "tenants.json").write_text(json.dumps({"image": "i", "python": "p"}))
    monkeypatch.setenv("KUBECONFIG", "k")
    monkeypatch.setenv("GPUSHARE_TENANTS", str(tmp_path / "tenants.json"))
    assert pods.place_of_this_cluster().gpu == GPU
    assert node.pods == {}
    node.gpu_nodes = [gpu_node(tenants=[{"podUid": "u"}])]  # somebody else's stay
    monkeypatch.setattr(pods, "SETTLE_SECONDS", 0.0)
    with pytest.raises(NotReadyError, match="has 1 pods already"):
        pods.place_of_this_cluster()


def test_a_new_cluster_gets_the_signatures_of_an_earlier_session_and_keeps_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node, signatures = OneNode(), table_signatures(GPU.model)
    own = {**signatures[JOB.program], "windowSeconds": 99}
    node.shares = [share(JOB.program, profile=own), share(TRAINING.program)]
    launcher = begun(node, monkeypatch)
    other = {TRAINING.program: signatures[TRAINING.program], JOB.program: signatures[JOB.program]}
    launcher.learn(other | {"cg": table_signatures("NVIDIA L4")[TRAINING.program]})
    assert node.learnt == {TRAINING.program: {"status": {"profile": signatures[TRAINING.program]}}}
    assert [each["status"]["profile"] for each in node.shares] == [own, signatures[TRAINING.program]]


def share(name: str, **status: Any) -> Json:
    return {"metadata": {"name": name}, "status": {"observedGeneration": 1, **status}}


def test_what_a_new_cluster_is_told_waits_for_the_operators_first_status_and_is_told_again_if_that_replaced_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On an H200 ten signatures were gone at once, and a run of gpushare began without any."""
    node, signatures = OneNode(), table_signatures(GPU.model)
    node.shares = [{"metadata": {"name": TRAINING.program}}]
    launcher = begun(node, monkeypatch)
    monkeypatch.setattr(pods, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(pods, "KEPT_SECONDS", 0.0)
    told = {TRAINING.program: signatures[TRAINING.program]}
    with pytest.raises(NotReadyError, match="the first status of the GpuShares"):
        launcher.learn(told)
    assert node.learnt == {}
    node.shares, node.overwritten = [share(TRAINING.program)], 1
    with monkeypatch.context() as patient:
        patient.setattr(pods, "PATIENCE_SECONDS", 60.0)
        launcher.learn(told)
    assert node.shares[0]["status"]["profile"] == signatures[TRAINING.program]
    node.shares, node.overwritten = [share(TRAINING.program)], 99
    with pytest.raises(NotReadyError, match="do not keep their signatures"):
        launcher.learn(told)


def test_programs_alone_take_turns_in_a_folder_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    node = OneNode()
    monkeypatch.setattr(pods, "kubectl", node)
    launcher = pods.PodLauncher(REAL)
    monkeypatch.setattr(launcher, "_offers", lambda: True)
    folders = []
    for _ in range(2):
        orders = [Order(TRAINING, 70), Order(JOB, 70)]
        launcher.begin(launcher.alone, orders)
        for order in orders:
            launcher.submit(order)
        (one, other) = (pod["spec"]["containers"][0] for pod in node.pods.values())
        assert one["command"][-4:] == other["command"][-4:]
        assert one["command"][-2:] == ["--of", "2"]
        folder = one["command"][-3]
        assert any(folder.startswith(f"{mount['mountPath']}/") for mount in one["volumeMounts"])
        folders.append(folder)
        node.pods.clear()
    assert len(set(folders)) == 2
    launcher.begin(FIFO, [Order(TRAINING, 70)])
    launcher.submit(Order(TRAINING, 70))
    assert "--turn" not in node.pods[TRAINING.name]["spec"]["containers"][0]["command"]
