"""Jobs as pods of a cluster with gpushare installed and one GPU, through kubectl and KUBECONFIG.

Who starts is the cluster's decision: kube-scheduler's by what the node offers (`manifests.capacity_patch`), or
gpushare's. A pod that is taken away, as a retraction does, is created again, as a Job's controller would do it.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.sharing.faults import TOLD, FaultInjector, Gauge, Hands, moments
from bench.sharing.joblog import story
from bench.sharing.launching import Ended, Order
from bench.sharing.machine import NotReadyError
from bench.sharing.manifests import (
    DAEMON,
    NAMESPACE,
    NODE_PATH,
    PERCENT,
    REPLICA,
    Json,
    Place,
    Tenants,
    capacity_patch,
    code,
    daemon_pod,
    fault_gpushare,
    fault_pod,
    gpushare_of,
    job_pod,
    offer,
)
from bench.sharing.podstate import TAIL, is_hopeless, where_it_is, why_failed
from bench.sharing.policies import FIFO, TURNS, SharingPolicy, World
from bench.sharing.trace import programs
from gpushare.core.api import GpuShareStatus, from_json, names
from gpushare.core.gpu import GpuInfo
from gpushare.core.interference import Profile, as_profile

LOOK_SECONDS = 0.4
PATIENCE_SECONDS = 90.0
END_SECONDS = 40.0  # of pods with a grace period of a second; the MPS daemon's has 15
SIGNATURE_SECONDS = 5.0  # seconds of a signature that are enough to begin with
TROUBLE_SECONDS = 60.0  # so long kubectl may fail before a run is given up
KEPT_SECONDS = 1.0  # after which a signature that was written is looked for
SETTLE_SECONDS = 20.0  # until the agent has seen that the last pods are gone: the self-test's, a stopped call's
_TRIES = 3
_PAUSE_SECONDS = 1.0
_LOOK_PATIENCE_SECONDS = 5.0
_AGENT = "app.kubernetes.io/component=agent"
_MESSAGE = 600  # characters of an event's


class KubectlError(RuntimeError):
    """kubectl failed, or did not answer in time."""


def kubectl(*arguments: str, stdin: str | None = None, seconds: float = 60.0) -> str:
    """Run kubectl with KUBECONFIG; return what it printed.

    Raises:
        KubectlError: with what it said.
    """
    try:
        done = subprocess.run(
            ["kubectl", *arguments], input=stdin, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise KubectlError(f"kubectl {' '.join(arguments)}: no answer within {seconds:g} s") from None
    if done.returncode:
        raise KubectlError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()[-400:]}")
    return done.stdout


def patiently(*arguments: str, stdin: str | None = None, seconds: float = 20.0) -> str:
    """Run kubectl, and again where it fails.

    Raises:
        KubectlError: it failed every time.
    """
    for tries in range(_TRIES):
        try:
            return kubectl(*arguments, stdin=stdin, seconds=seconds)
        except KubectlError as error:
            if tries and "AlreadyExists" in str(error):  # the try before was heard
                return ""
            if tries + 1 == _TRIES:
                raise
            time.sleep(_PAUSE_SECONDS)
    raise AssertionError("every try returns or raises")


def place_of_this_cluster() -> Place:
    """Return the cluster's node with a GPU, and how pods come to PyTorch; pods of a stopped call are removed.

    Raises:
        NotReadyError: no cluster, no gpushare, or not one GPU.
    """
    if not shutil.which("kubectl") or not os.environ.get("KUBECONFIG"):
        raise NotReadyError("kubectl and KUBECONFIG are needed, or --without-kubernetes")
    file = os.environ.get("GPUSHARE_TENANTS")
    if not file:
        raise NotReadyError("GPUSHARE_TENANTS has to name a file that says how pods come to PyTorch")
    tenants = Tenants.read(Path(file))
    try:
        remove_pods()
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            nodes = json.loads(kubectl("get", "gpunodes", "-o", "json"))["items"]
            try:
                return place_of(nodes, tenants)
            except NotReadyError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE_SECONDS)
    except KubectlError as error:
        raise NotReadyError(f"gpushare is not installed here: {error}") from error


def remove_pods() -> None:
    """Remove every pod of the benchmark, and wait until they are gone.

    Raises:
        KubectlError: they stay.
    """
    asked = ("-n", NAMESPACE, "get", "pods", "-o", "json")
    if not json.loads(patiently(*asked) or '{"items": []}')["items"]:
        return
    delete = ("-n", NAMESPACE, "delete", "pods", "--all", "--wait=true")
    try:
        kubectl(*delete, seconds=END_SECONDS)
    except KubectlError:  # kubelet does not end one: the next policy is not to meet it
        kubectl(*delete, "--force", "--grace-period=0", seconds=END_SECONDS)


def place_of(nodes: Sequence[Json], tenants: Tenants) -> Place:
    """Return where the pods run, from the cluster's GpuNodes.

    Raises:
        NotReadyError: there is not one healthy GPU and no more.
    """
    found = [(node["metadata"]["name"], gpu) for node in nodes for gpu in node.get("status", {}).get("gpus", [])]
    if len(found) != 1:
        raise NotReadyError(f"the benchmark is about one GPU, and this cluster has {len(found)}")
    node, gpu = found[0]
    if gpu["health"] != "Healthy":
        raise NotReadyError(f"GPU {gpu['uuid']} is {gpu['health']}")
    if gpu.get("tenants"):
        raise NotReadyError(f"GPU {gpu['uuid']} has {len(gpu['tenants'])} pods already")
    info = GpuInfo(gpu["uuid"], gpu["index"], gpu["model"], gpu["memoryMiB"], gpu["smCount"])
    return Place(node, info, tenants)


class PodWitness:
    """Witness that asks the node's agent through the API server, and the programs' GpuShares."""

    def __init__(self, place: Place, began_wall: float) -> None:
        self.gpu_model = place.gpu.model
        self._node, self._began_wall = place.node, began_wall
        self._agent = ""

    def seconds(self) -> float:
        """Return the seconds since the run began."""
        return time.time() - self._began_wall

    def metrics(self) -> str:
        """Return the agent's metrics; after a failure its pod is looked for anew.

        Raises:
            KubectlError: no answer.
        """
        agent, self._agent = self._agent or self._find(), ""
        text = kubectl("get", "--raw", agent, seconds=_LOOK_PATIENCE_SECONDS)
        self._agent = agent
        return text

    def profiles(self) -> Mapping[str, Profile]:
        """Return what the GpuShares say now of programs on this model of GPU, with what was learnt of them."""
        asked = ("-n", NAMESPACE, "get", "gpushares", "-o", "json")
        found = {}
        for share in json.loads(kubectl(*asked, seconds=_LOOK_PATIENCE_SECONDS))["items"]:
            status = from_json(GpuShareStatus, share.get("status", {}))
            if status.profile is None or status.profile.gpu_model != self.gpu_model:
                continue
            if (profile := as_profile(status.profile, status.learned)) is not None:
                found[share["metadata"]["name"]] = profile
        return found

    def _find(self) -> str:
        asked = ("get", "pods", "-A", "-l", _AGENT, f"--field-selector=spec.nodeName={self._node}", "-o", "json")
        for pod in json.loads(kubectl(*asked, seconds=_LOOK_PATIENCE_SECONDS))["items"]:
            about = pod["metadata"]
            ports = [port for each in pod["spec"]["containers"] for port in each.get("ports", [])]
            number = next((port["containerPort"] for port in ports if port.get("name") == "metrics"), None)
            if number is not None and "deletionTimestamp" not in about:
                return f"/api/v1/namespaces/{about['namespace']}/pods/{about['name']}:{number}/proxy/metrics"
        raise KubectlError(f"no node agent on {self._node}")


class PodLauncher:
    """Starts jobs as pods."""

    kind = "pods"
    alone = TURNS

    def __init__(self, place: Place) -> None:
        self._place = place
        self._policy: SharingPolicy = FIFO
        self._live: dict[str, Order] = {}
        self._restarts: dict[str, int] = {}
        self._first_started: dict[str, float] = {}
        self._programs: set[str] = set()
        self._numbers: dict[str, int] = {}
        self._began_wall = 0.0
        self._next_look = 0.0
        self._well_at = 0.0
        self._turn: tuple[str, int] | None = None
        self._injector: FaultInjector | None = None
        with contextlib.suppress(KubectlError):
            kubectl("create", "namespace", NAMESPACE)
        kubectl("label", "--overwrite", "namespace", NAMESPACE, f"{names.GROUP}/allow-latency=true")
        self._wait(self._has_account, "the namespace's service account")
        self._apply(code(place.tenants.simulated), *(gpushare_of(program) for program in programs()))

    def begin(self, policy: SharingPolicy, orders: Sequence[Order]) -> None:
        """Offer what the policy's pods ask for, and start its daemon."""
        self._policy, self._live, self._restarts, self._first_started = policy, {}, {}, {}
        self._programs = {order.job.program for order in orders}
        self._numbers = {order.job.name: order.job.number for order in orders}
        remove_pods()
        self._well_at = time.monotonic()
        self._turn = (f"{NODE_PATH}/turn-{time.time_ns()}", len(orders)) if policy.takes_turns else None
        if policy.world is not World.GPUSHARE:
            patch = json.dumps(list(capacity_patch(policy)))
            kubectl("patch", "node", self._place.node, "--subresource=status", "--type=json", "-p", patch)
            self._wait(self._offers, "the node's offer")
        if policy.world is World.MPS:
            self._create(daemon_pod(policy, self._place))
            try:
                self._wait(self._daemon_is_ready, "the MPS daemon")
            except TimeoutError as error:
                raise TimeoutError(f"{error}: {self._where([DAEMON])[DAEMON]}") from None
        self._began_wall = time.time()
        self._injector = None
        if policy.faults:
            self._apply(fault_gpushare())
            last = max(order.job.arrives for order in orders)
            witness = PodWitness(self._place, self._began_wall)
            self._injector = FaultInjector(moments(policy.faults, last), self._hands(witness), self._began_wall)

    def submit(self, order: Order) -> None:
        """Create the job's pod."""
        self._live[order.job.name] = order
        self._create(job_pod(self._policy, order, self._place, self._turn))

    def poll(self) -> dict[int, Ended]:
        """Look at the pods twice a second; a look that fails is repeated at the next.

        Raises:
            KubectlError: looks have failed for TROUBLE_SECONDS.
        """
        if time.monotonic() < self._next_look or not self._live:
            return {}
        self._next_look = time.monotonic() + LOOK_SECONDS
        ended: dict[int, Ended] = {}
        try:
            self._look(ended)
            self._well_at = time.monotonic()
        except KubectlError:
            if time.monotonic() - self._well_at > TROUBLE_SECONDS:
                raise
        return ended

    def _look(self, ended: dict[int, Ended]) -> None:
        found = {
            pod["metadata"]["name"]: pod
            for pod in json.loads(kubectl("-n", NAMESPACE, "get", "pods", "-o", "json"))["items"]
        }
        wall = time.time()
        now = wall - self._began_wall
        if self._injector is not None:
            self._injector.step(now, found, (KubectlError, ValueError))
        known = self.signatures() if any(order.until_known for order in self._live.values()) else {}
        for name, order in list(self._live.items()):
            pod = found.get(name)
            phase = None if pod is None else pod["status"].get("phase")
            if phase == "Running":
                self._first_started.setdefault(name, now)
            if pod is None:  # taken away
                self._create(job_pod(self._policy, order, self._place, self._turn))
                self._restarts[name] = self._restarts.get(name, 0) + 1
            elif phase == "Failed" and "deletionTimestamp" in pod["metadata"]:
                pass  # being taken away: it did not fail, and is created again once it is gone
            elif phase == "Failed" and self._injector is not None and self._injector.has_felled(pod):
                if self._injector.may_restart(name, now):  # as a Job would; created again once it is gone
                    kubectl("-n", NAMESPACE, "delete", "pod", name, "--wait=false")
            elif (
                phase in ("Succeeded", "Failed")
                or is_hopeless(pod, wall)
                # No other job runs beside one whose signature is taken, so its end affects none.
                or (
                    order.until_known
                    and known.get(order.job.program, {}).get("windowSeconds", 0.0) >= SIGNATURE_SECONDS
                )
            ):
                ended[order.job.number] = self._ended(order, pod)
                del self._live[name]
                with contextlib.suppress(KubectlError):  # else it is removed at the run's end
                    kubectl("-n", NAMESPACE, "delete", "pod", name, "--wait=false")

    def signatures(self) -> dict[str, Any]:
        """Return what the GpuShares say of the programs that ran; the cluster keeps it."""
        return {name: kept for name, kept in self._kept().items() if name in self._programs}

    def learn(self, signatures: Mapping[str, Any]) -> None:
        """Write them into GpuShares that have none: a new cluster lacks what an earlier session's has taken.

        The operator writes a new GpuShare's first status by what it read before, so that comes first.

        Raises:
            NotReadyError: the operator does not write, or they do not stay.
        """
        asked = [name for name, kept in signatures.items() if kept.get("gpuModel") == self._place.gpu.model]
        try:
            self._wait(lambda: self._are_reconciled(asked), "the first status of the GpuShares")
        except TimeoutError as error:
            raise NotReadyError(f"{error}: is the operator running?") from error
        for _ in range(_TRIES):
            kept = self._kept()
            if not (missing := [name for name in asked if name not in kept]):
                return
            for program in missing:
                patch = json.dumps({"status": {"profile": signatures[program]}})
                how = ("--subresource=status", "--type=merge", "-p", patch)
                patiently("-n", NAMESPACE, "patch", "gpushare", program, *how)
            time.sleep(KEPT_SECONDS)
        kept = self._kept()
        if missing := [name for name in asked if name not in kept]:
            raise NotReadyError(f"the GpuShares of {', '.join(missing)} do not keep their signatures")

    def unfinished(self) -> dict[int, str]:
        """Return where the pods of jobs are that have not ended."""
        where = self._where(self._live)
        return {order.job.number: where[name] for name, order in self._live.items()}

    def witness(self) -> PodWitness | None:
        """Return the witness of decisions and inference under gpushare."""
        return PodWitness(self._place, self._began_wall) if self._policy.is_ours else None

    def refusals(self) -> Sequence[Mapping[str, Any]]:
        """Return kube-scheduler's events about the run's jobs, oldest first; none where they cannot be read.

        `at` and `until` are seconds since the run began; an event that is repeated is one, with `times`.
        """
        try:
            found = json.loads(kubectl(*_asked_events("FailedScheduling"), seconds=_LOOK_PATIENCE_SECONDS))[
                "items"
            ]
        except KubectlError:
            return ()
        lines = []
        for event in found:
            number, first = self._numbers.get(event["involvedObject"]["name"]), _first_moment(event)
            if number is None or first < self._began_wall:  # of a run before, whose jobs had the same names
                continue
            series = event.get("series") or {}
            lines.append(
                {
                    "number": number,
                    "at": round(first - self._began_wall, 1),
                    "until": round(_moment(event) - self._began_wall, 1),
                    "times": int(series.get("count") or event.get("count") or 1),
                    "message": str(event.get("message", ""))[:_MESSAGE],
                }
            )
        return sorted(lines, key=lambda line: (line["at"], line["number"]))

    def faults(self) -> Sequence[Mapping[str, Any]]:
        """Return what became of each fault; one that is not over counts as it stands."""
        if self._injector is None:
            return ()
        self._injector.close()
        return self._injector.records

    def end(self) -> None:
        """Remove every pod of the benchmark; what stays costs no run that is over, and the next begins with it."""
        self._live = {}
        with contextlib.suppress(KubectlError):
            remove_pods()

    def close(self) -> None:
        """Leave the node as it was: no pods, and nothing offered that is not there. GpuShares stay."""
        self._live = {}
        try:
            remove_pods()
        finally:
            paths = [f"/status/capacity/{name.replace('/', '~1')}" for name in (REPLICA, PERCENT)]
            patch = [{"op": "remove", "path": path} for path in paths]
            with contextlib.suppress(KubectlError):
                asked = ("--subresource=status", "--type=json", "-p", json.dumps(patch))
                kubectl("patch", "node", self._place.node, *asked)

    def _hands(self, witness: PodWitness) -> Hands:
        def told() -> dict[str, list[float]]:
            found: dict[str, list[float]] = {}
            for event in json.loads(kubectl(*_asked_events(TOLD), seconds=_LOOK_PATIENCE_SECONDS))["items"]:
                found.setdefault(event["involvedObject"]["uid"], []).append(_moment(event) - self._began_wall)
            return found

        return Hands(
            create=lambda name: self._create(fault_pod(name, self._place)),
            delete=self._forget,
            log=lambda name: kubectl("-n", NAMESPACE, "logs", name, seconds=_LOOK_PATIENCE_SECONDS),
            gauge=lambda: gauge_of(witness.metrics()),
            told=told,
        )

    @staticmethod
    def _forget(name: str) -> None:
        kubectl("-n", NAMESPACE, "delete", "pod", name, "--wait=false", "--ignore-not-found")

    def _ended(self, order: Order, pod: Json) -> Ended:
        name = order.job.name
        states = [each["state"] for each in pod["status"].get("containerStatuses", [])]
        codes = [state["terminated"]["exitCode"] for state in states if "terminated" in state]
        is_running = pod["status"].get("phase") == "Running"
        status = 0 if is_running else codes[0] if codes else 1
        text = patiently("-n", NAMESPACE, "logs", name) if codes or is_running else ""
        decided = pod["metadata"].get("annotations", {}).get(names.THREAD_PERCENTAGE)
        cap = self._policy.cap(order.job) if decided is None else int(decided)
        return Ended(
            status,
            cap,
            story(text.splitlines(), self._began_wall),
            why_failed(pod, text) if status else "",
            self._restarts.get(name, 0),
            self._first_started.get(name) if name in self._restarts else None,
        )

    def _create(self, pod: Json) -> None:
        patiently("create", "-f", "-", stdin=json.dumps(pod))

    def _kept(self) -> dict[str, Any]:
        """Return the profile of every GpuShare that has one, by name."""
        return {name: kept for name, status in self._statuses().items() if (kept := status.get("profile"))}

    def _are_reconciled(self, programs: Sequence[str]) -> bool:
        found = self._statuses()
        return all("observedGeneration" in found.get(name, {}) for name in programs)

    @staticmethod
    def _statuses() -> dict[str, Json]:
        shares = json.loads(patiently("-n", NAMESPACE, "get", "gpushares", "-o", "json"))["items"]
        return {share["metadata"]["name"]: share.get("status", {}) for share in shares}

    @staticmethod
    def _where(pod_names: Iterable[str]) -> dict[str, str]:
        asked = ("-n", NAMESPACE, "get", "pods,events", "-o", "json")
        try:
            found = json.loads(kubectl(*asked, seconds=_LOOK_PATIENCE_SECONDS))["items"]
        except KubectlError as error:
            return dict.fromkeys(pod_names, str(error)[:TAIL])
        pods = {each["metadata"]["name"]: each for each in found if each["kind"] == "Pod"}
        events = [each for each in found if each["kind"] == "Event"]
        return {
            name: where_it_is(pods.get(name), [each for each in events if each["involvedObject"]["name"] == name])
            for name in pod_names
        }

    def _apply(self, *objects: Json) -> None:
        listed = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        patiently("apply", "--server-side", "-f", "-", stdin=json.dumps(listed))

    def _has_account(self) -> bool:
        with contextlib.suppress(KubectlError):
            return bool(kubectl("-n", NAMESPACE, "get", "serviceaccount", "default"))
        return False

    def _offers(self) -> bool:
        node = json.loads(kubectl("get", "node", self._place.node, "-o", "json"))["status"]["allocatable"]
        return all(node.get(name, "0") == amount for name, amount in offer(self._policy).items())

    def _daemon_is_ready(self) -> bool:
        with contextlib.suppress(KubectlError):
            return "ready" in kubectl("-n", NAMESPACE, "logs", DAEMON)
        return False

    @staticmethod
    def _wait(condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {PATIENCE_SECONDS:.0f} s")
            time.sleep(0.3)


def gauge_of(text: str) -> Gauge:
    """Return what the agent's metrics say of the cluster's one GPU."""
    faults = re.search(r"^gpushare_mps_faults_total\{.*\} (\S+)$", text, re.MULTILINE)
    serves = re.search(r"^gpushare_gpu_healthy\{.*\} 1(\.0)?$", text, re.MULTILINE)
    active = re.search(r'^gpushare_mps_state\{.*\bstate="Active".*\} 1(\.0)?$', text, re.MULTILINE)
    clients = re.findall(r'^gpushare_pod_clients\{(?:.*,)?pod="([^"]*)".*\} (\S+)$', text, re.MULTILINE)
    if faults is None:
        raise ValueError("the agent's metrics do not count faults now")
    at_work = frozenset(pod for pod, number in clients if float(number) > 0)
    return Gauge(float(faults.group(1)), bool(serves and active), at_work)


def _asked_events(reason: str) -> tuple[str, ...]:
    return ("-n", NAMESPACE, "get", "events", f"--field-selector=reason={reason}", "-o", "json")


def _moments(event: Json) -> list[float]:
    told = [event.get("eventTime"), event.get("firstTimestamp"), event.get("lastTimestamp")]
    told += [event["metadata"].get("creationTimestamp"), (event.get("series") or {}).get("lastObservedTime")]
    return [datetime.fromisoformat(each).timestamp() for each in told if each]


def _moment(event: Json) -> float:
    """Return the last time of an event, seconds since 1970."""
    return max(_moments(event))


def _first_moment(event: Json) -> float:
    """Return the first time of an event, seconds since 1970."""
    return min(_moments(event))
