"""The chart's webhook configurations on a real API server, with the real admission server behind them."""

import asyncio
import base64
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import pytest
import yaml
from installed import lacking

from gpushare.core.admission import DEFAULT_GPU_MEMORY_RESERVE_MIB, Defaults
from gpushare.core.api import names
from gpushare.kube import GPUSHARES, NAMESPACES, PODS, AlreadyExists, Api, ApiError, Resource

pytestmark = pytest.mark.integration

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpushare"
REGISTRATION = "admissionregistration.k8s.io"
CONFIGURATIONS = {
    kind: Resource(REGISTRATION, "v1", f"{kind.lower()}s", kind, namespaced=False)
    for kind in ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")
}
WORKLOADS = {
    "Deployment": Resource("apps", "v1", "deployments", "Deployment", namespaced=True),
    "StatefulSet": Resource("apps", "v1", "statefulsets", "StatefulSet", namespaced=True),
    "DaemonSet": Resource("apps", "v1", "daemonsets", "DaemonSet", namespaced=True),
    "ReplicaSet": Resource("apps", "v1", "replicasets", "ReplicaSet", namespaced=True),
    "Job": Resource("batch", "v1", "jobs", "Job", namespaced=True),
    "CronJob": Resource("batch", "v1", "cronjobs", "CronJob", namespaced=True),
}
GPUNODES_LARGEST = 143771


def rendered(template: str = "admission/webhooks.yaml", kinds: Collection[str] = CONFIGURATIONS) -> list[Json]:
    """Objects of one of the chart's templates; default: the webhook configurations."""
    helm = shutil.which("helm") or next((str(path) for path in sorted(CACHE.glob("bin/helm"))), None)
    if helm is None:
        lacking("helm", "no helm: hack/cluster tools builds it")
    command = [
        helm,
        "template",
        "gpushare",
        str(ROOT / "helm" / "gpushare"),
        "--namespace",
        "gpushare",
        "--kube-version",
        "1.35.0",
        "--show-only",
        f"templates/{template}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return [item for item in yaml.safe_load_all(done.stdout) if item and item["kind"] in kinds]


class Server:
    """The admission server as the chart starts it."""

    def __init__(self, directory: Path, port: int, kubeconfig: Path) -> None:
        self.directory, self.port, self.kubeconfig = directory, port, kubeconfig
        self.log = directory / "log"
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        paths = os.pathsep.join(str(ROOT / part) for part in ("src", "operator", "deviceplugin"))
        command = [
            sys.executable,
            "-m",
            "gpushare_operator.admission",
            "--port",
            str(self.port),
            "--host",
            "127.0.0.1",
            "--cert-dir",
            str(self.directory),
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": paths,
            "KUBECONFIG": str(self.kubeconfig),
            "GPUSHARE_MAX_SELECTORS": "2",
        }
        with self.log.open("wb") as output:
            self.process = self._launch(command, environment, output)
        async with asyncio.timeout(60):
            while b"serving admission" not in self.log.read_bytes():
                assert self.process.poll() is None, self.log.read_text()
                await asyncio.sleep(0.05)

    @staticmethod
    def _launch(command: list[str], environment: dict[str, str], output: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output, cwd="/")

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(timeout=30)


@pytest.fixture
async def webhooks(
    real_api: Api, kubeconfig: Path, tmp_path: Path, free_port: int, make_certificate: Callable[..., bytes]
) -> AsyncIterator[Server]:
    """Server and configurations in force; both gone afterwards."""
    bundle = base64.b64encode(make_certificate(tmp_path)).decode()
    server, configurations = Server(tmp_path, free_port, kubeconfig), rendered()
    made: list[tuple[Resource, str]] = []
    try:
        await server.start()
        for item in configurations:
            for webhook in item["webhooks"]:
                path = webhook["clientConfig"]["service"]["path"]
                webhook["clientConfig"] = {"url": f"https://127.0.0.1:{free_port}{path}", "caBundle": bundle}
            await real_api.create(CONFIGURATIONS[item["kind"]], item)
            made.append((CONFIGURATIONS[item["kind"]], item["metadata"]["name"]))
        yield server
    finally:
        try:
            for resource, name in made:
                await real_api.delete(resource, name)
            await forgotten(real_api)
        finally:
            server.stop()


async def forgotten(api: Api) -> None:
    """Wait until the API server heeds the configurations no more: it would refuse the next test's pods."""
    wrong = [(PODS, pod("wrong", fraction="0")), (WORKLOADS["CronJob"], workload("CronJob", fraction="0"))]
    for resource, body in wrong:
        async with asyncio.timeout(60):
            while await refusal(api, "default", body, resource) is not None:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.1)
        await api.delete(resource, "wrong", namespace="default", grace_seconds=0)


@pytest.fixture
async def namespace(real_api: Api, webhooks: Server) -> str:
    """A namespace, once the API server heeds the configurations."""
    name = f"t{uuid.uuid4().hex[:8]}"
    await real_api.create(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    async with asyncio.timeout(60):
        while await refusal(real_api, name, pod("probe", fraction="0")) is None:
            await real_api.delete(PODS, "probe", namespace=name, grace_seconds=0)
            await asyncio.sleep(0.1)
    async with asyncio.timeout(60):
        while await refused_workload(real_api, name, "CronJob", fraction="0") is None:
            await real_api.delete(WORKLOADS["CronJob"], "wrong", namespace=name)
            await asyncio.sleep(0.1)
    return name


def pod(name: str, **annotations: str) -> Json:
    metadata: Json = {"name": name, "labels": {"app": name}}
    if annotations:
        metadata["annotations"] = {f"gpushare.io/{key}": value for key, value in annotations.items()}
    spec = {"containers": [{"name": "main", "image": "x"}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def workload(kind: str, **annotations: str) -> Json:
    made = pod("wrong", **annotations)
    template: Json = {"metadata": made["metadata"], "spec": made["spec"]}
    template["metadata"].pop("name")
    spec: Json = {"template": template}
    if kind in ("Job", "CronJob"):
        template["spec"]["restartPolicy"] = "Never"
    else:
        spec["selector"] = {"matchLabels": template["metadata"]["labels"]}
    if kind == "CronJob":
        spec = {"schedule": "@daily", "jobTemplate": {"spec": spec}}
    resource = WORKLOADS[kind]
    return {"apiVersion": resource.api_version, "kind": kind, "metadata": {"name": "wrong"}, "spec": spec}


async def refusal(api: Api, namespace: str, body: Json, resource: Resource = PODS) -> str | None:
    try:
        await api.create(resource, body, namespace=namespace)
    except ApiError as error:
        return str(error)
    return None


async def refused_workload(api: Api, namespace: str, kind: str, **annotations: str) -> str | None:
    return await refusal(api, namespace, workload(kind, **annotations), WORKLOADS[kind])


async def test_an_annotated_pod_gets_what_is_promised_and_nothing_else(real_api: Api, namespace: str) -> None:
    plain = await real_api.create(PODS, pod("plain"), namespace=namespace)
    made = await real_api.create(PODS, pod("ours", fraction="0.25", memory="8Gi"), namespace=namespace)
    assert made["metadata"]["labels"] == {"app": "ours", names.MANAGED_LABEL: "true"}
    assert made["metadata"]["annotations"] == {names.FRACTION: "0.25", names.MEMORY: "8Gi"}
    resources = made["spec"]["containers"][0]["resources"]
    assert resources == {"limits": {names.SHARE_RESOURCE: "25"}, "requests": {names.SHARE_RESOURCE: "25"}}
    assert made["spec"]["schedulerName"] == names.SCHEDULER_NAME

    assert plain["metadata"]["labels"] == {"app": "plain"}
    assert plain["spec"]["schedulerName"] == "default-scheduler"
    made["spec"]["containers"][0]["resources"] = {}
    made["spec"]["schedulerName"] = "default-scheduler"
    for key in Defaults().taints:
        made["spec"]["tolerations"].remove({"key": key, "operator": "Exists"})
    assert made["spec"] == plain["spec"]


SENTENCES: list[tuple[dict[str, str], str]] = [
    ({"fraction": "1.5"}, 'annotation gpushare.io/fraction: "1.5" asks for more than one GPU but not for whole'),
    ({"fraction": "-1"}, 'annotation gpushare.io/fraction: "-1" is not a plain positive number; allowed are'),
    ({"fraction": "abc"}, 'annotation gpushare.io/fraction: "abc" is not a plain positive number; allowed are'),
    ({"fraction": "0.5", "memory": "lots"}, 'annotation gpushare.io/memory: "lots" is not an amount of memory;'),
    ({"fraction": "0.5", "class": "fast"}, 'annotation gpushare.io/class: "fast" is not a class; allowed are'),
    ({"fraction": "0.5", "container": "x"}, 'annotation gpushare.io/container: "x" is not a container of this'),
]


async def test_a_wrong_annotation_is_refused_at_apply(real_api: Api, namespace: str) -> None:
    for annotations, sentence in SENTENCES:
        refused = await refusal(real_api, namespace, pod("p", **annotations))
        assert refused is not None, annotations
        assert sentence in refused
        for kind in WORKLOADS:
            refused = await refused_workload(real_api, namespace, kind, **annotations)
            assert refused is not None, (kind, annotations)
            assert sentence in refused


async def test_a_running_pod_can_still_be_changed_by_its_controllers(
    real_api: Api, namespace: str, webhooks: Server
) -> None:
    """Labels, finalizers and deletion of an annotated pod never wait for us."""
    await real_api.create(PODS, pod("ours", fraction="0.25"), namespace=namespace)
    webhooks.stop()
    changed = await real_api.patch(PODS, "ours", {"metadata": {"labels": {"more": "x"}}}, namespace=namespace)
    assert changed["metadata"]["labels"]["more"] == "x"
    await real_api.delete(PODS, "ours", namespace=namespace, grace_seconds=0)


async def test_with_admission_down_only_annotated_pods_wait(
    real_api: Api, namespace: str, webhooks: Server
) -> None:
    webhooks.stop()
    assert await refusal(real_api, namespace, pod("plain")) is None
    refused = await refusal(real_api, namespace, pod("ours", fraction="0.25"))
    assert refused is not None
    assert "failed calling webhook" in refused
    for kind in WORKLOADS:
        refused = await refused_workload(real_api, namespace, kind, fraction="0.25")
        assert (refused is None) == (kind != "Job"), f"{kind}: a courtesy, but for the share in a Job's template"
    assert await refused_workload(real_api, namespace, "Job") is None
    await webhooks.start()
    assert await refusal(real_api, namespace, pod("ours", fraction="0.25")) is None


async def define(real_api: Api) -> None:
    """Have the API server know our definitions."""
    definitions = Resource(
        "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False
    )
    for path in sorted((ROOT / "crds").glob("*.yaml")):
        with suppress(AlreadyExists):
            await real_api.create(definitions, yaml.safe_load(path.read_text()))


async def test_one_selector_too_many(real_api: Api, namespace: str) -> None:
    """GpuShares are watched: the third of a namespace that has two is refused, once they have been seen."""
    await define(real_api)

    def share(name: str, **spec: Any) -> Json:
        metadata = {"name": name}
        return {"apiVersion": names.API_VERSION, "kind": "GpuShare", "metadata": metadata, "spec": spec}

    selector = {"matchLabels": {"app": "web"}}
    refused, made = None, 0
    async with asyncio.timeout(60):
        while refused is None or "GpuShares with a selector already" not in refused:
            refused = await refusal(real_api, namespace, share(f"s{made}", selector=selector), GPUSHARES)
            made += refused is None
            await asyncio.sleep(0.1)
    assert made >= 2
    assert "at most 2 are allowed" in refused
    assert await refusal(real_api, namespace, share("without", fraction="0.5"), GPUSHARES) is None
    changed = {"spec": {"maxSlowdown": 2}}
    await real_api.patch(GPUSHARES, "s0", changed, namespace=namespace)


async def test_more_memory_than_any_gpu_has(real_api: Api, namespace: str, webhooks: Server) -> None:
    """GpuNodes are watched: the refusal follows within moments of the first GPU's report."""
    await define(real_api)
    nodes = Resource(names.GROUP, names.VERSION, "gpunodes", "GpuNode", namespaced=False)
    node = {"apiVersion": names.API_VERSION, "kind": "GpuNode", "metadata": {"name": "large"}}
    async with asyncio.timeout(60):
        while True:
            try:
                await real_api.create(nodes, node)
                break
            except AlreadyExists:
                break
            except ApiError:  # the definition is not served yet
                await asyncio.sleep(0.05)
    gpu = {"uuid": "GPU-large", "memoryMiB": GPUNODES_LARGEST}
    await real_api.patch(nodes, "large", {"status": {"gpus": [gpu]}}, subresource="status")
    refused = None
    async with asyncio.timeout(60):
        while refused is None:
            refused = await refusal(real_api, namespace, pod("big", fraction="0.5", memory="200Gi"))
            if refused is None:
                await real_api.delete(PODS, "big", namespace=namespace, grace_seconds=0)
                await asyncio.sleep(0.1)
    allowed = f"allowed is at most {GPUNODES_LARGEST - DEFAULT_GPU_MEMORY_RESERVE_MIB}Mi"
    assert f'"200Gi" is more memory than tenants get of any GPU of this cluster; {allowed}' in refused
    assert await refusal(real_api, namespace, pod("fits", fraction="0.5", memory="100Gi")) is None
