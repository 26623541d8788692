"""The pods of the benchmark, as they are sent to a cluster; nothing here talks to one."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from bench.sharing.launching import Order
from bench.sharing.policies import SharingPolicy, World
from bench.sharing.trace import LEAST_SHARE, MEMORY_MIB
from gpushare.core.api import JobClass, names
from gpushare.core.gpu import GpuInfo
from gpushare.mps.control import REAL_EXECUTABLE

Json = dict[str, Any]

ROOT: Final = Path(__file__).resolve().parents[2]
NAMESPACE: Final = "sharing-bench"
PROGRAM_LABEL: Final = "sharing-bench/program"
REPLICA: Final = "sharing-bench/replica"
"""What a device plugin with replicas would offer: the driver writes so many to the node's status."""
PERCENT: Final = "sharing-bench/percent"
CODE: Final = "code"
CODE_PATH: Final = "/sharing"
NODE_PATH: Final = "/run/gpushare-sharing"
"""On the node and in pods: the benchmark's MPS daemon's folders, and where simulated jobs take turns."""
DAEMON: Final = "mps-daemon"
FAULT: Final = "fault"
_TWIN_CONTROL: Final = (
    "python",
    "-c",
    "import sys,os,gpushare.mps.control as c; os.execv(sys.executable, [*c.TWIN_EXECUTABLE, *sys.argv[1:]])",
)
# The programs need these of ours, and PyTorch.
_SOURCES: Final = (
    "bench/__init__.py",
    "bench/sharing/__init__.py",
    "bench/sharing/gpujob.py",
    "bench/sharing/work.py",
    "src/gpushare/__init__.py",
    "src/gpushare/research/__init__.py",
    "src/gpushare/research/calibration/__init__.py",
    "src/gpushare/research/calibration/table_applications.py",
    "src/gpushare/research/calibration/table_suite.py",
    "src/gpushare/research/calibration/workload.py",
    "src/gpushare/research/calibration/suite/networks.py",
)
# Empty there: the package itself names every program of the other suite, and these need more.
_EMPTY: Final = "src/gpushare/research/calibration/suite/__init__.py"
_TWIN_SOURCES: Final = (
    "bench/__init__.py",
    "bench/sharing/__init__.py",
    "bench/sharing/gpujob.py",
    "bench/sharing/trace.py",
    "bench/sharing/twinjob.py",
    "bench/sharing/work.py",
)


@dataclass(frozen=True, slots=True)
class Tenants:
    """Way pods get the job program, as hack/gpu/cluster writes it to the file that GPUSHARE_TENANTS names.

    Attributes:
        mounts: folders of the node that the program's Python needs.
        runtime_class: of pods that see the GPU without gpushare; empty where the default runtime is NVIDIA's.
    """

    image: str
    python: str
    mounts: tuple[str, ...] = ()
    simulated: bool = False
    runtime_class: str = "nvidia"

    @classmethod
    def read(cls, path: Path) -> "Tenants":
        """Read the file."""
        found = json.loads(path.read_text())
        given = {name: found[name] for name in ("image", "python", "simulated", "runtime_class") if name in found}
        return cls(mounts=tuple(found.get("mounts", ())), **given)


@dataclass(frozen=True, slots=True)
class Place:
    """Place of the pods: the cluster's one node with a GPU."""

    node: str
    gpu: GpuInfo
    tenants: Tenants


def code(simulated: bool) -> Json:
    """Return the ConfigMap with what a job program needs of this checkout."""
    data = {_key(path): (ROOT / path).read_text() for path in _sources(simulated) if path != _EMPTY}
    if not simulated:
        data[_key(_EMPTY)] = ""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": CODE, "namespace": NAMESPACE},
        "data": data,
    }


def gpushare_of(program: str) -> Json:
    """Return the GpuShare of a program's pods; it outlives them, and with it what is learnt."""
    return {
        "apiVersion": f"{names.GROUP}/{names.VERSION}",
        "kind": "GpuShare",
        "metadata": {"name": program, "namespace": NAMESPACE},
        "spec": {"selector": {"matchLabels": {PROGRAM_LABEL: program}}},
    }


def fault_gpushare() -> Json:
    """Return the GpuShare of the pods that fault: nobody is to profile them."""
    share = gpushare_of(FAULT)
    share["spec"]["profile"] = {"mode": "Off"}
    return share


def fault_pod(name: str, place: Place) -> Json:
    """Return a pod that works on the GPU for a second and then touches memory which is not there."""
    program = "chart_twin_tenant.py" if place.tenants.simulated else "cuda_tenant.py"
    text = (ROOT / "tests" / "gpu" / program).read_text()
    pod = _pod(name, place, [place.tenants.python, "-u", "-c", text, "fault", "3"], {})
    pod["metadata"]["labels"][PROGRAM_LABEL] = FAULT
    pod["metadata"]["annotations"] = {
        names.FRACTION: f"{LEAST_SHARE / 100:g}",
        names.MEMORY: "2048Mi",
        names.CLASS: JobClass.THROUGHPUT.value,
    }
    return pod


def job_pod(policy: SharingPolicy, order: Order, place: Place, turn: tuple[str, int] | None = None) -> Json:
    """Return the pod of a job under a policy.

    Args:
        turn: folder and number of the jobs of which one works at a time (work.turn).
    """
    job, tenants = order.job, place.tenants
    program = "twinjob" if tenants.simulated else "gpujob"
    command = [tenants.python, "-u", "-m", f"bench.sharing.{program}", *order.arguments()]
    if turn is not None:
        command += ["--turn", turn[0], "--of", str(turn[1])]
    env = {"PYTHONPATH": f"{CODE_PATH}:{CODE_PATH}/src", "OMP_NUM_THREADS": "1"}
    pod = _pod(job.name, place, command, env)
    spec, metadata = pod["spec"], pod["metadata"]
    metadata["labels"][PROGRAM_LABEL] = job.program
    container = spec["containers"][0]
    if policy.world is World.GPUSHARE:
        metadata["annotations"] = {
            names.FRACTION: f"{job.share_percent / 100:g}",
            names.MEMORY: f"{MEMORY_MIB}Mi",
            names.CLASS: job.job_class.value,
            names.WORKLOAD: job.program,  # a GpuShare with a selector profiles pods of one workload only
        }
        return pod
    _let_see_the_gpu(pod, place)
    if policy.places is not None:
        container["resources"] = {"limits": {REPLICA: "1"}}
    elif policy.counts_shares:
        container["resources"] = {"limits": {PERCENT: str(job.share_percent)}}
    _mount(pod, "node", NODE_PATH, read_only=False)
    if policy.world is World.MPS:
        container["env"].append({"name": "CUDA_MPS_PIPE_DIRECTORY", "value": f"{NODE_PATH}/mps/pipe"})
        if (cap := policy.cap(job)) is not None:
            container["env"].append({"name": "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "value": str(cap)})
    else:
        container["env"].append({"name": "CUDA_MPS_PIPE_DIRECTORY", "value": "/nonexistent/no-mps"})
        if tenants.simulated:
            container["command"] += ["--turns", f"{NODE_PATH}/turns"]
    return pod


def daemon_pod(policy: SharingPolicy, place: Place) -> Json:
    """Return the pod of one MPS daemon, given the two commands that NVIDIA's device plugin gives its own."""
    control = _TWIN_CONTROL if place.tenants.simulated else REAL_EXECUTABLE
    words = ["start_server -uid 0"]
    if policy.percentage is not None:
        limit = place.gpu.memory_mib * policy.percentage // 100
        words = [
            f"set_default_device_pinned_mem_limit 0 {limit}M",
            f"set_default_active_thread_percentage {policy.percentage}",
            *words,
        ]
    script = [
        "set -e",
        'rm -rf "$CUDA_MPS_PIPE_DIRECTORY"',  # of a daemon that was killed
        'mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"',
        '"$@" -d -multiuser-server',
        *(f"echo '{word}' | \"$@\"" for word in words),
        "trap 'echo quit | \"$@\"; exit 0' TERM",
        "echo ready",
        "while :; do sleep 1; done",
    ]
    env = {
        "CUDA_MPS_PIPE_DIRECTORY": f"{NODE_PATH}/mps/pipe",
        "CUDA_MPS_LOG_DIRECTORY": f"{NODE_PATH}/mps/log",
        "CUDA_VISIBLE_DEVICES": place.gpu.uuid,
    }
    if place.tenants.simulated:
        env["GPUSHARE_TWIN_GPU"] = json.dumps(asdict(place.gpu))
        del env["CUDA_VISIBLE_DEVICES"]
    pod = _pod(DAEMON, place, ["sh", "-c", "\n".join(script), "daemon", *control], env)
    pod["spec"] |= {"hostPID": True, "terminationGracePeriodSeconds": 15}
    _let_see_the_gpu(pod, place)
    _mount(pod, "node", NODE_PATH, read_only=False)
    return pod


def offer(policy: SharingPolicy) -> dict[str, str]:
    """Return how much of what the node offers to a policy's pods."""
    return {REPLICA: str(policy.places or 0), PERCENT: "100" if policy.counts_shares else "0"}


def capacity_patch(policy: SharingPolicy) -> Sequence[Json]:
    """Return the JSON patch of the node's status that offers what a policy's pods ask for."""
    return [
        {"op": "add", "path": f"/status/capacity/{name.replace('/', '~1')}", "value": amount}
        for name, amount in offer(policy).items()
    ]


def _pod(name: str, place: Place, command: Sequence[str], env: Mapping[str, str]) -> Json:
    container: Json = {
        "name": "main",
        "image": place.tenants.image,
        "imagePullPolicy": "IfNotPresent",
        "command": list(command),
        "env": [{"name": key, "value": value} for key, value in env.items()],
        "securityContext": {"runAsUser": 0},
        "volumeMounts": [],
    }
    pod: Json = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": {}},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "containers": [container],
            "volumes": [],
        },
    }
    paths = [{"key": _key(path), "path": path} for path in _sources(place.tenants.simulated)]
    pod["spec"]["volumes"].append({"name": CODE, "configMap": {"name": CODE, "items": paths}})
    container["volumeMounts"].append({"name": CODE, "mountPath": CODE_PATH, "readOnly": True})
    if not place.tenants.simulated:
        pod["spec"]["volumes"].append({"name": "shm", "emptyDir": {"medium": "Memory"}})
        container["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})
    for number, path in enumerate(place.tenants.mounts):
        _mount(pod, f"host-{number}", path, read_only=True)
    return pod


def _mount(pod: Json, name: str, path: str, *, read_only: bool) -> None:
    kind = {} if read_only else {"type": "DirectoryOrCreate"}
    pod["spec"]["volumes"].append({"name": name, "hostPath": {"path": path, **kind}})
    mount = {"name": name, "mountPath": path, "readOnly": read_only}
    pod["spec"]["containers"][0]["volumeMounts"].append(mount)


def _let_see_the_gpu(pod: Json, place: Place) -> None:
    """Give a pod the GPU past gpushare: by the runtime and its variables."""
    if place.tenants.simulated:
        return
    if place.tenants.runtime_class:
        pod["spec"]["runtimeClassName"] = place.tenants.runtime_class
    pod["spec"]["containers"][0]["env"] += [
        {"name": "NVIDIA_VISIBLE_DEVICES", "value": place.gpu.uuid},
        {"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "compute,utility"},
    ]


def _key(path: str) -> str:
    """Return a ConfigMap's key for a path: it may have no slashes."""
    return path.replace("/", "-")


def _sources(simulated: bool) -> tuple[str, ...]:
    return _TWIN_SOURCES if simulated else (*_SOURCES, _EMPTY)
