"""A cluster for the tests of bench/chaos: as the load wants it, but for what a test breaks; it has a clock."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.chaos.auditor import Allowance
from bench.chaos.faults import Injected, NotPossibleError
from bench.chaos.freezes import FreezeReport
from bench.chaos.load import ASKED_AGAIN, Load
from bench.chaos.parts import Component
from bench.chaos.picture import ClientSeen, GpuSeen, Picture, PodSeen
from bench.chaos.plan import PlannedFault
from bench.chaos.run import ChaosRun

from gpushare.kube import PODS
from gpushare.kube.fake import ObjectStore

GPU = "GPU-1"


class StoredPods:
    """What the load asks of its client, which waits for each answer, of the shipped fake's store."""

    def __init__(self) -> None:
        self.store = ObjectStore()
        self.made = 0

    @property
    def pods(self) -> dict[str, dict]:
        """By name."""
        return {pod["metadata"]["name"]: pod for pod in self.store.objects(PODS).values()}

    def create(self, path: str, body: dict) -> dict:
        self.made += 1
        return self.store.respond("POST", path, {}, body)

    def merge(self, path: str, body: dict) -> dict:
        return self.store.respond("PATCH", path, {}, body)

    def delete(self, path: str, body: dict | None = None) -> dict:
        return self.store.respond("DELETE", path, {}, body)


@dataclass
class BreakableCluster:
    """A cluster that is as the load wants it, but for what a test breaks; also eye, injector and freezer."""

    api: StoredPods
    clock: float = 0.0
    recovers_at: float = 0.0
    recovers_after: float = 0.0
    ended: set[str] = field(default_factory=set)
    ends: set[str] = field(default_factory=set)
    allowance: Allowance = field(default_factory=Allowance)
    undone: int = 0
    frozen: dict[str, float] = field(default_factory=dict)
    refuses: str = ""
    room_percent: int | None = None  # pods beyond it wait; memory is as scarce
    placed: dict[str, int] = field(default_factory=dict)
    promised: int = 0  # newest pods that wait since a promise could not be kept
    has_old_words: bool = False  # of those, until they change; then they are told of the promise
    binds_asked: bool = False  # the promise could be kept, so that they are bound once they change
    parts: dict[str, Component] = field(default_factory=dict)
    part_pods: tuple[dict, ...] = ()

    def picture(self) -> Picture:
        pods = {}
        for item in self.api.pods.values():
            uid, name = item["metadata"]["uid"], item["metadata"]["name"]
            share = round(float(item["metadata"]["annotations"]["gpushare.io/fraction"]) * 100)
            phase = "Failed" if name in self.ended else "Running"
            memory_mib = 10 if self.room_percent is None else _memory_mib(item)
            pod = PodSeen(uid, f"load/{name}", phase, share, (GPU,), share, is_bound=True)
            pods[uid] = replace(pod, memory_mib=memory_mib)
        if self.room_percent is not None:
            self._let_wait(pods)
        for uid in list(pods)[len(pods) - self.promised :]:
            is_asked = ASKED_AGAIN in self._annotations(uid)
            if is_asked and self.binds_asked:
                continue
            why = "a tenant could keep only 0.05, 0.08 is promised"
            if self.has_old_words and not is_asked:
                why = "the freest has 10 percent free"
            pods[uid] = replace(pods[uid], phase="Pending", gpus=(), is_bound=False, why=why)
        unready = ("agent is not ready",) if self.clock < self.recovers_at else ()
        running = {uid: pod for uid, pod in pods.items() if not pod.is_over and pod.is_bound}
        clients = tuple(ClientSeen(number, uid) for number, uid in enumerate(running))
        gpu = GpuSeen(
            GPU,
            143_000,
            tenants={uid: pod.share for uid, pod in running.items()},
            clients=clients,
            told=clients,
        )
        return Picture(pods, (gpu,), {uid: (f"{GPU}::{uid}",) for uid in pods}, {}, frozenset(), unready)

    def _annotations(self, uid: str) -> dict:
        return next(x["metadata"]["annotations"] for x in self.api.pods.values() if x["metadata"]["uid"] == uid)

    def _let_wait(self, pods: dict[str, PodSeen]) -> None:
        """Place pods while there is room, those that have a place first; the others wait."""
        self.placed = {uid: share for uid, share in self.placed.items() if uid in pods and not pods[uid].is_over}
        for uid, pod in pods.items():
            if pod.is_over or uid in self.placed:
                continue
            if sum(self.placed.values()) + pod.share <= (self.room_percent or 0):
                self.placed[uid] = pod.share
            else:
                why = "Unschedulable; 0/1 nodes have room"
                pods[uid] = replace(pod, phase="Pending", gpus=(), is_bound=False, why=why)

    def make(self, _: PlannedFault) -> Injected:
        if self.refuses:
            raise NotPossibleError(self.refuses)
        self.recovers_at = self.clock + self.recovers_after
        self.ended |= {name for name in self.api.pods if name in self.ends}

        def undo() -> None:
            self.undone += 1
            self.recovers_at = self.clock + self.recovers_after

        return Injected("something", self.allowance, [undo])

    def watch(self, _: object, __: float) -> None: ...

    def report(self, _: float) -> FreezeReport:
        return FreezeReport(self.frozen, 1.0)

    def sleep(self, seconds: float) -> None:
        self.clock += max(seconds, 0.01)


def _memory_mib(item: dict) -> int:
    return int(item["metadata"]["annotations"]["gpushare.io/memory"].removesuffix("Mi"))


def run_of(cluster: BreakableCluster, load: Load, directory: Path) -> ChaosRun:
    """Return a run of faults on a cluster, by the cluster's own clock."""
    return ChaosRun(
        cluster,
        load,
        cluster,
        cluster,
        directory,
        population=4,
        diagnose=lambda where: where.mkdir(),
        clock=lambda: cluster.clock,
        sleep=cluster.sleep,
    )
