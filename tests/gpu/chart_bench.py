"""The bench of chart_suite.py: a cluster with gpushare, pods that share, and what both say."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "support"))
from livecluster import RELEASE, RELEASE_NAMESPACE, ROOT, Cluster, Json, Namespace, NotYet, processes_of, wait_for

PROGRAMS = ("cuda_tenant.py", "torch_tenant.py", "programs.py")
METRICS_PORT = 9400
RUNTIME_CLASS = "nvidia"
START = 90.0  # seconds within which a pod's first words are there, whatever the machine does
# What a tenant sets to be let off: in the program itself, where no admission sees it.
GREEDY = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "95", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=120G"}


class Failed(Exception):
    """What was promised did not hold."""


class NotHere(Exception):
    """What a step needs is not in this cluster."""


def must(condition: object, text: str) -> None:
    if not condition:
        raise Failed(text)


class ChartBench:
    """One namespace of a cluster with gpushare, for pods of the suite."""

    def __init__(self, out: Path) -> None:
        self.out = out
        tenants = json.loads(Path(os.environ["GPUSHARE_TENANTS"]).read_text())
        self.image, self.python = tenants["image"], tenants["python"]
        self.plain_python = tenants.get("plain_python", self.python)  # one without PyTorch starts sooner
        self.mounts, self.simulated = tenants["mounts"], tenants["simulated"]
        self.cluster = Cluster(os.environ["KUBECONFIG"], "kubectl", "existing")
        self._revision: int | None = None
        self.oom_kills = 3
        self.space = Namespace(self.cluster, self.image)
        programs = {name: (HERE / name).read_text() for name in PROGRAMS}
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "programs"}, "data": programs}
        self.space.create(body)

    def close(self) -> None:
        self.space.close()

    # pods -------------------------------------------------------------------------------------------------------

    def cuda(self, mode: str, seconds: float, mib: int = 0, env: Mapping[str, str] | None = None) -> list[str]:
        """The command of a CUDA program."""
        variables = [f"--env={key}={value}" for key, value in (env or {}).items()]
        program = HERE / ("chart_twin_tenant.py" if self.simulated else "cuda_tenant.py")
        # as an argument: a volume would delay the pod's start
        return [self.plain_python, "-c", program.read_text(), mode, str(seconds), str(mib), *variables]

    def torch(self, program: str, seconds: float, env: Mapping[str, str] | None = None) -> list[str]:
        """The command of a PyTorch program of programs.py."""
        if self.simulated:
            return self.cuda("run", seconds, 512, env)
        variables = [f"--env={key}={value}" for key, value in (env or {}).items()]
        return [self.python, "/programs/torch_tenant.py", program, str(seconds), *variables]

    def pod(
        self,
        name: str,
        command: Sequence[str],
        fraction: str | None = None,
        memory: str | None = None,
        *,
        workload: str | None = None,
        labels: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        runtime_class: str | None = None,
        security: Mapping[str, object] | None = None,
        grace_seconds: int = 1,
        host_memory: str | None = None,
    ) -> Json:
        wanted = {"fraction": fraction, "memory": memory, "workload": workload}
        mounts, volumes = self._volumes() if "-c" not in command else ([], [])
        container = {
            "name": "main",
            "image": self.image,
            "imagePullPolicy": "IfNotPresent",
            "command": list(command),
            "env": [{"name": key, "value": value} for key, value in (env or {}).items()],
            "volumeMounts": mounts,
            "securityContext": dict(security or {"runAsUser": 0}),
        }
        if host_memory is not None:
            container["resources"] = {"limits": {"memory": host_memory}}
        spec: Json = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": grace_seconds,
            "automountServiceAccountToken": False,
            "containers": [container],
            "volumes": volumes,
        }
        if runtime_class and not self.simulated:
            spec["runtimeClassName"] = runtime_class
        annotations = {f"gpushare.io/{key}": value for key, value in wanted.items() if value is not None}
        metadata = {"name": name, "annotations": annotations, "labels": dict(labels or {})}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}

    def _volumes(self) -> tuple[list[Json], list[Json]]:
        """What a PyTorch pod mounts: the programs, and the host's PyTorch where the image has none."""
        mounts: list[Json] = [
            {"name": "programs", "mountPath": "/programs"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ]
        volumes: list[Json] = [
            {"name": "programs", "configMap": {"name": "programs"}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ]
        for number, place in enumerate(self.mounts):
            mounts.append({"name": f"host-{number}", "mountPath": place, "readOnly": True})
            volumes.append({"name": f"host-{number}", "hostPath": {"path": place}})
        return mounts, volumes

    def start(self, *pods: Json) -> float:
        """Create the pods; return when, by the wall clock that they too tell their events by."""
        at = time.time()
        self.space.create(*pods)
        return at

    def lines(self, name: str) -> list[Json]:
        found = []
        for line in self.space.log(name).splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and "event" in event:
                found.append(event)
        return found

    def events_of(self, name: str, event: str) -> list[Json]:
        return [line for line in self.lines(name) if line["event"] == event]

    def until(self, name: str, event: str, seconds: float = START) -> Json:
        """Wait for an event in a pod's log; fail at once where the pod ended without it."""

        def probe() -> Json | None:
            ended = self.ended(name)
            if found := self.events_of(name, event):
                return found[0]
            must(not ended, f"{name} ended without {event!r}: {self.space.log(name)[-600:]}")
            return None

        try:
            return wait_for(f"{event!r} of {name}", probe, seconds=seconds, every=0.1)
        except NotYet as late:
            raise Failed(f"{late}; {self.space.events(name)[-4:]}") from None

    def ended(self, name: str) -> Json | None:
        """How a pod's container ended, if it did."""
        found: Json = self.space.get(name)["status"]
        for status in found.get("containerStatuses", []):
            if "terminated" in status["state"]:
                ended: Json = status["state"]["terminated"]
                return ended
        return (
            {"reason": found.get("reason"), "message": found.get("message")}
            if found["phase"] == "Failed"
            else None
        )

    def until_ended(self, *names: str, seconds: float = START) -> None:
        for name in names:
            wait_for(f"{name} ended", lambda name=name: self.ended(name), seconds=seconds)

    def rate(self, name: str, newest: int = 3) -> float:
        """Mean of the newest rates of a pod's log."""
        rates = [line["per_s"] for line in self.events_of(name, "rate")][-newest:]
        must(rates, f"no rate in the log of {name}")
        return float(sum(rates) / len(rates))

    def delete(self, *names: str) -> None:
        if names:
            self.cluster.try_kubectl(
                "-n", self.space.name, "delete", "pod", *names, "--ignore-not-found", "--wait=true", seconds=90
            )

    def clear(self) -> None:
        """Remove every pod of the suite, and wait until the GPUs are free of them."""
        self.cluster.try_kubectl(
            "-n", self.space.name, "delete", "pods,gpushares", "--all", "--wait=true", seconds=90
        )

        def free() -> bool:
            tenants = [tenant for gpu in self.cluster.gpus() for tenant in gpu.get("tenants", [])]
            return not [tenant for tenant in tenants if tenant.get("namespace") == self.space.name]

        wait_for("the GPUs free of the suite's pods", free, seconds=40)

    # tenants that must not be harmed
    # ------------------------------------------------------------------------------

    def neighbours(self, seconds: float = 300) -> None:
        """Two tenants at work: 20% and 30% of a GPU."""
        one, two = self.cuda("run", seconds, 1024), self.cuda("run", seconds, 2048)
        self.start(self.pod("one", one, "0.2", "8Gi"), self.pod("two", two, "0.3", "16Gi"))
        for name in ("one", "two"):
            self.until(name, "rate")

    def identity(self, *names: str) -> dict[str, object]:
        """What must not change about a running pod."""
        found = {}
        for name in names or ("one", "two"):
            (status,) = self.space.get(name)["status"]["containerStatuses"]
            (container,) = {status["containerID"]}
            found[name] = (container, status["restartCount"], "running" in status["state"], self.pid(name))
        return found

    def pid(self, name: str) -> int:
        return int(self.events_of(name, "start")[0]["pid"])

    def unharmed(self, before: dict[str, object]) -> dict[str, float]:
        """The same processes go on; returns their rates."""
        now = self.identity(*before)
        must(now == before, f"tenants changed: {before} became {now}")
        totals = {name: self._total(name) for name in before}
        for name in before:
            wait_for(f"{name} going on", lambda name=name: self._total(name) > totals[name], seconds=30)
        return {name: self.rate(name) for name in before}

    def _total(self, name: str) -> int:
        return len(self.events_of(name, "rate"))

    # gpushare
    # -----------------------------------------------------------------------------------------------------

    def gpus(self) -> list[Json]:
        return self.cluster.gpus()

    def gpu_of(self, name: str) -> str:
        return str(self.space.get(name)["metadata"]["annotations"]["gpushare.io/gpu"])

    def sees(self, name: str) -> list[str]:
        """The GPUs that a CUDA program's process sees, by the driver's word to it."""
        return list(self.events_of(name, "context")[0]["gpus"])

    def healthy(self) -> bool:
        gpus = self.gpus()
        return bool(gpus) and all(gpu["health"] == "Healthy" and gpu["mps"]["state"] == "Active" for gpu in gpus)

    def part(self, name: str) -> list[Json]:
        """The pods of a part of gpushare."""
        selector = f"app.kubernetes.io/component={name}"
        found = self.cluster.get("-n", RELEASE_NAMESPACE, "pods", "-l", selector)["items"]
        return [pod for pod in found if not pod["metadata"].get("deletionTimestamp")]

    def processes(self, part: str, saying: str) -> list[int]:
        """Pids of a part's processes on this machine."""
        found = [pid for pod in self.part(part) for pid in processes_of(pod["metadata"]["uid"], saying=saying)]
        if not found:
            raise NotHere(f"no process of {part} here: the node is another machine")
        return found

    def kill(self, part: str, saying: str) -> list[int]:
        pids = self.processes(part, saying)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return pids

    def reasons(self, name: str) -> set[str]:
        """Reasons of the events about a pod."""
        about = f"involvedObject.name={name}"
        found = self.cluster.get("-n", self.space.name, "events", f"--field-selector={about}")["items"]
        return {str(item["reason"]) for item in found}

    def node_reasons(self) -> set[str]:
        found = self.cluster.get("-A", "events", "--field-selector=involvedObject.kind=Node")["items"]
        return {str(item["reason"]) for item in found}

    def metrics(self, pattern: str) -> dict[str, float]:
        """The agent's metrics, of one GPU node, whose names match."""
        (pod, *_) = self.part("agent")
        name = f"{pod['metadata']['name']}:{METRICS_PORT}"
        text = self.cluster.kubectl(
            "get", "--raw", f"/api/v1/namespaces/{RELEASE_NAMESPACE}/pods/{name}/proxy/metrics"
        )
        found = {}
        for line in text.splitlines():
            if re.match(pattern, line):
                key, _, value = line.rpartition(" ")
                found[key] = float(value)
        return found

    def of_pod(self, family: str, name: str) -> float | None:
        values = [value for key, value in self.metrics(family).items() if f'pod="{name}"' in key]
        return values[0] if values else None

    def helm(self, *arguments: str, seconds: float = 150) -> str:
        done = subprocess.run(
            ["helm", *arguments, "--namespace", RELEASE_NAMESPACE, "--kubeconfig", self.cluster.kubeconfig],
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        must(done.returncode == 0, f"helm {arguments[0]}: {(done.stdout + done.stderr)[-1500:]}")
        return done.stdout

    def upgrade(self, *sets: str) -> None:
        """Change values of the release, until `restore`."""
        if self._revision is None:
            self._revision = int(json.loads(self.helm("status", RELEASE, "-o", "json"))["version"])
        given = [word for one in sets for word in ("--set", one)]
        chart = str(ROOT / "helm" / "gpushare")
        self.helm("upgrade", RELEASE, chart, "--reset-then-reuse-values", *given, "--wait", "--timeout", "120s")

    def restore(self) -> None:
        """Put the release back to what it was before the first `upgrade`, unless it is uninstalled."""
        if self._revision is None or not self.helm("list", "--all", "--short", "--filter", f"^{RELEASE}$").strip():
            return
        self.helm("rollback", RELEASE, str(self._revision))
        self._revision = None


def tenants_of(cluster: Cluster) -> list[str]:
    """The pods that share the cluster's GPUs, as its GpuNodes have them."""
    tenants = [tenant for gpu in cluster.gpus() for tenant in gpu.get("tenants", [])]
    return sorted(f"{tenant.get('namespace')}/{tenant.get('pod')}" for tenant in tenants)


def measured(action: Callable[[], object]) -> float:
    begun = time.monotonic()
    action()
    return round(time.monotonic() - begun, 2)


Details = dict[str, Any]
