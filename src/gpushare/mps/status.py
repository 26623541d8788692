"""The MPS host's report on one GPU: gate.json, read by the agent and by `gpushare mps status`."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, TypeVar

STATUS_VERSION: Final = 1
S = TypeVar("S", bound=StrEnum)


class GateState(StrEnum):
    """State of a GPU's MPS as a whole; ACTIVE and DEGRADED admit new clients."""

    STARTING = "Starting"
    SELF_TEST = "SelfTest"
    ACTIVE = "Active"
    DEGRADED = "Degraded"  # admits clients; something beside MPS does not answer
    FAULT = "Fault"
    DOWN = "Down"


class SelfTestResult(StrEnum):
    """Whether ceilings were proven to bind on this driver."""

    PENDING = "Pending"
    PASSED = "Passed"
    FAILED = "Failed"
    SKIPPED = "Skipped"


class HoldReason(StrEnum):
    """Why a connection waits at the gate; the label `reason` of metrics."""

    UNKNOWN_POD = "UnknownPod"
    NO_DECISION = "NoDecision"
    WRONG_GPU = "WrongGpu"
    POD_ENDS = "PodEnds"
    DAEMON_DOWN = "DaemonDown"
    FAULT = "Fault"
    SELF_TEST = "SelfTest"
    CLIENTS = "TooManyClients"
    POD_CLIENTS = "TooManyClientsOfPod"
    CLIENTS_RESERVED = "ClientsReserved"
    POD_CAP = "PodCapInUse"
    MEMORY_SETTLING = "PodMemorySettling"
    BACK_OFF = "TurnBackOff"
    PROTOCOL = "UnknownProtocol"
    RATE = "TooManyConnections"
    OTHER = "Other"  # a value of a later version's gate
    TURN = "WaitingForTurn"


class RefuseReason(StrEnum):
    """Why a connection was closed by the gate: never one of a well-behaved CUDA process."""

    CONTROL_COMMAND = "ControlCommand"
    TOO_MANY_CONNECTIONS = "TooManyConnections"
    PROTOCOL = "Protocol"


class MismatchKind(StrEnum):
    """How a pod runs otherwise than decided; one that comes to another GPU's gate is held (HoldReason)."""

    UNKNOWN_CLIENT = "UnknownClient"
    STALE_CEILING = "StaleCeiling"
    MEMORY_OVERRUN = "MemoryOverrun"


@dataclass(frozen=True, slots=True)
class ClientStatus:
    """One MPS client.

    Attributes:
        pod_uid: None for a process of no pod.
        thread_percentage, memory_limit_mib: the ceilings it connected under; None when it connected before this
            gate.
        memory_used_mib: device memory now; None where nobody can tell.
        connected_at: Unix time, seconds.
    """

    pid: int
    pod_uid: str | None
    thread_percentage: int | None = None
    memory_limit_mib: int | None = None
    memory_used_mib: int | None = None
    connected_at: float | None = None
    start_ticks: int | None = None


@dataclass(frozen=True, slots=True)
class HeldStatus:
    """One process whose connections wait; `since` is Unix time."""

    pid: int
    pod_uid: str | None
    reason: HoldReason
    since: float


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A pod that runs otherwise than decided, with a sentence for its event."""

    kind: MismatchKind
    pod_uid: str | None
    pid: int
    detail: str


@dataclass(frozen=True, slots=True)
class SelfTest:
    """The proof that ceilings bind on this driver, with what was asked and what was seen."""

    result: SelfTestResult = SelfTestResult.PENDING
    detail: str = ""
    driver: str = ""
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class TurnStatistics:
    """Turns since the gate started; a turn is one process's way to the daemon.

    Attributes:
        waits_seconds_sum: time from the first word of a process to its turn; durations_seconds_sum: length of
            turns.
    """

    count: int = 0
    timeouts: int = 0
    waits_seconds_sum: float = 0.0
    durations_seconds_sum: float = 0.0
    duration_seconds_max: float = 0.0


_NO_THROTTLE: Final = {"problem": "this MPS host is of a version without a throttle"}


class ThrottleRefusal(StrEnum):
    """Why a pod that the agent asked to throttle runs freely."""

    LATENCY = "LatencyClass"
    UNKNOWN_CLASS = "UnknownClass"
    NO_DECISION = "NoDecision"
    ANOTHER_GPU = "ThrottledOnAnotherGpu"
    NO_CGROUP = "NoCgroup"
    FROZEN_BY_OTHERS = "FrozenByOthers"
    NOT_WRITABLE = "FreezerNotWritable"
    STUCK = "StuckInFreezing"
    OTHER = "Other"  # of a later version


@dataclass(frozen=True, slots=True)
class PodThrottle:
    """A throttled pod: the share of time that it runs, and whether it stands still now for a reading."""

    pod_uid: str
    duty_ratio: float
    is_stopped: bool = False


@dataclass(frozen=True, slots=True)
class RefusedThrottle:
    """A pod that runs freely though the agent asked otherwise."""

    pod_uid: str
    reason: ThrottleRefusal
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ThrottleStatus:
    """The throttle of one GPU.

    Attributes:
        beat: seconds of CLOCK_BOOTTIME when this was written.
        problem: why nobody can be frozen here; empty when pods can.
        pods: who is throttled now.
        refusals: by reason, times that an ask was refused since the throttle's process started.
        freezes: pods frozen since then.
        started_at: seconds of CLOCK_BOOTTIME when that process first looked; 0 from a version that does not say.
    """

    beat: float = 0.0
    problem: str = ""
    pods: tuple[PodThrottle, ...] = ()
    refused: tuple[RefusedThrottle, ...] = ()
    refusals: Mapping[str, int] = field(default_factory=dict)
    freezes: int = 0
    started_at: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the file's JSON object."""
        return {"version": STATUS_VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, data: Any) -> "ThrottleStatus":
        """Read the object; fields of later versions are ignored.

        Raises:
            ValueError, KeyError, TypeError: not a throttle's status.
        """
        values = _only(cls, data)
        values["pods"] = tuple(PodThrottle(**_only(PodThrottle, p)) for p in values.get("pods", ()))
        values["refused"] = tuple(
            RefusedThrottle(
                **{
                    **_only(RefusedThrottle, r),
                    "reason": _known(ThrottleRefusal, r["reason"], ThrottleRefusal.OTHER),
                }
            )
            for r in values.get("refused", ())
        )
        return cls(**values)


@dataclass(frozen=True, slots=True)
class GateStatus:
    """Everything the MPS host knows about one GPU.

    Attributes:
        written_at: Unix time; a file older than some seconds means that the host is not running.
        daemon_restarts: times that the daemon was started anew; server_restarts: times that its server had ended
            while it lived on, and another was started.
        faults: server faults seen since the gate started; `last_fault` says what happened, for an event;
            `last_fault_at` is when it was noticed, `last_fault_pods` the uids of the pods that were connected when
            it began, whether or not they still were when it was noticed; `last_fault_by` is the pod that began it,
            None where that is not known.
        connections: sockets open at the gate, silent ones included; `unread`: those of them that came faster than
            their pod may connect and are not greeted yet.
        unknown_decision_values: fields and classes in the agent's decisions that this gate does not know.
    """

    gpu_uuid: str
    state: GateState
    written_at: float
    detail: str = ""
    gate_pid: int = 0
    gate_started_at: float = 0.0
    daemon_pid: int | None = None
    daemon_up_since: float | None = None
    daemon_restarts: int = 0
    server_restarts: int = 0
    server_pid: int | None = None
    faults: int = 0
    last_fault: str = ""
    last_fault_at: float | None = None
    self_test: SelfTest = SelfTest()
    clients: tuple[ClientStatus, ...] = ()
    held: tuple[HeldStatus, ...] = ()
    refused: Mapping[str, int] = field(default_factory=dict)
    mismatches: tuple[Mismatch, ...] = ()
    connections: int = 0
    turns: TurnStatistics = TurnStatistics()
    last_fault_pods: tuple[str, ...] = ()
    last_fault_by: str | None = None
    unread: int = 0
    unknown_decision_values: int = 0
    throttle: ThrottleStatus = ThrottleStatus()

    def to_json(self) -> dict[str, Any]:
        """Return the file's JSON object."""
        return {"version": STATUS_VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, data: Any) -> "GateStatus":
        """Read the file's object; fields of later versions are ignored.

        Raises:
            ValueError, KeyError, TypeError: not a status file.
        """
        if not isinstance(data, dict) or data.get("version") != STATUS_VERSION:
            raise ValueError(f"not a gate status of version {STATUS_VERSION}")
        known = {f.name for f in dataclasses.fields(cls)}
        values = {key: value for key, value in data.items() if key in known}
        # A later version's gate may be in a state that this one does not know: assume, to be safe, that it admits
        # nobody.
        values["state"] = _known(GateState, values["state"], GateState.DOWN)
        test = _only(SelfTest, values.get("self_test", {}))
        result = _known(SelfTestResult, test.get("result"), SelfTestResult.PENDING)
        values["self_test"] = SelfTest(**{**test, "result": result})
        values["last_fault_pods"] = tuple(map(str, values.get("last_fault_pods", ())))
        if not isinstance(values.get("last_fault_by"), str | None):
            raise ValueError("last_fault_by is not a pod")
        values["clients"] = tuple(ClientStatus(**_only(ClientStatus, c)) for c in values.get("clients", ()))
        values["held"] = tuple(
            HeldStatus(**{**_only(HeldStatus, h), "reason": _known(HoldReason, h["reason"], HoldReason.OTHER)})
            for h in values.get("held", ())
        )
        values["mismatches"] = tuple(
            Mismatch(**{**_only(Mismatch, m), "kind": MismatchKind(m["kind"])})
            for m in values.get("mismatches", ())
            if m["kind"] in set(MismatchKind)
        )
        values["throttle"] = ThrottleStatus.from_json(values.get("throttle", _NO_THROTTLE))
        values["turns"] = TurnStatistics(**_only(TurnStatistics, values.get("turns", {})))
        return cls(**values)


def _known(kind: type[S], value: Any, otherwise: S) -> S:
    try:
        return kind(value)
    except ValueError:
        return otherwise


def _only(kind: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    known = {f.name for f in dataclasses.fields(kind)}
    return {key: value for key, value in data.items() if key in known}
