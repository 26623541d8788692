"""The MPS host's status of one GPU: gate.json, read by the agent and by `gpushare mps status`."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, TypeVar

STATUS_VERSION: Final = 1
_WAITING_KEY: Final = "held"  # in JSON, of `waiting_connections`
S = TypeVar("S", bound=StrEnum)


class GateState(StrEnum):
    """State of a GPU's MPS as a whole; ACTIVE and DEGRADED admit new clients."""

    STARTING = "Starting"
    SELF_TEST = "SelfTest"
    ACTIVE = "Active"
    DEGRADED = "Degraded"  # admits clients; something other than MPS does not answer
    FAULT = "Fault"
    DOWN = "Down"


class SelfTestResult(StrEnum):
    """Result of the test that this driver enforces ceilings."""

    PENDING = "Pending"
    PASSED = "Passed"
    FAILED = "Failed"
    SKIPPED = "Skipped"


class HoldReason(StrEnum):
    """Reason for which a connection waits at the gate; the label `reason` of metrics."""

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
    OTHER = "Other"  # a value of a later version
    TURN = "WaitingForTurn"


class RefuseReason(StrEnum):
    """Reason for which the gate closed a connection; well-behaved CUDA processes never cause one."""

    CONTROL_COMMAND = "ControlCommand"
    TOO_MANY_CONNECTIONS = "TooManyConnections"
    PROTOCOL = "Protocol"


class MismatchKind(StrEnum):
    """Kind of difference between a pod and its decision; a pod at another GPU's gate is held instead."""

    UNKNOWN_CLIENT = "UnknownClient"
    STALE_CEILING = "StaleCeiling"
    MEMORY_OVERRUN = "MemoryOverrun"


def highest_grants(grants: Sequence[int | None], contexts: int) -> tuple[int | None, ...]:
    """Return the highest of a process's thread percentages, one a context; which contexts are gone is not known.

    Args:
        grants: of all its turns, at least one; None for an unknown one, which counts as the highest.
    """
    ordered = sorted(grants, key=lambda each: math.inf if each is None else each, reverse=True)
    return tuple((ordered + [ordered[0]] * contexts)[:contexts])


@dataclass(frozen=True, slots=True)
class ClientStatus:
    """One MPS client.

    Attributes:
        pod_uid: None for a process in no pod.
        thread_percentage: the ceiling it connected under; None if it connected before this gate.
        memory_limit_mib: likewise.
        memory_used_mib: its present device memory; None if unknown.
        connected_at: Unix time, seconds.
        contexts: how many contexts it has by the server's log; 0 if the log shows none, or from a version that
            does not count them.
        grants: the thread percentages of all its turns, as in `Admission`.
        pod_limit_mib: its pod's memory limit when it connected, of which its own is a part; None if unknown.
    """

    pid: int
    pod_uid: str | None
    thread_percentage: int | None = None
    memory_limit_mib: int | None = None
    memory_used_mib: int | None = None
    connected_at: float | None = None
    start_ticks: int | None = None
    contexts: int = 0
    grants: tuple[int | None, ...] = ()
    pod_limit_mib: int | None = None

    @property
    def context_percentages(self) -> tuple[int | None, ...]:
        """Return the ceiling of each of its contexts, which have SMs of their own each (docs/facts.md 37)."""
        return highest_grants(self.grants or (self.thread_percentage,), max(1, self.contexts))


@dataclass(frozen=True, slots=True)
class HeldStatus:
    """One process whose connections wait; `since` is Unix time."""

    pid: int
    pod_uid: str | None
    reason: HoldReason
    since: float


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A pod that runs differently from its decision, with a sentence for its event."""

    kind: MismatchKind
    pod_uid: str | None
    pid: int
    detail: str


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """A pod's process that the MPS server did not take although it had no fault.

    Attributes:
        cuda_error: what the process got from the server.
        at: Unix time.
    """

    pid: int
    pod_uid: str
    cuda_error: int
    at: float


@dataclass(frozen=True, slots=True)
class SelfTest:
    """The proof that ceilings are enforced on this driver, with what was asked for and what was measured."""

    result: SelfTestResult = SelfTestResult.PENDING
    detail: str = ""
    driver: str = ""
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class TurnStatistics:
    """Turns since the gate started; a turn is one process's way to the daemon.

    Attributes:
        waits_seconds_sum: time from the first message of a process to its turn.
        durations_seconds_sum: length of turns.
    """

    count: int = 0
    timeouts: int = 0
    waits_seconds_sum: float = 0.0
    durations_seconds_sum: float = 0.0
    duration_seconds_max: float = 0.0


_NO_THROTTLE: Final = {"problem": "this MPS host is of a version without a throttle"}


class ThrottleRefusal(StrEnum):
    """Reason for which a pod is not throttled although the agent asked for it."""

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
    """A throttled pod: the part of the time that it runs, and whether it is stopped now for a reading."""

    pod_uid: str
    duty_ratio: float
    is_stopped: bool = False


@dataclass(frozen=True, slots=True)
class RefusedThrottle:
    """A pod that runs freely although the agent asked to throttle it."""

    pod_uid: str
    reason: ThrottleRefusal
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ThrottleStatus:
    """The throttle of one GPU.

    Attributes:
        beat: when this was written, in seconds of CLOCK_BOOTTIME.
        problem: why no pod can be frozen here; empty if pods can.
        pods: pods that are throttled now.
        refusals: by reason, how often an ask was refused since the throttle's process started.
        freezes: number of freezes since then.
        started_at: when that process first looked, in seconds of CLOCK_BOOTTIME; 0 from a version that does not
            say.
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
        daemon_restarts: how often the daemon was started again.
        server_restarts: how often the server was started again after it had ended while the daemon ran on.
        faults: server faults since the gate started.
        last_fault: what happened at the last fault, for an event.
        last_fault_at: when it was noticed.
        last_fault_pods: uids of the pods that were connected when it began, even if they had left when it was
            noticed, and of those that the server turned away meanwhile.
        last_fault_by: the pod that caused it; None if unknown.
        connections: sockets open at the gate, silent ones included.
        unread: those of them that exceed their pod's rate and are not greeted yet.
        unknown_decision_values: fields and classes in the agent's decisions that this gate does not know.
        faults_settled_bytes: how far the server's log has been looked at for faults that are counted here; None
            from a version that does not say.
        lost_pods: uids of the decided pods that have connected no process since a fault ended theirs.
        is_fault_counted: whether `faults` has the fault that the server is in, if it is in one.
        turned_away: the latest processes that the server did not take, without a fault.
        counts_since: when faults and restarts began to be counted, Unix time: the start of the first gate of those
            that go on with each other's counts. 0 from a version that does not say, and from its successors.
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
    waiting_connections: tuple[HeldStatus, ...] = ()
    refused: Mapping[str, int] = field(default_factory=dict)
    mismatches: tuple[Mismatch, ...] = ()
    connections: int = 0
    turns: TurnStatistics = TurnStatistics()
    last_fault_pods: tuple[str, ...] = ()
    last_fault_by: str | None = None
    unread: int = 0
    unknown_decision_values: int = 0
    throttle: ThrottleStatus = ThrottleStatus()
    faults_settled_bytes: int | None = None
    is_fault_counted: bool = False
    lost_pods: tuple[str, ...] = ()
    turned_away: tuple[TurnedAway, ...] = ()
    counts_since: float = 0.0

    def following(self, former: "GateStatus") -> "GateStatus":
        """Return the status of a gate that goes on with its predecessor's counts, last fault and self-test."""
        return dataclasses.replace(
            self,
            daemon_restarts=former.daemon_restarts,
            server_restarts=former.server_restarts,
            faults=former.faults,
            last_fault=former.last_fault,
            last_fault_at=former.last_fault_at,
            last_fault_pods=former.last_fault_pods,
            last_fault_by=former.last_fault_by,
            self_test=former.self_test,
            counts_since=former.counts_since,
        )

    def uncounted(self) -> "GateStatus":
        """Return the status with counts of zero, to which those of a gate that counts anew can be compared."""
        return dataclasses.replace(self, faults=0, daemon_restarts=0, server_restarts=0, last_fault_pods=())

    def to_json(self) -> dict[str, Any]:
        """Return the file's JSON object."""
        return {"version": STATUS_VERSION, **self.fields_json()}

    def fields_json(self) -> dict[str, Any]:
        """Return every field by its name in JSON."""
        names = {"waiting_connections": _WAITING_KEY}
        return {names.get(name, name): value for name, value in dataclasses.asdict(self).items()}

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
        # A later version's gate may be in a state that this version does not know; to be safe, assume that it
        # admits no clients.
        values["state"] = _known(GateState, values["state"], GateState.DOWN)
        test = _only(SelfTest, values.get("self_test", {}))
        result = _known(SelfTestResult, test.get("result"), SelfTestResult.PENDING)
        values["self_test"] = SelfTest(**{**test, "result": result})
        for name in ("last_fault_pods", "lost_pods"):
            values[name] = tuple(map(str, values.get(name, ())))
        if not isinstance(values.get("last_fault_by"), str | None):
            raise ValueError("last_fault_by is not a pod")
        values["clients"] = tuple(
            ClientStatus(**{**_only(ClientStatus, c), "grants": tuple(c.get("grants", ()))})
            for c in values.get("clients", ())
        )
        values["waiting_connections"] = tuple(
            HeldStatus(**{**_only(HeldStatus, h), "reason": _known(HoldReason, h["reason"], HoldReason.OTHER)})
            for h in data.get(_WAITING_KEY, ())
        )
        values["mismatches"] = tuple(
            Mismatch(**{**_only(Mismatch, m), "kind": MismatchKind(m["kind"])})
            for m in values.get("mismatches", ())
            if m["kind"] in set(MismatchKind)
        )
        values["turned_away"] = tuple(
            TurnedAway(**_only(TurnedAway, each)) for each in values.get("turned_away", ())
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
