"""Kueue's own manager as a process beside an API server: its definitions, webhooks, settings and queue."""

import asyncio
import base64
import contextlib
import signal
import subprocess
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml
from devcluster import tools
from installed import lacking

from gpushare.core.api import names
from gpushare.kube import Api, ApiError, NotFound, Resource

Json = dict[str, Any]
T = TypeVar("T")
PATIENCE_SECONDS = 240.0
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
QUEUE = "gpus"
URGENT = "urgent"
# What kubectl may say of an object's file where nothing has drifted: nothing.
DIFFS = (("diff",), ("diff", "--server-side", "--field-manager=kubectl-client-side-apply"))
DEFINITIONS = Resource(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False
)
CONFIGURATIONS = {
    kind: Resource("admissionregistration.k8s.io", "v1", f"{kind.lower()}s", kind, namespaced=False)
    for kind in ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")
}
# Parts of the paths of the webhooks that a framework needs; Kueue's own kinds always have theirs.
OWN_WEBHOOKS = "-kueue-x-k8s-io-v1beta1-"
WEBHOOKS = {
    "batch/job": ("/mutate-batch-v1-job", "/validate-batch-v1-job"),
    "pod": ("/mutate--v1-pod", "/validate--v1-pod"),
    "deployment": ("-apps-v1-deployment",),
    "jobset.x-k8s.io/jobset": ("-jobset-x-k8s-io-v1alpha2-jobset",),
}


def _resource(plural: str, kind: str, *, namespaced: bool = False) -> Resource:
    return Resource("kueue.x-k8s.io", "v1beta1", plural, kind, namespaced)


FLAVORS = _resource("resourceflavors", "ResourceFlavor")
CLUSTER_QUEUES = _resource("clusterqueues", "ClusterQueue")
LOCAL_QUEUES = _resource("localqueues", "LocalQueue", namespaced=True)
QUEUED = _resource("workloads", "Workload", namespaced=True)
PRIORITIES = _resource("workloadpriorityclasses", "WorkloadPriorityClass")


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


def built() -> Path:
    """Return the directory of Kueue's manager; skips where it is not built."""
    found = tools.built_kueue()
    if found is None:
        lacking("kueue", "no Kueue: hack/cluster test-programs builds it")
    return found


def definitions(kueue: Path) -> list[Json]:
    """Return the definitions of Kueue's kinds."""
    return [yaml.safe_load(path.read_text()) for path in sorted((kueue / "crds").glob("*.yaml"))]


async def define(api: Api, wanted: Collection[Json]) -> None:
    """Create definitions, and wait until discovery lists every kind: Kueue looks once, at its start."""
    for definition in wanted:
        await api.create(DEFINITIONS, definition)
    missing = {
        (spec["group"], version["name"], spec["names"]["plural"])
        for spec in (each["spec"] for each in wanted)
        for version in spec["versions"]
        if version["served"]
    }
    async with asyncio.timeout(PATIENCE_SECONDS):
        while missing:
            for group, version in {each[:2] for each in missing}:
                with contextlib.suppress(ApiError):
                    listed = await api._call("GET", f"/apis/{group}/{version}")
                    missing -= {(group, version, each["name"]) for each in listed["resources"]}
            await asyncio.sleep(0.1)


def webhooks(kueue: Path, frameworks: Collection[str], *, namespace: str | None = None) -> list[Json]:
    """Return Kueue's webhook configurations for these frameworks, asked about one namespace alone or about all."""
    parts = [OWN_WEBHOOKS, *(part for each in frameworks for part in WEBHOOKS[each])]
    found = [each for each in yaml.safe_load_all((kueue / "webhooks.yaml").read_text()) if each]
    for configuration in found:
        configuration["webhooks"] = [
            each
            for each in configuration["webhooks"]
            if any(part in each["clientConfig"]["service"]["path"] for part in parts)
        ]
        for each in configuration["webhooks"] if namespace is not None else ():
            each["namespaceSelector"] = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    return found


async def intercept(api: Api, configurations: Collection[Json], certificate: bytes, port: int) -> None:
    """Put webhooks in force, at the process on this port."""
    bundle = base64.b64encode(certificate).decode()
    for configuration in configurations:
        for each in configuration["webhooks"]:
            path = each["clientConfig"]["service"]["path"]
            each["clientConfig"] = {"url": f"https://127.0.0.1:{port}{path}", "caBundle": bundle}
        await api.create(CONFIGURATIONS[configuration["kind"]], configuration)


def start_manager(
    processes: Processes, kueue: Path, work: Path, kubeconfig: Path, port: int, frameworks: Sequence[str]
) -> None:
    """Start Kueue; the pair of its certificate lies in `work`/certificates."""
    certificates, settings = work / "certificates", work / "kueue.yaml"
    settings.write_text(yaml.safe_dump(_settings(certificates, port, frameworks)))
    # Kueue reads its metrics' certificate from /etc whatever its settings say: it gets an /etc of its own.
    folder = "/etc/kueue/metrics/certs"
    own = f"mount -t tmpfs none /etc && mkdir -p {folder} && cp {certificates}/tls.* {folder}"
    gates = "--feature-gates=VisibilityOnDemand=false"  # its server wants certificates too
    command = f"{own} && exec {kueue}/kueue --config={settings} {gates} --kubeconfig={kubeconfig}"
    processes.start("kueue", ["unshare", "--mount", "sh", "-c", command])


def _settings(certificates: Path, port: int, frameworks: Sequence[str]) -> Json:
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
        "integrations": {"frameworks": list(frameworks)},
    }


async def make_queue(
    api: Api, processes: Processes, namespace: str, quota_percent: int, *, is_held: bool = False
) -> None:
    """Make a queue with this quota in a namespace that exists; held, it admits nothing until `release`."""

    def body(resource: Resource, name: str, **more: Any) -> Json:
        return {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": {"name": name}, **more}

    resources = [{"name": names.SHARE_RESOURCE, "nominalQuota": quota_percent}]
    group = {"coveredResources": [names.SHARE_RESOURCE], "flavors": [{"name": QUEUE, "resources": resources}]}
    spec: Json = {
        "namespaceSelector": {},
        "preemption": {"withinClusterQueue": "LowerPriority"},
        "resourceGroups": [group],
    }
    if is_held:
        spec["stopPolicy"] = "Hold"
    await _once_ready(processes, api, FLAVORS, body(FLAVORS, QUEUE, spec={}))
    await _once_ready(processes, api, CLUSTER_QUEUES, body(CLUSTER_QUEUES, QUEUE, spec=spec))
    await _once_ready(processes, api, PRIORITIES, body(PRIORITIES, URGENT, value=1000, description="x"))
    await _once_ready(
        processes, api, LOCAL_QUEUES, body(LOCAL_QUEUES, QUEUE, spec={"clusterQueue": QUEUE}), namespace
    )


async def release(api: Api) -> None:
    """Let a held queue admit."""
    await api.patch(CLUSTER_QUEUES, QUEUE, {"spec": {"stopPolicy": "None"}})


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


async def remove(api: Api, kueue: Path) -> None:
    """Take Kueue's webhooks, definitions and objects away, in whatever state they are; its manager has ended."""
    for configuration in webhooks(kueue, ()):
        with contextlib.suppress(NotFound):
            await api.delete(CONFIGURATIONS[configuration["kind"]], configuration["metadata"]["name"])
    kinds = []
    for definition in definitions(kueue):
        spec, kind = definition["spec"], definition["spec"]["names"]
        stored = next(each["name"] for each in spec["versions"] if each["storage"])
        is_namespaced = spec["scope"] == "Namespaced"
        kinds.append(Resource(spec["group"], stored, kind["plural"], kind["kind"], is_namespaced))
        with contextlib.suppress(NotFound):
            await api.delete(DEFINITIONS, definition["metadata"]["name"])
    for each in kinds:
        await until(f"no {each.plural}", partial(_is_gone, api, each))


async def _is_gone(api: Api, kind: Resource) -> bool:
    """Free what is left of a kind of its finalizers, which nobody answers any more; whether the kind is gone."""
    try:
        left = (await api.list(kind, _whole)).items
    except NotFound:
        left = []
    for metadata in (each["metadata"] for each in left):
        if metadata.get("finalizers"):
            freed = {"metadata": {"finalizers": None}}
            with contextlib.suppress(NotFound):
                await api.patch(kind, metadata["name"], freed, namespace=metadata.get("namespace"))
    try:
        await api.get(DEFINITIONS, f"{kind.plural}.{kind.group}")
    except NotFound:
        return True
    return False


def _whole(obj: Json) -> Json:
    return obj


def reserved_percent(workload: Json) -> int:
    """Return what Kueue has reserved for a Workload; what its pods that have ended held is free again."""
    status = workload.get("status") or {}
    conditions = {each["type"]: each["status"] for each in status.get("conditions") or ()}
    if status.get("admission") is None or conditions.get("Finished") == "True":
        return 0
    ended = {each["name"]: each["count"] for each in status.get("reclaimablePods") or ()}
    return sum(
        int((each.get("resourceUsage") or {}).get(names.SHARE_RESOURCE, 0))
        * (each["count"] - ended.get(each["name"], 0))
        // max(each["count"], 1)
        for each in status["admission"]["podSetAssignments"]
    )


async def admitted(api: Api, namespace: str) -> dict[str, int]:
    """Return the percents that Kueue has reserved, by owner."""
    found = {}
    for workload in (await api.list(QUEUED, _whole, namespace=namespace)).items:
        if percent := reserved_percent(workload):
            found[workload["metadata"]["ownerReferences"][0]["name"]] = percent
    return found


async def assert_no_drift(
    kubectl: Callable[..., Awaitable[tuple[int, str]]], versions: Callable[[], Awaitable[Collection[str]]]
) -> None:
    """Have kubectl compare an object's file with the API server, in both ways, and find nothing.

    kubectl reads an object twice. What a controller wrote in between shows as a difference that is none, so a
    comparison in whose course a resource version changed is made again.
    """
    for words in DIFFS:
        async with asyncio.timeout(PATIENCE_SECONDS):
            before, answer = await versions(), await kubectl(*words)
            while answer != (0, "") and (now := await versions()) != before:
                before, answer = now, await kubectl(*words)
        assert answer == (0, ""), answer[1]


async def until(what: str, check: Callable[[], Awaitable[T]], *, seconds: float = PATIENCE_SECONDS) -> T:
    """Poll until a check answers something true."""
    try:
        async with asyncio.timeout(seconds):
            while not (found := await check()):  # noqa: ASYNC110 - the API server tells no event of this
                await asyncio.sleep(0.3)
            return found
    except TimeoutError:
        raise AssertionError(f"{what}: not within {seconds:.0f} s") from None
