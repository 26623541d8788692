"""The scheduler binds to nodes as clouds label them, with the chart's policies in force on a real API server."""

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from devcluster.settings import NODE_LABELS
from tests.operator.test_webhooks_on_api_server import CACHE, REGISTRATION, rendered

from gpushare.core.api import names
from gpushare.kube import PODS, Api, Resource

pytestmark = pytest.mark.integration

Json = dict[str, Any]
Bind = Callable[..., subprocess.CompletedProcess[str]]
NODES = Resource("", "v1", "nodes", "Node", namespaced=False)
SCHEDULER = "system:serviceaccount:gpushare:gpushare-scheduler"
POLICIES = {
    kind: Resource(REGISTRATION, "v1", plural, kind, namespaced=False)
    for kind, plural in (
        ("ValidatingAdmissionPolicy", "validatingadmissionpolicies"),
        ("ValidatingAdmissionPolicyBinding", "validatingadmissionpolicybindings"),
    )
}


@pytest.fixture
def bind(kubeconfig: Path, namespace: str) -> Bind:
    """Send a Binding as the chart's scheduler."""
    program = shutil.which("kubectl") or str(CACHE / "bin" / "kubectl")

    def run(pod: str, node: str, **metadata: dict[str, str]) -> subprocess.CompletedProcess[str]:
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": pod, "annotations": {names.GPU: "GPU-1"}, **metadata},
            "target": {"kind": "Node", "name": node},
        }
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/binding"
        who = [f"--as={SCHEDULER}", "--as-group=system:masters"]
        return subprocess.run(
            [program, *who, "create", "--raw", path, "-f", "-"],
            input=json.dumps(binding),
            capture_output=True,
            text=True,
            env={**os.environ, "KUBECONFIG": str(kubeconfig)},
            timeout=120,
            check=False,
        )

    return run


def body(name: str, node: str = "") -> Json:
    spec: Json = {"containers": [{"name": "main", "image": "none"}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec | {"nodeName": node}}


@pytest.fixture
async def zoned(real_api: Api, namespace: str, bind: Bind) -> AsyncIterator[str]:
    """A node with a zone and a region, which the API server copies; the policies are in force."""
    name = f"{namespace}-zoned"
    made = [(NODES, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": NODE_LABELS}})]
    made += [(POLICIES[item["kind"]], item) for item in rendered("policies/accounts.yaml", POLICIES)]
    for resource, item in made:
        await real_api.create(resource, item)
    try:
        await real_api.create(PODS, body("probe"), namespace=namespace)
        async with asyncio.timeout(180):
            while "and nothing else" not in bind("probe", "nowhere", labels={"app": "a"}).stderr:
                await real_api.delete(PODS, "probe", namespace=namespace, grace_seconds=0)
                await real_api.create(PODS, body("probe"), namespace=namespace)
                await asyncio.sleep(0.1)
            while True:
                if await _copied(real_api, namespace, name):
                    break
                await asyncio.sleep(0.1)
        yield name
    finally:
        for resource, item in made:
            await real_api.delete(resource, item["metadata"]["name"])


async def _copied(api: Api, namespace: str, node: str) -> bool:
    """Whether the API server knows the node's labels yet: it copies them to a pod made on it."""
    pod = await api.create(PODS, body("placed", node), namespace=namespace)
    await api.delete(PODS, "placed", namespace=namespace, grace_seconds=0)
    return bool(NODE_LABELS.items() <= pod["metadata"].get("labels", {}).items())


async def test_a_pod_is_bound_to_a_node_with_a_zone_and_a_region(
    real_api: Api, namespace: str, zoned: str, bind: Bind
) -> None:
    """Before: every Binding was refused for the labels that Kubernetes 1.35 copies onto it."""
    await real_api.create(PODS, body("tenant"), namespace=namespace)
    done = bind("tenant", zoned)
    assert done.returncode == 0, done.stderr
    bound = await real_api.get(PODS, "tenant", namespace=namespace)
    assert bound["spec"]["nodeName"] == zoned
    assert bound["metadata"]["labels"] == NODE_LABELS
    assert bound["metadata"]["annotations"] == {names.GPU: "GPU-1"}


@pytest.mark.parametrize("labels", [{names.MANAGED_LABEL: "true"}, {"app": "a", **NODE_LABELS}], ids=str)
async def test_a_stolen_scheduler_token_brings_a_pod_no_other_label(
    real_api: Api, namespace: str, zoned: str, bind: Bind, labels: dict[str, str]
) -> None:
    await real_api.create(PODS, body("tenant"), namespace=namespace)
    done = bind("tenant", zoned, labels=labels)
    assert "binds it, and nothing else" in done.stderr
    assert "nodeName" not in (await real_api.get(PODS, "tenant", namespace=namespace))["spec"]
