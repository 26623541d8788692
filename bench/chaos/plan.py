"""Plan the faults: a pure function of the seed and the fault's number, so that a run can be resumed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class FaultKind(StrEnum):
    """Kind of fault."""

    KILL_OPERATOR = "kill-operator"
    KILL_ADMISSION = "kill-admission"
    KILL_EXTENDER = "kill-extender"
    KILL_EXTENDERS = "kill-extenders"
    KILL_SCHEDULER = "kill-scheduler"
    KILL_AGENT = "kill-agent"
    KILL_FRONT = "kill-front"
    KILL_STANDBY = "kill-standby"
    KILL_GATE = "kill-gate"
    KILL_THROTTLE = "kill-throttle"
    KILL_THAWER = "kill-thawer"
    KILL_HOST = "kill-host"
    KILL_FREEZERS = "kill-freezers"
    KILL_DAEMON = "kill-daemon"
    KILL_SERVER = "kill-server"
    MPS_FAULT = "mps-fault"
    DELETE_PART = "delete-part"
    STALL_OPERATOR = "stall-operator"
    STALL_ADMISSION = "stall-admission"
    STALL_SCHEDULER = "stall-scheduler"
    STALL_AGENT = "stall-agent"
    STALL_FRONT = "stall-front"
    STALL_GATE = "stall-gate"
    STALL_THROTTLE = "stall-throttle"
    STALL_THAWER = "stall-thawer"
    STALL_HOST = "stall-host"
    STALL_DAEMON = "stall-daemon"
    APISERVER_AWAY = "apiserver-away"
    STALL_APISERVER = "stall-apiserver"
    SLOW_APISERVER = "slow-apiserver"
    RESTART_ETCD = "restart-etcd"
    STALL_ETCD = "stall-etcd"
    RESTART_KUBELET = "restart-kubelet"
    STALL_KUBELET = "stall-kubelet"
    RESTART_CONTAINERD = "restart-containerd"
    RESTART_CONTROLLERS = "restart-controllers"
    BREAK_WATCHES = "break-watches"
    CUT_PART = "cut-part"
    CUT_ADMISSION = "cut-admission"
    HANG_DRIVER = "hang-driver"
    FILL_DISK = "fill-disk"


class Ends(StrEnum):
    """Tenants that the fault itself ends; gpushare may end no others."""

    NOBODY = "nobody"
    OF_THE_GPU = "those of the GPU"
    OF_THE_NODE = "those of the node"


@dataclass(frozen=True, slots=True)
class KindTraits:
    """Properties of a kind of fault.

    Attributes:
        what: for the report.
        seconds: shortest and longest time that it lasts; 0 for what happens at once.
        weight: how often it comes, relative to the others.
        takes_plugin: kubelet is without the device plugin for a while, and rejects pods that are bound meanwhile.
    """

    what: str
    ends: Ends = Ends.NOBODY
    seconds: tuple[float, float] = (0.0, 0.0)
    weight: float = 1.0
    takes_plugin: bool = False


_SHORT: Final = (2.0, 6.0)  # below the 15 s of a lease and of a busy MPS daemon
_K = FaultKind
TRAITS: Final[dict[FaultKind, KindTraits]] = {
    _K.KILL_OPERATOR: KindTraits("kill -9 of the operator"),
    _K.KILL_ADMISSION: KindTraits("kill -9 of one admission server"),
    _K.KILL_EXTENDER: KindTraits("kill -9 of one extender"),
    _K.KILL_EXTENDERS: KindTraits("kill -9 of every extender"),
    _K.KILL_SCHEDULER: KindTraits("kill -9 of one kube-scheduler beside an extender"),
    _K.KILL_AGENT: KindTraits("kill -9 of the agent, its forecaster included", weight=2.0),
    _K.KILL_FRONT: KindTraits("kill -9 of the agent's front, the agent with it", takes_plugin=True),
    _K.KILL_STANDBY: KindTraits("kill -9 of the front that waits beside it", weight=0.5),
    _K.KILL_GATE: KindTraits("kill -9 of one GPU's gate", weight=2.0),
    _K.KILL_THROTTLE: KindTraits("kill -9 of the throttle's process", weight=2.0),
    _K.KILL_THAWER: KindTraits("kill -9 of the thawer's process"),
    _K.KILL_HOST: KindTraits("kill -9 of the MPS host", Ends.OF_THE_NODE, weight=0.5),
    _K.KILL_FREEZERS: KindTraits(
        "kill -9 of MPS host and throttle at once, so that the thawer alone is left", Ends.OF_THE_NODE, weight=0.5
    ),
    _K.KILL_DAEMON: KindTraits("kill -9 of one GPU's MPS daemon", Ends.OF_THE_GPU),
    _K.KILL_SERVER: KindTraits("kill -9 of one GPU's MPS server", Ends.OF_THE_GPU),
    _K.MPS_FAULT: KindTraits("a fatal fault in one GPU's MPS server", Ends.OF_THE_GPU),
    _K.DELETE_PART: KindTraits("pod of operator, admission, scheduler or agent deleted", takes_plugin=True),
    _K.STALL_OPERATOR: KindTraits("the operator stands still (SIGSTOP)", seconds=_SHORT),
    _K.STALL_ADMISSION: KindTraits("one admission server stands still", seconds=_SHORT),
    _K.STALL_SCHEDULER: KindTraits(
        "one scheduler and its extender stand still, at times beyond their lease", seconds=(2.0, 20.0)
    ),
    _K.STALL_AGENT: KindTraits("the agent stands still", seconds=_SHORT),
    _K.STALL_FRONT: KindTraits("the agent's front stands still", seconds=_SHORT),
    _K.STALL_GATE: KindTraits("one GPU's gate stands still", seconds=_SHORT),
    _K.STALL_THROTTLE: KindTraits("the throttle's process stands still", seconds=_SHORT),
    _K.STALL_THAWER: KindTraits("the thawer's process stands still", seconds=_SHORT),
    _K.STALL_HOST: KindTraits("the MPS host's process stands still", seconds=_SHORT),
    _K.STALL_DAEMON: KindTraits("one GPU's MPS daemon stands still", seconds=_SHORT),
    _K.APISERVER_AWAY: KindTraits("kill -9 of the API server, away for a while", seconds=(0.0, 6.0)),
    _K.STALL_APISERVER: KindTraits("the API server stands still", seconds=_SHORT),
    _K.SLOW_APISERVER: KindTraits("the API server runs a quarter of the time", seconds=_SHORT),
    _K.RESTART_ETCD: KindTraits("kill -9 of etcd, started again"),
    _K.STALL_ETCD: KindTraits("etcd stands still", seconds=_SHORT),
    _K.RESTART_KUBELET: KindTraits("kill -9 of kubelet, started again", weight=1.5, takes_plugin=True),
    _K.STALL_KUBELET: KindTraits("kubelet stands still", seconds=_SHORT),
    _K.RESTART_CONTAINERD: KindTraits("kill -9 of containerd, started again"),
    _K.RESTART_CONTROLLERS: KindTraits("kill -9 of kube-controller-manager, started again", weight=0.5),
    _K.BREAK_WATCHES: KindTraits("every connection to the API server cut"),
    _K.CUT_PART: KindTraits("packets between one part and the API server lost", seconds=(2.0, 12.0), weight=2.0),
    _K.CUT_ADMISSION: KindTraits("packets between API server and admission lost", seconds=_SHORT),
    _K.HANG_DRIVER: KindTraits("one GPU's driver does not answer", seconds=(2.0, 12.0)),
    _K.FILL_DISK: KindTraits("the node's gpushare directory is full", seconds=_SHORT),
}
# What a short run in CI takes: one of each sort, none that waits for a lease.
QUICK: Final = (
    _K.KILL_OPERATOR,
    _K.KILL_ADMISSION,
    _K.KILL_EXTENDER,
    _K.KILL_AGENT,
    _K.KILL_FRONT,
    _K.KILL_GATE,
    _K.KILL_THROTTLE,
    _K.KILL_SERVER,
    _K.MPS_FAULT,
    _K.STALL_AGENT,
    _K.STALL_GATE,
    _K.STALL_THROTTLE,
    _K.STALL_APISERVER,
    _K.RESTART_KUBELET,
    _K.BREAK_WATCHES,
    _K.CUT_PART,
    _K.HANG_DRIVER,
)


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One fault to come.

    Attributes:
        number: from 0.
        choice_ratio: 0 to 1, picks among the replicas, GPUs or parts that are there.
        seconds: how long it lasts.
        churn: pods that are replaced while it is in force.
    """

    number: int
    kind: FaultKind
    choice_ratio: float
    seconds: float
    churn: int

    def pick(self, names: Sequence[str]) -> str:
        """Return the one of the names that this fault concerns."""
        ordered = sorted(names)
        return ordered[min(int(self.choice_ratio * len(ordered)), len(ordered) - 1)]


def fault(seed: int, number: int, kinds: Sequence[FaultKind] = tuple(FaultKind)) -> PlannedFault:
    """Return the fault of a number; it depends on nothing but these arguments."""
    draw = random.Random(f"{seed}/{number}")
    (kind,) = draw.choices(kinds, [TRAITS[each].weight for each in kinds])
    low, high = TRAITS[kind].seconds
    return PlannedFault(number, kind, draw.random(), round(draw.uniform(low, high), 2), draw.randint(1, 3))
