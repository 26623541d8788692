"""Generate load: sharing pods of several sizes and classes, always replaced; and record which of them must exist.

A call with an unknown outcome is repeated until the outcome is known, so the load itself loses no pod.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from bench.chaos.api import ApiConnection, Json, NoAnswerError, RefusedError
from bench.chaos.auditor import waits_by_design
from bench.chaos.picture import ExpectedPods, Picture
from bench.chaos.room import CLIENTS_PER_GPU, RESERVE_MIB, SHARES_PER_GPU

# So many percent of each GPU are asked for that a pod of the largest size always has room on one of the GPUs.
LARGEST_PERCENT: Final = 20
GRACE_SECONDS: Final = 4  # of a pod; the gate ends its clients 3 s before
WORKLOADS: Final = ("montecarlo-fp32", "stream", "gemm-fp16", "dlrm-infer", "latency-probe", "resnet50-train")
PERCENTS: Final = (6, 7, 8, 10, 15, LARGEST_PERCENT)  # none below what is charged at least
MEMORY_PART: Final = 0.7  # of what a share's part of the memory would be, so that the share stays what is asked
TWO_PROCESSES_FROM: Final = 15  # percent: each process has to have MPS's least
PROCESS_PERCENT: Final = 6  # that least
FULL_PERCENTS: Final = (PROCESS_PERCENT, 8, 12, 20, 25, 33)
FULL_LATENCY: Final = 0.25  # of the pods: only class latency may have all clients of its share
FULL_MEMORY: Final = 0.97  # of what the share is worth, at least; more than it is worth would raise the share
USED_MEMORY: Final = 0.97  # of a pod's limit, that its processes allocate
CONTEXT_MIB: Final = 125  # of each process, on the twin
WAITING: Final = 3  # pods for which there is no room, one of them of the smallest size
MOST_WAITING: Final = 8  # with those that wait for a promise
ASKED_AGAIN: Final = "chaos/asked-again"  # an annotation; kube-scheduler tries a waiting pod again that changes
MOST_PODS: Final = 60  # in a cluster that gives everyone room the load is no larger


class Filling(StrEnum):
    """Size of the load relative to the GPUs."""

    ROOMY = "roomy"
    """So little that a pod of the largest size always has room: no pod waits for it."""
    FULL = "full"
    """More than there is: some pods always wait for room, the others have nearly all shares and memory."""


@dataclass(frozen=True, slots=True)
class PodOrder:
    """A pod to create."""

    name: str
    percent: int
    memory_mib: int
    workload: str
    is_latency: bool
    processes: int
    used_mib: int


def order(seed: int, number: int, gpu_memory_mib: int) -> PodOrder:
    """Return the pod of a number; it depends on nothing but these arguments."""
    draw = random.Random(f"{seed}/pod/{number}")
    percent = draw.choice(PERCENTS)
    most = int(gpu_memory_mib * percent / 100 * MEMORY_PART)
    is_latency = draw.random() < 0.15
    processes = 2 if percent >= TWO_PROCESSES_FROM and draw.random() < 0.3 else 1
    memory_mib = draw.randint(min(1024, most), most)
    workload, used_mib = draw.choice(WORKLOADS), min(256, memory_mib // 4)
    return PodOrder(f"load-{number}", percent, memory_mib, workload, is_latency, processes, used_mib)


def full_order(seed: int, number: int, gpu_memory_mib: int, *, is_smallest: bool = False) -> PodOrder:
    """Return the pod of a number where GPUs are to be full: it takes what its share allows, or nearly so."""
    draw = random.Random(f"{seed}/full/{number}")
    percent = draw.choice(FULL_PERCENTS)
    if is_smallest:
        percent = PROCESS_PERCENT
    most = (gpu_memory_mib - RESERVE_MIB) * percent // SHARES_PER_GPU
    memory_mib = draw.randint(int(most * FULL_MEMORY), most)
    is_latency = draw.random() < FULL_LATENCY
    processes = percent * CLIENTS_PER_GPU // SHARES_PER_GPU if is_latency else percent // PROCESS_PERCENT
    used_mib = int(memory_mib * USED_MEMORY / processes) - CONTEXT_MIB
    workload = draw.choice(WORKLOADS)
    return PodOrder(f"load-{number}", percent, memory_mib, workload, is_latency, processes, used_mib)


def room_percent(gpus: int) -> int:
    """Return the sum of shares up to which the largest pod always fits: no GPU may be left just short of it."""
    return gpus * (100 - LARGEST_PERCENT)


def manifest(one: PodOrder, image: str) -> Json:
    """Return the pod's object; the program is the twin's tenant, one line a second in its log."""
    annotations = {
        "gpushare.io/fraction": f"{one.percent / 100:.2f}",
        "gpushare.io/memory": f"{one.memory_mib}Mi",
        "gpushare.io/workload": one.workload,
        "gpushare.io/class": "latency" if one.is_latency else "throughput",
        "gpushare.io/processes": str(one.processes),
    }
    command = ["python", "-m", "gpushare.twin.mps.tenant", "--workload", one.workload]
    command += ["--processes", str(one.processes), "--memory-mib", str(one.used_mib)]
    container = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": command,
        "securityContext": {"runAsUser": 0},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": one.name, "annotations": annotations},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            "automountServiceAccountToken": False,
            "containers": [container],
        },
    }


class Load:
    """The pods of one namespace."""

    def __init__(
        self,
        api: ApiConnection,
        namespace: str,
        image: str,
        seed: int,
        *,
        gpus: int,
        gpu_memory_mib: int,
        filling: Filling = Filling.ROOMY,
    ) -> None:
        self._api, self._image, self._seed = api, image, seed
        self._namespace = namespace
        self._path = f"/api/v1/namespaces/{namespace}/pods"
        self._filling, self._gpu_memory_mib = filling, gpu_memory_mib
        self._room, self._all_percent = room_percent(gpus), gpus * SHARES_PER_GPU
        self._random = random.Random(f"{seed}/churn")
        self._next = self._asked = 0
        self._orders: list[PodOrder] = []  # to be created, or of unknown outcome
        self._book: dict[str, ExpectedPods] = {}
        # uids as of the last picture: those that are bound, and those that wait for a promise and not for room
        self._bound: frozenset[str] = frozenset()
        self._by_design: frozenset[str] = frozenset()
        self._leaving: dict[str, str] = {}  # uid -> name; deletion asked for, or to be asked for again
        self._to_delete: set[str] = set()
        self.created = self.deleted = self.refusals = 0
        self.last_refusal = ""

    @property
    def expected(self) -> tuple[ExpectedPods, ...]:
        """Return the pods that must be there."""
        return tuple(self._book.values())

    @property
    def leaving(self) -> tuple[str, ...]:
        """Return the uids of the pods that must go."""
        return tuple(self._leaving)

    @property
    def is_idle(self) -> bool:
        """Return whether nothing is left to ask of the API server."""
        return not self._orders and not self._to_delete

    def running(self, picture: Picture) -> set[str]:
        """Return the uids of its pods, those that leave included, that have processes."""
        return {uid for uid in (*self._book, *self._leaving) if uid in picture.processes}

    def fill(self, most: int) -> None:
        """Order pods until there are so many, or the room is used; for full GPUs until enough wait for room."""
        is_full = self._filling is Filling.FULL
        most = MOST_PODS if is_full else most
        while len(self._book) + len(self._orders) < most:
            one = self._next_for_full() if is_full else self._next_for_roomy()
            if one is None:
                return
            self._next += 1
            self._orders.append(one)

    def _next_for_roomy(self) -> PodOrder | None:
        one = order(self._seed, self._next, self._gpu_memory_mib)
        return one if self._percent() + one.percent <= self._room else None

    def _next_for_full(self) -> PodOrder | None:
        unbound = [uid for uid in self._book if uid not in self._bound]
        waiting = [self._book[uid].share for uid in unbound if uid not in self._by_design]
        waiting += [each.percent for each in self._orders]
        is_short = self._percent() < self._all_percent
        if not is_short and len(unbound) + len(self._orders) >= MOST_WAITING:
            return None
        if is_short or len(waiting) < WAITING:
            return full_order(self._seed, self._next, self._gpu_memory_mib)
        if PROCESS_PERCENT not in waiting:
            return full_order(self._seed, self._next, self._gpu_memory_mib, is_smallest=True)
        return None

    def churn(self, count: int, most: int) -> None:
        """Replace so many pods, chosen at random; the new ones come while the old ones still go.

        Of a load that fills the GPUs these are bound ones, and the one that has waited longest goes with them.
        """
        uids = sorted(self._book)
        if self._filling is Filling.FULL:
            waiting = [uid for uid in self._book if uid not in self._bound]
            uids = sorted(self._book.keys() & self._bound)
            if waiting:
                self._leave(waiting[0])
        for uid in self._random.sample(uids, min(count, len(uids))):
            self._leave(uid)
        self.fill(most)

    def replace_ended(self, picture: Picture, uids: Sequence[str]) -> None:
        """Delete pods that a fault ended; `fill` orders others."""
        for uid in uids:
            if uid in self._book and picture.pods is not None:
                self._leave(uid)

    def forget(self, uid: str) -> None:
        """Take a pod out of the book that is gone: it has been reported, once."""
        self._book.pop(uid, None)

    def step(self, picture: Picture | None = None) -> None:
        """Ask the API server for what is still to be done; what fails is tried again at the next step."""
        if picture is not None:
            if picture.pods is None:
                return  # it would not answer this either
            self._bound = frozenset(uid for uid, pod in picture.pods.items() if pod.is_bound)
            self._by_design = frozenset(uid for uid, pod in picture.pods.items() if waits_by_design(pod))
        try:
            for one in tuple(self._orders):
                self._create(one)
            for uid in tuple(self._to_delete):
                self._delete(uid)
        except NoAnswerError:
            return
        if picture is not None and picture.pods is not None:
            for uid in [uid for uid in self._leaving if uid not in self._to_delete and uid not in picture.pods]:
                del self._leaving[uid]
                self.deleted += 1

    def ask_again(self, uid: str) -> bool:
        """Make kube-scheduler try a pod of the book again, by a change to it; return whether it was written."""
        name = self._book[uid].name.rpartition("/")[2]
        self._asked += 1
        body = {"metadata": {"uid": uid, "annotations": {ASKED_AGAIN: str(self._asked)}}}
        try:
            self._api.merge(f"{self._path}/{name}", body)
        except (NoAnswerError, RefusedError):
            return False
        return True

    def _percent(self) -> int:
        # Pods that go still hold their share until they are gone; a GPU may then be full for a moment.
        return sum(one.share for one in self._book.values()) + sum(one.percent for one in self._orders)

    def _leave(self, uid: str) -> None:
        one = self._book.pop(uid)
        self._leaving[uid] = one.name
        self._to_delete.add(uid)

    def _create(self, one: PodOrder) -> None:
        try:
            made = self._api.create(self._path, manifest(one, self._image))
        except RefusedError as refused:
            if refused.code != 409:
                # Admission away (failurePolicy Fail) is a 500, which is no refusal.
                self.refusals, self.last_refusal = self.refusals + 1, str(refused)
                return
            made = self._api.get(f"{self._path}/{one.name}")  # an earlier try had worked
        self._orders.remove(one)
        uid = made["metadata"]["uid"]
        self._book[uid] = ExpectedPods(uid, f"{self._namespace}/{one.name}", one.percent, one.memory_mib)
        self.created += 1

    def _delete(self, uid: str) -> None:
        name = self._leaving[uid].rpartition("/")[2]
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": uid}}
        try:
            self._api.delete(f"{self._path}/{name}", body)
        except RefusedError as refused:
            if refused.code not in {404, 409}:
                raise NoAnswerError(str(refused)) from None
        self._to_delete.discard(uid)
