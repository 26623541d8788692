"""Kueue's own manager counts fractions: annotated Jobs wait for quota, are admitted, preempted, and all end.

A real API server of its own, the Job controller, our admission server and Kueue's manager run as processes. The
test is the kubelet: it lets pods succeed.
"""

import asyncio
import base64
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import yaml
from devcluster import tools
from installed import lacking
from tests.operator.conftest import CACHE, DEFINITIONS, ApiServer, MakeCertificate
from tests.operator.test_templates_on_api_server import DIFFS
from tests.operator.test_webhooks_on_api_server import CONFIGURATIONS, WORKLOADS, Server, rendered

from gpushare.core.api import names
from gpushare.kube import NAMESPACES, PODS, Api, ApiError, NotFound, Resource, connect

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

Json = dict[str, Any]
JOBS = WORKLOADS["Job"]
NAMESPACE = "research"
QUOTA_PERCENT = 400
PATIENCE_SECONDS = 240.0
KUEUE_WEBHOOKS = {
    "": ("-kueue-x-k8s-io-v1beta1-",),
    "batch/job": ("/mutate-batch-v1-job", "/validate-batch-v1-job"),
    "pod": ("/mutate--v1-pod", "/validate--v1-pod"),
    "deployment": ("-apps-v1-deployment",),
    "jobset.x-k8s.io/jobset": ("-jobset-x-k8s-io-v1alpha2-jobset",),
}


def kueue_resource(plural: str, kind: str, *, namespaced: bool = False) -> Resource:
    return Resource("kueue.x-k8s.io", "v1beta1", plural, kind, namespaced)


FLAVORS = kueue_resource("resourceflavors", "ResourceFlavor")
CLUSTER_QUEUES = kueue_resource("clusterqueues", "ClusterQueue")
LOCAL_QUEUES = kueue_resource("localqueues", "LocalQueue", namespaced=True)
QUEUED = kueue_resource("workloads", "Workload", namespaced=True)
PRIORITIES = kueue_resource("workloadpriorityclasses", "WorkloadPriorityClass")


class Processes:
    """Programs beside the API server; each writes a log, and all end with the test."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, command: list[str]) -> None:
        with (self._work / f"{name}.log").open("wb") as output:
            self._running.append(subprocess.Popen(command, stdout=output, stderr=output, cwd="/"))

    def close(self) -> None:
        for process in reversed(self._running):
            process.send_signal(signal.SIGKILL)
            process.wait(timeout=30)

    def check(self) -> None:
        """Fail at once where one has ended."""
        assert all(process.poll() is None for process in self._running), "a program has ended"

    def words(self) -> str:
        """The last of what each said, for a failure."""
        return "\n".join(
            f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in self._work.glob("*.log")
        )


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
    kueue, etcd, kube = tools.built_kueue(), shutil.which("etcd"), CACHE / "bin" / "kubectl"
    if kueue is None:
        lacking("kueue", "no Kueue: hack/cluster test-programs builds it")
    if etcd is None or not kube.exists():
        pytest.skip("no etcd or kube-apiserver: hack/cluster up builds them")
    if os.geteuid() != 0:
        pytest.skip("Kueue needs an /etc of its own, which takes root")
    server = ApiServer(etcd, kube.resolve(), tmp_path)
    ours_port, kueue_port = free_ports(), free_ports()
    bundle = base64.b64encode(make_certificate(tmp_path / "certificates")).decode()
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
            kueues = [yaml.safe_load(path.read_text()) for path in sorted((kueue / "crds").glob("*.yaml"))]
            for definition in (*kueues, *definitions):
                await api.create(DEFINITIONS, definition)
            await _served(api, (*kueues, *definitions))
            paths = [path for name in ("", *frameworks) for path in KUEUE_WEBHOOKS[name]]
            await _intercept(api, kueue, bundle, ours_port, kueue_port, paths)
            settings = tmp_path / "kueue.yaml"
            settings.write_text(yaml.safe_dump(_settings(tmp_path / "certificates", kueue_port, frameworks)))
            kubeconfig = f"--kubeconfig={server.kubeconfig}"
            # Kueue reads its metrics' certificate from /etc whatever its settings say: it gets an /etc of its own.
            there = "/etc/kueue/metrics/certs"
            own = f"mount -t tmpfs none /etc && mkdir -p {there} && cp {tmp_path}/certificates/tls.* {there}"
            gates = "--feature-gates=VisibilityOnDemand=false"  # its server wants certificates too
            command = f"{own} && exec {kueue}/kueue --config={settings} {gates} {kubeconfig}"
            processes.start("kueue", ["unshare", "--mount", "sh", "-c", command])
            try:
                await _make_queue(api, processes)
                yield api
            except (TimeoutError, AssertionError) as error:
                raise AssertionError(f"{error!r}\n{processes.words()}") from error
    finally:
        processes.close()
        admission.stop()
        server.close()


async def _served(api: Api, definitions: Collection[Json]) -> None:
    """Wait until discovery lists every kind: Kueue looks once, at its start, and ends where one is missing."""
    wanted = {
        (spec["group"], version["name"], spec["names"]["plural"])
        for spec in (each["spec"] for each in definitions)
        for version in spec["versions"]
        if version["served"]
    }
    async with asyncio.timeout(PATIENCE_SECONDS):
        while wanted:
            for group, version in {each[:2] for each in wanted}:
                with contextlib.suppress(ApiError):
                    listed = await api._call("GET", f"/apis/{group}/{version}")
                    wanted -= {(group, version, each["name"]) for each in listed["resources"]}
            await asyncio.sleep(0.1)


def _settings(certificates: Path, port: int, frameworks: list[str]) -> Json:
    return {
        "apiVersion": "config.kueue.x-k8s.io/v1beta1",
        "kind": "Configuration",
        "namespace": "kueue-system",
        "health": {"healthProbeBindAddress": "0"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": "127.0.0.1", "port": port, "certDir": str(certificates)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "clientConnection": {"qps": 200, "burst": 400},
        "integrations": {"frameworks": frameworks},
    }


async def _intercept(
    api: Api, kueue: Path, bundle: str, ours_port: int, kueue_port: int, paths: list[str]
) -> None:
    """Put our webhooks and Kueue's of these paths in force, each at its process."""
    theirs = [each for each in yaml.safe_load_all((kueue / "webhooks.yaml").read_text()) if each]
    for configurations, port in ((rendered(), ours_port), (theirs, kueue_port)):
        for item in configurations:
            kept = []
            for webhook in item["webhooks"]:
                path = webhook["clientConfig"]["service"]["path"]
                if port == kueue_port and not any(part in path for part in paths):
                    continue
                webhook["clientConfig"] = {"url": f"https://127.0.0.1:{port}{path}", "caBundle": bundle}
                kept.append(webhook)
            await api.create(CONFIGURATIONS[item["kind"]], {**item, "webhooks": kept})


async def _make_queue(api: Api, processes: Processes) -> None:
    def body(resource: Resource, name: str, **more: Any) -> Json:
        return {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": {"name": name}, **more}

    resources = [{"name": names.SHARE_RESOURCE, "nominalQuota": QUOTA_PERCENT}]
    group = {"coveredResources": [names.SHARE_RESOURCE], "flavors": [{"name": "gpus", "resources": resources}]}
    spec = {
        "namespaceSelector": {},
        "preemption": {"withinClusterQueue": "LowerPriority"},
        "resourceGroups": [group],
    }
    await api.create(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    await _once_ready(processes, api, FLAVORS, body(FLAVORS, "gpus", spec={}))
    await _once_ready(processes, api, CLUSTER_QUEUES, body(CLUSTER_QUEUES, "gpus", spec=spec))
    await _once_ready(processes, api, PRIORITIES, body(PRIORITIES, "urgent", value=1000, description="x"))
    await _once_ready(
        processes, api, LOCAL_QUEUES, body(LOCAL_QUEUES, "gpus", spec={"clusterQueue": "gpus"}), NAMESPACE
    )


async def _once_ready(
    processes: Processes, api: Api, resource: Resource, body: Json, namespace: str | None = None
) -> None:
    """Create as soon as definitions are served and Kueue's webhooks answer."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                await api.create(resource, body, namespace=namespace)
            except ApiError as error:
                processes.check()
                if error.reason == "AlreadyExists":
                    return
                await asyncio.sleep(0.5)
            else:
                return


def job(name: str, fraction: str, *, pods: int = 1, urgent: bool = False) -> Json:
    labels = {"kueue.x-k8s.io/queue-name": "gpus"}
    if urgent:
        labels["kueue.x-k8s.io/priority-class"] = "urgent"
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
    """Percents that Kueue has reserved, by Job; what pods that have ended held is free again."""
    found = {}
    for workload in (await api.list(QUEUED, _whole, namespace=NAMESPACE)).items:
        status = workload.get("status") or {}
        conditions = {each["type"]: each["status"] for each in status.get("conditions") or ()}
        if status.get("admission") is None or conditions.get("Finished") == "True":
            continue
        ended = {each["name"]: each["count"] for each in status.get("reclaimablePods") or ()}
        owner = workload["metadata"]["ownerReferences"][0]["name"]
        found[owner] = sum(
            int((each.get("resourceUsage") or {}).get(names.SHARE_RESOURCE, 0))
            * (each["count"] - ended.get(each["name"], 0))
            // max(each["count"], 1)
            for each in status["admission"]["podSetAssignments"]
        )
    return found


async def until(what: str, check: Callable[[], Any]) -> Any:
    """Poll until a check answers something true."""
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not (found := await check()):  # noqa: ASYNC110 - the API server tells no event of this
                await asyncio.sleep(0.3)
            return found
    except TimeoutError:
        raise AssertionError(f"{what}: not within {PATIENCE_SECONDS:.0f} s") from None


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


async def assert_no_drift(work: Path, body: Json) -> None:
    for words in DIFFS:
        done = await kubectl(work, body, *words)
        assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


async def test_jobs_are_admitted_by_fraction_preempted_by_priority_and_never_past_quota(
    queue: Api, tmp_path: Path
) -> None:
    """One of them is kept in a file: kubectl sees no drift while Kueue holds it, lets it run and has it done."""
    filed = job("filed", "0.25", pods=2)
    applied = await kubectl(tmp_path, filed, "apply")
    assert applied.returncode == 0, applied.stderr
    await assert_no_drift(tmp_path, filed)
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
    await assert_no_drift(tmp_path, filed)
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
    await assert_no_drift(tmp_path, filed)
