"""An existing cluster with GPUs: the chart is installed and removed, nothing else changes.

If gpushare is already in use there, nothing is installed unless this is confirmed (`--yes`).
"""

import json
import os

from devcluster import backends, progress, tools
from devcluster.gpunode import INSTALL_SECONDS, RELEASE, RELEASE_NAMESPACE, RUNTIME_CLASS
from devcluster.progress import Failed, step
from devcluster.settings import REPOSITORY, cache_dir

GPU_NODES = "gpunodes.gpushare.io"


class ExistingGpus:
    """The cluster of the current kubeconfig context, whose nodes have NVIDIA's driver and container toolkit."""

    name = "existing"

    def __init__(self, *, yes: bool = False) -> None:
        self._yes = yes
        self._cluster = backends.ExistingCluster()
        self.kubeconfig = self._cluster.kubeconfig

    def up(self) -> None:
        self._cluster.up()

    def down(self) -> None:
        self._cluster.down()

    def status(self) -> dict[str, object]:
        return self._cluster.status()

    def install(self, *sets: str) -> None:
        """Install the chart with IMAGE, or with its own default image where IMAGE is unset.

        Raises:
            Failed: gpushare is there already, pods share the GPUs, or another device plugin offers them.
        """
        if not self._yes and (used := [*self._releases(), *self._tenants()]):
            raise Failed(
                f"gpushare is in use in the cluster of {self.kubeconfig}: {', '.join(used)}. This would replace "
                "it and harm who uses it; --yes (make test-gpu: YES=1) does so"
            )
        if not self._yes and (claimed := self._claimed()):
            raise Failed(
                f"another device plugin offers GPUs of the cluster of {self.kubeconfig}: {', '.join(claimed)}. "
                "Both would give the same GPU to different pods; take it off these nodes, or go on by --yes "
                "(make test-gpu: YES=1)"
            )
        own = []
        if image := os.environ.get("IMAGE"):
            repository, _, tag = image.rpartition(":")
            own += [f"image.repository={repository}", f"image.tag={tag}"]
        if self._has_runtime_class():
            own.append(f"runtimeClassName={RUNTIME_CLASS}")
        command = [tools.helm(), "upgrade", "--install", RELEASE, REPOSITORY / "helm" / "gpushare", *self._place()]
        for one in (*own, *sets):
            command += ["--set", one]
        command += ["--create-namespace", "--wait", "--timeout", f"{INSTALL_SECONDS}s"]
        with step("helm install gpushare, and waiting until every part is ready"):
            progress.run(command, timeout_seconds=INSTALL_SECONDS + 15)

    def test(self) -> str:
        command = [tools.helm(), "test", RELEASE, *self._place(), "--logs", "--timeout", "60s"]
        return progress.run(command, timeout_seconds=75)

    def _place(self) -> list[object]:
        return ["--kubeconfig", self.kubeconfig, "--namespace", RELEASE_NAMESPACE]

    def _releases(self) -> list[str]:
        command = [
            tools.helm(),
            "--kubeconfig",
            self.kubeconfig,
            "list",
            "--all-namespaces",
            "--all",
            "-o",
            "json",
        ]
        found = json.loads(progress.run(command, timeout_seconds=30))
        return [
            f"release {one['namespace']}/{one['name']}"
            for one in found
            if one["name"] == RELEASE or one["chart"].startswith(f"{RELEASE}-")
        ]

    def _tenants(self) -> list[str]:
        kubectl = [tools.kubectl(), f"--kubeconfig={self.kubeconfig}", "--request-timeout=10s", "get"]
        if not progress.run([*kubectl, "crd", GPU_NODES, "--ignore-not-found", "-o", "name"]).strip():
            return []
        nodes = json.loads(progress.run([*kubectl, GPU_NODES, "-o", "json"]))["items"]
        gpus = [gpu for node in nodes for gpu in node.get("status", {}).get("gpus", [])]
        return [f"pod {one.get('namespace')}/{one.get('pod')}" for gpu in gpus for one in gpu.get("tenants", [])]

    def _claimed(self) -> list[str]:
        """Return the GPUs and MIG instances that nodes offer through another device plugin."""
        kubectl = [tools.kubectl(), f"--kubeconfig={self.kubeconfig}", "--request-timeout=10s", "get"]
        nodes = json.loads(progress.run([*kubectl, "nodes", "-o", "json"]))["items"]
        return [
            f"{node['metadata']['name']} {number} {resource}"
            for node in nodes
            for resource, number in sorted(node.get("status", {}).get("allocatable", {}).items())
            if resource.startswith("nvidia.com/") and number != "0"
        ]

    def _has_runtime_class(self) -> bool:
        try:
            progress.run(
                [tools.kubectl(), f"--kubeconfig={self.kubeconfig}", "get", "runtimeclass", RUNTIME_CLASS]
            )
        except Failed:
            return False
        return True

    def environment(self) -> dict[str, str]:
        """Return the environment of a command of `run`, with the additions for this cluster."""
        tenants = cache_dir() / "tenants.json"
        tenants.parent.mkdir(parents=True, exist_ok=True)
        image = os.environ.get("TENANT_IMAGE", "pytorch/pytorch")
        python = os.environ.get("TENANT_PYTHON", "python3")
        tenants.write_text(json.dumps({"image": image, "python": python, "mounts": [], "simulated": False}))
        links = tools.kubectl().parent
        return {
            **os.environ,
            "KUBECONFIG": str(self.kubeconfig),
            "GPUSHARE_TENANTS": str(tenants),
            "PATH": f"{links}{os.pathsep}{tools.helm().parent}{os.pathsep}{os.environ['PATH']}",
        }
