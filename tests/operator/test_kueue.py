"""Kueue's own manager counts fractions: annotated Jobs wait for quota, are admitted, preempted, and all end.

A real API server of its own, the Job controller, our admission server and Kueue's manager run as processes. The
test is the kubelet: it lets pods succeed.
"""

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path
from typing import Any

import kueuemanager
import pytest
import yaml
from kueuemanager import Processes, until
from tests.operator.conftest import CACHE, ApiServer, MakeCertificate
from tests.operator.test_webhooks_on_api_server import WORKLOADS, Server, rendered

from gpushare.core.api import names
from gpushare.kube import NAMESPACES, PODS, Api, NotFound, connect

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

Json = dict[str, Any]
JOBS = WORKLOADS["Job"]
NAMESPACE = "research"
QUOTA_PERCENT = 400


@pytest.fixture
async def queue(
    tmp_path: Path, free_ports: Callable[[], int], make_certificate: MakeCertificate
) -> AsyncIterator[Api]:
    """An API server with our admission, the Job controller and Kueue, and a queue of four GPUs."""
    async with queueing(["batch/job"], tmp_path, free_ports, make_certificate) as api:
        yield api


@contextlib.asynccontextmanager
async def queueing(
    frameworks: list[str],
    tmp_path: Path,
    free_ports: Callable[[], int],
    make_certificate: MakeCertificate,
    *,
    definitions: Collection[Json] = (),
    controllers: str = "job-controller",
) -> AsyncIterator[Api]:
    """The same, where Kueue manages these kinds, of which some need a definition, and these controllers run."""
    kueue, etcd, kube = kueuemanager.built(), shutil.which("etcd"), CACHE / "bin" / "kubectl"
    if etcd is None or not kube.exists():
        pytest.skip("no etcd or kube-apiserver: hack/cluster up builds them")
    if os.geteuid() != 0:
        pytest.skip("Kueue needs an /etc of its own, which takes root")
    server = ApiServer(etcd, kube.resolve(), tmp_path)
    ours_port, kueue_port = free_ports(), free_ports()
    certificate = make_certificate(tmp_path / "certificates")
    admission = Server(tmp_path / "certificates", ours_port, server.kubeconfig)
    processes = Processes(tmp_path)
    try:
        server.start()
        await admission.start()
        options = [f"--controllers={controllers}", "--leader-elect=false", f"--kubeconfig={server.kubeconfig}"]
        processes.start(
            "controllers", [str(kube.resolve()), "kube-controller-manager", *options, "--secure-port=0"]
        )
        async with connect(server.kubeconfig) as api:
            await kueuemanager.define(api, [*kueuemanager.definitions(kueue), *definitions])
            await kueuemanager.intercept(api, rendered(), certificate, ours_port)
            theirs = kueuemanager.webhooks(kueue, frameworks)
            await kueuemanager.intercept(api, theirs, certificate, kueue_port)
            kueuemanager.start_manager(processes, kueue, tmp_path, server.kubeconfig, kueue_port, frameworks)
            try:
                body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
                await api.create(NAMESPACES, body)
                await kueuemanager.make_queue(api, processes, NAMESPACE, QUOTA_PERCENT)
                yield api
            except (TimeoutError, AssertionError) as error:
                raise AssertionError(f"{error!r}\n{processes.words()}") from error
    finally:
        processes.close()
        admission.stop()
        server.close()


def job(name: str, fraction: str, *, pods: int = 1, urgent: bool = False) -> Json:
    labels = {kueuemanager.QUEUE_LABEL: kueuemanager.QUEUE}
    if urgent:
        labels[kueuemanager.PRIORITY_LABEL] = kueuemanager.URGENT
    template = {
        "metadata": {"annotations": {names.FRACTION: fraction}},
        "spec": {"restartPolicy": "Never", "containers": [{"name": "main", "image": "none"}]},
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels},
        "spec": {"parallelism": pods, "completions": pods, "template": template},
    }


def _whole(obj: Json) -> Json:
    return obj


async def admitted(api: Api) -> dict[str, int]:
    """Percents that Kueue has reserved, by Job."""
    return await kueuemanager.admitted(api, NAMESPACE)


async def let_pods_succeed(api: Api) -> None:
    """What a kubelet does with a container that ends well."""
    for pod in (await api.list(PODS, _whole, namespace=NAMESPACE)).items:
        if (pod.get("status") or {}).get("phase") == "Pending":
            done = {"status": {"phase": "Succeeded"}}
            with contextlib.suppress(NotFound):  # its Job was suspended since the list
                await api.patch(PODS, pod["metadata"]["name"], done, namespace=NAMESPACE, subresource="status")


async def kubectl(work: Path, body: Json, *words: str) -> subprocess.CompletedProcess[str]:
    """What kubectl says of an object's file to the API server whose files are in `work`."""
    path = work / "object.yaml"
    path.write_text(yaml.safe_dump(body))
    program = shutil.which("kubectl") or str(CACHE / "bin" / "kubectl")
    command = [program, f"--kubeconfig={work / 'kubeconfig'}", "-n", NAMESPACE, *words, "-f", str(path)]
    return await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=240, check=False
    )


async def assert_no_drift(api: Api, work: Path, body: Json) -> None:
    async def compare(*words: str) -> tuple[int, str]:
        done = await kubectl(work, body, *words)
        return done.returncode, done.stdout + done.stderr

    async def versions() -> list[str]:
        found = await api.get(JOBS, body["metadata"]["name"], namespace=NAMESPACE)
        return [found["metadata"]["resourceVersion"]]

    await kueuemanager.assert_no_drift(compare, versions)


async def test_jobs_are_admitted_by_fraction_preempted_by_priority_and_never_past_quota(
    queue: Api, tmp_path: Path
) -> None:
    """One of them is kept in a file: kubectl sees no drift while Kueue holds it, lets it run and has it done."""
    filed = job("filed", "0.25", pods=2)
    applied = await kubectl(tmp_path, filed, "apply")
    assert applied.returncode == 0, applied.stderr
    await assert_no_drift(queue, tmp_path, filed)
    jobs = [job(f"quarter-{at:03}", "0.25", pods=2) for at in range(int(os.environ.get("KUEUE_JOBS", "24")))]
    for each in jobs:
        made = await queue.create(JOBS, each, namespace=NAMESPACE)
        assert made["spec"]["suspend"] is True, "Kueue holds it back"
        resources = made["spec"]["template"]["spec"]["containers"][0]["resources"]
        assert resources["limits"] == {names.SHARE_RESOURCE: "25"}, "what Kueue reads carries the share"

    async def is_full() -> dict[str, int] | None:
        found = await admitted(queue)
        assert sum(found.values()) <= QUOTA_PERCENT
        return found if sum(found.values()) == QUOTA_PERCENT else None

    full = await until("four GPUs are given away", is_full)
    assert set(full.values()) == {50}, "two pods of a quarter each"
    assert "filed" in full, "it came first"
    await assert_no_drift(queue, tmp_path, filed)
    changed = {**filed, "metadata": {**filed["metadata"], "labels": {**filed["metadata"]["labels"], "a": "b"}}}
    assert (await kubectl(tmp_path, changed, "diff")).returncode == 1, "a real change is seen"

    await queue.create(JOBS, job("urgent", "3", urgent=True), namespace=NAMESPACE)

    async def has_preempted() -> bool:
        found = await admitted(queue)
        assert sum(found.values()) <= QUOTA_PERCENT
        return found.get("urgent") == 300

    await until("the urgent Job takes three of four GPUs", has_preempted)
    suspended = [
        each["metadata"]["name"]
        for each in (await queue.list(JOBS, _whole, namespace=NAMESPACE)).items
        if each["metadata"]["name"] in full and each["spec"]["suspend"]
    ]
    assert len(suspended) >= 6, "those of lower priority wait again"

    async def all_done() -> bool:
        assert sum((await admitted(queue)).values()) <= QUOTA_PERCENT
        await let_pods_succeed(queue)
        listed = (await queue.list(JOBS, _whole, namespace=NAMESPACE)).items
        done = [
            each["metadata"]["name"]
            for each in listed
            if any(
                c["type"] == "Complete" and c["status"] == "True" for c in each["status"].get("conditions") or ()
            )
        ]
        return len(done) == len(jobs) + 2

    await until("every Job ends", all_done)
    await assert_no_drift(queue, tmp_path, filed)
