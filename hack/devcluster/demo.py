"""`make demo`: a cluster with two simulated GPUs, with gpushare, and a story about it; idempotent."""

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from devcluster import backends, image, progress, tools
from devcluster.local import LocalCluster
from devcluster.progress import Failed, say, step
from devcluster.settings import HACK, IMAGE, KUBERNETES_VERSION, REPOSITORY, patience

RELEASE = "gpushare"
RELEASE_NAMESPACE = "gpushare-system"
DEMO_NAMESPACE = "gpushare-demo"
INSTALL_SECONDS = 180
COMMENT_COLUMN = 76  # longer commands push their comment to the right


class Demo:
    """The steps of the demo on one cluster."""

    def __init__(self, cluster: backends.Cluster) -> None:
        self.cluster = cluster
        self.env = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}

    def kubectl(self, *arguments: object, stdin: str | None = None) -> str:
        return progress.run([tools.kubectl(), *arguments], env=self.env, stdin=stdin, timeout_seconds=300)

    # install ----------------------------------------------------------------------------------------------------

    def install(self, *extra: str) -> dict[str, str]:
        """Load the images onto the node, then run `helm upgrade --install`; return the names of the images."""
        images = backends.push_images(self.cluster)
        repository, _, tag = images["image"].rpartition(":")
        sets = [f"image.repository={repository}", f"image.tag={tag}"]
        if scheduler := images.get("scheduler"):
            name, _, version = scheduler.rpartition(":")
            sets += [f"scheduler.image.repository={name}", f"scheduler.image.tag={version}"]
        command: list[object] = [tools.helm(), "upgrade", "--install", RELEASE, REPOSITORY / "helm" / "gpushare"]
        command += ["--namespace", RELEASE_NAMESPACE, "--create-namespace", "--values", HACK / "demo-values.yaml"]
        for one in sets:
            command += ["--set", one]
        # CRDs outlive a release on purpose; a later release adopts them
        command += [*extra, "--take-ownership", "--wait", "--timeout", f"{INSTALL_SECONDS * patience():.0f}s"]
        with step("helm install gpushare, and waiting until every part is ready"):
            try:
                progress.run(command, env=self.env)
            except Failed as failed:
                raise Failed(f"{failed}\n{self.diagnosis()}") from None
        return images

    def diagnosis(self) -> str:
        """Return the pods' states and logs, for when the release does not become ready."""
        try:
            return self.kubectl(
                "-n", RELEASE_NAMESPACE, "get", "pods,events", "--sort-by=.metadata.creationTimestamp"
            )
        except Failed as failed:
            return str(failed)

    # the story --------------------------------------------------------------------------------------------------

    def story(self, image: str, *, record: Path | None = None) -> int:
        """Let pods come one after the other and tell what happens, on this terminal; return its exit status.

        Args:
            record: where to write a recording of it, in asciinema's format; a picture of its end goes beside it.
        """
        python = REPOSITORY / ".venv" / "bin" / "python"
        command: list[object] = [python, "-m", "story", "--kubeconfig", self.cluster.kubeconfig]
        command += ["--namespace", DEMO_NAMESPACE, "--image", image, "--kubectl", tools.kubectl()]
        if record is not None:
            command += ["--picture", record.with_suffix(".svg")]
            command = [python, "-m", "story.recording", record, *command]
        env = {**self.env, "PYTHONPATH": f"{HACK}:{REPOSITORY / 'src'}"}
        return subprocess.run([str(part) for part in command], env=env, check=False).returncode


def _namespace(name: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}


@contextlib.contextmanager
def image_meanwhile(cluster: backends.Cluster) -> Iterator[None]:
    """Build gpushare's image beside what is done within, for the local cluster.

    The first time both take minutes, and either leaves a core idle while it downloads, links or packs.
    """
    if not isinstance(cluster, LocalCluster) or os.geteuid() != 0:  # the cluster itself says that it needs root
        yield
        return
    tools.install_packages()
    with ThreadPoolExecutor(1, thread_name_prefix="image") as pool:
        building = pool.submit(image.build, docker=backends.docker_answers())
        yield
        building.result()


def up(*, record: Path | None = None) -> int:
    """Run the whole demo and leave everything running; return its exit status.

    Args:
        record: where to write a recording of the story.
    """
    begun = time.monotonic()
    cluster = backends.pick()
    say(
        f"gpushare demo on the {cluster.name} cluster "
        f"(the first run builds Kubernetes {KUBERNETES_VERSION} and its tools, 10 to 15 minutes on 2 cores)"
    )
    subprocess.run([HACK / "venv"], check=True)
    with image_meanwhile(cluster):
        cluster.up()
    demo = Demo(cluster)
    images = demo.install()
    demo.kubectl("apply", "-f", "-", stdin=json.dumps(_namespace(DEMO_NAMESPACE)))
    say(f"gpushare is up after {time.monotonic() - begun:.0f} s; now pods come, and you are told what happens")
    status = demo.story(images["image"], record=record)
    print(next_things(cluster.kubeconfig, DEMO_NAMESPACE), flush=True)
    return status


def further_commands(kubeconfig: Path, namespace: str) -> list[tuple[str, str]]:
    """Return commands to look further with after the story in a namespace, each with a comment.

    The first one sets the environment of the others; tests/e2e/test_story.py runs them.
    """
    path = f"{tools.kubectl().parent}:{REPOSITORY / '.venv' / 'bin'}:$PATH"
    return [
        (f"export KUBECONFIG={kubeconfig} PATH={path}", ""),
        ("gpushare top", "the table above, live; q leaves it"),
        (f"kubectl gpushare explain -n {namespace} POD", "why it is there, what was seen and done"),
        (
            f"kubectl -n {namespace} get events --sort-by .metadata.creationTimestamp",
            "what you were told, and more",
        ),
        ("kubectl get gpunodes -o wide; kubectl get gpushares -A", "the objects behind it"),
        (f"kubectl -n {namespace} describe gpushare etl", "its profile, and what it is kept apart from"),
        (f"kubectl -n {namespace} logs -f deploy/train --tail 5", "true iterations/s of one tenant"),
        (
            f"kubectl -n {namespace} run wrong --image {IMAGE}:dev --annotations gpushare.io/fraction=1.5",
            "a wrong annotation is refused",
        ),
        ("make demo-down", "remove every trace"),
    ]


def next_things(kubeconfig: Path, namespace: str) -> str:
    """Return the text that the demo ends with."""
    commands = further_commands(kubeconfig, namespace)
    lines = [
        f"  {command.ljust(COMMENT_COLUMN)}  # {comment}" if comment else f"  {command}"
        for command, comment in commands
    ]
    return "\n".join(["", "The cluster stays up. Look further:", *lines, ""])


def down() -> None:
    """Remove the demo: only the release from a cluster that existed before, otherwise the whole cluster."""
    cluster = backends.pick()
    if cluster.name == "existing":
        demo = Demo(cluster)
        demo.kubectl("delete", "namespace", DEMO_NAMESPACE, "--ignore-not-found")
        uninstall: list[object] = [
            tools.helm(),
            "uninstall",
            RELEASE,
            "-n",
            RELEASE_NAMESPACE,
            "--ignore-not-found",
        ]
        progress.run([*uninstall, "--wait"], env=demo.env)
        demo.kubectl("delete", "namespace", RELEASE_NAMESPACE, "--ignore-not-found")
        demo.kubectl("delete", "crd", "gpushares.gpushare.io", "gpunodes.gpushare.io", "--ignore-not-found")
    cluster.down()
