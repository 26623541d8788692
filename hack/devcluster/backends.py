"""The three kinds of cluster, and the choice of the one that this machine can run."""

import os
import shutil
import sys
from pathlib import Path
from typing import Protocol

from devcluster import image, progress, tools
from devcluster.local import LocalCluster
from devcluster.progress import Failed, run
from devcluster.settings import HACK, IMAGE, cache_dir

NAMES = ("local", "kind", "existing")
KIND_CLUSTER = "gpushare"


class Cluster(Protocol):
    """Interface that the demo and the tests need of a cluster."""

    @property
    def name(self) -> str: ...
    @property
    def kubeconfig(self) -> Path: ...
    @property
    def node_name(self) -> str: ...
    def up(self) -> None: ...
    def down(self) -> None: ...
    def load(self, tar: Path) -> None: ...
    def has_image(self, name: str) -> bool: ...
    def status(self) -> dict[str, object]: ...


def kind_node_image() -> str:
    """Return the node image that hack/kind.yaml asks for."""
    for line in (HACK / "kind.yaml").read_text().splitlines():
        if line.strip().lstrip("- ").startswith("image:"):
            return line.partition("image:")[2].strip()
    raise Failed("hack/kind.yaml names no node image")


def docker_answers() -> bool:
    return _succeeds("docker", "info")


def _succeeds(*command: str) -> bool:
    try:
        run(command, timeout_seconds=20)
    except Failed:
        return False
    return True


class KindCluster:
    """kind in a Docker engine; its kubeconfig is kept apart from the user's own."""

    name = "kind"
    node_name = f"{KIND_CLUSTER}-control-plane"

    @property
    def kubeconfig(self) -> Path:
        return cache_dir() / "kind.kubeconfig"

    def up(self) -> None:
        if not docker_answers():
            raise Failed("CLUSTER=kind needs a running Docker engine, and none answers")
        if KIND_CLUSTER not in run([tools.kind(), "get", "clusters"]).split():
            with progress.step("creating a kind cluster"):
                command = [tools.kind(), "create", "cluster", "--name", KIND_CLUSTER, "--wait", "180s"]
                run([*command, "--config", HACK / "kind.yaml", "--kubeconfig", self.kubeconfig])
        else:
            export = [tools.kind(), "export", "kubeconfig", "--name", KIND_CLUSTER]
            run([*export, "--kubeconfig", self.kubeconfig])

    def down(self) -> None:
        if docker_answers():
            run([tools.kind(), "delete", "cluster", "--name", KIND_CLUSTER, "--kubeconfig", self.kubeconfig])
        self.kubeconfig.unlink(missing_ok=True)

    def load(self, tar: Path) -> None:
        run([tools.kind(), "load", "image-archive", tar, "--name", KIND_CLUSTER])

    def has_image(self, name: str) -> bool:
        return (
            name in run(["docker", "exec", self.node_name, "ctr", "-n", "k8s.io", "images", "list", "-q"]).split()
        )

    def status(self) -> dict[str, object]:
        up = docker_answers() and KIND_CLUSTER in run([tools.kind(), "get", "clusters"]).split()
        return {"backend": self.name, "up": up, "kubeconfig": str(self.kubeconfig)}


class ExistingCluster:
    """The cluster of the current kubeconfig context; nothing in it is created or removed."""

    name = "existing"

    @property
    def kubeconfig(self) -> Path:
        return Path(os.environ.get("KUBECONFIG") or Path.home() / ".kube" / "config")

    @property
    def node_name(self) -> str:
        return self._kubectl("get", "nodes", "-o=jsonpath={.items[0].metadata.name}")

    def _kubectl(self, *arguments: str) -> str:
        return run([tools.kubectl(), f"--kubeconfig={self.kubeconfig}", "--request-timeout=10s", *arguments])

    def up(self) -> None:
        try:
            self._kubectl("get", "--raw", "/readyz")
        except Failed as failed:
            raise Failed(
                f"CLUSTER=existing, but the cluster of {self.kubeconfig} does not answer: {failed}"
            ) from None

    def down(self) -> None:
        progress.say("the cluster was here before: it is left as it is")

    def load(self, tar: Path) -> None:
        raise Failed(
            f"cannot put {tar.name} on the nodes of an existing cluster: push the image to your registry and set "
            "IMAGE=registry/name:tag"
        )

    def has_image(self, name: str) -> bool:
        return bool(name)  # its nodes pull the images that they lack

    def status(self) -> dict[str, object]:
        return {
            "backend": self.name,
            "up": _succeeds(str(tools.kubectl()), "version"),
            "kubeconfig": str(self.kubeconfig),
        }


def pick() -> Cluster:
    """Choose the cluster: $CLUSTER, else kind where Docker and kind's node image exist, else local."""
    chosen = os.environ.get("CLUSTER", "")
    if chosen and chosen not in NAMES:
        raise Failed(f"CLUSTER={chosen}: allowed are {', '.join(NAMES)}")
    if not chosen:
        chosen = "local"
        if not LocalCluster().processes.names() and shutil.which("docker") and docker_answers():
            chosen = "kind" if _succeeds("docker", "image", "inspect", kind_node_image()) else "local"
    if chosen == "local" and sys.platform != "linux":
        raise Failed(
            "the local cluster needs Linux; start a Docker engine, pull kind's node image and use CLUSTER=kind"
        )
    match chosen:
        case "local":
            return LocalCluster()
        case "kind":
            return KindCluster()
    return ExistingCluster()


def push_images(cluster: Cluster) -> dict[str, str]:
    """Build gpushare's image (and the scheduler's, where none can be pulled) and put them on the node."""
    if isinstance(cluster, ExistingCluster):  # its nodes pull the images; unset names stay at the chart's
        named = {
            "image": os.environ.get("IMAGE") or f"{IMAGE}:dev",
            "scheduler": os.environ.get("SCHEDULER_IMAGE"),
        }
        return {part: name for part, name in named.items() if name}
    name, tar = image.build(docker=docker_answers())
    images = {"image": name}
    archives = [(name, tar)]
    if isinstance(cluster, LocalCluster):
        images["scheduler"], scheduler_tar = image.scheduler()
        archives.append((images["scheduler"], scheduler_tar))
    for tagged, tar_path in archives:
        if not cluster.has_image(tagged):
            with progress.step(f"putting {tagged} on the node"):
                cluster.load(tar_path)
    return images
