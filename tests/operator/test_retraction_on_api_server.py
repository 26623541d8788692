"""Retraction on a real API server: a budget holds it, a freed one lets it go, a killed operator does it once."""

import asyncio
import itertools
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from tests.operator.live import PATIENCE_SECONDS, Running, Shares, decide, pod

from gpushare.core.api import GpuNodeStatus, GpuStatus, Phase, Retraction, TenantStatus, TenantTrouble, to_json
from gpushare.kube import EVENTS, GPUNODES, PODS, AlreadyExists, Api, Conflict, Resource, Retryable

pytestmark = pytest.mark.integration

Json = dict[str, Any]
REPLICASETS = Resource("apps", "v1", "replicasets", "ReplicaSet", namespaced=True)
BUDGETS = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", namespaced=True)
WHY = "old makes 0.52 of what it makes alone, promised are 0.60"


async def running_pod(api: Api, namespace: str, name: str) -> Json:
    """Make a pod of a ReplicaSet that was placed, runs and is ready."""
    labels = {"app": name}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "main", "image": "x"}]}}
    spec = {"selector": {"matchLabels": labels}, "template": template}
    body = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": {"name": name}, "spec": spec}
    owner = await api.create(REPLICASETS, body, namespace=namespace)
    raw = await pod(api, namespace, f"{name}-0", owner)
    await decide(api, raw, f"GPU-{namespace}", f"node-{namespace}")
    status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    return await api.patch(PODS, f"{name}-0", {"status": status}, namespace=namespace, subresource="status")


async def budget(api: Api, namespace: str, allowed: int) -> None:
    """Let a PodDisruptionBudget over all pods allow so many disruptions, as its controller would."""
    spec = {"minAvailable": 1, "selector": {"matchLabels": {"app": "web"}}}
    body = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "all"}, "spec": spec}
    with suppress(AlreadyExists):
        await api.create(BUDGETS, body, namespace=namespace)
    status = {
        "observedGeneration": 1,
        "disruptionsAllowed": allowed,
        "currentHealthy": 1 + allowed,
        "desiredHealthy": 1,
        "expectedPods": 2,
    }
    await api.patch(BUDGETS, "all", {"status": status}, namespace=namespace, subresource="status")


@asynccontextmanager
async def agent(
    api: Api, namespace: str, asks: dict[str, str | None], troubles: Mapping[str, TenantTrouble] | None = None
) -> AsyncIterator[None]:
    """Write a GpuNode as a node's agent does, again and again, with its asks and troubles by pod uid."""
    name = f"node-{namespace}"
    await api.create(
        GPUNODES, {"apiVersion": "gpushare.io/v1alpha1", "kind": "GpuNode", "metadata": {"name": name}}
    )

    async def report() -> None:
        for second in itertools.count():
            tenants = tuple(
                TenantStatus(uid, share_percent=25, retract=why, trouble=(troubles or {}).get(uid))
                for uid, why in asks.items()
            )
            status = GpuNodeStatus.of(
                (GpuStatus(uuid=f"GPU-{namespace}", memory_mib=143771, tenants=tenants),),
                observed_at=f"2026-11-22T{second // 3600 % 24:02d}:{second // 60 % 60:02d}:{second % 60:02d}Z",
            )
            await api.patch(GPUNODES, name, {"status": to_json(status, nulls=True)}, subresource="status")
            await asyncio.sleep(1.0)

    task = asyncio.create_task(report())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await api.delete(GPUNODES, name)


def retractions(shares: Shares) -> tuple[Retraction, ...]:
    share = shares.named("replicaset-new")
    return share.status.retractions if share is not None else ()


async def until(fits: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await fits():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.2)


async def is_leaving(api: Api, namespace: str, name: str) -> bool:
    return "deletionTimestamp" in (await api.get(PODS, name, namespace=namespace))["metadata"]


async def test_a_budget_holds_a_retraction_and_a_killed_operator_does_it_once(
    real_api: Api, namespace: str, shares: Shares, running: Running
) -> None:
    old, new = [await running_pod(real_api, namespace, name) for name in ("old", "new")]
    asks: dict[str, str | None] = {old["metadata"]["uid"]: None, new["metadata"]["uid"]: None}
    await budget(real_api, namespace, 0)
    async with agent(real_api, namespace, asks):
        await shares.until(lambda: all(shares.named(f"replicaset-{name}") for name in ("old", "new")))
        asks[new["metadata"]["uid"]] = WHY
        await shares.until(lambda: len(retractions(shares)) == 1)
        (intent,) = retractions(shares)
        assert (intent.until, intent.pod_uid, intent.neighbours) == (
            None,
            new["metadata"]["uid"],
            (f"{namespace}/replicaset-old",),
        )
        with pytest.raises(Retryable):
            await real_api.evict("new-0", namespace=namespace)  # the budget holds for everybody

        async def refused() -> bool:
            try:
                metrics = await asyncio.to_thread(running.get, "/metrics", running.metrics_port)
            except OSError:  # it starts
                return False
            return bool(
                re.search(r'gpushare_retractions_refused_total\{reason="DisruptionBudget"\} [1-9]', metrics)
            )

        await until(refused)
        running.stop(signal.SIGKILL)
        running.start()
        await until(refused)
        assert retractions(shares) == (intent,), "the intent outlives the operator"
        assert not await is_leaving(real_api, namespace, "new-0")

        await budget(real_api, namespace, 1)
        await shares.until(lambda: any(one.until is not None for one in retractions(shares)))
        (record,) = retractions(shares)
        assert (record.count, record.pod_uid, record.gpu) == (1, new["metadata"]["uid"], f"GPU-{namespace}")
        assert await is_leaving(real_api, namespace, "new-0")
        assert not await is_leaving(real_api, namespace, "old-0")
        share = shares.named("replicaset-new")
        assert share is not None
        assert share.status.phase is Phase.RETRACTED

        async def told() -> bool:
            events = (await real_api.list(EVENTS, lambda obj: obj, namespace=namespace)).items
            found = {
                one["regarding"]["kind"] for one in events if one["reason"] == "Retracted" and WHY in one["note"]
            }
            return found == {"Pod", "GpuShare"}

        await until(told)


async def test_a_pod_of_another_uid_is_not_evicted_but_a_conflict(real_api: Api, namespace: str) -> None:
    """From which the retractor learns that the pod which was to leave is gone."""
    made = await running_pod(real_api, namespace, "new")
    with pytest.raises(Conflict):
        await real_api.evict("new-0", namespace=namespace, uid="00000000-0000-0000-0000-000000000000")
    assert (await real_api.get(PODS, "new-0", namespace=namespace))["metadata"]["uid"] == made["metadata"]["uid"]


async def test_an_operator_killed_right_after_the_eviction_records_it_once(
    real_api: Api, namespace: str, shares: Shares, running: Running
) -> None:
    old, new = [await running_pod(real_api, namespace, name) for name in ("old", "new")]
    asks: dict[str, str | None] = {old["metadata"]["uid"]: None, new["metadata"]["uid"]: None}
    await budget(real_api, namespace, 0)
    async with agent(real_api, namespace, asks):
        asks[new["metadata"]["uid"]] = WHY
        await shares.until(lambda: len(retractions(shares)) == 1)
        running.stop(signal.SIGKILL)
        await budget(real_api, namespace, 1)
        # What the operator did last: the API server has accepted the eviction, and nobody wrote that down.
        await real_api.evict("new-0", namespace=namespace, uid=new["metadata"]["uid"])
        await real_api.delete(PODS, "new-0", namespace=namespace, grace_seconds=0)
        del asks[new["metadata"]["uid"]]
        running.start()
        await shares.until(lambda: any(one.until is not None for one in retractions(shares)))
        (record,) = retractions(shares)
        assert (record.count, record.pod_uid) == (1, new["metadata"]["uid"])
        assert not await is_leaving(real_api, namespace, "old-0")
