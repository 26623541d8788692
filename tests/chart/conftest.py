"""Helm renders the chart; a small client speaks to the real API server, as anyone."""

import base64
import json
import os
import pickle
import re
import shutil
import ssl
import subprocess
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from installed import lacking
from tests.chart.chartobjects import PODS, SHARES

from gpushare.core.api import names

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "gpushare"
RELEASE, NAMESPACE = "gpushare", "gpushare-system"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpushare"

Json = dict[str, Any]
Render = Callable[..., list[Json]]


@cache
def helm_program() -> str | None:
    cached = [
        CACHE / "bin" / "helm",
        *sorted(CACHE.glob("helm/*/helm")),
        *sorted(CACHE.glob("tools-build/bin/helm")),
    ]
    return next((str(path) for path in cached if path.exists()), shutil.which("helm"))


@pytest.fixture(scope="session")
def helm() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs helm; skips where there is none (hack/cluster builds one)."""
    program = helm_program()
    if program is None:
        lacking("helm", "no helm: `make demo` or `make test` builds it")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        frugal = {**os.environ, "GOGC": "off"}  # it ends before a look for garbage pays: a quarter less CPU time
        return subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=60, check=False, env=frugal
        )

    return run


@pytest.fixture(scope="session")
def render(helm: Callable[..., subprocess.CompletedProcess[str]]) -> Render:
    """Renders the chart with values into objects; raises with helm's words where it refuses."""

    @cache
    def rendered(values: str, kube_version: str) -> bytes:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(values)
            file.flush()
            where = ("-n", NAMESPACE, "--kube-version", kube_version)
            done = helm("template", RELEASE, str(CHART), *where, "-f", file.name)
        if done.returncode:
            raise ValueError(done.stderr)
        return pickle.dumps([item for item in yaml.load_all(done.stdout, yaml.CSafeLoader) if item])

    def objects(values: Json | None = None, *, kube_version: str = "1.35.4") -> list[Json]:
        made: list[Json] = pickle.loads(rendered(json.dumps(values or {}), kube_version))  # each test's own copy
        return made

    return objects


@dataclass(frozen=True)
class Answer:
    """What the API server said."""

    code: int
    body: Json
    warnings: tuple[str, ...] = ()

    @property
    def message(self) -> str:
        return str(self.body.get("message", ""))


@dataclass
class ApiServer:
    """A client with the kubeconfig's certificate that can act as any user."""

    server: str
    context: ssl.SSLContext
    kubeconfig: Path
    made: list[str] = field(default_factory=list)

    def call(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        user: str = "",
        node: str = "",
        dry_run: bool = False,
        content_type: str = "application/json",
    ) -> Answer:
        query = "?dryRun=All&fieldValidation=Strict" if dry_run else ""
        request = urllib.request.Request(
            self.server + path + query, method=method, data=None if body is None else json.dumps(body).encode()
        )
        request.add_header("Content-Type", content_type)
        if user:
            request.add_header("Impersonate-User", user)
            request.add_header("Impersonate-Group", "system:masters")
        if node:
            key = urllib.parse.quote("authentication.kubernetes.io/node-name", safe="")
            request.add_header(f"Impersonate-Extra-{key}", node)
        try:
            with urllib.request.urlopen(request, context=self.context, timeout=30) as response:
                warnings = tuple(response.headers.get_all("Warning", ()))
                return Answer(response.status, json.loads(response.read()), warnings)
        except urllib.error.HTTPError as error:
            return Answer(error.code, json.loads(error.read()))


def kubeconfig_path() -> Path | None:
    candidates = [os.environ.get("KUBECONFIG"), "/var/lib/gpushare-dev/kubeconfig"]
    return next((Path(path) for path in candidates if path and Path(path).exists()), None)


@pytest.fixture(scope="session")
def api() -> ApiServer:
    """The real API server of the local cluster."""
    path = kubeconfig_path()
    if path is None:
        lacking("cluster", "no cluster: hack/cluster up")
    config = yaml.safe_load(path.read_text())
    cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]

    def material(holder: Json, key: str) -> str:
        if key in holder:
            return str(Path(path.parent, holder[key]))
        with tempfile.NamedTemporaryFile(delete=False) as file:
            file.write(base64.b64decode(holder[f"{key}-data"]))
        return file.name

    context = ssl.create_default_context(cafile=material(cluster, "certificate-authority"))
    context.load_cert_chain(material(user, "client-certificate"), material(user, "client-key"))
    server = ApiServer(cluster["server"], context, path)
    try:
        server.call("GET", "/version")
    except OSError as error:
        pytest.skip(f"the cluster does not answer: {error}")
    return server


GROUPS = {
    "CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
    "ValidatingAdmissionPolicy": "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings",
}


@pytest.fixture(scope="session")
def installed(api: ApiServer, render: Render) -> Iterator[ApiServer]:
    """The API server with the chart's definitions and policies; those that were not there leave with the tests."""
    made: list[str] = []
    for item in render():
        if path := GROUPS.get(item["kind"]):
            answer = api.call("POST", path, item)
            assert answer.code in (201, 409), answer.message
            if answer.code == 201:
                made.append(f"{path}/{item['metadata']['name']}")
    labels = api.call("GET", "/api/v1/namespaces/default").body["metadata"]["labels"]
    try:
        _label_default_namespace(api, dict.fromkeys(ALLOWED, "true"))
        _wait_until_enforced(api)
        yield api
    finally:
        _label_default_namespace(api, {key: labels.get(key) for key in ALLOWED})
        for path in made:
            api.call("DELETE", path)


ALLOWED = ("gpushare.io/allow-latency", "gpushare.io/allow-isolated")


def _label_default_namespace(api: ApiServer, labels: Mapping[str, str | None]) -> None:
    body = {"metadata": {"labels": labels}}
    answer = api.call("PATCH", "/api/v1/namespaces/default", body, content_type="application/merge-patch+json")
    assert answer.code == 200, answer.message


@pytest.fixture(scope="session")
def accounts(installed: ApiServer) -> dict[str, str]:
    """Usernames of the parts, as the policies in force name them: the release may be anybody's."""
    path = f"{GROUPS['ValidatingAdmissionPolicy']}/{RELEASE}-decisions"
    text = json.dumps(installed.call("GET", path).body["spec"]["validations"])
    match = re.search(r"(system:serviceaccount:[a-z0-9-]+:[a-z0-9-]+)-scheduler", text)
    assert match is not None
    return {part: f"{match[1]}-{part}" for part in ("agent", "scheduler", "operator")}


def _wait_until_enforced(api: ApiServer) -> None:
    """New definitions, policies and labels take a moment; ask until all of them answer.

    Namespace kube-public has none of the labels that allow class latency and isolation.
    """
    share = {"apiVersion": "gpushare.io/v1alpha1", "kind": "GpuShare", "metadata": {"name": "probe"}}
    decided = _pod("probe", {"gpushare.io/gpu": "GPU-1"})
    grabbing = _pod("probe")
    grabbing["spec"]["containers"][0]["resources"] = {"limits": {"gpushare.io/share": "1"}}
    latency = {**share, "spec": {"class": "latency"}}
    isolated = {**share, "spec": {"faultDomain": "isolated"}}
    probes = (
        (201, SHARES, {**share, "spec": {**latency["spec"], **isolated["spec"]}}),
        (403, SHARES.replace("default", "kube-public"), latency),
        (403, SHARES.replace("default", "kube-public"), isolated),
        (403, PODS.replace("default", "kube-public"), _pod("probe", {names.CLASS: "latency"})),
        (403, PODS, decided),
        (403, PODS, grabbing),
    )
    for _ in range(600):
        answers = [(code, api.call("POST", path, body, dry_run=True)) for code, path, body in probes]
        if all(code == answer.code for code, answer in answers):
            return
    raise AssertionError(f"not enforced: {[(answer.code, answer.message) for _, answer in answers]}")


def _pod(name: str, annotations: dict[str, str] | None = None, labels: dict[str, str] | None = None) -> Json:
    """A pod that no scheduler of the cluster takes."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": annotations or {}, "labels": labels or {}},
        "spec": {"schedulerName": "nobody", "containers": [{"name": "main", "image": "none"}]},
    }


@pytest.fixture(scope="session")
def pod_object() -> Callable[..., Json]:
    """Makes pods that no scheduler of the cluster takes."""
    return _pod


@pytest.fixture
def tenant(installed: ApiServer, pod_object: Callable[..., Json]) -> Iterator[str]:
    """A managed pod that is never run; made as the scheduler, so that no webhook has to be up."""
    name = f"p-{uuid.uuid4().hex[:8]}"
    pod = pod_object(name, {"example.com/own": "1"}, {names.MANAGED_LABEL: "true"})
    made = installed.call("POST", PODS, pod)
    assert made.code == 201, made.message
    yield name
    installed.call("DELETE", f"{PODS}/{name}", {"gracePeriodSeconds": 0})


@pytest.fixture
def decided(installed: ApiServer, pod_object: Callable[..., Json]) -> Iterator[Callable[..., str]]:
    """Makes pods with a fraction that are bound to the node `no-such-node`, with a decision, by the scheduler."""
    made: list[str] = []

    def make(fraction: str = "0.25", *, cap: str = "25", **more: str) -> str:
        name = f"p-{uuid.uuid4().hex[:8]}"
        asked = {names.FRACTION: fraction} | {f"{names.GROUP}/{key}": text for key, text in more.items()}
        pod = pod_object(name, asked, {names.MANAGED_LABEL: "true"})
        del pod["spec"]["schedulerName"]  # admission, where it runs, refuses any but its own
        pod["spec"]["nodeSelector"] = {"nobody": "else-binds-it"}
        units = str(int(100 * float(fraction)))
        pod["spec"]["containers"][0]["resources"] = {"limits": {names.SHARE_RESOURCE: units}}
        answer = installed.call("POST", PODS, pod)
        assert answer.code == 201, answer.message
        made.append(name)
        decision = {
            names.GPU: "GPU-1",
            names.THREAD_PERCENTAGE: cap,
            names.MEMORY_LIMIT: "0=1024M",
            names.DECIDED_AT: "2026-11-24T00:00:00Z",
        }
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": name, "annotations": decision},
            "target": {"kind": "Node", "name": "no-such-node"},
        }
        path = f"{GROUPS['ValidatingAdmissionPolicy']}/{RELEASE}-decisions"
        text = json.dumps(installed.call("GET", path).body["spec"]["validations"])
        (scheduler,) = set(re.findall(r"system:serviceaccount:[a-z0-9-]+:[a-z0-9-]+-scheduler", text))
        answer = installed.call("POST", f"{PODS}/{name}/binding", binding, user=scheduler)
        assert answer.code == 201, answer.message
        return name

    yield make
    for name in made:
        installed.call("DELETE", f"{PODS}/{name}", {"gracePeriodSeconds": 0})


@pytest.fixture
def bound(installed: ApiServer, pod_object: Callable[..., Json]) -> Iterator[str]:
    """A pod of somebody's on the node `no-such-node`."""
    name = f"p-{uuid.uuid4().hex[:8]}"
    pod = pod_object(name, {"example.com/own": "1"}, {"app": "a"})
    pod["spec"]["nodeName"] = "no-such-node"
    assert installed.call("POST", PODS, pod).code == 201
    yield name
    installed.call("DELETE", f"{PODS}/{name}", {"gracePeriodSeconds": 0})
