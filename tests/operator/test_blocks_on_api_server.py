"""What the README and the guide tell people to type at kubectl and helm, and to apply, on a real API server.

No controller and no kubelet runs: commands succeed, objects are checked as a server checks them, no pod starts.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from blocks import ROOT, Way, blocks, commands, words
from devcluster import tools
from installed import lacking
from tests.operator.conftest import CACHE, ApiServer, server_programs

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

Json = dict[str, Any]
REMOVE = "helm uninstall gpushare --namespace gpushare-system --ignore-not-found"
# What a page's commands may rely on, beside the release: other people's kinds, and the node that the reader names.
PROMETHEUS_KINDS = {"podmonitors": "PodMonitor", "prometheusrules": "PrometheusRule"}
DEFINITIONS = "gpushares.gpushare.io gpunodes.gpushare.io"
NAMESPACES = ("gpushare-system", "research", "shop")


@dataclass(frozen=True, slots=True)
class Shell:
    """Runs commands as a reader would, in a checkout's root, with kubectl and helm on the path."""

    folder: Path
    environment: dict[str, str]

    def run(self, command: str, *, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", command],
            input=stdin,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def must(self, command: str, *, stdin: str | None = None) -> str:
        done = self.run(command, stdin=stdin)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """One of this module's own: its webhooks and policies come and go with the release."""
    own = ApiServer(*server_programs(), tmp_path_factory.mktemp("server"))
    try:
        own.start()
        yield own
    finally:
        own.close()


@pytest.fixture(scope="module")
def shell(server: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Shell:
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "bin").mkdir()
    for name in ("kubectl", "helm"):
        program = CACHE / "bin" / name
        if not program.exists():
            lacking(name, f"no {name}: hack/cluster tools builds it")
        (folder / "bin" / name).symlink_to(program.resolve())
    (folder / "helm").symlink_to(ROOT / "helm")
    shutil.copy(ROOT / "src" / "gpushare" / "data" / "h200-model.json", folder / "l4-model.json")
    environment = {
        **os.environ,
        "HOME": str(folder),
        "KUBECONFIG": str(server.kubeconfig),
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
    }
    shell = Shell(folder, environment)
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-a"}}
    spaces = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in NAMESPACES]
    items = [node, *spaces, *(_definition(*pair) for pair in PROMETHEUS_KINDS.items())]
    shell.must("kubectl apply -f -", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    for plural in PROMETHEUS_KINDS:
        shell.must(f"kubectl wait --for=condition=Established crd/{plural}.monitoring.coreos.com --timeout=120s")
    return shell


def _definition(plural: str, kind: str) -> Json:
    """A kind of Prometheus' operator, with any content."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"plural": plural, "kind": kind, "singular": kind.lower()}
    spec = {"group": "monitoring.coreos.com", "scope": "Namespaced", "names": names, "versions": [version]}
    metadata = {"name": f"{plural}.monitoring.coreos.com"}
    definition = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"}
    return {**definition, "metadata": metadata, "spec": spec}


@pytest.fixture
def removed(shell: Shell) -> Iterator[None]:
    """No release is left after a page's commands."""
    yield
    shell.must(REMOVE)


INSTALL = next(command for _, command in commands(Way.CLUSTER) if command.startswith("helm install"))
PAGES = sorted({block.page for block, _ in commands(Way.CLUSTER)})


@pytest.mark.slow
@pytest.mark.usefixtures("removed")
@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_succeeds_in_its_order(shell: Shell, page: str) -> None:
    mine = [command for block, command in commands(Way.CLUSTER) if block.page == page]
    if not any(command.startswith("helm install") for command in mine):
        shell.must(INSTALL.replace(" --wait", ""))
    for command in mine:
        if command.startswith("helm install"):  # a page may show several ways
            shell.must(REMOVE)
        # Nothing here makes pods ready: bench/first_pod.py runs it as it stands.
        shell.must(re.sub(r"\bNODE\b", "node-a", command.replace(" --wait", "")))
        if selected := re.search(r"delete pod|get pods|logs", command) and re.search(r" -l (\S+)", command):
            key, _, value = selected[1].partition("=")
            assert value in _components(shell, key), f"{command}: the release has no such pod"


def _components(shell: Shell, key: str) -> set[str]:
    """The values that a label has in the release's pods; here in what would make them."""
    owners = json.loads(shell.must("kubectl get deployments,daemonsets -n gpushare-system -o json"))["items"]
    return {owner["spec"]["template"]["metadata"]["labels"].get(key) for owner in owners}


def manifests(*, of_kueue: bool) -> list[object]:
    """Every object that a page shows whole."""
    return [
        pytest.param(each, id=f"{block.place}:{each['kind']}/{each['metadata']['name']}")
        for block in blocks("yaml")
        for each in yaml.safe_load_all(block.text)
        if "kind" in each and "metadata" in each
        if each["apiVersion"].startswith("kueue.x-k8s.io/") is of_kueue
    ]


@pytest.fixture
def definitions(shell: Shell) -> None:
    """Our kinds, as the release's own: a page's `helm install` may come later, or have deleted them before."""
    if shell.run(f"kubectl get crd {DEFINITIONS}").returncode == 0:
        return
    shell.must(f"kubectl apply -f {ROOT / 'crds'}")
    shell.must(f"kubectl label crd {DEFINITIONS} app.kubernetes.io/managed-by=Helm")
    release = "meta.helm.sh/release-name=gpushare meta.helm.sh/release-namespace=gpushare-system"
    shell.must(f"kubectl annotate crd {DEFINITIONS} {release}")
    shell.must(f"kubectl wait --for=condition=Established crd {DEFINITIONS} --timeout=120s")


@pytest.mark.usefixtures("definitions")
@pytest.mark.parametrize("obj", manifests(of_kueue=False))
def test_what_a_page_applies_the_server_takes(shell: Shell, obj: Json) -> None:
    """Strictly: an unknown field is refused."""
    told = shell.must("kubectl apply --dry-run=server --validate=strict -f -", stdin=json.dumps(obj))
    assert "created (server dry run)" in told


@pytest.mark.usefixtures("definitions")
def test_the_server_refuses_what_is_misspelt(shell: Shell) -> None:
    """So that the test above can fail."""
    (quota,) = (param.values[0] for param in manifests(of_kueue=False) if "ResourceQuota" in str(param.id))
    wrong = {**quota, "spec": {"hart": quota["spec"]["hard"]}}
    done = shell.run("kubectl apply --dry-run=server --validate=strict -f -", stdin=json.dumps(wrong))
    assert done.returncode != 0
    assert 'unknown field "spec.hart"' in done.stderr


@pytest.fixture(scope="module")
def kueue_definitions(shell: Shell) -> None:
    kueue = tools.built_kueue()
    if kueue is None:
        lacking("kueue", "no Kueue: hack/cluster test-programs builds it")
    shell.must(f"kubectl apply --server-side -f {kueue / 'crds'}")
    for plural in ("resourceflavors", "clusterqueues", "localqueues"):
        shell.must(f"kubectl wait --for=condition=Established crd/{plural}.kueue.x-k8s.io --timeout=120s")


@pytest.mark.usefixtures("kueue_definitions")
@pytest.mark.parametrize("obj", manifests(of_kueue=True))
def test_what_the_page_of_kueue_applies_its_definitions_take(shell: Shell, obj: Json) -> None:
    told = shell.must("kubectl apply --dry-run=server --validate=strict -f -", stdin=json.dumps(obj))
    assert "created (server dry run)" in told


def test_pages_and_objects_are_found_at_all() -> None:
    assert {"README.md", "docs/install.md", "docs/guide/first-hour.md", "docs/guide/monitoring.md"} <= set(PAGES)
    kinds = {param.values[0]["kind"] for of in (True, False) for param in manifests(of_kueue=of)}
    assert {"Pod", "Deployment", "Job", "GpuShare", "ResourceQuota", "LimitRange", "ClusterQueue"} <= kinds
    assert words(INSTALL)[:2] == ["helm", "install"]
