"""Kueue's own manager counts fractions of pods, Deployments and JobSets, as it does of Jobs (test_kueue.py)."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from devcluster import tools
from installed import lacking
from kueuemanager import PATIENCE_SECONDS, until
from tests.operator.conftest import MakeCertificate
from tests.operator.test_kueue import NAMESPACE, QUOTA_PERCENT, admitted, job, queueing
from tests.operator.test_webhooks_on_api_server import (
    CONFIGURATIONS,
    REGISTRATION,
    WORKLOADS,
    pod,
    rendered,
    workload,
)

from gpushare.core.api import names
from gpushare.kube import PODS, Api, ApiError, NotFound, Resource

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

Json = dict[str, Any]
JOBSETS = Resource("jobset.x-k8s.io", "v1alpha2", "jobsets", "JobSet", namespaced=True)
GATE = {"name": "kueue.x-k8s.io/admission"}
QUEUE = {"kueue.x-k8s.io/queue-name": "gpus"}
MUTATING = CONFIGURATIONS["MutatingWebhookConfiguration"]
POLICIES = {
    kind: Resource(REGISTRATION, "v1", plural, kind, namespaced=False)
    for kind, plural in (
        ("ValidatingAdmissionPolicy", "validatingadmissionpolicies"),
        ("ValidatingAdmissionPolicyBinding", "validatingadmissionpolicybindings"),
    )
}


@pytest.fixture
async def queue(
    tmp_path: Path, free_ports: Callable[[], int], make_certificate: MakeCertificate
) -> AsyncIterator[Api]:
    """A queue of four GPUs for pods, Deployments and JobSets, with the chart's policies in force too."""
    path = tools.built_jobset_definition()
    if path is None:
        lacking("jobset", "no definition of JobSets: hack/cluster test-programs fetches it")
    kinds = ["pod", "deployment", "jobset.x-k8s.io/jobset"]
    jobsets = [yaml.safe_load(path.read_text())]
    controllers = "deployment-controller,replicaset-controller"
    async with queueing(
        kinds, tmp_path, free_ports, make_certificate, definitions=jobsets, controllers=controllers
    ) as api:
        for item in rendered("policies/decisions.yaml", POLICIES):
            await api.create(POLICIES[item["kind"]], item)
        yield api


def queued_pod(name: str, fraction: str, *, urgent: bool = False) -> Json:
    body = pod(name, fraction=fraction)
    body["metadata"]["labels"] |= QUEUE
    if urgent:
        body["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] = "urgent"
    body["spec"]["restartPolicy"] = "Never"
    return body


def jobset(name: str) -> Json:
    """Two workers of a quarter of a GPU each, and one of half a GPU."""
    replicated = [
        {"name": "small", "replicas": 2, "template": {"spec": job("x", "0.25")["spec"]}},
        {"name": "large", "replicas": 1, "template": {"spec": job("x", "0.5")["spec"]}},
    ]
    metadata = {"name": name, "labels": dict(QUEUE)}
    return {
        "apiVersion": JOBSETS.api_version,
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {"suspend": True, "replicatedJobs": replicated},
    }


def _whole(obj: Json) -> Json:
    return obj


def is_held(obj: Json) -> bool:
    return GATE in (obj["spec"].get("schedulingGates") or ())


async def pods(api: Api) -> dict[str, Json]:
    found = (await api.list(PODS, _whole, namespace=NAMESPACE)).items
    return {each["metadata"]["name"]: each for each in found if not each["metadata"].get("deletionTimestamp")}


async def create_when_served(api: Api, resource: Resource, body: Json) -> Json:
    """Kueue's webhooks of this kind may not answer yet."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                return await api.create(resource, body, namespace=NAMESPACE)
            except ApiError as error:
                if "failed calling webhook" not in str(error):
                    raise
                await asyncio.sleep(0.5)


async def let_them_succeed(api: Api) -> None:
    """What a kubelet does with containers that end well, of pods that nothing holds back."""
    done = {"status": {"phase": "Succeeded"}}
    for name, each in (await pods(api)).items():
        if not is_held(each) and each["status"]["phase"] == "Pending":
            with contextlib.suppress(NotFound):  # Kueue took it back since the list
                await api.patch(PODS, name, done, namespace=NAMESPACE, subresource="status")


async def test_plain_pods_wait_are_admitted_by_fraction_and_give_way_to_an_urgent_one(queue: Api) -> None:
    for at in range(10):
        made = await create_when_served(queue, PODS, queued_pod(f"half-{at}", "0.5"))
        assert is_held(made), "Kueue holds it back"
        assert made["spec"]["containers"][0]["resources"]["limits"] == {names.SHARE_RESOURCE: "50"}

    async def free_to_go() -> list[Json] | None:
        assert sum((await admitted(queue)).values()) <= QUOTA_PERCENT
        found = [each for each in (await pods(queue)).values() if not is_held(each)]
        return found if len(found) == QUOTA_PERCENT // 50 else None

    for each in await until("eight halves are let go", free_to_go):
        assert each["spec"]["schedulerName"] == names.SCHEDULER_NAME, "they go to our scheduler"
        assert each["spec"]["containers"][0]["resources"]["limits"] == {names.SHARE_RESOURCE: "50"}
    assert len(await pods(queue)) == 10
    await queue.create(PODS, queued_pod("urgent", "3", urgent=True), namespace=NAMESPACE)

    async def urgent_goes() -> bool:
        found = await pods(queue)
        assert sum((await admitted(queue)).values()) <= QUOTA_PERCENT
        return not is_held(found["urgent"])

    await until("the urgent pod takes three of four GPUs", urgent_goes)
    assert len(await pods(queue)) <= 5, "six halves are gone: Kueue deletes plain pods that it preempts"

    async def all_done() -> bool:
        await let_them_succeed(queue)
        return {each["status"]["phase"] for each in (await pods(queue)).values()} == {"Succeeded"}

    await until("those that are left go and end", all_done)
    await _the_other_order_of_webhooks(queue)


async def _the_other_order_of_webhooks(queue: Api) -> None:
    """The API server calls configurations by their names: now Kueue's before ours."""
    found = (await queue.list(MUTATING, _whole)).items
    (theirs,) = [each for each in found if any(one["name"] == "mpod.kb.io" for one in each["webhooks"])]
    (ours,) = [each for each in found if any(one["name"] == "pods.mutate.gpushare.io" for one in each["webhooks"])]
    first = "a-kueue"
    assert first < ours["metadata"]["name"] < theirs["metadata"]["name"]
    numbers = itertools.count()

    async def made_with_gate(*, gate: bool) -> Json | None:
        """A new pod, as soon as the API server heeds what was changed."""
        name = f"reversed-{next(numbers)}"
        made = await queue.create(PODS, queued_pod(name, "0.5"), namespace=NAMESPACE)
        if is_held(made) is gate:
            return made
        await queue.delete(PODS, name, namespace=NAMESPACE, grace_seconds=0)
        return None

    await queue.delete(MUTATING, theirs["metadata"]["name"])
    ungated = await until("Kueue is not asked", partial(made_with_gate, gate=False))
    await queue.delete(PODS, ungated["metadata"]["name"], namespace=NAMESPACE, grace_seconds=0)
    body = {"apiVersion": MUTATING.api_version, "kind": MUTATING.kind, "metadata": {"name": first}}
    await queue.create(MUTATING, {**body, "webhooks": theirs["webhooks"]})
    made = await until("Kueue is asked first", partial(made_with_gate, gate=True))
    assert made["spec"]["containers"][0]["resources"]["limits"] == {names.SHARE_RESOURCE: "50"}

    async def goes() -> bool:
        return not is_held((await pods(queue))[made["metadata"]["name"]])

    await until("it is let go", goes)


async def test_pods_of_a_deployment_are_let_go_one_by_one(queue: Api) -> None:
    body = workload("Deployment", fraction="0.5")
    body["metadata"] = {"name": "web", "labels": dict(QUEUE)}
    body["spec"]["replicas"] = 10
    made = await create_when_served(queue, WORKLOADS["Deployment"], body)
    assert not made["spec"]["template"]["spec"]["containers"][0].get("resources"), "its template is not touched"

    async def full() -> bool:
        found = await pods(queue)
        assert sum((await admitted(queue)).values()) <= QUOTA_PERCENT
        limits = [each["spec"]["containers"][0]["resources"]["limits"] for each in found.values()]
        assert all(limit == {names.SHARE_RESOURCE: "50"} for limit in limits)
        return (len(found), sum(map(is_held, found.values()))) == (10, 2)

    await until("eight of ten are let go", full)


async def test_jobsets_are_admitted_by_the_sum_of_their_fractions(queue: Api) -> None:
    for at in range(5):
        made = await create_when_served(queue, JOBSETS, jobset(f"set-{at}"))
        templates = [each["template"]["spec"]["template"]["spec"] for each in made["spec"]["replicatedJobs"]]
        shares = [each["containers"][0]["resources"]["limits"][names.SHARE_RESOURCE] for each in templates]
        assert (shares, made["spec"]["suspend"]) == (["25", "50"], True)

    async def started() -> list[str]:
        found = (await queue.list(JOBSETS, _whole, namespace=NAMESPACE)).items
        return [each["metadata"]["name"] for each in found if not each["spec"].get("suspend")]

    async def four_run() -> list[str] | None:
        found = await admitted(queue)
        assert sum(found.values()) <= QUOTA_PERCENT
        names_of = await started()
        return names_of if set(found.values()) == {100} and len(names_of) == 4 else None

    running = await until("four JobSets of a whole GPU in sum are started", four_run)
    (waiting,) = {f"set-{at}" for at in range(5)} - set(running)
    ended = {"type": "Completed", "status": "True", "reason": "x", "message": "x"}
    ended["lastTransitionTime"] = "2026-11-23T00:00:00Z"
    await queue.patch(
        JOBSETS, running[0], {"status": {"conditions": [ended]}}, namespace=NAMESPACE, subresource="status"
    )

    async def the_fifth_runs() -> bool:
        assert sum((await admitted(queue)).values()) <= QUOTA_PERCENT
        return waiting in await started()

    await until("the fifth is started once one has ended", the_fifth_runs)
