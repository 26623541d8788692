"""Pods in trouble on a real API server: what a node reports is kept, and a budget holds a replacement."""

import pytest
from tests.operator.live import Running, Shares
from tests.operator.test_retraction_on_api_server import agent, budget, is_leaving, running_pod, until

from gpushare.core.api import (
    ConditionStatus,
    GpuNode,
    GpuNodeStatus,
    GpuStatus,
    TenantSlo,
    TenantStatus,
    TenantTrouble,
    TroubleKind,
    to_json,
)
from gpushare.kube import GPUNODES, Api, Invalid

pytestmark = pytest.mark.integration
STALLED = TenantTrouble(TroubleKind.STALLED, "its processes have done nothing for 30 minutes")


def condition(shares: Shares, kind: str) -> str | None:
    share = shares.named("replicaset-new")
    return next((one.reason for one in share.status.conditions if one.type == kind), None) if share else None


async def test_a_stalled_pod_is_said_held_by_its_budget_and_then_replaced(
    real_api: Api, namespace: str, shares: Shares, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    running.stop()
    monkeypatch.setenv("GPUSHARE_HYGIENE_STALLED", "replace")
    running.start()
    new = await running_pod(real_api, namespace, "new")
    await running_pod(real_api, namespace, "old")
    uid = new["metadata"]["uid"]
    await budget(real_api, namespace, 0)
    async with agent(real_api, namespace, {uid: None}, {uid: STALLED}):
        await shares.until(lambda: condition(shares, "Troubled") == "Stalled")
        await shares.until(lambda: condition(shares, "RetractionRefused") == "DisruptionBudget")
        assert not await is_leaving(real_api, namespace, "new-0")
        await budget(real_api, namespace, 1)

        async def leaves() -> bool:
            return await is_leaving(real_api, namespace, "new-0")

        await until(leaves)
        assert not await is_leaving(real_api, namespace, "old-0")
        await shares.until(lambda: condition(shares, "RetractionRefused") is None)
        share = shares.named("replicaset-new")
        assert share is not None
        assert share.status.retractions == ()


async def test_targets_and_trouble_are_kept_as_written_and_others_refused(real_api: Api, namespace: str) -> None:
    name = f"written-{namespace}"
    body = {"apiVersion": "gpushare.io/v1alpha1", "kind": "GpuNode", "metadata": {"name": name}}
    await real_api.create(GPUNODES, body)
    try:
        slo = TenantSlo(ConditionStatus.FALSE, "Missed", "p99 is 81ms", "p99<50ms", 0.05, 0.081)
        tenant = TenantStatus("uid-1", share_percent=25, slo=slo, trouble=STALLED)
        status = GpuNodeStatus.of((GpuStatus(uuid="GPU-1", tenants=(tenant,)),))
        await real_api.patch(GPUNODES, name, {"status": to_json(status, nulls=True)}, subresource="status")
        assert GpuNode.from_object(await real_api.get(GPUNODES, name)).status == status
        for wrong in ({"slo": {"met": "Maybe", "reason": "x"}}, {"trouble": {"kind": "Bored"}}):
            tenants = [{"podUid": "uid-1", **wrong}]
            bad = {"status": {"gpus": [{"uuid": "GPU-1", "tenants": tenants}]}}
            with pytest.raises(Invalid):
                await real_api.patch(GPUNODES, name, bad, subresource="status")
    finally:
        await real_api.delete(GPUNODES, name)
