"""Processes outside MPS: reported by an event on their pod, and counted (gpushare.core.gpu.outside)."""

import asyncio
import logging
import math
import os
import random
import signal
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from gpushare.core.api import names
from gpushare.core.gpu import (
    AGAIN_SECONDS,
    Found,
    GpuProcess,
    OutsideProcess,
    OutsideWatch,
    look,
    pids_outside,
)
from gpushare.mps.identity import PROC, container_of, pod_uid_of, start_ticks_of
from gpushare.mps.status import GateState, GateStatus
from gpushare_deviceplugin.gates import Notice
from gpushare_deviceplugin.pods import ManagedPod
from gpushare_deviceplugin.state import AgentPart, NodeState

_log = logging.getLogger(__name__)
REASON: Final = "OutsideMps"
_MOST_WAITING: Final = 256  # reports in the queue while the API server is slow
_SHOWN_PIDS: Final = 8
_ASK_SECONDS: Final = 10.0  # between two lookups of one pod: a static pod's uid differs from the API server's
_MOST_KNOWN: Final = 1024  # pods remembered; beyond that, all are forgotten and looked up again
# So many processes of a pod ended within so many seconds end its container too: kubelet waits longer each time.
_MOST_ENDED: Final = 3
_MANY_SECONDS: Final = 60.0
# Between two looks for a pod's container, which go through all processes of the node.
_CONTAINER_SECONDS: Final = 5.0
# One round in so many comes early, by chance, so that no pod's rhythm stays between two looks for long.
_ROUNDS_TO_EARLY: Final = 16
# In other states the gate's report may name a server that no longer runs.
_SERVING: Final = frozenset({GateState.ACTIVE, GateState.DEGRADED})

FindPod = Callable[[str], Awaitable[ManagedPod | None]]
Tell = Callable[[Notice, ManagedPod | None], Awaitable[None]]


class OutsidePolicy(StrEnum):
    """Policy on ending processes outside MPS; all are reported, those of no pod are never ended (ADR 0171).

    DECIDED: those of pods that were given a part of a GPU by a decision. END: also those of all other pods.
    """

    EVENT = "event"
    DECIDED = "decided"
    END = "end"


def end_process(process: OutsideProcess, proc: Path = PROC) -> bool:
    """Send SIGKILL to this very process, not to a later one with its pid; return False when it is gone.

    A process outside MPS has a GPU context of its own, so its end affects no other process.

    Raises:
        OSError: it may not be ended (the chart gives the capability KILL with every policy but `event`).
    """
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        if start_ticks_of(process.pid, proc) != process.start_ticks:
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def first_of_container(process: OutsideProcess, proc: Path = PROC) -> OutsideProcess | None:
    """Return the first process of a process' container, with which the container ends; None if it cannot be told.

    It is the one that was started first of those in the same cgroups. A process that is gone is in no container.
    """
    cgroups = container_of(process.pid, proc)
    if not cgroups or pod_uid_of(process.pid, proc) != process.pod_uid:
        return None
    beside = [int(each.name) for each in proc.iterdir() if each.name.isdecimal()]
    found = [
        (ticks, pid)
        for pid in beside
        if container_of(pid, proc) == cgroups and (ticks := start_ticks_of(pid, proc)) is not None
    ]
    return OutsideProcess(min(found)[1], min(found)[0], process.pod_uid) if found else None


@dataclass(frozen=True, slots=True)
class EndedContainer:
    """A container that was ended, by the uid of its pod; its processes had left MPS repeatedly."""

    pod_uid: str


class OutsideMps:
    """Checks of the processes in each sampling round; `run` reports findings.

    Args:
        find_pod: a pod of this node by its uid, ours or not.
        tell: write an event about a pod, or about the node.
        end: end one process; never called with the policy `event`.
        chance: return a number from 0 to 1 that no pod can predict.

    Attributes:
        watches: by GPU, its processes outside MPS; no entry before its first check.
        ended: by GPU, processes that were ended.
        is_ready: whether the node's pods are known, and so those with several whole GPUs.
    """

    def __init__(
        self,
        state: NodeState,
        find_pod: FindPod,
        tell: Tell,
        clock: Callable[[], float],
        *,
        policy: OutsidePolicy = OutsidePolicy.DECIDED,
        proc: Path = PROC,
        end: Callable[[OutsideProcess], bool] = end_process,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.watches: dict[str, OutsideWatch] = {}
        self.ended: dict[str, int] = {}
        self.is_ready = False
        self._state = state
        self._find_pod = find_pod
        self._tell = tell
        self._clock = clock
        self._policy = policy
        self._proc = proc
        self._end = end
        self._chance = chance
        self._others: set[str] = set()  # pods of this node without a share, as the API server listed them
        self._again_until = -math.inf
        self._wary_until = -math.inf
        self._rounds = 0
        self._asked_at: dict[str, float] = {}  # lookups of unknown pods, by uid
        self._refused: set[OutsideProcess] = set()
        self._ended_at: dict[str, dict[OutsideProcess, float]] = {}  # by pod uid, the last ones
        self._container_ended_at: dict[str, float] = {}  # by pod uid, also where that did not work
        self._found: asyncio.Queue[tuple[str, Found | EndedContainer]] = asyncio.Queue(_MOST_WAITING)

    def take(self, uuid: str, processes: Iterable[GpuProcess] | None, gate: GateStatus | None) -> None:
        """Check one GPU's processes; ignore `None`, or a gate that does not serve."""
        if processes is None or gate is None or gate.state not in _SERVING or not self.is_ready:
            return
        listed = tuple(processes)
        graphics = {process.pid for process in listed if process.is_graphics}
        candidates = [
            OutsideProcess(pid, ticks, pod_uid_of(pid, self._proc), pid in graphics)
            for pid in pids_outside(listed, gate.server_pid)
            if (ticks := start_ticks_of(pid, self._proc)) is not None  # otherwise it has ended meanwhile
        ]
        # The node's own desktop is nobody's problem.
        present = [process for process in candidates if process.pod_uid is not None or not process.is_graphics]
        exempt = self._exempt(uuid, gate) if present else frozenset()
        now = self._clock()
        clients = {process.pid for process in listed if process.is_mps_client}
        before = self.watches.get(uuid, OutsideWatch())
        self.watches[uuid], found = look(before, present, exempt, now, clients=clients)
        if self.watches[uuid].is_unsure:
            self._again_until = now + AGAIN_SECONDS
        if self.watches[uuid].is_wary:
            self._wary_until = now + AGAIN_SECONDS
        for each in found:
            _log.warning(
                "processes %s of pod %s use GPU %s outside MPS", _listed(each.pids), each.pod_uid or "(none)", uuid
            )
            if each.is_told and not self._found.full():
                self._found.put_nowait((uuid, each))
        if self._policy is not OutsidePolicy.EVENT:
            self._end_all(uuid, self.watches[uuid].present)

    def pace(self) -> float:
        """Return the seconds until the next look is wanted; called once a round.

        Few if the last look saw a new process. By chance after short processes, and now and then without any:
        a pod whose processes live for 0.45 s of each second would else fall between all looks of a second.
        """
        now = self._clock()
        self._rounds += 1
        if now < self._again_until:
            return AGAIN_SECONDS
        if now < self._wary_until or self._rounds % _ROUNDS_TO_EARLY == 0:
            return AGAIN_SECONDS * (1 + self._chance())
        return math.inf

    def _ends(self, uuid: str, pod: ManagedPod | None, *, is_graphics: bool) -> bool:
        """Return whether the policy ends a known pod's processes on a GPU; graphics only with END (ADR 0171)."""
        if pod is None or self._policy is not OutsidePolicy.DECIDED:
            return pod is not None and self._policy is OutsidePolicy.END
        has_it_alone = pod.share_units >= names.SHARES_PER_GPU and uuid in self._state.gpus_of(pod)
        return pod.decision is not None and not has_it_alone and not is_graphics

    def _end_all(self, uuid: str, present: Iterable[OutsideProcess]) -> None:
        """End the processes of pods that are known to have no whole GPUs; look up unknown pods first."""
        self._forget_ended()
        for process in present:
            uid = process.pod_uid
            if uid is None:
                continue
            pod = self._state.pods.get(uid)
            if self._ends(uuid, pod, is_graphics=process.is_graphics) or uid in self._others:
                self._end_one(uuid, process)
            elif self._policy is not OutsidePolicy.END:
                continue
            elif self._clock() - self._asked_at.get(uid, -_ASK_SECONDS) >= _ASK_SECONDS and not self._found.full():
                if len(self._asked_at) >= _MOST_KNOWN:
                    self._asked_at.clear()
                self._asked_at[uid] = self._clock()
                self._found.put_nowait((uuid, Found(uid, (process.pid,), is_told=False)))

    def _end_one(self, uuid: str, process: OutsideProcess) -> None:
        try:
            first = first_of_container(process, self._proc) if self._leaves_again(process) else None
            if self._end(process):
                self.ended[uuid] = self.ended.get(uuid, 0) + 1
                _log.warning("ended process %d of pod %s, outside MPS", process.pid, process.pod_uid)
            if first is not None and self._end(first):
                self._ended_at.pop(str(first.pod_uid), None)
                _log.warning("ended the container of process %d of pod %s", process.pid, process.pod_uid)
                if not self._found.full():
                    self._found.put_nowait((uuid, EndedContainer(str(first.pod_uid))))
        except OSError as error:
            if process not in self._refused:
                self._refused = {process} | {each for each in self._refused if each.pod_uid == process.pod_uid}
                self._state.counts.error(AgentPart.OUTSIDE)
                _log.error("process %d outside MPS cannot be ended: %s", process.pid, error)

    def _forget_ended(self) -> None:
        now = self._clock()
        self._ended_at = {
            pod: lately
            for pod, ended in self._ended_at.items()
            if (lately := {each: at for each, at in ended.items() if now - at < _MANY_SECONDS})
        }
        self._container_ended_at = {
            pod: at for pod, at in self._container_ended_at.items() if now - at < _CONTAINER_SECONDS
        }

    def _leaves_again(self, process: OutsideProcess) -> bool:
        """Record a process that is to be ended; return whether its container is to end with it."""
        now, uid = self._clock(), str(process.pod_uid)
        ended = self._ended_at.setdefault(uid, {})
        ended.setdefault(process, now)
        if len(ended) < _MOST_ENDED or uid in self._container_ended_at:
            return False
        self._container_ended_at[uid] = now
        return True

    def _exempt(self, uuid: str, gate: GateStatus) -> frozenset[str]:
        """Return the exempt pods: those of several whole GPUs (docs/adr/0030), and the MPS host's self-test."""
        host = pod_uid_of(gate.gate_pid, self._proc)
        return frozenset(
            [pod.uid for pod in self._state.pods.values() if _has_whole(self._state.gpus_of(pod), uuid)]
            + ([host] if host else [])
        )

    async def run(self) -> None:
        """Report findings until cancelled."""
        while True:
            await self.tell_next()

    async def tell_next(self) -> None:
        """Wait for the next finding and report it: on the pod where it is known, else on the node."""
        uuid, found = await self._found.get()
        if isinstance(found, EndedContainer):
            pod = await self._find_pod(found.pod_uid)
            note = f"processes of it use GPU {uuid} outside MPS again and again: their container was ended"
            await self._tell(Notice(pod.uid if pod else None, REASON, note), pod)
            return
        pod = await self._find_pod(found.pod_uid) if found.pod_uid is not None else None
        if pod is not None:
            if _has_whole(self._state.gpus_of(pod), uuid):
                return  # our watch did not have it yet
            if pod.uid not in self._state.pods and self._policy is OutsidePolicy.END:
                if len(self._others) >= _MOST_KNOWN:
                    self._others.clear()
                self._others.add(pod.uid)
        if found.is_told:
            note = _note(uuid, found, pod)
            if self._ends(uuid, pod, is_graphics=found.is_graphics):
                note += ". The node agent ends it, as its policy outsideMps says"
            await self._tell(Notice(pod.uid if pod else None, REASON, note), pod)


def _has_whole(gpus: tuple[str, ...], uuid: str) -> bool:
    return len(gpus) > 1 and uuid in gpus


def _listed(pids: tuple[int, ...]) -> str:
    more = f" and {len(pids) - _SHOWN_PIDS} more" if len(pids) > _SHOWN_PIDS else ""
    return ", ".join(map(str, pids[:_SHOWN_PIDS])) + more


def _note(uuid: str, found: Found, pod: ManagedPod | None) -> str:
    if len(found.pids) == 1:
        who = f"process {_listed(found.pids)} uses GPU {uuid}"
    else:
        who = f"processes {_listed(found.pids)} use GPU {uuid}"
    if found.pod_uid is None:
        return f"{who} outside MPS and in no pod: gpushare's shares and memory limits do not bind there"
    if pod is None:
        return (
            f"{who} outside MPS: gpushare's shares and memory limits do not bind there; "
            f"the pod with uid {found.pod_uid} is not known"
        )
    if pod.share_units and found.is_graphics:
        return f"{who} for graphics, which MPS does not limit: the pod's share and memory limit do not bind there"
    if pod.share_units:
        return (
            f"{who} outside MPS: the pod's share and memory limit do not bind there. CUDA uses MPS while the "
            "pod's containers leave CUDA_MPS_PIPE_DIRECTORY as gpushare sets it"
        )
    return (
        f"{who}, which gpushare shares, outside MPS: the pod asked for no share and no limit binds it. Give it "
        "the annotation gpushare.io/fraction, or keep NVIDIA_VISIBLE_DEVICES from giving it GPUs"
    )
