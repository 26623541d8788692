"""The Kopf operator on a real API server: GpuShares appear for annotated pods, and their status follows."""

import asyncio
import re
import signal
import urllib.error
import urllib.request
from contextlib import suppress
from typing import Any

import pytest
from tests.operator.live import PATIENCE_SECONDS, Running, Shares, controller, decide, pod

from gpushare.core.api import (
    GpuNodeStatus,
    GpuStatus,
    Phase,
    TenantStatus,
    names,
    to_json,
)
from gpushare.kube import (
    EVENTS,
    GPUNODES,
    GPUSHARES,
    NAMESPACES,
    PODS,
    AlreadyExists,
    Api,
    Resource,
)

pytestmark = pytest.mark.integration

Json = dict[str, Any]
DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment", namespaced=True)
JOBS = Resource("batch", "v1", "jobs", "Job", namespaced=True)
REPLICASETS = Resource("apps", "v1", "replicasets", "ReplicaSet", namespaced=True)


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


async def report(api: Api, node: str, *tenants: TenantStatus) -> None:
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
        real_api,
        "n1",
        TenantStatus(first["metadata"]["uid"], progress_ratio=0.9, slowdown_ratio=1.11),
        TenantStatus(second["metadata"]["uid"], progress_ratio=0.1, slowdown_ratio=10.0),
    )

    def observed() -> bool:
        share = shares.named("deployment-web")
        return share is not None and share.status.observed is not None and len(share.status.placements) == 2

    await shares.until(observed)
    share = shares.named("deployment-web")
    assert share is not None
    assert share.status.phase is Phase.SHARING
    assert share.status.observed is not None
    assert (share.status.observed.progress_ratio, share.status.observed.slowdown_ratio) == (0.1, 10.0)
    assert [(p.pod, p.node, p.gpu_uuids, p.share_percent) for p in share.status.placements] == [
        ("web-abc-1", "n1", ("GPU-1",), 25),
        ("web-abc-2", "n1", ("GPU-1",), 25),
    ]
    promise = next(one for one in share.status.conditions if one.type == "PromiseKept")
    assert (promise.status.value, promise.reason) == ("False", "PromiseBroken")
    assert share.status.promise_ratio == 0.167

    # a roll-out: another ReplicaSet of the same Deployment
    newer = await deployment(real_api, namespace, "web", "def")
    await pod(real_api, namespace, "web-def-1", newer)
    await shares.until(lambda: (s := shares.named("deployment-web")) is not None and len(s.owners) == 3)
    assert [s.name for s, _ in shares.reflector.items.values()] == ["deployment-web"]

    for raw in (first, second):
        untouched = await real_api.get(PODS, raw["metadata"]["name"], namespace=namespace)
        assert "finalizers" not in untouched["metadata"]
        decided = set(names.DECISION_ANNOTATIONS) - {names.PROBATION_SECONDS}
        assert set(untouched["metadata"]["annotations"]) == {names.FRACTION, *decided}
        managers = {one["manager"] for one in untouched["metadata"]["managedFields"]}
        assert "gpushare-operator" not in managers

    told: set[tuple[str, str]] = set()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not {("deployment-web", "Sharing"), ("deployment-web", "PromiseBroken")} <= told:
            events = (await real_api.list(EVENTS, lambda obj: obj, namespace=namespace)).items
            told = {(event["regarding"]["name"], event["reason"]) for event in events}
            await asyncio.sleep(0.1)  # statuses are written first, and events after them (ADR 0192)
    assert "the API server drops" not in running.log.read_text(), "this release's definition keeps all fields"


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


async def test_a_namespace_that_does_not_exist_yet_keeps_nobody_else_waiting(
    real_api: Api, namespace: str, shares: Shares, running: Running
) -> None:
    """Kopf lists nothing of a namespace that it does not find; a release outlives the team whose name it has."""
    running.stop()
    later = f"{namespace}-later"
    running.start(namespace, later)
    await pod(real_api, namespace, "here")
    await shares.until(lambda: (s := shares.named("pod-here")) is not None and bool(s.status.conditions))
    await real_api.create(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": later}})
    await pod(real_api, later, "there")
    of_later = Shares(real_api, later)
    async with of_later.reflector:
        await of_later.until(lambda: of_later.named("pod-there") is not None)


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
    assert re.search(r'gpushare_operator_reconciliations_total\{kind="pod",result="done"\} [1-9]', metrics)
    assert 'gpushare_operator_gpushares{phase="Pending"}' in metrics
    assert await asyncio.to_thread(running.get, "/healthz", running.probe_port) == "ok\n"
    with pytest.raises(urllib.error.HTTPError):
        await asyncio.to_thread(running.get, "/elsewhere", running.probe_port)


@pytest.mark.usefixtures("controllers", "running")
async def test_a_gpushare_lives_and_goes_with_its_deployment(
    real_api: Api, namespace: str, shares: Shares
) -> None:
    """With Kubernetes' own controllers and collector: one GpuShare over a roll-out, gone with the owner."""
    metadata = {"labels": {"app": "web", names.MANAGED_LABEL: "true"}, "annotations": {names.FRACTION: "0.25"}}
    template = {"metadata": metadata, "spec": {"containers": [{"name": "main", "image": "x"}]}}
    spec = {
        "replicas": 2,
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": {"app": "web"}},
        "template": template,
    }
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
        "metadata": metadata,
        "spec": {"restartPolicy": "Never", "containers": [{"name": "main", "image": "x"}]},
    }
    cronjobs = Resource("batch", "v1", "cronjobs", "CronJob", namespaced=True)
    spec = {"schedule": "0 0 1 1 *", "jobTemplate": {"spec": {"template": template}}}
    made = {"apiVersion": "batch/v1", "kind": "CronJob", "metadata": {"name": "nightly"}, "spec": spec}
    nightly = await real_api.create(cronjobs, made, namespace=namespace)
    for number in (1, 2):
        job: Json = {"apiVersion": "batch/v1", "kind": "Job", "spec": {"template": template}}
        job["metadata"] = {"name": f"nightly-{number}", "ownerReferences": [controller(nightly)]}
        await real_api.create(JOBS, job, namespace=namespace)
    await shares.until(lambda: (s := shares.named("cronjob-nightly")) is not None and len(s.owners) == 3)
    assert len(shares.reflector.items) == 1
    assert shares.raw("cronjob-nightly")["spec"] == {"fraction": "auto"}
    await real_api.delete(JOBS, "nightly-1", namespace=namespace)
    await shares.until(lambda: (s := shares.named("cronjob-nightly")) is not None and len(s.owners) == 2)


async def test_a_job_that_owns_itself_stops_nobody(
    real_api: Api, namespace: str, shares: Shares, running: Running
) -> None:
    """The API server takes it, and whoever may write Jobs may do it."""
    spec = {"template": {"spec": {"restartPolicy": "Never", "containers": [{"name": "main", "image": "x"}]}}}
    body = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "own"}, "spec": spec | {"suspend": True}}
    job = await real_api.create(JOBS, body, namespace=namespace)
    metadata = {"ownerReferences": [controller(job)]}
    job = await real_api.patch(JOBS, "own", {"metadata": metadata}, namespace=namespace)
    assert job["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]
    await pod(real_api, namespace, "own-1", job)
    await shares.until(lambda: shares.named("job-own") is not None)
    await pod(real_api, namespace, "after", await deployment(real_api, namespace, "web", "abc"))
    await shares.until(lambda: shares.named("deployment-web") is not None)


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
