"""The running cluster with gpushare installed on two simulated GPUs, and a namespace for each test."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from former import OLDEST, FormerReleases
from installed import lacking
from livecluster import RELEASE_NAMESPACE, ROOT, Cluster, Namespace, driver, wait_for


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """The cluster that `make test` or `hack/cluster up` brought up; skips where there is none."""
    done = subprocess.run(
        [str(ROOT / "hack" / "cluster"), "status"], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        lacking("cluster", "no cluster: `make test` brings one up, or `hack/cluster up` as root")
    status = json.loads(done.stdout)
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    program = Path(os.environ.get("GPUSHARE_CACHE") or base / "gpushare", "bin", "kubectl")
    return Cluster(status["kubeconfig"], str(program) if program.exists() else "kubectl", status["backend"])


@pytest.fixture(scope="session")
def image(cluster: Cluster) -> str:
    """gpushare built from this checkout and installed; the demo's tenants would be in the way."""
    cluster.try_kubectl("delete", "namespace", "gpushare-demo", "--ignore-not-found", seconds=180)
    images = json.loads(driver("install", timeout_seconds=1200).splitlines()[-1])
    wait_for("two healthy GPUs", lambda: cluster.healthy_gpus() == 2, seconds=90)
    return str(images["image"])


@pytest.fixture(scope="session", autouse=True)
def former(
    request: pytest.FixtureRequest, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FormerReleases]:
    """Former releases; the oldest one's image is built beside the tests before the one that wants it."""
    releases = FormerReleases(tmp_path_factory.mktemp("former"))
    if cluster.backend == "local" and any(item.path.name == "test_upgrade.py" for item in request.session.items):
        releases.build(OLDEST)
    yield releases
    releases.close()


@pytest.fixture
def spaces(cluster: Cluster, image: str) -> Iterator[Callable[[], Namespace]]:
    """Makes namespaces that go with the test."""
    made: list[Namespace] = []

    def make() -> Namespace:
        made.append(Namespace(cluster, image))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def space(spaces: Callable[[], Namespace]) -> Namespace:
    """The test's own namespace."""
    return spaces()


@pytest.fixture
def part(cluster: Cluster, image: str) -> Callable[[str], list[dict]]:
    """The pods of one of gpushare's parts: operator, admission, scheduler, agent or mps."""

    def pods(name: str) -> list[dict]:
        selector = f"app.kubernetes.io/component={name}"
        found = cluster.get("-n", RELEASE_NAMESPACE, "pods", "-l", selector)["items"]
        return [pod for pod in found if not pod["metadata"].get("deletionTimestamp")]

    return pods
