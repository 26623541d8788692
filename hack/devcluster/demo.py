"""`make demo`: a cluster with two simulated GPUs, gpushare installed, pods sharing; idempotent."""

import json
import os
import subprocess
import time
from typing import Any

from devcluster import backends, progress, tools
from devcluster.progress import Failed, say, step
from devcluster.settings import HACK, IMAGE, KUBERNETES_VERSION, REPOSITORY

RELEASE = "gpushare"
RELEASE_NAMESPACE = "gpushare-system"
DEMO_NAMESPACE = "gpushare-demo"
SAMPLES = HACK / "demo"
INSTALL_SECONDS = 180
PLACED_SECONDS = 120
# Progress is computed from a window of samples; give the agents time for a few before the table is printed.
MEASURED_SECONDS = 45


class Demo:
    """The steps of the demo on one cluster."""

    def __init__(self, cluster: backends.Cluster) -> None:
        self.cluster = cluster
        self.env = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}

    def kubectl(self, *arguments: object, stdin: str | None = None) -> str:
        return progress.run([tools.kubectl(), *arguments], env=self.env, stdin=stdin, timeout_seconds=300)

    def kubectl_json(self, *arguments: object) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.kubectl(*arguments, "-o", "json"))
        return found

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
        command += [*extra, "--take-ownership", "--wait", "--timeout", f"{INSTALL_SECONDS}s"]
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

    # sample pods ------------------------------------------------------------------------------------------------

    def apply_samples(self, image: str) -> None:
        for sample in (SAMPLES / "train.yaml", SAMPLES / "recommend.yaml", SAMPLES / "serve.yaml"):
            text = sample.read_text().replace(f"{IMAGE}:dev", image)
            self.kubectl("-n", DEMO_NAMESPACE, "apply", "-f", "-", stdin=text)

    def wait_for_samples(self) -> None:
        self.kubectl("-n", DEMO_NAMESPACE, "rollout", "status", "deployment", f"--timeout={PLACED_SECONDS}s")

    def run_alone(self, image: str) -> None:
        """Run each workload alone on a GPU for a few seconds; slowdown is reported relative to that run."""
        self.kubectl("-n", DEMO_NAMESPACE, "delete", "deployments,pods", "--all", "--wait=true")
        manifests = (SAMPLES / "alone.yaml").read_text().replace(f"{IMAGE}:dev", image)
        self.kubectl("-n", DEMO_NAMESPACE, "apply", "-f", "-", stdin=manifests)
        done = ["--for=jsonpath={.status.phase}=Succeeded", "pods", "-l", "gpushare-demo=alone"]
        self.kubectl("-n", DEMO_NAMESPACE, "wait", *done, f"--timeout={PLACED_SECONDS}s")
        self.kubectl("-n", DEMO_NAMESPACE, "delete", "pods", "-l", "gpushare-demo=alone", "--wait=true")

    def knows_progress(self) -> bool:
        """Return whether the agent reports the progress of every tenant."""
        found = json.loads(self.top("--json"))
        return bool(found) and all(row["progress_ratio"] is not None for row in found)

    def wait_for_progress(self) -> None:
        """Wait until the agent reports every tenant's progress, or the time is up; then the table shows dashes."""
        deadline = time.monotonic() + MEASURED_SECONDS
        while time.monotonic() < deadline:
            if self.knows_progress():
                return
            time.sleep(1)

    def top(self, *arguments: str) -> str:
        program = REPOSITORY / ".venv" / "bin" / "gpushare"
        return progress.run([program, "top", "-n", DEMO_NAMESPACE, *arguments], env=self.env)


def _namespace(name: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}


def up() -> None:
    """Run the whole demo and leave everything running."""
    begun = time.monotonic()
    cluster = backends.pick()
    say(
        f"gpushare demo on the {cluster.name} cluster "
        f"(the first run builds Kubernetes {KUBERNETES_VERSION} and its tools, about 15 minutes on 2 cores)"
    )
    subprocess.run([HACK / "venv"], check=True)
    cluster.up()
    demo = Demo(cluster)
    images = demo.install()
    demo.kubectl("apply", "-f", "-", stdin=json.dumps(_namespace(DEMO_NAMESPACE)))
    if not demo.knows_progress():
        with step("letting each workload run alone for a few seconds, so that slowdown can be told"):
            demo.run_alone(images["image"])
    with step("starting pods of three kinds of workload, one of class latency"):
        demo.apply_samples(images["image"])
        demo.wait_for_samples()
    with step("letting them run until the agent knows how they fare"):
        demo.wait_for_progress()
    say(f"the demo is up after {time.monotonic() - begun:.0f} s")
    print(f"\n{demo.top()}\n{_next_things(cluster)}", flush=True)


def _next_things(cluster: backends.Cluster) -> str:
    kubectl = tools.kubectl()
    return f"""The cluster stays up. Try:
  export KUBECONFIG={cluster.kubeconfig} PATH={kubectl.parent}:{REPOSITORY / ".venv" / "bin"}:$PATH
  gpushare top --watch                                          # the table above, live
  kubectl get gpunodes -o wide; kubectl get gpushares -A        # the objects behind it
  kubectl -n {DEMO_NAMESPACE} logs -f deploy/train --tail 5         # iterations/s of one tenant ...
  kubectl -n {DEMO_NAMESPACE} scale deploy/train --replicas 3       # ... fall when neighbours arrive
  kubectl -n {DEMO_NAMESPACE} get pods -o yaml | grep gpushare.io/      # what was asked and what was decided
  kubectl run wrong --image {IMAGE}:dev --annotations gpushare.io/fraction=1.5   # a wrong annotation is refused
  make demo-down                                                # remove every trace
"""


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
