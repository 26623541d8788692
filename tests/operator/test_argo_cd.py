"""Argo CD sees no drift: its own engine syncs and compares objects on a real API server with our webhooks."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from devcluster import tools
from installed import lacking
from tests.operator.conftest import DEFINITIONS
from tests.operator.test_webhooks_on_api_server import (  # noqa: F401 - fixtures
    WORKLOADS,
    namespace,
    pod,
    refusal,
    webhooks,
    workload,
)

from gpushare.core.api import names
from gpushare.kube import PODS, AlreadyExists, Api, Resource

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

Json = dict[str, Any]
FRACTIONS = {"0.25": "25", "auto": "50"}  # what is annotated, and the share that it is without a profile
JOBSETS = Resource("jobset.x-k8s.io", "v1alpha2", "jobsets", "JobSet", namespaced=True)
# How Argo CD compares: by default; with the sync option ServerSideApply; with the compare option ServerSideDiff,
# and with IncludeMutationWebhook beside it.
WAYS = {"client", "structured", "server", "server-and-webhooks"}


def jobset(fraction: str = "0.25") -> Json:
    template = {"spec": workload("Job", fraction=fraction)["spec"]}
    replicated = [{"name": "gpu", "replicas": 1, "template": template}]
    spec = {"replicatedJobs": replicated}
    return {"apiVersion": JOBSETS.api_version, "kind": "JobSet", "metadata": {}, "spec": spec}


def containers_of(obj: Json) -> list[Json]:
    """The containers of a pod, of a template, or of a JobSet's first template."""
    spec = obj["spec"]
    if "replicatedJobs" in spec:
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    found: list[Json] = (spec["template"]["spec"] if "template" in spec else spec)["containers"]
    return found


@pytest.fixture
async def jobsets(real_api: Api, namespace: str) -> AsyncIterator[None]:  # noqa: F811
    """JobSet's own definition, served."""
    path = tools.built_jobset_definition()
    if path is None:
        lacking("jobset", "no definition of JobSets: hack/cluster test-programs fetches it")
    async with asyncio.timeout(60):
        while True:
            try:
                await real_api.create(DEFINITIONS, yaml.safe_load(path.read_text()))
                break
            except AlreadyExists:  # another test's, which is on its way out
                await asyncio.sleep(0.5)
    try:
        body = jobset()
        body["metadata"]["name"] = "probe"
        async with asyncio.timeout(60):
            while await refusal(real_api, namespace, body, JOBSETS) is not None:  # noqa: ASYNC110 - not served yet
                await asyncio.sleep(0.2)
        await real_api.delete(JOBSETS, "probe", namespace=namespace)
        yield
    finally:
        await real_api.delete(DEFINITIONS, "jobsets.jobset.x-k8s.io")


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("sync", ["client", "server"])
@pytest.mark.usefixtures("jobsets")
async def test_what_admission_adds_is_no_drift_and_a_change_is(
    real_api: Api,
    namespace: str,  # noqa: F811
    kubeconfig: Path,
    tmp_path: Path,
    sync: str,
    fraction: str,
) -> None:
    programs = tools.built_clients()
    if programs is None:
        lacking("clients", "no program on Argo CD's engine: hack/cluster test-programs builds it")
    path = tmp_path / "wanted.yaml"

    async def out_of_sync(resource: Resource, wanted: Json, *options: str) -> dict[str, Json]:
        path.write_text(yaml.safe_dump(wanted))
        command = [
            programs / "argodiff",
            "--kubeconfig",
            kubeconfig,
            "--resource",
            resource.plural,
            *options,
            path,
        ]
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert set(found) == WAYS
        return {way: outcome for way, outcome in found.items() if outcome["outOfSync"]}

    async def kubectl_diff() -> tuple[int, str]:
        """kubectl's own comparison with the file that was synced last: 1 where they differ."""
        server = ["--server-side", "--field-manager=argocd-controller"] if sync == "server" else []
        command = [tools.kubectl(), f"--kubeconfig={kubeconfig}", "diff", *server, "-f", path]
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=240, check=False
        )
        return done.returncode, done.stdout + done.stderr

    for resource, wanted in (
        (WORKLOADS["Job"], workload("Job", fraction=fraction)),
        (PODS, pod("one", fraction=fraction)),
        (JOBSETS, jobset(fraction)),
    ):
        wanted["metadata"] |= {"name": "one", "namespace": namespace}
        assert await out_of_sync(resource, wanted, "--sync", sync) == {}, resource.kind
        live = await real_api.get(resource, "one", namespace=namespace)
        shares = [each["resources"]["limits"] for each in containers_of(live)]
        assert shares == [{names.SHARE_RESOURCE: FRACTIONS[fraction]}], "admission has added it"
        assert await out_of_sync(resource, wanted, "--sync", sync) == {}, f"a second sync of the {resource.kind}"
        assert await kubectl_diff() == (0, "")
        wanted["metadata"]["labels"] = {"new": "label"}
        assert set(await out_of_sync(resource, wanted)) == WAYS, "a real change is seen"
        assert (await kubectl_diff())[0] == 1
