"""A cluster with GPUs that was there before: the chart goes into it and comes out of it, nothing else changes."""

import json
import os

from devcluster import backends, progress, tools
from devcluster.gpunode import INSTALL_SECONDS, RELEASE, RELEASE_NAMESPACE, RUNTIME_CLASS
from devcluster.progress import Failed, step
from devcluster.settings import REPOSITORY, cache_dir


class ExistingGpus:
    """The cluster of the current kubeconfig context, whose nodes have NVIDIA's driver and container toolkit."""

    name = "existing"

    def __init__(self) -> None:
        self._cluster = backends.ExistingCluster()
        self.kubeconfig = self._cluster.kubeconfig

    def up(self) -> None:
        self._cluster.up()

    def down(self) -> None:
        self._cluster.down()

    def status(self) -> dict[str, object]:
        return self._cluster.status()

    def install(self, *sets: str) -> None:
        """Install the chart with IMAGE, or with its own default image where IMAGE is unset."""
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

    def _has_runtime_class(self) -> bool:
        try:
            progress.run(
                [tools.kubectl(), f"--kubeconfig={self.kubeconfig}", "get", "runtimeclass", RUNTIME_CLASS]
            )
        except Failed:
            return False
        return True

    def environment(self) -> dict[str, str]:
        """What a command of `run` finds beside its own environment."""
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
