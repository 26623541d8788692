"""Kueue's own manager on the cluster: annotated Jobs wait for quota, run by fraction, and are preempted.

Pods end at once, but for one test that gives them a grace period. Kueue runs beside the cluster, not in it. Its
webhooks are asked about the test's namespace alone, and nothing of Kueue is left after a test. GPUSHARE_KUEUE_JOBS
says how many Jobs wait.
"""

import asyncio
import contextlib
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import kueuemanager
import pytest
from certificates import make_pair
from devcluster.loopback import unused_port
from kueuemanager import CONFIGURATIONS, DEFINITIONS, QUEUED, Processes, reserved_percent, until
from livecluster import H200_SM_COUNT, IDLE, Cluster, Namespace, decided

from gpushare.core.api import names
from gpushare.kube import CONFIGMAPS, PODS, Api, Resource, Retryable, connect

JOB_COUNT = int(os.environ.get("GPUSHARE_KUEUE_JOBS", "12"))
PATIENCE_SECONDS = 300.0 + 10.0 * JOB_COUNT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600 + 2 * PATIENCE_SECONDS)]

Json = dict[str, Any]
JOBS = Resource("batch", "v1", "jobs", "Job", namespaced=True)
FRAMEWORKS = ("batch/job",)
QUOTA_PERCENT = 150  # of two GPUs
QUOTA, OF_JOB = "quota", "batch.kubernetes.io/job-name"
FRACTIONS = ("0.1", "0.25", "0.5")
TICKS = 4  # seconds of work on the GPU, in ticks of the twin
SETTING = "length"  # a ConfigMap; without it a Job that reads it goes on until it is ended
# A CUDA program that ends by itself, well only where it got on the GPU; its last words become the pod's status.
PROGRAM = """
import os
from pathlib import Path
from gpushare.twin.contention import WORKLOADS
from gpushare.twin.mps.client import TwinContext
context = TwinContext(os.environ, WORKLOADS["montecarlo-fp32"])
context.allocate(64)
for _ in range(int(os.environ.get("TICKS") or 1_000_000)):
    context.tick(60.0)
Path("/dev/termination-log").write_text(f"{context.attached.gpu_uuid} {context.attached.sm_count}")
context.close()
"""
# Before that, in a pod with a grace period: asked to end, it goes on for a while, and has not done its work.
GRACE_SECONDS = 20
LINGER_SECONDS = 15.0  # Kueue lets the next Job go within a second or two, on a busy machine within several
LINGERING = f"""
import signal, sys, time
def end(*_):
    time.sleep({LINGER_SECONDS})
    sys.exit(3)
signal.signal(signal.SIGTERM, end)
"""


class Watched:
    """Objects of one kind in a namespace through every state that the API server gave them, in its order.

    Attributes:
        peaks: the most percents that the objects of one moment took, of the quota and of each GPU.
    """

    def __init__(
        self, api: Api, resource: Resource, namespace: str, percent: Callable[[Json], Mapping[str, int]]
    ) -> None:
        self.objects: dict[str, Json] = {}
        self.history: list[Json] = []
        self.peaks: Counter[str] = Counter()
        self._api, self._resource, self._namespace, self._percent = api, resource, namespace, percent

    async def __aenter__(self) -> Self:
        listing = await self._api.list(self._resource, lambda obj: obj, namespace=self._namespace)
        assert not listing.items, "nothing came before the watch"
        self._task = asyncio.create_task(self._follow(listing.resource_version))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _follow(self, version: str) -> None:
        while True:
            with contextlib.suppress(Retryable):  # the next watch begins where this one broke off
                async for event in self._api.watch(
                    self._resource, resource_version=version, namespace=self._namespace
                ):
                    version = event.object["metadata"]["resourceVersion"]
                    if event.type != "BOOKMARK":
                        self._take(event.type, event.object)
            await asyncio.sleep(0.1)

    def _take(self, kind: str, obj: Json) -> None:
        uid = obj["metadata"]["uid"]
        self.history.append(obj)
        if kind == "DELETED":
            self.objects.pop(uid, None)
        else:
            self.objects[uid] = obj
        taken: Counter[str] = Counter()
        for each in self.objects.values():
            taken.update(self._percent(each))
        self.peaks |= taken

    @property
    def peak_percent(self) -> int:
        """The most that was taken of the quota."""
        return self.peaks[QUOTA]

    def check(self) -> None:
        """Fail where the watch has ended: moments would be missed."""
        if self._task.done():
            self._task.result()


class Stage:
    """A namespace with Kueue's queue, and a watch of its pods, Jobs and Workloads."""

    def __init__(self, api: Api, space: Namespace, processes: Processes, work: Path) -> None:
        self.api, self.space = api, space
        self.let_go = Watched(api, PODS, space.name, taken_by)
        self.reserved = Watched(api, QUEUED, space.name, lambda workload: {QUOTA: reserved_percent(workload)})
        self.jobs = Watched(api, JOBS, space.name, lambda _: {})
        self.has_grace = False
        self._processes, self._file = processes, work / "jobs.json"

    def check(self) -> None:
        """Never was a GPU given beyond 100%, or the quota passed: not by what Kueue reserved, not by pods let go.

        Of pods with a grace period, those that are ending may pass the quota.
        """
        self._processes.check()
        for watched in (self.let_go, self.reserved, self.jobs):
            watched.check()
        assert self.reserved.peak_percent <= QUOTA_PERCENT
        seen = [describe(pod) for pod in self.let_go.history]
        assert all(peak <= 100 for at, peak in self.let_go.peaks.items() if at != QUOTA), seen
        assert self.has_grace or self.let_go.peak_percent <= QUOTA_PERCENT, seen

    async def until(self, what: str, check: Callable[[], bool]) -> None:
        async def holds() -> bool:
            self.check()
            return check()

        try:
            await until(what, holds, seconds=PATIENCE_SECONDS)
        except AssertionError as error:
            pods = "\n".join(map(describe, self.let_go.objects.values()))
            raise AssertionError(f"{error}\n{pods}\n{self._processes.words()}") from error

    async def kubectl(self, *words: str) -> tuple[int, str]:
        """Return the exit status and the words of kubectl about the file of Jobs."""
        command = (*words, "-f", str(self._file))
        done = await asyncio.to_thread(
            self.space.cluster.try_kubectl, "-n", self.space.name, *command, seconds=PATIENCE_SECONDS
        )
        return done.code, done.out + done.err

    async def apply(self, jobs: list[Json]) -> None:
        self._file.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": jobs}))
        code, words = await self.kubectl("apply")
        assert code == 0, words

    async def assert_no_drift(self) -> None:
        async def versions() -> list[str]:
            found = await self.api.list(JOBS, lambda job: job["metadata"], namespace=self.space.name)
            return sorted(each["resourceVersion"] for each in found.items)

        await kueuemanager.assert_no_drift(self.kubectl, versions)

    def suspended(self, name: str) -> list[bool]:
        """Whether Kueue held a Job back, as it was time after time."""
        found = [bool(each["spec"].get("suspend")) for each in self.jobs.history if name_of(each) == name]
        return [now for at, now in enumerate(found) if at == 0 or now != found[at - 1]]

    def pods_of(self, job: str) -> list[Json]:
        """Return each pod of a Job as it was last, the oldest first."""
        found = {
            pod["metadata"]["uid"]: pod
            for pod in self.let_go.history
            if pod["metadata"]["labels"].get(OF_JOB) == job
        }
        return list(found.values())

    def completed(self) -> set[str]:
        return {
            name_of(job)
            for job in self.jobs.objects.values()
            for each in (job.get("status") or {}).get("conditions") or ()
            if (each["type"], each["status"]) == ("Complete", "True")
        }


def name_of(obj: Json) -> str:
    return str(obj["metadata"]["name"])


def taken_by(pod: Json) -> dict[str, int]:
    """Return what a pod takes until it has ended: of the quota, if it is a Job's, and of the GPU that it has."""
    percent, metadata = share_percent(pod), pod["metadata"]
    gpu = metadata["annotations"].get(names.GPU) if pod["spec"].get("nodeName") else None
    found = {gpu: percent} if gpu is not None else {}
    return found | ({QUOTA: percent} if OF_JOB in metadata["labels"] else {})


def share_percent(pod: Json) -> int:
    """Return the share of a pod until it has ended, bound or not."""
    if pod["status"].get("phase") in {"Succeeded", "Failed"}:
        return 0
    return sum(int(each["resources"]["limits"][names.SHARE_RESOURCE]) for each in pod["spec"]["containers"])


def describe(pod: Json) -> str:
    metadata, status = pod["metadata"], pod["status"]
    conditions = {each["type"]: each["status"] for each in status.get("conditions") or ()}
    return (
        f"{metadata['name']} {share_percent(pod)} {status.get('phase')} {conditions} {metadata['resourceVersion']}"
    )


def queued(
    space: Namespace,
    name: str,
    fraction: str,
    *,
    is_urgent: bool = False,
    reads_length: bool = False,
    grace_seconds: int = 0,
) -> Json:
    """A Job of one such program."""
    program = LINGERING + PROGRAM if grace_seconds else PROGRAM
    pod = space.tenant(name, fraction, command=["python", "-c", program])
    pod["spec"]["terminationGracePeriodSeconds"] = grace_seconds
    (container,) = pod["spec"]["containers"]
    reference = {"name": SETTING, "key": "ticks", "optional": True}
    ticks = {"valueFrom": {"configMapKeyRef": reference}} if reads_length else {"value": str(TICKS)}
    container["env"] = [{"name": "TICKS", **ticks}]
    labels = {kueuemanager.QUEUE_LABEL: kueuemanager.QUEUE}
    if is_urgent:
        labels[kueuemanager.PRIORITY_LABEL] = kueuemanager.URGENT
    template = {"metadata": {"annotations": pod["metadata"]["annotations"]}, "spec": pod["spec"]}
    return {
        "apiVersion": JOBS.api_version,
        "kind": JOBS.kind,
        "metadata": {"name": name, "labels": labels},
        "spec": {"template": template},
    }


async def webhooks_of(api: Api) -> set[str]:
    return {name_of(each) for kind in CONFIGURATIONS.values() for each in (await api.list(kind, dict)).items}


@pytest.fixture
async def stage(cluster: Cluster, space: Namespace, tmp_path: Path) -> AsyncIterator[Stage]:
    """A held queue; afterwards nothing of Kueue is left, however the test ended."""
    kueue = kueuemanager.built()
    if cluster.backend != "local":
        pytest.skip("the API server of another cluster reaches no webhook on this machine's loopback")
    certificate, port, processes = make_pair(tmp_path / "certificates"), unused_port(), Processes(tmp_path)
    async with connect(cluster.kubeconfig) as api:
        await kueuemanager.remove(api, kueue)  # of a run that was killed
        before = await webhooks_of(api)
        try:
            await kueuemanager.define(api, kueuemanager.definitions(kueue))
            theirs = kueuemanager.webhooks(kueue, FRAMEWORKS, namespace=space.name)
            await kueuemanager.intercept(api, theirs, certificate, port)
            kubeconfig = Path(cluster.kubeconfig)
            kueuemanager.start_manager(processes, kueue, tmp_path, kubeconfig, port, FRAMEWORKS)
            await kueuemanager.make_queue(api, processes, space.name, QUOTA_PERCENT, is_held=True)
            staged = Stage(api, space, processes, tmp_path)
            async with staged.let_go, staged.reserved, staged.jobs:
                yield staged
        finally:
            processes.close()
            await kueuemanager.remove(api, kueue)
            left = "jobs", "--all", "--ignore-not-found"
            await asyncio.to_thread(cluster.try_kubectl, "-n", space.name, "delete", *left)
        assert await webhooks_of(api) == before
        found = (await api.list(DEFINITIONS, name_of)).items
        assert not [each for each in found if each.endswith(".kueue.x-k8s.io")]


async def test_annotated_jobs_wait_run_by_fraction_never_past_quota_and_all_complete(stage: Stage) -> None:
    fractions = {f"job-{at:03}": FRACTIONS[at % len(FRACTIONS)] for at in range(JOB_COUNT)}
    await stage.apply([queued(stage.space, name, fraction) for name, fraction in fractions.items()])
    await stage.until("every Job is seen", lambda: len(stage.jobs.objects) == JOB_COUNT)
    assert all(job["spec"]["suspend"] for job in stage.jobs.objects.values()), "Kueue holds them back"
    assert not stage.let_go.history, "no pod before the quota"
    await stage.assert_no_drift()

    await kueuemanager.release(stage.api)
    await stage.until("every Job has completed", lambda: stage.completed() == set(fractions))
    await stage.assert_no_drift()
    assert stage.let_go.peak_percent > QUOTA_PERCENT - 50, "whoever fits is let go"
    for name, fraction in fractions.items():
        assert stage.suspended(name) == [True, False]
        assert_ran(stage.pods_of(name)[-1], round(100 * float(fraction)))


@pytest.mark.parametrize("grace_seconds", [0, GRACE_SECONDS])
async def test_a_preempted_job_is_suspended_comes_again_and_completes(stage: Stage, grace_seconds: int) -> None:
    """One whole GPU each of one and a half: only one of the two can run, on the one GPU that the queue has left.

    Kueue gives an evicted Job's quota back once its `status.active` is 0 (v0.14.5, jobframework's reconciler), and
    that does not count pods which are being ended. So with a grace period the next pod is let go before they have
    ended; gpushare's scheduler has it wait for the GPU.
    """
    stage.has_grace = grace_seconds > 0
    await kueuemanager.release(stage.api)
    stage.space.create(stage.space.tenant("filler", "1", command=IDLE))
    await asyncio.to_thread(stage.space.running, "filler")
    await stage.apply([queued(stage.space, "ordinary", "1", reads_length=True, grace_seconds=grace_seconds)])

    def runs() -> bool:
        return [pod["status"].get("phase") for pod in stage.pods_of("ordinary")] == ["Running"]

    await stage.until("it runs", runs)
    setting = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": SETTING},
        "data": {"ticks": str(TICKS)},
    }
    await stage.api.create(CONFIGMAPS, setting, namespace=stage.space.name)
    await stage.apply([queued(stage.space, "urgent", "1", is_urgent=True)])
    await stage.until("both have completed", lambda: stage.completed() == {"ordinary", "urgent"})
    assert stage.suspended("ordinary") == [True, False, True, False]
    assert stage.suspended("urgent") == [True, False]
    first, again = stage.pods_of("ordinary")
    assert first["metadata"].get("deletionTimestamp"), "it was ended"
    (urgent,) = stage.pods_of("urgent")
    print(
        f"grace {grace_seconds} s: pods that had not ended took {stage.let_go.peak_percent}% of {QUOTA_PERCENT}%"
    )
    assert stage.let_go.peak_percent == (200 if stage.has_grace else 100)
    assert decided(first)[0] == decided(urgent)[0] == decided(again)[0], "each had it after the other"
    assert int(first["metadata"]["resourceVersion"]) < int(again["metadata"]["resourceVersion"])
    assert_ran(urgent, 100)
    assert_ran(again, 100)


def assert_ran(pod: Json, percent: int) -> None:
    """It was placed by our scheduler, and had the GPU and the cap that were decided."""
    assert pod["status"]["phase"] == "Succeeded"
    assert pod["spec"]["schedulerName"] == names.SCHEDULER_NAME
    gpu, threads, _ = decided(pod)
    assert threads == percent
    (container,) = pod["status"]["containerStatuses"]
    got_gpu, got_sms = container["state"]["terminated"]["message"].split()
    assert got_gpu == gpu
    assert 0 < int(got_sms) <= max(8, H200_SM_COUNT * percent // 100)
