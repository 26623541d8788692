"""What integration and e2e tests need of the running cluster: kubectl, pods that share, waiting."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from livereads import LiveReads
from surroundings import surroundings

ROOT = Path(__file__).resolve().parents[2]
RELEASE = "gpushare"
RELEASE_NAMESPACE = "gpushare-system"
GPU = "gpushare.io/gpu"
THREADS = "gpushare.io/thread-percentage"
MEMORY_LIMIT = "gpushare.io/memory-limit"
H200_SM_COUNT = 132
DAEMONSETS = ("agent", "mps")  # of the release's parts; the others are Deployments
NOWHERE = "gpushare.io/nowhere"
PRIVILEGES = ("latency", "isolated")  # what a namespace needs a label for (the chart's policy.restricted)
IDLE = ["sh", "-c", "exec sleep infinity"]  # a pod that has its share and starts nothing on the GPU

Json = dict[str, Any]
T = TypeVar("T")


def sms_under(percent: int) -> int:
    """SMs of an H200 that a client sees under a thread percentage: pairs, at least 8 (docs/facts.md 7 and 11)."""
    return max(8, int(H200_SM_COUNT * percent / 100) // 2 * 2)


class NotYet(AssertionError):
    """What a test waits for did not come in time."""


def wait_for(what: str, probe: Callable[[], T | None], *, seconds: float = 60.0, every: float = 0.25) -> T:
    """Poll until the probe answers something true, and return that."""
    deadline = time.monotonic() + seconds
    while not (found := probe()):
        if time.monotonic() > deadline:
            raise NotYet(f"{what}: not within {seconds:.0f} s; {surroundings()}")
        time.sleep(every)
    return found


def driver(*arguments: str, timeout_seconds: float = 600) -> str:
    """Run hack/cluster."""
    command = [str(ROOT / "hack" / "cluster"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds, check=False)
    if done.returncode:
        raise AssertionError(f"hack/cluster {' '.join(arguments)}: {done.stderr[-3000:]}")
    return done.stdout


@dataclass(frozen=True)
class Answer:
    """What kubectl said."""

    code: int
    out: str
    err: str


class Cluster:
    """The running cluster through kubectl, as its administrator."""

    def __init__(self, kubeconfig: str, program: str, backend: str) -> None:
        self.kubeconfig = kubeconfig
        self.backend = backend
        self.program = program
        self.reads = LiveReads(kubeconfig)

    def try_kubectl(self, *arguments: str, stdin: str | None = None, seconds: float = 120) -> Answer:
        done = subprocess.run(
            [self.program, f"--kubeconfig={self.kubeconfig}", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        return Answer(done.returncode, done.stdout, done.stderr)

    def kubectl(self, *arguments: str, stdin: str | None = None, seconds: float = 120) -> str:
        answer = self.try_kubectl(*arguments, stdin=stdin, seconds=seconds)
        assert answer.code == 0, f"kubectl {' '.join(arguments)}: {answer.err}"
        return answer.out

    def get(self, *arguments: str) -> Json:
        """What `kubectl get -o json` answers."""
        found = self.reads.get(arguments)
        if found is None:
            found = json.loads(self.kubectl("get", *arguments, "-o", "json"))
        return found

    def apply(self, *objects: Json, namespace: str) -> Answer:
        body = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        return self.try_kubectl("-n", namespace, "create", "-f", "-", stdin=body)

    def dry_run(self, obj: Json) -> Answer:
        """Ask the API server what it would say to a new object."""
        return self.try_kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(obj))

    def gpus(self) -> list[Json]:
        """Every GPU as its agent reports it."""
        return [gpu for node in self.get("gpunodes")["items"] for gpu in node.get("status", {}).get("gpus", [])]

    def healthy_gpus(self) -> int:
        """How many GPUs take tenants."""
        gpus = self.gpus()
        return sum(gpu["health"] == "Healthy" and gpu.get("mps", {}).get("state") == "Active" for gpu in gpus)


def helm(cluster: Cluster, *arguments: str) -> str:
    """Run helm on the release's namespace."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")  # the driver's default
    program = Path(os.environ.get("GPUSHARE_CACHE") or base / "gpushare", "bin", "helm")
    done = subprocess.run(
        [program, *arguments, "--namespace", RELEASE_NAMESPACE, "--kubeconfig", cluster.kubeconfig],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def until_agents_are_replaced(cluster: Cluster) -> None:
    """Wait for what `helm upgrade --wait` does not, as the agent of a single node may be unavailable."""
    agents = ("-n", RELEASE_NAMESPACE, "rollout", "status", f"daemonset/{RELEASE}-agent")
    cluster.kubectl(*agents, "--timeout=240s", seconds=260)


def try_gpushare(kubeconfig: str, *arguments: str) -> Answer:
    """Run `gpushare`, or `kubectl gpushare`, as this checkout has it."""
    program = "import sys; from gpushare.cli import main; sys.argv[0] = 'gpushare'; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments, "--kubeconfig", kubeconfig],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PYTHONPATH": str(ROOT / "src")},
    )
    return Answer(done.returncode, done.stdout, done.stderr)


def gpushare(cluster: Cluster, *arguments: str) -> str:
    """What it prints."""
    answer = try_gpushare(cluster.kubeconfig, *arguments)
    assert answer.code == 0, answer.err
    return answer.out


def pods_of(cluster: Cluster, *parts: str) -> list[Json]:
    """Pods of these parts, those that are still ending included: an ending server still answers."""
    selector = f"app.kubernetes.io/component in ({','.join(parts)})"
    found: list[Json] = cluster.get("-n", RELEASE_NAMESPACE, "pods", "-l", selector)["items"]
    return found


@contextmanager
def without(cluster: Cluster, *parts: str) -> Iterator[None]:
    """Take parts of the release away, all of their pods; afterwards they are there again, and the GPUs healthy."""
    daemonsets = [part for part in parts if part in DAEMONSETS]
    replicas = {
        part: cluster.get("-n", RELEASE_NAMESPACE, "deployment", f"{RELEASE}-{part}")["spec"]["replicas"]
        for part in parts
        if part not in DAEMONSETS
    }
    # What is to be there, as an upgrade may still be replacing pods: helm does not wait for the agents.
    of_nodes = [cluster.get("-n", RELEASE_NAMESPACE, "daemonset", f"{RELEASE}-{part}") for part in daemonsets]
    count = sum(replicas.values()) + sum(each["status"]["desiredNumberScheduled"] for each in of_nodes)

    asking: Json = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "asks", "namespace": "default", "annotations": {"gpushare.io/fraction": "0.1"}},
        "spec": {"containers": [{"name": "main", "image": "none"}]},
    }

    def scale(counts: Mapping[str, int]) -> None:
        for part, count in counts.items():
            cluster.kubectl(
                "-n", RELEASE_NAMESPACE, "scale", "deployment", f"{RELEASE}-{part}", f"--replicas={count}"
            )

    def select(value: str | None) -> None:
        body = json.dumps({"spec": {"template": {"spec": {"nodeSelector": {NOWHERE: value}}}}})
        for part in daemonsets:
            cluster.kubectl("-n", RELEASE_NAMESPACE, "patch", "daemonset", f"{RELEASE}-{part}", "-p", body)

    def are_back() -> bool:
        pods = pods_of(cluster, *parts)
        ready = [pod for pod in pods if is_ready(pod) and "deletionTimestamp" not in pod["metadata"]]
        return len(ready) == len(pods) == count

    try:
        scale(dict.fromkeys(replicas, 0))
        select("true")
        wait_for(f"no {', '.join(parts)} left", lambda: not pods_of(cluster, *parts), seconds=120)
        yield
    finally:
        select(None)
        scale(replicas)
        wait_for(f"{', '.join(parts)} again", are_back, seconds=180)
        if "admission" in parts:  # the node's rules for its Service come a moment after its pods are ready
            wait_for("the API server reaches admission", lambda: cluster.dry_run(asking).code == 0)
        wait_for("both GPUs healthy again", lambda: cluster.healthy_gpus() == 2, seconds=120)


def is_ready(pod: Json) -> bool:
    conditions: list[Json] = pod["status"].get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


class Namespace:
    """One test's own namespace with its pods."""

    def __init__(self, cluster: Cluster, image: str) -> None:
        self.cluster = cluster
        self.image = image
        self.name = f"e2e-{uuid.uuid4().hex[:8]}"
        cluster.kubectl("create", "namespace", self.name)
        self.allow(*PRIVILEGES)

        def account() -> bool:
            return cluster.try_kubectl("-n", self.name, "get", "serviceaccount", "default").code == 0

        # kube-controller-manager makes it, which lists anew a minute after the API server has restarted.
        wait_for("the namespace's service account", account, seconds=180)

    def allow(self, *privileges: str) -> None:
        """Let its pods have these, of `PRIVILEGES`, and no others."""
        labels = {f"gpushare.io/allow-{each}": "true" if each in privileges else None for each in PRIVILEGES}
        body = json.dumps({"metadata": {"labels": labels}})
        self.cluster.kubectl("patch", "namespace", self.name, "--type=merge", "-p", body)

    def leave_one_gpu(self, *, but: str | None = None) -> None:
        """Take all GPUs but one of two; pods on that one tolerate so much that no prediction keeps them apart.

        Args:
            but: pods with this label have another GpuShare.
        """
        selector: Json = {"matchLabels": {"gpushare.io/managed": "true"}}
        if but is not None:
            selector["matchExpressions"] = [{"key": but, "operator": "DoesNotExist"}]
        tolerant = {
            "apiVersion": "gpushare.io/v1alpha1",
            "kind": "GpuShare",
            "metadata": {"name": "tolerant"},
            "spec": {"selector": selector, "maxSlowdown": 10},
        }
        self.create(tolerant, self.tenant("filler", "1", command=IDLE))
        self.running("filler")

    def tenant(
        self,
        name: str,
        fraction: str,
        *arguments: str,
        workload: str = "montecarlo-fp32",
        memory: str | None = None,
        job_class: str | None = None,
        processes: int | None = None,
        env: Mapping[str, str] | None = None,
        command: Sequence[str] | None = None,
    ) -> Json:
        """A pod that shares; without a command it runs the tenant program with these arguments."""
        annotations = {"gpushare.io/fraction": fraction, "gpushare.io/workload": workload}
        if memory is not None:
            annotations["gpushare.io/memory"] = memory
        if job_class is not None:
            annotations["gpushare.io/class"] = job_class
        if processes is not None:
            annotations["gpushare.io/processes"] = str(processes)
        run = ["python", "-m", "gpushare.twin.mps.tenant", "--workload", workload, *arguments]
        return self.pod(name, list(command) if command else run, annotations=annotations, env=env)

    def pod(
        self,
        name: str,
        command: Sequence[str],
        *,
        annotations: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Json:
        container = {
            "name": "main",
            "image": self.image,
            "imagePullPolicy": "IfNotPresent",
            "command": list(command),
            "env": [{"name": key, "value": value} for key, value in (env or {}).items()],
            "securityContext": {"runAsUser": 0},  # root, as most tenants are: it must not help them
        }
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "annotations": dict(annotations or {})},
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 0,
                "automountServiceAccountToken": False,
                "containers": [container],
            },
        }

    def create(self, *pods: Json) -> None:
        answer = self.cluster.apply(*pods, namespace=self.name)
        assert answer.code == 0, answer.err

    def get(self, name: str) -> Json:
        return self.cluster.get("-n", self.name, "pod", name)

    def pods(self) -> list[Json]:
        items: list[Json] = self.cluster.get("-n", self.name, "pods")["items"]
        return items

    def told(self) -> str:
        """What the cluster says of the namespace's pods: for the message of a test that failed."""
        return "\n".join(self.cluster.kubectl("-n", self.name, *each) for each in (("get", "pods"), ("events",)))

    def bound(self, pod_name: str, *, seconds: float) -> None:
        """Wait until a pod has a node."""
        try:
            wait_for(f"{pod_name} bound", lambda: self.get(pod_name)["spec"].get("nodeName"), seconds=seconds)
        except NotYet as late:
            raise NotYet(f"{late}\n{self.told()}") from None

    def running(self, *pod_names: str, seconds: float = 60) -> list[Json]:
        """Wait until these pods run."""

        def probe() -> list[Json] | None:
            found = {pod["metadata"]["name"]: pod for pod in self.pods()}
            chosen = [found[name] for name in pod_names]
            return chosen if all(pod["status"].get("phase") == "Running" for pod in chosen) else None

        try:
            return wait_for(f"{', '.join(pod_names)} running", probe, seconds=seconds)
        except NotYet as late:
            raise NotYet(f"{late}\n{self.told()}") from None

    def log(self, name: str, *arguments: str, tail: int | None = None) -> str:
        found = None if arguments else self.cluster.reads.log(self.name, name, tail=tail)
        if found is None:
            wanted = (*arguments, *([] if tail is None else [f"--tail={tail}"]))
            found = self.cluster.try_kubectl("-n", self.name, "logs", name, *wanted).out
        return found

    def figures(self, name: str, *, seconds: float = 40) -> dict[str, str]:
        """The newest line of the tenant's log that has a rate, as names and values."""

        def probe() -> dict[str, str] | None:
            lines = [line for line in self.log(name, tail=50).splitlines() if "iterations/s=" in line]
            return dict(re.findall(r"(\S+?)=(\S+)", lines[-1])) if lines else None

        return wait_for(f"a rate in the log of {name}", probe, seconds=seconds)

    def rate(self, name: str) -> float:
        return float(self.figures(name)["iterations/s"])

    def connected(self, name: str, *, seconds: float = 40) -> dict[str, str]:
        """The line that the tenant wrote when it was connected."""

        def probe() -> dict[str, str] | None:
            lines = [line for line in self.log(name).splitlines() if " connected after " in line]
            if not lines:
                return None
            found = dict(re.findall(r"(\S+?)=(\S+)", lines[0]))
            after = re.search(r"connected after ([\d.]+) s", lines[0])
            assert after is not None, lines[0]
            return {**found, "after_seconds": after[1]}

        return wait_for(f"{name} connected", probe, seconds=seconds)

    def events(self, name: str) -> list[str]:
        """Messages of the events about a pod."""
        return [item["message"] for item in self._events(name)]

    def reasons(self, name: str) -> set[str]:
        """Reasons of the events about a pod."""
        return {item["reason"] for item in self._events(name)}

    def _events(self, name: str) -> list[Json]:
        items: list[Json] = self.cluster.get(
            "-n", self.name, "events", f"--field-selector=involvedObject.name={name}"
        )["items"]
        return items

    def delete(self, *pod_names: str) -> None:
        self.cluster.kubectl("-n", self.name, "delete", "pod", *pod_names, "--wait=true")

    def close(self) -> None:
        """Remove it; waits for its pods and their processes, so that the next test finds the GPUs free.

        The namespace goes first: while it ends, no controller can make a successor of a pod that is deleted.
        """
        self.cluster.try_kubectl("delete", "namespace", self.name, "--wait=false")
        uids = {pod["metadata"]["uid"] for pod in self.pods()}
        by_force = ("--all", "--force", "--grace-period=0", "--wait=false")
        self.cluster.try_kubectl("-n", self.name, "delete", "pods", *by_force)

        def free() -> bool:
            left = [pod["metadata"] for pod in self.pods()]
            uids.update(pod["uid"] for pod in left)
            tenants = [t for gpu in self.cluster.gpus() for t in gpu.get("tenants", [])]
            are_deleted = all("deletionTimestamp" in pod for pod in left)
            return are_deleted and all(tenant.get("namespace") != self.name for tenant in tenants)

        wait_for(f"the GPUs free of {self.name}", free, seconds=60)
        # The API server has forgotten them, and kubelet ends them moments later; its watch sleeps on for a minute
        # and more after an outage of the API server. A GpuNode tells less than that.
        wait_for(f"the end of the processes of {self.name}", lambda: not processes_of(*uids), seconds=180)


def decided(pod: Json) -> tuple[str, int, int]:
    """(GPU, thread percentage, memory limit in MiB) of a pod's decision annotations."""
    annotations = pod["metadata"]["annotations"]
    limit = re.fullmatch(r"0=(\d+)M", annotations[MEMORY_LIMIT])
    assert limit is not None, annotations[MEMORY_LIMIT]
    return annotations[GPU], int(annotations[THREADS]), int(limit[1])


def processes_of(*pod_uids: str, saying: str = "") -> list[int]:
    """Pids of these pods' processes on this machine whose command line holds `saying`."""
    wanted = {form for uid in pod_uids for form in (uid, uid.replace("-", "_"))}
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            cgroup = (process / "cgroup").read_text()
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if any(one in cgroup for one in wanted) and command and saying in command:
            found.append(int(process.name))
    return found


def kill(pids: Sequence[int]) -> None:
    assert pids, "no such process"
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
