"""The Kopf operator on a real API server: GpuShares appear for annotated pods, and their status follows."""

import asyncio
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpushare.core.api import names
from gpushare.core.api.decision import Decision
from gpushare.core.api.objects import (
    GpuNodeStatus,
    GpuShare,
    GpuStatus,
    Phase,
    Tenant,
)
from gpushare.core.api.schema import to_json
from gpushare.kube import (
    EVENTS,
    GPUNODES,
    GPUSHARES,
    NAMESPACES,
    PODS,
    AlreadyExists,
    Api,
    NotFound,
    Reflector,
    Resource,
)

pytestmark = pytest.mark.integration

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
DEFINITIONS = Resource(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False
)
DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment", namespaced=True)
REPLICASETS = Resource("apps", "v1", "replicasets", "ReplicaSet", namespaced=True)
PATIENCE_SECONDS = 120


class Shares:
    """The GpuShares of a namespace as a watch brings them; `until` waits for them to fit."""

    def __init__(self, api: Api, namespace: str) -> None:
        self._changed = asyncio.Event()
        self.reflector = Reflector(
            api, GPUSHARES, lambda obj: (GpuShare.from_object(obj), obj), namespace=namespace,
            on_change=lambda *_: self._changed.set(),
        )  # fmt: skip

    def named(self, name: str) -> GpuShare | None:
        return next((share for share, _ in self.reflector.items.values() if share.name == name), None)

    def raw(self, name: str) -> Json:
        return next(obj for share, obj in self.reflector.items.values() if share.name == name)

    async def until(self, fits: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not fits():
                self._changed.clear()
                await self._changed.wait()


class Running:
    """The operator as the chart starts it, in a process of its own."""

    def __init__(self, kubeconfig: Path, port: int, metrics_port: int, log: Path) -> None:
        self.kubeconfig, self.port, self.metrics_port, self.log = kubeconfig, port, metrics_port, log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *namespaces: str) -> None:
        paths = os.pathsep.join(str(ROOT / part) for part in ("src", "operator", "deviceplugin"))
        environment = {
            **os.environ, "KUBECONFIG": str(self.kubeconfig), "PYTHONPATH": paths,
            "GPUSHARE_METRICS_PORT": str(self.metrics_port), "GPUSHARE_MAX_SLOWDOWN": "1.5",
            "GPUSHARE_NAMESPACES": ",".join(namespaces),
        }  # fmt: skip
        command = [
            sys.executable, "-m", "kopf", "run", "-m", "gpushare_operator", "--standalone",
            "--liveness", f"http://127.0.0.1:{self.port}/healthz",
            *([f"--namespace={name}" for name in namespaces] or ["--all-namespaces"]),
        ]  # fmt: skip
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, cwd="/")

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(how)
        return self.process.wait(timeout=30)

    def get(self, path: str, port: int) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            text: str = answer.read().decode()
            return text


@pytest.fixture
async def namespace(real_api: Api) -> str:
    """A fresh namespace on a server that knows our definitions."""
    for path in sorted((ROOT / "crds").glob("*.yaml")):
        definition = yaml.safe_load(path.read_text())
        with suppress(AlreadyExists):
            await real_api.create(DEFINITIONS, definition)
    for resource in (GPUSHARES, GPUNODES):
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                try:
                    await real_api.list(resource, lambda obj: obj)
                    break
                except NotFound:  # its endpoint appears a moment after the definition
                    await asyncio.sleep(0.05)
    name = f"t{uuid.uuid4().hex[:8]}"
    await real_api.create(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    return name


@pytest.fixture
async def shares(real_api: Api, namespace: str) -> AsyncIterator[Shares]:
    watched = Shares(real_api, namespace)
    async with watched.reflector:
        yield watched


@pytest.fixture
async def running(
    kubeconfig: Path, namespace: str, free_ports: Callable[[], int], tmp_path: Path
) -> AsyncIterator[Running]:
    operator = Running(kubeconfig, free_ports(), free_ports(), tmp_path / "operator.log")
    operator.start()
    yield operator
    if operator.process is not None and operator.process.poll() is None:
        operator.stop()
    print(operator.log.read_text()[-20000:])


async def deployment(api: Api, namespace: str, name: str, revision: str) -> Json:
    """A Deployment (made if it is not there) and a ReplicaSet of it, as its controller makes it; the latter."""
    labels = {"app": name}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "main", "image": "x"}]}}
    spec = {"selector": {"matchLabels": labels}, "template": template}
    meta: Json = {"name": name, "namespace": namespace}
    try:
        owner = await api.create(
            DEPLOYMENTS,
            {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta, "spec": spec},
            namespace=namespace,
        )
    except AlreadyExists:
        owner = await api.get(DEPLOYMENTS, name, namespace=namespace)
    meta = {"name": f"{name}-{revision}", "ownerReferences": [controller(owner)]}
    body = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": meta, "spec": spec}
    return await api.create(REPLICASETS, body, namespace=namespace)


def controller(obj: Json) -> Json:
    meta = obj["metadata"]
    return {
        "apiVersion": obj["apiVersion"], "kind": obj["kind"], "name": meta["name"], "uid": meta["uid"],
        "controller": True,
    }  # fmt: skip


async def pod(api: Api, namespace: str, name: str, owner: Json | None = None, *, ours: bool = True) -> Json:
    metadata: Json = {"name": name}
    if ours:
        metadata |= {
            "annotations": {names.FRACTION: "0.25"},
            "labels": {names.MANAGED_LABEL: "true", "app": "web"},
        }
    if owner is not None:
        metadata["ownerReferences"] = [controller(owner)]
    share = {names.SHARE_RESOURCE: "25"} if ours else {}
    containers = [{"name": "main", "image": "x", "resources": {"limits": share}}]
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": containers}}
    return await api.create(PODS, body, namespace=namespace)


async def decide(api: Api, raw: Json, gpu: str) -> None:
    meta = raw["metadata"]
    decision = Decision((gpu,), 25, 8192, "2026-11-21T11:00:00Z")
    await api.bind(
        meta["name"], "n1", namespace=meta["namespace"], uid=meta["uid"], annotations=decision.to_annotations()
    )


async def report(api: Api, node: str, *tenants: Tenant) -> None:
    """Write a GpuNode as its agent does."""
    with suppress(AlreadyExists):
        await api.create(
            GPUNODES, {"apiVersion": "gpushare.io/v1alpha1", "kind": "GpuNode", "metadata": {"name": node}}
        )
    status = GpuNodeStatus.of((GpuStatus(uuid="GPU-1", memory_mib=143771, tenants=tenants),))
    await api.patch(GPUNODES, node, {"status": to_json(status)}, subresource="status")


async def test_the_life_of_a_deployments_gpushare(
    real_api: Api, namespace: str, shares: Shares, running: Running
) -> None:
    replicaset = await deployment(real_api, namespace, "web", "abc")
    first, second = [await pod(real_api, namespace, f"web-abc-{n}", replicaset) for n in "12"]
    await pod(real_api, namespace, "stranger", ours=False)

    await shares.until(lambda: (s := shares.named("deployment-web")) is not None and bool(s.status.conditions))
    made = shares.raw("deployment-web")
    assert [owner["kind"] for owner in made["metadata"]["ownerReferences"]] == ["Deployment", "ReplicaSet"]
    assert made["spec"] == {"fraction": "0.25"}
    assert "finalizers" not in made["metadata"]
    assert "annotations" not in made["metadata"]

    for raw in (first, second):
        await decide(real_api, raw, "GPU-1")
    await report(
        real_api, "n1",
        Tenant(first["metadata"]["uid"], progress_ratio=0.9, slowdown_ratio=1.11),
        Tenant(second["metadata"]["uid"], progress_ratio=0.4, slowdown_ratio=2.5),
    )  # fmt: skip

    def observed() -> bool:
        share = shares.named("deployment-web")
        return share is not None and share.status.observed is not None and len(share.status.placements) == 2

    await shares.until(observed)
    share = shares.named("deployment-web")
    assert share is not None
    assert share.status.phase is Phase.SHARING
    assert share.status.observed is not None
    assert (share.status.observed.progress_ratio, share.status.observed.slowdown_ratio) == (0.4, 2.5)
    assert [(p.pod, p.node, p.gpu_uuids, p.share_percent) for p in share.status.placements] == [
        ("web-abc-1", "n1", ("GPU-1",), 25),
        ("web-abc-2", "n1", ("GPU-1",), 25),
    ]
    tolerance = next(one for one in share.status.conditions if one.type == "WithinTolerance")
    assert (tolerance.status.value, tolerance.reason) == ("False", "SlowdownBeyondTolerance")

    # a roll-out: another ReplicaSet of the same Deployment
    newer = await deployment(real_api, namespace, "web", "def")
    await pod(real_api, namespace, "web-def-1", newer)
    await shares.until(lambda: (s := shares.named("deployment-web")) is not None and len(s.owners) == 3)
    assert [s.name for s, _ in shares.reflector.items.values()] == ["deployment-web"]

    for raw in (first, second):
        untouched = await real_api.get(PODS, raw["metadata"]["name"], namespace=namespace)
        assert "finalizers" not in untouched["metadata"]
        assert set(untouched["metadata"]["annotations"]) == {names.FRACTION, *names.DECISION_ANNOTATIONS}
        managers = {one["manager"] for one in untouched["metadata"]["managedFields"]}
        assert "gpushare-operator" not in managers

    events = (await real_api.list(EVENTS, lambda obj: obj, namespace=namespace)).items
    told = {(event["regarding"]["name"], event["reason"]) for event in events}
    assert {("deployment-web", "Sharing"), ("deployment-web", "SlowdownBeyondTolerance")} <= told


async def test_a_restart_rebuilds_everything_and_writes_nothing_twice(
    real_api: Api, namespace: str, shares: Shares, running: Running
) -> None:
    bare = await pod(real_api, namespace, "solo")
    await decide(real_api, bare, "GPU-1")
    await shares.until(lambda: (s := shares.named("pod-solo")) is not None and len(s.status.placements) == 1)
    before = shares.raw("pod-solo")["metadata"]["resourceVersion"]
    running.stop(signal.SIGKILL)

    while_away = await pod(real_api, namespace, "later")
    running.start()
    await shares.until(lambda: (s := shares.named("pod-later")) is not None and bool(s.status.conditions))
    assert shares.raw("pod-solo")["metadata"]["resourceVersion"] == before
    assert shares.raw("pod-later")["metadata"]["ownerReferences"][0]["uid"] == while_away["metadata"]["uid"]

    # the pod goes: the group is empty again
    await real_api.delete(PODS, "solo", namespace=namespace, grace_seconds=0)
    await shares.until(lambda: (s := shares.named("pod-solo")) is not None and s.status.phase is Phase.PENDING)
    assert running.stop() == 0


async def test_a_users_own_gpushare_speaks_for_what_it_selects(
    real_api: Api, namespace: str, shares: Shares, running: Running
) -> None:
    own = {"apiVersion": "gpushare.io/v1alpha1", "kind": "GpuShare", "metadata": {"name": "own"}}
    own["spec"] = {"selector": {"matchLabels": {"app": "web"}}, "maxSlowdown": 2}
    await real_api.create(GPUSHARES, own, namespace=namespace)
    selected = await pod(real_api, namespace, "web-0")
    await decide(real_api, selected, "GPU-1")
    await shares.until(lambda: (s := shares.named("own")) is not None and len(s.status.placements) == 1)
    assert shares.named("pod-web-0") is None

    await real_api.delete(GPUSHARES, "own", namespace=namespace)
    await shares.until(lambda: shares.named("own") is None and shares.named("pod-web-0") is not None)


async def test_it_can_be_kept_to_some_namespaces(
    real_api: Api, namespace: str, shares: Shares, running: Running
) -> None:
    running.stop()
    other = f"{namespace}-other"
    await real_api.create(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": other}})
    await pod(real_api, other, "elsewhere")
    running.start(namespace)
    await pod(real_api, namespace, "here")
    await shares.until(lambda: (s := shares.named("pod-here")) is not None and bool(s.status.conditions))
    assert (await real_api.list(GPUSHARES, lambda obj: obj, namespace=other)).items == []


async def test_a_name_that_is_taken_and_bad_objects_stop_nobody(
    real_api: Api, namespace: str, shares: Shares, running: Running
) -> None:
    taken = {"apiVersion": "gpushare.io/v1alpha1", "kind": "GpuShare", "metadata": {"name": "pod-a"}, "spec": {}}
    await real_api.create(GPUSHARES, taken, namespace=namespace)
    broken = {"metadata": {"annotations": {names.THREAD_PERCENTAGE: "lots", names.GPU: "GPU-1"}}}
    await pod(real_api, namespace, "a")
    await pod(real_api, namespace, "b")
    await real_api.patch(PODS, "b", broken, namespace=namespace)

    def told() -> bool:
        share = shares.named("pod-b")
        return share is not None and any(one.reason == "Malformed" for one in share.status.conditions)

    await shares.until(told)
    await shares.until(lambda: len(shares.reflector.items) == 3)
    (renamed,) = {s.name for s, _ in shares.reflector.items.values()} - {"pod-a", "pod-b"}
    assert renamed.startswith("pod-a-")

    metrics = await asyncio.to_thread(running.get, "/metrics", running.metrics_port)
    assert 'gpushare_operator_reconciliations_total{kind="pod",result="done"}' in metrics
    assert 'gpushare_operator_gpushares{phase="Pending"}' in metrics
    assert '"reconciler": "running"' in await asyncio.to_thread(running.get, "/healthz", running.port)
    with pytest.raises(urllib.error.HTTPError):
        await asyncio.to_thread(running.get, "/elsewhere", running.port)


@pytest.mark.usefixtures("controllers", "running")
async def test_a_gpushare_lives_and_goes_with_its_deployment(
    real_api: Api, namespace: str, shares: Shares
) -> None:
    """With Kubernetes' own controllers and collector: one GpuShare over a roll-out, gone with the owner."""
    metadata = {"labels": {"app": "web", names.MANAGED_LABEL: "true"}, "annotations": {names.FRACTION: "0.25"}}
    template = {"metadata": metadata, "spec": {"containers": [{"name": "main", "image": "x"}]}}
    spec = {
        "replicas": 2, "strategy": {"type": "Recreate"}, "selector": {"matchLabels": {"app": "web"}},
        "template": template,
    }  # fmt: skip
    body = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}, "spec": spec}
    await real_api.create(DEPLOYMENTS, body, namespace=namespace)

    def owners() -> list[str]:
        share = shares.named("deployment-web")
        return [owner.kind for owner in share.owners] if share is not None else []

    await shares.until(lambda: owners() == ["Deployment", "ReplicaSet"])
    old = shares.named("deployment-web")
    assert old is not None
    newer = {"spec": {"template": {"spec": {"containers": [{"name": "main", "image": "y"}]}}}}
    await real_api.patch(DEPLOYMENTS, "web", newer, namespace=namespace)
    await shares.until(lambda: len(owners()) == 3)
    await real_api.delete(REPLICASETS, old.owners[1].name, namespace=namespace)  # as its history limit would
    await shares.until(lambda: len(owners()) == 2)
    kept = shares.named("deployment-web")
    assert kept is not None
    assert kept.uid == old.uid
    assert kept.owners[1].uid != old.owners[1].uid

    await real_api.delete(DEPLOYMENTS, "web", namespace=namespace)
    await shares.until(lambda: not shares.reflector.items)


@pytest.mark.usefixtures("controllers", "running")
async def test_the_jobs_of_a_cronjob_share_one_gpushare(real_api: Api, namespace: str, shares: Shares) -> None:
    metadata = {"labels": {names.MANAGED_LABEL: "true"}, "annotations": {names.FRACTION: "auto"}}
    template = {
        "metadata": metadata, "spec": {"restartPolicy": "Never", "containers": [{"name": "main", "image": "x"}]},
    }  # fmt: skip
    jobs = Resource("batch", "v1", "jobs", "Job", namespaced=True)
    cronjobs = Resource("batch", "v1", "cronjobs", "CronJob", namespaced=True)
    spec = {"schedule": "0 0 1 1 *", "jobTemplate": {"spec": {"template": template}}}
    made = {"apiVersion": "batch/v1", "kind": "CronJob", "metadata": {"name": "nightly"}, "spec": spec}
    nightly = await real_api.create(cronjobs, made, namespace=namespace)
    for number in (1, 2):
        job: Json = {"apiVersion": "batch/v1", "kind": "Job", "spec": {"template": template}}
        job["metadata"] = {"name": f"nightly-{number}", "ownerReferences": [controller(nightly)]}
        await real_api.create(jobs, job, namespace=namespace)
    await shares.until(lambda: (s := shares.named("cronjob-nightly")) is not None and len(s.owners) == 3)
    assert len(shares.reflector.items) == 1
    assert shares.raw("cronjob-nightly")["spec"] == {"fraction": "auto"}
    await real_api.delete(jobs, "nightly-1", namespace=namespace)
    await shares.until(lambda: (s := shares.named("cronjob-nightly")) is not None and len(s.owners) == 2)


async def test_the_api_servers_restart_is_survived(
    real_api: Api, namespace: str, shares: Shares, running: Running, api_server: Any
) -> None:
    await pod(real_api, namespace, "before")
    await shares.until(lambda: shares.named("pod-before") is not None)
    assert running.process is not None
    first = running.process.pid
    await asyncio.to_thread(api_server.kill)
    await asyncio.to_thread(api_server.start)
    await pod(real_api, namespace, "after")
    own = {"apiVersion": "gpushare.io/v1alpha1", "kind": "GpuShare", "metadata": {"name": "own"}, "spec": {}}
    await real_api.create(GPUSHARES, own, namespace=namespace)
    await shares.until(
        lambda: all((s := shares.named(name)) is not None and s.status.conditions for name in ("pod-after", "own"))
    )
    assert (running.process.pid, running.process.poll()) == (first, None), "without a restart of its own"
