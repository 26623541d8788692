"""The MPS host's report on each GPU, its age, and the health and the events that follow from it."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from gpushare.core.api import Ceilings, MpsFault, MpsState, MpsStatus, names
from gpushare.core.gpu import GpuHealth, Health
from gpushare.mps.layout import Fresh, GpuDirectory, status_reader
from gpushare.mps.status import GateState, GateStatus, HoldReason, SelfTestResult, TurnedAway

_log = logging.getLogger(__name__)
STALE_SECONDS: Final = 10.0  # the host writes at least every few seconds
# MPS is back 1.3 s after a fault or a killed daemon (docs/measurements/gate-h200.md), and its host after a few.
GRACE_SECONDS: Final = 15.0

_STATES: Final = {
    GateState.STARTING: MpsState.STARTING,
    GateState.SELF_TEST: MpsState.STARTING,
    GateState.ACTIVE: MpsState.ACTIVE,
    GateState.DEGRADED: MpsState.ACTIVE,
    GateState.FAULT: MpsState.FAULT,
    GateState.DOWN: MpsState.DOWN,
}
_CEILINGS: Final = {SelfTestResult.PASSED: Ceilings.ENFORCED, SelfTestResult.FAILED: Ceilings.NOT_ENFORCED}
RECENT_SECONDS: Final = 10.0
SELDOM_SECONDS: Final = 60.0  # between two events of one kind on one pod and GPU that the pod can cause at will
_SHOWN_HOLDS: Final = frozenset(
    {
        HoldReason.CLIENTS,
        HoldReason.POD_CLIENTS,
        HoldReason.CLIENTS_RESERVED,
        HoldReason.POD_CAP,
        HoldReason.WRONG_GPU,
        HoldReason.PROTOCOL,
        HoldReason.RATE,
    }
)


_ADVICE: Final = {
    HoldReason.POD_CAP: "; the pod's processes and contexts have all of its thread percentage, so it goes on "
    f"when one leaves. The annotation {names.PROCESSES} says how many share it",
    HoldReason.POD_CLIENTS: "; the pod has its share's part of the GPU's MPS clients, or as many as "
    f"one pod may have. The annotation {names.PROCESSES} asks for more, and is charged for them",
}
_CUDA_ERRORS: Final = {
    807: "it is not ready for new clients",
    808: "it has as many clients as it takes",
    809: "it has as many connections as it takes",
}
"""What CUDA's errors mean by which the MPS server turns a process away (the driver API's CUresult)."""


class Gates:
    """Readers of every GPU's gate.json, with their age on our own monotonic clock."""

    def __init__(
        self, directory: Path, clock: Callable[[], float], wall: Callable[[], float] | None = None
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._wall = wall
        self._readers: dict[str, Fresh[GateStatus]] = {}

    def read(self, uuid: str) -> GateStatus | None:
        """Return the gate's report on a GPU; None if it never wrote one or has stopped writing."""
        if uuid not in self._readers:
            file = status_reader(GpuDirectory.of(self._directory, uuid))
            self._readers[uuid] = Fresh(file, self._clock, STALE_SECONDS, self._wall)
        return self._readers[uuid].read()


def mps_status(status: GateStatus | None) -> MpsStatus:
    """Return a gate's state for the GpuNode."""
    if status is None:
        return MpsStatus(state=MpsState.DOWN, message="the MPS host does not report")
    message = status.detail or None
    if status.self_test.result is SelfTestResult.FAILED:
        message = message or f"ceilings do not bind on this driver: {status.self_test.detail}"
    return MpsStatus(
        state=_STATES[status.state],
        clients=len(status.clients),
        waiting_connections=len(status.waiting_connections),
        ceilings=_CEILINGS.get(status.self_test.result, Ceilings.UNTESTED),
        message=message[:1024] if message else None,
        last_fault=_fault_of(status),
    )


def _fault_of(status: GateStatus) -> MpsFault | None:
    if status.last_fault_at is None:
        return None
    at = datetime.fromtimestamp(status.last_fault_at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return MpsFault(at, status.last_fault_by)


def conclude_health(device: GpuHealth, status: GateStatus | None, drained: str = "") -> GpuHealth:
    """Return a GPU's health: healthy if the device is and MPS is up, since clients without MPS would be uncapped.

    Args:
        drained: why it gets no new pods although it is healthy; empty if it may.
    """
    if device.health is Health.UNHEALTHY:
        return device
    if status is None:
        return GpuHealth(Health.UNHEALTHY, "the MPS host does not report")
    if status.state in {GateState.ACTIVE, GateState.DEGRADED}:
        return GpuHealth(Health.UNHEALTHY, drained) if drained else device
    reasons = {
        GateState.STARTING: "MPS is starting",
        GateState.SELF_TEST: "MPS tests whether ceilings bind",
        GateState.FAULT: "the MPS server is in FAULT and is being drained",
        GateState.DOWN: "the MPS daemon is down",
    }
    detail = f": {status.detail}" if status.detail else ""
    return GpuHealth(Health.UNHEALTHY, f"{reasons[status.state]}{detail}")


class ListedHealth:
    """Health that kubelet's list of devices has for each GPU.

    Kubelet rejects for good what was bound to a GPU before the extender knew that it is unhealthy. So a GPU stays
    healthy in the list while what is wrong with it may pass, for `GRACE_SECONDS` at most. That holds from an
    agent's first look on: the GpuNode is written after the first list, and may still say that it is healthy.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._listed: dict[str, Health] = {}
        self._unwell_since: dict[str, float] = {}  # GPUs that are listed as healthy and are not

    def of(self, uuid: str) -> Health:
        """Return what the list has for a GPU; one of which nothing is known yet is healthy."""
        return self._listed.get(uuid, Health.HEALTHY)

    def update(self, uuid: str, health: GpuHealth, *, may_pass: bool) -> bool:
        """Take a GPU's health as concluded now, and return whether the list changes; call it in every round.

        Args:
            may_pass: whether what makes it unhealthy may pass by itself while the device is well.
        """
        before = self._listed.get(uuid)
        is_told = before is Health.UNHEALTHY
        if may_pass and health.health is Health.UNHEALTHY and not is_told and not self._lasts(uuid):
            return False
        self._unwell_since.pop(uuid, None)
        self._listed[uuid] = health.health
        return before is not health.health

    def _lasts(self, uuid: str) -> bool:
        now = self._clock()
        seconds = now - self._unwell_since.setdefault(uuid, now)
        if seconds < GRACE_SECONDS:
            return False
        _log.warning("GPU %s has been unhealthy for %.0f s: kubelet is told", uuid, seconds, extra={"gpu": uuid})
        return True


@dataclass(frozen=True, slots=True)
class Notice:
    """Event about a pod (by uid), or about the node (None).

    Attributes:
        is_at_will: whether processes of a tenant can cause it as often as they like.
    """

    pod_uid: str | None
    reason: str
    note: str
    is_warning: bool = True
    is_at_will: bool = False


def health_notices(uuid: str, old: GpuHealth | None, new: GpuHealth, tenants: Iterable[str]) -> tuple[Notice, ...]:
    """Return notices of a GPU that failed or recovered, for its tenants and the node; none for a new GPU."""
    if old is None or old.health is new.health:
        return ()
    everyone = [*tenants, None]
    if new.health is Health.UNHEALTHY:
        note = f"GPU {uuid} is unhealthy and takes no new tenants: {new.reason}"
        return tuple(Notice(uid, "GpuUnhealthy", note) for uid in everyone)
    note = f"GPU {uuid} is healthy again"
    return tuple(Notice(uid, "GpuRecovered", note, is_warning=False) for uid in everyone)


class SeldomNotices:
    """Filter of notices that tenants can cause at will; else a pod could flood the API server with its events."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._told_at: dict[tuple[str, str | None, str], float] = {}

    def due(self, uuid: str, found: Iterable[Notice]) -> list[Notice]:
        """Return the notices about a GPU to tell now: of those at will one a pod and reason in SELDOM_SECONDS."""
        now = self._clock()
        self._told_at = {key: at for key, at in self._told_at.items() if now - at < SELDOM_SECONDS}
        told = []
        for notice in found:
            key = uuid, notice.pod_uid, notice.reason
            if notice.is_at_will and key in self._told_at:
                continue
            if notice.is_at_will:
                self._told_at[key] = now
            told.append(notice)
        return told


class RecentTenants:
    """Pods that share a GPU or did moments ago: a fault ends pods before the gate's report of it is read."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: dict[str, dict[str, float]] = {}

    def of(self, uuid: str, present: Iterable[str]) -> list[str]:
        """Return the uids of the pods that share the GPU now (`present`) or did within RECENT_SECONDS."""
        now = self._clock()
        seen = self._seen.setdefault(uuid, {})
        seen.update((uid, now) for uid in present)
        for uid in [uid for uid, at in seen.items() if now - at > RECENT_SECONDS]:
            del seen[uid]
        return list(seen)


def notices(old: GateStatus | None, new: GateStatus, tenants: Iterable[str]) -> tuple[Notice, ...]:
    """Return a gate report's news as events for the pods concerned.

    Args:
        tenants: uids of the pods on this GPU, which all get an event for a restart, as does every other pod that
            was connected when it began, by the gate's record. For a fault the record alone counts: a pod that came
            after it lost nothing, and one that joins the record was turned away a moment later. Where there is no
            record, or one of two faults, all get an event.

    A gate continues its predecessor's counts, so a count that grew is reported even if the MPS host restarted in
    between. Where it could not read them, it counts anew, and all that it has counted is reported.
    """
    found: list[Notice] = []
    if old is not None and old.counts_since != new.counts_since:
        old = old.uncounted()
    if old is not None and new.faults >= old.faults:
        whom = "every process under its MPS server, or on its way to it"
        note = f"a fault on GPU {new.gpu_uuid} ended {whom}: {new.last_fault}"
        hurt: tuple[str | None, ...] = tuple(uid for uid in new.last_fault_pods if uid not in old.last_fault_pods)
        if new.faults > old.faults:
            is_on_record = new.faults == old.faults + 1 and new.last_fault_pods
            hurt = (*(() if is_on_record else tenants), *new.last_fault_pods, None)
        found += [Notice(uid, "GpuFault", note) for uid in dict.fromkeys(hurt)]
    if old is not None and (
        new.daemon_restarts > old.daemon_restarts or new.server_restarts > old.server_restarts
    ):
        note = f"MPS of GPU {new.gpu_uuid} was restarted; processes that it served have ended"
        # kubelet may not have listed a very new pod yet, but the gate knows its processes
        connected = (client.pod_uid for client in old.clients if client.pod_uid is not None)
        found += [Notice(uid, "MpsRestarted", note) for uid in dict.fromkeys((*tenants, *connected))]
        found.append(Notice(None, "MpsRestarted", note))
    seen = {(h.pod_uid, h.reason) for h in old.waiting_connections} if old is not None else set()
    for waiting in new.waiting_connections:
        if waiting.reason in _SHOWN_HOLDS and (waiting.pod_uid, waiting.reason) not in seen:
            advice = _ADVICE.get(waiting.reason, "")
            note = f"a process waits at the gate of GPU {new.gpu_uuid}: {waiting.reason}{advice}"
            found.append(Notice(waiting.pod_uid, f"Held{waiting.reason}", note, is_at_will=True))
    # The record has clients of days ago, which an agent that starts must not tell as news.
    known = {(m.kind, m.pod_uid, m.pid) for m in (old or new).mismatches}
    found += [
        Notice(mismatch.pod_uid, f"Mismatch{mismatch.kind}", mismatch.detail, is_at_will=True)
        for mismatch in new.mismatches
        if (mismatch.kind, mismatch.pod_uid, mismatch.pid) not in known
    ]
    known_refusals = set((old or new).turned_away)
    found += [
        Notice(each.pod_uid, "MpsTurnedAway", _refusal_note(new.gpu_uuid, each), is_at_will=True)
        for each in new.turned_away
        if each not in known_refusals
    ]
    return tuple(dict.fromkeys(found))


def _refusal_note(uuid: str, refused: TurnedAway) -> str:
    why = _CUDA_ERRORS.get(refused.cuda_error, "")
    return (
        f"the MPS server of GPU {uuid} did not take process {refused.pid}: CUDA error {refused.cuda_error}"
        f"{why and f', {why}'}"
    )
