"""The share in the templates of Jobs and JobSets on a real API server: set once, and no tool sees a drift."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kueuemanager import DIFFS
from tests.operator.test_webhooks_on_api_server import (  # noqa: F401 - fixtures
    CACHE,
    REGISTRATION,
    WORKLOADS,
    Server,
    define,
    namespace,
    pod,
    refusal,
    rendered,
    webhooks,
    workload,
)

from gpushare.core.admission import Defaults
from gpushare.core.api import names
from gpushare.kube import GPUSHARES, PODS, Api, Resource

pytestmark = pytest.mark.integration

Json = dict[str, Any]
JOBS = WORKLOADS["Job"]
POLICIES = {
    "ValidatingAdmissionPolicy": "validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": "validatingadmissionpolicybindings",
}
QUOTAS = Resource("", "v1", "resourcequotas", "ResourceQuota", namespaced=True)
LIMIT_RANGES = Resource("", "v1", "limitranges", "LimitRange", namespaced=True)
JOBSETS = Resource("jobset.x-k8s.io", "v1alpha2", "jobsets", "JobSet", namespaced=True)
DEFINITIONS = Resource(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False
)
SHARE = {"limits": {names.SHARE_RESOURCE: "25"}, "requests": {names.SHARE_RESOURCE: "25"}}
FRACTIONS = {"0.25": "25", "auto": "50"}  # what is annotated, and the share that it is without a profile


def job(name: str, **annotations: str) -> Json:
    made = workload("Job", **annotations)
    return {**made, "metadata": {"name": name}}


def resources_of(obj: Json) -> Json:
    found: Json = obj["spec"]["template"]["spec"]["containers"][0]["resources"]
    return found


def carrying(percent: str) -> Json:
    """Resources of a container that carries a share."""
    return {"limits": {names.SHARE_RESOURCE: percent}, "requests": {names.SHARE_RESOURCE: percent}}


@pytest.mark.parametrize("fraction", FRACTIONS)
async def test_applied_twice_server_side_nothing_changes(
    real_api: Api,
    namespace: str,  # noqa: F811
    fraction: str,
) -> None:
    body = job("applied", fraction=fraction)
    body["metadata"]["namespace"] = namespace
    first = await real_api.apply(JOBS, body)
    assert resources_of(first) == carrying(FRACTIONS[fraction])
    again = await real_api.apply(JOBS, body, force=False)
    assert again["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
    assert again["spec"] == first["spec"]


async def test_replaced_by_the_file_that_it_was_made_from(real_api: Api, namespace: str) -> None:  # noqa: F811
    made = await real_api.create(JOBS, job("replaced", fraction="auto"), namespace=namespace)
    assert resources_of(made)["limits"] == {names.SHARE_RESOURCE: "50"}
    file = {**made, "metadata": {**made["metadata"], "labels": {"new": "label"}}}
    file["spec"] = {**made["spec"], "template": {**made["spec"]["template"]}}
    pod = file["spec"]["template"]["spec"] = {**made["spec"]["template"]["spec"]}
    pod["containers"] = [{**pod["containers"][0], "resources": {}}]
    changed = await real_api.replace(JOBS, "replaced", file, namespace=namespace)
    assert changed["metadata"]["labels"]["new"] == "label"
    assert changed["spec"]["template"] == made["spec"]["template"]


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def kubectl(namespace: str, kubeconfig: Path, tmp_path: Path) -> Run:  # noqa: F811
    """Run kubectl on an object, by way of a file."""
    program = shutil.which("kubectl") or str(CACHE / "bin" / "kubectl")
    path = tmp_path / "object.yaml"

    def run(body: Json, *words: str) -> subprocess.CompletedProcess[str]:
        path.write_text(yaml.safe_dump(body))
        environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}
        command = [program, "-n", namespace, *words, "-f", str(path)]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)

    return run


@pytest.mark.parametrize("fraction", FRACTIONS)
async def test_kubectl_diff_shows_no_drift(
    real_api: Api,
    namespace: str,  # noqa: F811
    kubectl: Run,
    fraction: str,
) -> None:
    body = job("diffed", fraction=fraction)
    assert kubectl(body, "apply").returncode == 0
    found = resources_of(await real_api.get(JOBS, "diffed", namespace=namespace))
    assert found == carrying(FRACTIONS[fraction])
    for words in DIFFS:
        done = kubectl(body, *words)
        assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
    labelled = {**job("diffed", fraction=fraction), "metadata": {"name": "diffed", "labels": {"a": "b"}}}
    assert kubectl(labelled, "diff").returncode == 1, "a real change is seen"
    assert kubectl(labelled, "apply").returncode == 0


@pytest.mark.parametrize("own", [[], [{"key": "dedicated", "operator": "Exists"}]], ids=["without", "with"])
async def test_a_pod_may_be_applied_again_with_or_without_tolerations_of_its_own(
    real_api: Api,
    namespace: str,  # noqa: F811
    kubectl: Run,
    own: list[Json],
) -> None:
    """Its tolerations are one value of the file, and the API server lets nobody take one away."""
    body = pod("again", fraction="0.25")
    if own:
        body["spec"]["tolerations"] = own
    for _ in range(2):
        done = kubectl(body, "apply")
        assert done.returncode == 0, done.stderr
    made = await real_api.get(PODS, "again", namespace=namespace)
    found = [each for each in made["spec"]["tolerations"] if not each["key"].startswith("node.kubernetes.io/")]
    assert found == (own or [{"key": key, "operator": "Exists"} for key in Defaults().taints])


async def test_what_auto_stands_for_may_change_and_a_job_that_was_made_does_not(
    real_api: Api,
    namespace: str,  # noqa: F811
    kubectl: Run,
) -> None:
    await define(real_api)
    body = job("settled", fraction="auto")
    body["metadata"]["namespace"] = namespace
    first = await real_api.apply(JOBS, body)
    assert resources_of(first) == carrying("50")
    labels = body["spec"]["template"]["metadata"]["labels"]
    share = {
        "apiVersion": GPUSHARES.api_version,
        "kind": GPUSHARES.kind,
        "metadata": {"name": "profiled"},
        "spec": {"selector": {"matchLabels": labels}},
    }
    await real_api.create(GPUSHARES, share, namespace=namespace)
    status = {"status": {"recommendedFraction": "0.3"}}
    await real_api.patch(GPUSHARES, "profiled", status, namespace=namespace, subresource="status")
    async with asyncio.timeout(60):
        share_of_another = "50"
        while share_of_another != "30":  # until admission has heard of it
            made = await real_api.create(JOBS, job("another", fraction="auto"), namespace=namespace)
            share_of_another = resources_of(made)["limits"][names.SHARE_RESOURCE]
            await real_api.delete(JOBS, "another", namespace=namespace)
            await asyncio.sleep(0.2)
    again = await real_api.apply(JOBS, body, force=False)
    assert resources_of(again) == carrying("50")
    assert again["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
    done = kubectl(body, "diff", "--server-side", "--field-manager=gpushare-test")
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


async def test_a_jobset_carries_it_in_each_template(real_api: Api, namespace: str) -> None:  # noqa: F811
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1alpha2", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": "jobsets.jobset.x-k8s.io",
            "annotations": {"api-approved.kubernetes.io": "unapproved, a test's stand-in"},
        },
        "spec": {
            "group": "jobset.x-k8s.io",
            "scope": "Namespaced",
            "names": {"kind": "JobSet", "plural": "jobsets", "singular": "jobset", "listKind": "JobSetList"},
            "versions": [version],
        },
    }
    await real_api.create(DEFINITIONS, definition)
    try:
        replicated = [
            {"name": name, "template": {"spec": job(name, **annotations)["spec"]}}
            for name, annotations in (("gpu", {"fraction": "0.25"}), ("cpu", {}))
        ]
        body = {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": "set"},
            "spec": {"replicatedJobs": replicated},
        }
        refused: str | None = "the server has not heard of it yet"
        async with asyncio.timeout(60):
            while refused is not None:
                refused = await refusal(real_api, namespace, body, JOBSETS)
                await asyncio.sleep(0.2 if refused else 0)
        made = await real_api.get(JOBSETS, "set", namespace=namespace)
        pods = [each["template"]["spec"]["template"]["spec"] for each in made["spec"]["replicatedJobs"]]
        assert [pod["containers"][0].get("resources") for pod in pods] == [SHARE, None]
    finally:
        await real_api.delete(DEFINITIONS, "jobsets.jobset.x-k8s.io")


async def test_a_quota_counts_the_shares_that_admission_sets(real_api: Api, namespace: str) -> None:  # noqa: F811
    hard = {f"requests.{names.SHARE_RESOURCE}": "50"}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "gpus"}, "spec": {"hard": hard}}
    await real_api.create(QUOTAS, quota, namespace=namespace)
    # the part of the quota controller, which does not run here; what is used is counted by the API server itself
    status = {"status": {"hard": hard, "used": dict.fromkeys(hard, "0")}}
    await real_api.patch(QUOTAS, "gpus", status, namespace=namespace, subresource="status")

    async def is_in_force() -> bool:
        refused = await refusal(real_api, namespace, pod("large", fraction="0.75"))
        if refused is None:
            await real_api.delete(PODS, "large", namespace=namespace, grace_seconds=0)
        return refused is not None and "exceeded quota: gpus" in refused

    async with asyncio.timeout(60):
        while not await is_in_force():
            await real_api.patch(QUOTAS, "gpus", status, namespace=namespace, subresource="status")
            await asyncio.sleep(0.2)
    for name in ("first", "second"):
        assert await refusal(real_api, namespace, pod(name, fraction="0.25")) is None
    refused = await refusal(real_api, namespace, pod("third", fraction="0.01"))
    assert refused is not None
    # 6% is the least that a pod of class throughput is charged
    assert f"requested: requests.{names.SHARE_RESOURCE}=6, used: requests.{names.SHARE_RESOURCE}=50" in refused


async def test_a_limit_range_bounds_the_share_of_a_container(real_api: Api, namespace: str) -> None:  # noqa: F811
    none = {names.SHARE_RESOURCE: "0"}  # without a default the maximum would be one, for every container
    limits = [{"type": "Container", "max": {names.SHARE_RESOURCE: "50"}, "default": none, "defaultRequest": none}]
    body = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "gpus"}, "spec": {"limits": limits}}
    await real_api.create(LIMIT_RANGES, body, namespace=namespace)
    refused = None
    async with asyncio.timeout(60):
        while refused is None:  # the plugin keeps a namespace's ranges for some seconds
            refused = await refusal(real_api, namespace, pod("large", fraction="0.75"))
            if refused is None:
                await real_api.delete(PODS, "large", namespace=namespace, grace_seconds=0)
                await asyncio.sleep(0.5)
    assert f"maximum {names.SHARE_RESOURCE} usage per Container is 50, but limit is 75" in refused
    made = [
        (Resource(REGISTRATION, "v1", plural, kind, namespaced=False), item)
        for kind, plural in POLICIES.items()
        for item in rendered("policies/decisions.yaml", {kind})
        if item["metadata"]["name"].endswith("-shares")
    ]
    for resource, item in made:
        await real_api.create(resource, item)
    try:
        await _check_default_of_none(real_api, namespace, none)
    finally:
        for resource, item in made:
            await real_api.delete(resource, item["metadata"]["name"])


async def _check_default_of_none(real_api: Api, namespace: str, none: Json) -> None:  # noqa: F811
    """With the policy against shares by hand in force, the default of none is no share."""
    by_hand = pod("byhand")
    by_hand["spec"]["containers"][0]["resources"] = {"limits": {names.SHARE_RESOURCE: "5"}}
    refused = None
    async with asyncio.timeout(60):
        while refused is None:
            refused = await refusal(real_api, namespace, by_hand)
            if refused is None:
                await real_api.delete(PODS, "byhand", namespace=namespace, grace_seconds=0)
                await asyncio.sleep(0.5)
    assert "leave it out and annotate the pod instead" in refused
    half = await real_api.create(PODS, pod("half", fraction="0.5"), namespace=namespace)
    assert half["spec"]["containers"][0]["resources"]["limits"] == {names.SHARE_RESOURCE: "50"}
    plain = await real_api.create(PODS, pod("plain"), namespace=namespace)
    assert plain["spec"]["containers"][0]["resources"]["limits"] == none
