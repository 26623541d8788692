"""Set up everything that a chaos run or a soak needs of the running cluster, and take it down again."""

import contextlib
import json
import os
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from devcluster.local import LocalCluster
from devcluster.progress import Failed, say, wait_for

from bench.chaos import node
from bench.chaos.api import ApiConnection, NoAnswerError, RefusedError
from bench.chaos.faults import Injector
from bench.chaos.freezes import FreezeWatch
from bench.chaos.load import Filling, Load
from bench.chaos.look import Eye
from bench.chaos.parts import RELEASE_NAMESPACE
from bench.chaos.run import ChaosRun
from gpushare.core.api import names
from gpushare.mps.freezer import CgroupFreezer, FreezerError

PREFIX: Final = "chaos-"
LOG_LINES: Final = "--tail=400"
GONE_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True)
class Setting:
    """The cluster, its load, and its observers."""

    cluster: LocalCluster
    eye: Eye
    load: Load
    freezes: FreezeWatch
    injector: Injector

    def chaos(self, directory: Path, population: int, commit: str = "") -> ChaosRun:
        """Return a run that writes into a directory; `commit` is what it is of."""
        return ChaosRun(
            self.eye,
            self.load,
            self.injector,
            self.freezes,
            directory,
            population=population,
            commit=commit,
            diagnose=lambda where: diagnose(self.cluster, where),
        )


@contextmanager
def set_up(
    cluster: LocalCluster, image: str, seed: int, name: str, filling: Filling = Filling.ROOMY
) -> Iterator[Setting]:
    """Make the load's namespace; take back every fault and remove the namespace in the end."""
    api = ApiConnection(cluster.state / "pki")
    eye = Eye(api)
    eye.picture()
    injector = Injector(cluster, api, eye)
    injector.heal_all()
    wait_for("the API server", lambda: eye.picture().pods is not None, timeout_seconds=90)
    remove_namespaces(api)
    namespace = f"{PREFIX}{name}"
    metadata = {"name": namespace, "labels": {f"{names.GROUP}/allow-latency": "true"}}
    api.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    account = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
    wait_for("the namespace's service account", lambda: _exists(api, account), timeout_seconds=60)
    gpus = wait_for_gpus(eye)
    load = Load(api, namespace, image, seed, gpus=len(gpus), gpu_memory_mib=min(gpus.values()), filling=filling)
    freezes = FreezeWatch()
    freezes.start()
    try:
        yield Setting(cluster, eye, load, freezes, injector)
    finally:
        freezes.close()
        injector.heal_all()
        try:
            wait_for("the API server", lambda: eye.picture().pods is not None, timeout_seconds=90)
            remove_namespaces(api)
        except (Failed, NoAnswerError, RefusedError) as error:
            say(f"the load's namespace may still be there: {error}")


def wait_for_gpus(eye: Eye) -> dict[str, int]:
    """Return the memory of each GPU once all are at work."""
    found: dict[str, int] = {}

    def ready() -> bool:
        gpus = eye.picture().gpus
        found.update({gpu.uuid: gpu.memory_mib for gpu in gpus})
        return bool(gpus) and all((gpu.health, gpu.mps_state) == ("Healthy", "Active") for gpu in gpus)

    wait_for("healthy GPUs", ready, timeout_seconds=180, interval_seconds=1.0)
    return found


def diagnose(cluster: LocalCluster, where: Path) -> None:
    """Keep what helps to find a cause: pods, events, the parts' logs, the gates' files."""
    where.mkdir(parents=True, exist_ok=True)
    asked = {
        "pods.txt": ["get", "pods", "-A", "-o", "wide"],
        "pods.json": ["get", "pods", "-A", "-o", "json"],
        "events.txt": ["get", "events", "-A", "--sort-by=.lastTimestamp"],
        "gpunodes.json": ["get", "gpunodes", "-o", "json"],
    }
    for part in ("operator", "admission", "scheduler", "agent", "mps"):
        logs = ["-n", RELEASE_NAMESPACE, "logs", "-l", f"app.kubernetes.io/component={part}"]
        logs += ["--all-containers", "--prefix", LOG_LINES, "--ignore-errors"]
        asked |= {f"{part}.log": logs, f"{part}-before.log": [*logs, "--previous"]}
    for name, arguments in asked.items():
        try:
            text = cluster.kubectl(*arguments)
        except Failed as failed:
            text = str(failed)
        (where / name).write_text(text)
    for gpu in node.gpus_on_node():
        for name in ("gate.json", "decisions.json", "throttle.json", "throttled.json", "twin.json"):
            path = node.RUN / gpu / name
            if path.is_file():
                (where / f"{gpu}-{name}").write_bytes(path.read_bytes())
    (where / "devices.json").write_text(json.dumps(node.devices_by_pod()))


def _exists(api: ApiConnection, path: str) -> bool:
    try:
        api.get(path)
    except (NoAnswerError, RefusedError):
        return False
    return True


def remove_namespaces(api: ApiConnection) -> None:
    """Remove the loads of this and of earlier runs, and wait until nothing of them is left.

    Pods that kubelet does not end within two minutes would hold their shares for whoever comes next: a warning
    tells of each, it is removed from the API by force, and its processes are thawed and killed.
    """

    def mine() -> list[str]:
        names = [item["metadata"]["name"] for item in api.items("/api/v1/namespaces")]
        return [name for name in names if name.startswith(PREFIX) or name == "gpushare-demo"]

    def gone() -> bool:
        try:
            names = mine()
            for name in names:
                api.delete(f"/api/v1/namespaces/{name}")
        except (NoAnswerError, RefusedError):
            time.sleep(1.0)
            return False
        return not names

    try:
        wait_for("earlier loads gone", gone, timeout_seconds=GONE_SECONDS, interval_seconds=1.0)
    except Failed:
        for name in mine():
            _force(api, name)
        wait_for("earlier loads gone, by force", gone, timeout_seconds=60, interval_seconds=1.0)


def _force(api: ApiConnection, namespace: str) -> None:
    """Remove a namespace's pods from the API, and thaw and kill their processes."""
    freezer = CgroupFreezer()
    for pod in api.items(f"/api/v1/namespaces/{namespace}/pods"):
        meta, status = pod["metadata"], pod.get("status", {})
        told = {key: meta.get(key) for key in ("deletionTimestamp", "deletionGracePeriodSeconds", "finalizers")}
        told |= {key: status.get(key) for key in ("phase", "reason", "message", "containerStatuses")}
        with contextlib.suppress(OSError, FreezerError):
            if (cgroup := freezer.find(meta["uid"])) is not None:
                told["cgroup"] = freezer.state(cgroup)
                freezer.thaw(cgroup)
        warnings.warn(f"pod {namespace}/{meta['name']} was not ended: {json.dumps(told)}", stacklevel=2)
        path = f"/api/v1/namespaces/{namespace}/pods/{meta['name']}"
        with contextlib.suppress(NoAnswerError, RefusedError):
            api.delete(path, {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0})
        for process in node.processes():
            if process.pod_uid == meta["uid"]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
