"""Namespaces of watch.namespaces in which the operator may not list, on a real API server with RBAC."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.operator.conftest import ApiServer
from tests.operator.live import PATIENCE_SECONDS, Running, Shares, pod
from tests.operator.test_webhooks_on_api_server import rendered

from gpushare.kube import NAMESPACES, AlreadyExists, Api, Resource

pytestmark = pytest.mark.integration

Json = dict[str, Any]
RBAC = {
    kind: Resource("rbac.authorization.k8s.io", "v1", f"{kind.lower()}s", kind, namespaced=kind == "RoleBinding")
    for kind in ("ClusterRole", "ClusterRoleBinding", "RoleBinding")
}


async def bind(api: Api, namespace: str) -> None:
    """Make the chart's RoleBinding of a watched namespace."""
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "gpushare-operator"}
    subject = {"kind": "ServiceAccount", "name": "gpushare-operator", "namespace": "gpushare"}
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "gpushare-operator"},
        "roleRef": role,
        "subjects": [subject],
    }
    await api.create(RBAC["RoleBinding"], binding, namespace=namespace)


async def make(api: Api, namespace: str) -> None:
    await api.create(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})


def metrics(operator: Running) -> str:
    return operator.get("/metrics", operator.metrics_port)


async def told(operator: Running, text: str) -> None:
    """Until the operator has logged this."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while text not in operator.log.read_text():  # noqa: ASYNC110 - another process's log
            await asyncio.sleep(0.1)


@pytest.fixture
async def roles(real_api: Api) -> None:
    """What the chart grants the operator with watch.namespaces, but for the bindings in these."""
    for item in rendered("rbac/operator.yaml", ("ClusterRole", "ClusterRoleBinding")):
        if (item["kind"], item["metadata"]["name"]) != ("ClusterRoleBinding", "gpushare-operator"):
            with suppress(AlreadyExists):
                await real_api.create(RBAC[item["kind"]], item)


@pytest.fixture
async def restricted(
    api_server: ApiServer, roles: None, namespace: str, free_ports: Callable[[], int], tmp_path: Path
) -> AsyncIterator[Running]:
    """The operator with the rights that the chart grants it; not started."""
    operator = Running(api_server.operators_kubeconfig, free_ports(), free_ports(), tmp_path / "operator.log")
    yield operator
    if operator.process is not None and operator.process.poll() is None:
        await asyncio.to_thread(operator.stop)
    print(operator.log.read_text()[-20000:])


async def test_a_namespace_without_its_binding_keeps_nobody_waiting_and_is_taken_up_when_it_has_it(
    real_api: Api, namespace: str, shares: Shares, restricted: Running
) -> None:
    refused = f"t{uuid.uuid4().hex[:8]}"
    await make(real_api, refused)
    await bind(real_api, namespace)
    restricted.start(namespace, refused)
    await pod(real_api, namespace, "here")
    await pod(real_api, refused, "there")
    await shares.until(lambda: (s := shares.named("pod-here")) is not None and bool(s.status.conditions))
    assert "gpushare_operator_refused_namespaces 1.0" in await asyncio.to_thread(metrics, restricted)
    await bind(real_api, refused)
    of_refused = Shares(real_api, refused)
    async with of_refused.reflector:
        await of_refused.until(lambda: of_refused.named("pod-there") is not None)
    assert "gpushare_operator_refused_namespaces 0.0" in await asyncio.to_thread(metrics, restricted)
    log = restricted.log.read_text()
    assert log.count(f"may not list in namespace {refused}") == 1
    assert log.count("APIForbiddenError") == 2, "the first one of each type"


async def test_a_namespace_that_loses_its_binding_ends_nobodys_watches(
    real_api: Api, api_server: ApiServer, namespace: str, shares: Shares, restricted: Running
) -> None:
    """As one does that is deleted and made again: the release's next upgrade makes the binding anew."""
    again = f"t{uuid.uuid4().hex[:8]}"
    await make(real_api, again)
    for name in (namespace, again):
        await bind(real_api, name)
    restricted.start(namespace, again)
    of_again = Shares(real_api, again)
    async with of_again.reflector:
        await pod(real_api, again, "before")
        await of_again.until(lambda: of_again.named("pod-before") is not None)
        await real_api.delete(RBAC["RoleBinding"], "gpushare-operator", namespace=again)
        await asyncio.to_thread(api_server.kill)  # else the watches go on, which were allowed as they began
        await asyncio.to_thread(api_server.start)
        await pod(real_api, again, "after")
        await told(restricted, f"may not list in namespace {again}")
        await pod(real_api, namespace, "elsewhere")
        await shares.until(lambda: shares.named("pod-elsewhere") is not None)
        await bind(real_api, again)
        await of_again.until(lambda: of_again.named("pod-after") is not None)
