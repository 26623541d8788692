"""Judge a picture of the cluster: what is broken, and what has not settled yet. Pure; time is an argument."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from bench.chaos.freezes import LOOK_SECONDS, FreezeReport
from bench.chaos.picture import ExpectedPods, GpuSeen, Picture, PodSeen
from bench.chaos.plan import Ends
from bench.chaos.room import CLIENTS_PER_GPU, RESERVE_MIB, SHARES_PER_GPU, given, has_room

GATE_SILENT_SECONDS: Final = 6.0  # it writes every second; the agent treats it as dead after 10
LEFT_FROZEN_SECONDS: Final = 2.0 + LOOK_SECONDS  # 2 s are promised, and a thaw is seen one look later
GAP_SECONDS: Final = LEFT_FROZEN_SECONDS  # a freeze as long could hide in a longer time without a look
UNWATCHED_SECONDS: Final = 5.0
# Kubelet may give the ids of an allocation under way to the next pod too (docs/measurements/hostile.md).
DEVICE_RACE_SECONDS: Final = 10.0
KUBELET_REJECTS: Final = "UnexpectedAdmissionError"  # of a pod that was bound while kubelet had no device plugin
DEVICES_SEPARATOR: Final = "::"
# Two are usual. Its watch sleeps after outages of the API server in a row (docs/measurements/hostile.md).
KUBELET_SLOW_SECONDS: Final = 15.0
_UNSEEN: Final = "and kubelet has not seen it"
# In the scheduler's message: beside its neighbours a promise could not be kept.
WAITS_BY_DESIGN: Final = "is promised"


class Rule(StrEnum):
    """Rule that must hold at every moment, whatever fails."""

    SHARES = "over-commit of shares"
    MEMORY = "over-commit of memory"
    CLIENTS = "over-commit of clients"
    LIMIT = "a pod beyond its own limit"
    DEVICE = "device id of kubelet's for two pods"
    DEVICE_RACE = "device id of kubelet's for two pods that came at once"
    LOST = "pod lost"
    TWICE = "pod placed twice"
    ENDED = "tenant ended by us"
    REJECTED = "new pod rejected by kubelet while no device plugin served"
    FROZEN = "tenant left frozen"
    UNWATCHED = "tenant whose freezer nobody watched"
    GAP = "too long without a look at the freezers"
    DIFFERS = "gate.json and the twin disagree for long"
    STARTS = "pod with room no client in time"
    UNWOKEN = "pod with room that kube-scheduler was not made to try again"
    OUTSIDE = "tenant outside MPS"
    SETTLED = "not settled in time"
    KUBELET = "pod bound in time that kubelet did not see in time"


@dataclass(frozen=True, slots=True)
class Violation:
    """Violated rule, with a sentence on what was seen."""

    rule: Rule
    detail: str


@dataclass(frozen=True, slots=True)
class Allowance:
    """Tenants whose end the present fault explains.

    Attributes:
        gpu: the GPU that the fault concerns, for Ends.OF_THE_GPU.
    """

    ends: Ends = Ends.NOBODY
    gpu: str = ""

    def covers(self, pod: PodSeen) -> bool:
        """Return whether the fault itself ends a pod."""
        match self.ends:
            case Ends.NOBODY:
                return False
            case Ends.OF_THE_GPU:
                return self.gpu in pod.gpus
            case Ends.OF_THE_NODE:
                return True


def broken(picture: Picture, expected: Sequence[ExpectedPods], allowance: Allowance) -> list[Violation]:
    """Return every rule that does not hold at this moment; what depends on the API server waits for it."""
    found = list(_clients(picture))
    if picture.pods is None:
        return found
    pods = picture.pods
    found += _sums(picture)
    found += _devices(picture)
    found += _limits(picture)
    for one in expected:
        pod = pods.get(one.uid)
        if pod is None:
            found.append(Violation(Rule.LOST, f"{one.name} ({one.uid}) is gone, and nobody deleted it"))
            continue
        if pod.is_deleting and not allowance.covers(pod):
            found.append(Violation(Rule.ENDED, f"{pod.name} is being deleted, and not by the load"))
        elif pod.is_over and KUBELET_REJECTS in pod.why and not allowance.covers(pod):
            found.append(Violation(Rule.REJECTED, f"{pod.name}, which never ran: {pod.why}"))
        elif (pod.is_over or pod.restarts) and not allowance.covers(pod):
            found.append(
                Violation(Rule.ENDED, f"{pod.name} is {pod.phase} after {pod.restarts} restarts: {pod.why}")
            )
        if one.uid in picture.outside and not allowance.covers(pod):
            found.append(Violation(Rule.OUTSIDE, f"{pod.name} uses its GPU without MPS"))
    found += _names(pods.values())
    return found


def _sums(picture: Picture) -> Iterable[Violation]:
    """Check the sums of shares and memory over the pods that hold some, by their decisions."""
    memory = {gpu.uuid: gpu.memory_mib for gpu in picture.gpus}
    taken = given(picture)
    for uuid, total in taken.shares.items():
        if total > SHARES_PER_GPU:
            yield Violation(Rule.SHARES, f"{total} percent decided on {uuid}")
    for uuid, total in taken.memory_mib.items():
        if uuid in memory and total > memory[uuid] - RESERVE_MIB:
            yield Violation(
                Rule.MEMORY, f"{total} MiB decided on {uuid}, which has {memory[uuid]} less {RESERVE_MIB}"
            )


def _devices(picture: Picture) -> Iterable[Violation]:
    """Check that no device id of kubelet's belongs to two live pods."""
    owner: dict[str, PodSeen] = {}
    for uid, ids in picture.devices.items():
        pod = (picture.pods or {}).get(uid)
        if pod is None or pod.is_over:
            continue
        for one in ids:
            if (other := owner.setdefault(one, pod)).uid != pod.uid:
                rule = Rule.DEVICE_RACE if _came_at_once(pod, other) else Rule.DEVICE
                yield Violation(rule, f"kubelet gave {one} to {other.name} and {pod.name}")
                break


def _came_at_once(one: PodSeen, other: PodSeen) -> bool:
    if one.admitted_at is None or other.admitted_at is None:
        return False
    return abs(one.admitted_at - other.admitted_at) <= DEVICE_RACE_SECONDS


def _clients(picture: Picture) -> Iterable[Violation]:
    for gpu in picture.gpus:
        alive = sum(client.is_alive for client in gpu.clients)
        if alive > CLIENTS_PER_GPU:
            yield Violation(Rule.CLIENTS, f"{alive} clients on {gpu.uuid}")
        used = sum(client.memory_used_mib or 0 for client in gpu.clients if client.is_alive)
        if gpu.memory_mib and used > gpu.memory_mib:
            yield Violation(Rule.MEMORY, f"clients use {used} of {gpu.memory_mib} MiB on {gpu.uuid}")
    for uid, uuids in clients_by_pod(picture.gpus).items():
        if len(uuids) > 1 and uid not in picture.mps_hosts:
            yield Violation(Rule.TWICE, f"pod {uid} has clients on {', '.join(sorted(uuids))}")


def _limits(picture: Picture) -> Iterable[Violation]:
    """Check that a pod's clients together have no more than its decision gives."""
    pods = picture.pods or {}
    for gpu in picture.gpus:
        percent: Counter[str] = Counter()
        used: Counter[str] = Counter()
        for client in gpu.clients:
            if client.is_alive and client.pod_uid is not None:
                percent[client.pod_uid] += client.thread_percentage or 0
                used[client.pod_uid] += client.memory_used_mib or 0
        for uid, pod in pods.items():
            if pod.memory_mib and used[uid] > pod.memory_mib:
                yield Violation(Rule.LIMIT, f"{pod.name} uses {used[uid]} of {pod.memory_mib} MiB on {gpu.uuid}")
            cap = max(pod.thread_percentage, pod.most_threads)
            if cap not in {0, 100} and percent[uid] > cap:
                yield Violation(Rule.LIMIT, f"{pod.name} has {percent[uid]}% of threads, not {cap}")


def _names(pods: Iterable[PodSeen]) -> Iterable[Violation]:
    for name, count in Counter(pod.name for pod in pods if not pod.is_over).items():
        if count > 1:
            yield Violation(Rule.TWICE, f"{count} pods are named {name}")


def left_frozen(report: FreezeReport) -> list[Violation]:
    """Return violations: pods frozen at every look for too long, and pods whose freezer was not watched."""
    found = [
        Violation(Rule.FROZEN, f"pod {uid} was frozen for {seconds:.1f} s")
        for uid, seconds in report.longest.items()
        if seconds > LEFT_FROZEN_SECONDS
    ]
    found += [
        Violation(Rule.UNWATCHED, f"the cgroup of pod {uid} is not found")
        for uid, seconds in report.unwatched.items()
        if seconds > UNWATCHED_SECONDS
    ]
    if report.gap_seconds > GAP_SECONDS:
        found.append(Violation(Rule.GAP, f"{report.gap_seconds:.1f} s"))
    return found


def clients_by_pod(gpus: Iterable[GpuSeen]) -> dict[str, set[str]]:
    """Return the GPUs of which each pod has live clients, by uid."""
    found: dict[str, set[str]] = {}
    for gpu in gpus:
        for client in gpu.clients:
            if client.is_alive and client.pod_uid is not None:
                found.setdefault(client.pod_uid, set()).add(gpu.uuid)
    return found


def differences(gpu: GpuSeen) -> dict[tuple[str, int, str], str]:
    """Return the differences between a gate's status and the twin, each with a sentence; ignore stale files."""
    if max(gpu.gate_age_seconds, gpu.twin_age_seconds) > GATE_SILENT_SECONDS:
        return {}
    real = {client.pid: client for client in gpu.clients if client.is_alive}
    told = {client.pid: client for client in gpu.told if client.is_alive}
    found = {
        (
            gpu.uuid,
            pid,
            "client",
        ): f"process {pid} is a client of {gpu.uuid} by {'twin' if pid in real else 'gate'} alone"
        for pid in real.keys() ^ told.keys()
    }
    for pid in real.keys() & told.keys():
        for name in ("pod_uid", "thread_percentage", "memory_used_mib"):
            reported, seen = getattr(told[pid], name), getattr(real[pid], name)
            # A gate that was started later does not know a client's limits at its connection.
            if reported != seen and (reported is not None or name == "pod_uid"):
                found[gpu.uuid, pid, name] = (
                    f"{name} of client {pid} of {gpu.uuid} is {seen}, the gate says {reported}"
                )
    return found


def lateness(waiting: Sequence[str]) -> Violation:
    """Return the violation of what has not settled in time: kubelet's own where nothing else is missing."""
    is_kubelets = bool(waiting) and all(each.endswith(_UNSEEN) for each in waiting)
    return Violation(Rule.KUBELET if is_kubelets else Rule.SETTLED, "; ".join(waiting)[:1500])


def is_slow(pod: PodSeen, now: float) -> bool:
    """Return whether kubelet should have taken a pod long ago, by when it was bound."""
    return pod.bound_at is not None and pod.admitted_at is None and now - pod.bound_at >= KUBELET_SLOW_SECONDS


def _who_lets_it_wait(pod: PodSeen, picture: Picture) -> str:
    """Return what a pod without a reason in its status waits for."""
    if not pod.is_bound:
        return "kube-scheduler has not tried it"
    if not is_slow(pod, picture.taken_at):
        return "bound"
    waited = f"bound for {picture.taken_at - (pod.bound_at or 0.0):.0f} s"
    if picture.kubelet_has is None or pod.uid in picture.kubelet_has:  # it may wait for our device plugin
        return f"{waited}, and kubelet has not admitted it"
    return f"{waited}, {_UNSEEN}"


def waiting_by_design(picture: Picture, expected: Sequence[ExpectedPods]) -> int:
    """Return how many of these pods are not bound since a promise could not be kept beside any neighbours."""
    pods = picture.pods or {}
    found = (pods.get(one.uid) for one in expected)
    return sum(pod is not None and not pod.is_over and waits_by_design(pod) for pod in found)


def waiting_for_room(picture: Picture, expected: Sequence[ExpectedPods]) -> int:
    """Return how many of these pods wait for room that no GPU has, by the auditor's own sums."""
    pods = picture.pods or {}
    return sum(_waits_for_room(pods.get(one.uid), one, picture) for one in expected)


def waits_by_design(pod: PodSeen) -> bool:
    """Return whether kube-scheduler was last told that a promise could not be kept beside any neighbours."""
    return not pod.is_bound and WAITS_BY_DESIGN in pod.why


def _waits_for_room(pod: PodSeen | None, one: ExpectedPods, picture: Picture) -> bool:
    is_pending = pod is not None and not pod.is_over and not pod.is_bound
    return is_pending and not has_room(picture, one)


def unsettled(picture: Picture, expected: Sequence[ExpectedPods], leaving: Sequence[str]) -> list[str]:
    """Return what is not yet as it should be, each with a sentence; empty when all has settled.

    Args:
        expected: every one of them has to run, as a client of the GPU that was decided for it; but who waits for a
            promise, or for room that no GPU has, waits rightly.
        leaving: uids that the load has deleted; they have to go.
    """
    if picture.pods is None:
        return ["the API server does not answer"]
    waiting = list(picture.unready)
    clients = clients_by_pod(picture.gpus)
    for gpu in picture.gpus:
        if (gpu.health, gpu.mps_state) != ("Healthy", "Active"):
            waiting.append(f"GpuNode says {gpu.uuid} is {gpu.health}, MPS {gpu.mps_state}")
        if gpu.gate_state != "Active" or gpu.gate_age_seconds > GATE_SILENT_SECONDS:
            waiting.append(f"the gate of {gpu.uuid} is {gpu.gate_state}, written {gpu.gate_age_seconds:.0f} s ago")
    told = {uid: share for gpu in picture.gpus for uid, share in gpu.tenants.items()}
    for one in expected:
        pod = picture.pods.get(one.uid)
        if pod is None or pod.is_over:
            waiting.append(f"{one.name} is {'gone' if pod is None else pod.phase}")
        elif waits_by_design(pod) or _waits_for_room(pod, one, picture):
            continue
        elif pod.phase != "Running":
            waiting.append(f"{one.name} is {pod.phase}: {pod.why or _who_lets_it_wait(pod, picture)}")
        elif clients.get(one.uid, set()).isdisjoint(pod.gpus):
            waiting.append(f"{one.name} is no client of {', '.join(pod.gpus) or 'any GPU'}")
        elif {each.partition(DEVICES_SEPARATOR)[0] for each in picture.devices.get(one.uid, ())} != set(pod.gpus):
            waiting.append(f"{one.name} has other devices of kubelet's than was decided")
        elif told.get(one.uid) != one.share:
            waiting.append(f"GpuNode counts {told.get(one.uid)} percent for {one.name}, not {one.share}")
    waiting += [f"deleted pod {uid} is still there" for uid in leaving if uid in picture.pods]
    known = {one.uid for one in expected} | set(leaving)
    waiting += [f"GpuNode still counts pod {uid}" for uid in told if uid not in known and uid not in picture.pods]
    return waiting
