"""The throttle of a node: reads the agent's asks, refuses those not allowed, freezes and thaws on time, reports.

`Throttle.look` is one round, with time as an argument; `gpushare.mps.throttler` is the process that calls it.
"""

import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from gpushare.core.api import JobClass
from gpushare.mps.asks import ThrottleAsk, ThrottleAsks
from gpushare.mps.duty import NOBODY, Schedule, duty_in_force, let_go, schedule
from gpushare.mps.freezer import Freezer
from gpushare.mps.frozen import NUDGE_EVERY_SECONDS, FreezeRefused, FrozenPods
from gpushare.mps.layout import (
    Decisions,
    GpuDirectory,
    LastGood,
    decisions_reader,
    gpu_directories,
    throttle_reader,
    write_throttled,
)
from gpushare.mps.status import PodThrottle, RefusedThrottle, ThrottleRefusal, ThrottleStatus

logger = logging.getLogger(__name__)

READ_EVERY_SECONDS: Final = 0.05  # while a pod is throttled
IDLE_READ_SECONDS: Final = 0.2
RESCAN_SECONDS: Final = 1.0  # for new GPUs, and for the status that shows that we are alive
RETRY_SECONDS: Final = 1.0  # after a refusal by the freezer


@dataclass(slots=True)
class _ThrottledGpu:
    directory: GpuDirectory
    asks: LastGood[ThrottleAsks]
    decisions: LastGood[Decisions]
    schedule: Schedule = NOBODY
    refused: dict[str, FreezeRefused] = field(default_factory=dict)
    retry_at: dict[str, float] = field(default_factory=dict)  # after the freezer refused
    refusals: Counter[str] = field(default_factory=Counter)
    freezes: int = 0
    written: ThrottleStatus | None = None


class Throttle:
    """The throttle of all GPUs of the node; a pod is throttled on one of them at a time."""

    def __init__(self, base: Path | str, freezer: Freezer) -> None:
        self._base, self._freezer = base, freezer
        self._pods = FrozenPods(base, freezer)
        self._gpus: dict[str, _ThrottledGpu] = {}
        self._rescan_at = -math.inf
        self._started_at = 0.0
        self._problem = ""

    @property
    def frozen(self) -> frozenset[str]:
        """Return the uids of the pods that we have frozen now."""
        return self._pods.uids

    @property
    def frozen_since(self) -> float:
        """Return since when a pod has been frozen, of several the first; infinite for none."""
        return self._pods.since

    def look(self, now: float) -> float:
        """Run one round; return when the next one is due."""
        self._started_at = self._started_at or now
        if now >= self._rescan_at:
            self._rescan_at = now + RESCAN_SECONDS
            self._pods.thaw_left()
            self._rescan()
        # the MPS host thaws pods while we get no CPU; do not treat running pods as frozen
        if freed := self._pods.let_go():
            logger.warning("somebody else thawed these pods, they run on: %s", ", ".join(sorted(freed)))
            for gpu in self._gpus.values():
                gpu.schedule = let_go(gpu.schedule, freed, now)
        wanted: dict[str, _ThrottledGpu] = {}
        looks = [now + IDLE_READ_SECONDS]
        throttled: set[str] = set()
        for gpu in self._gpus.values():
            granted = self._vet(gpu, now, throttled)
            throttled |= granted.pods.keys()
            gpu.schedule = schedule(gpu.schedule, granted, now)
            wanted |= dict.fromkeys(gpu.schedule.frozen, gpu)
            looks.append(gpu.schedule.look_at)
        # thaw first, so that no pod waits while others are frozen
        for uid in self._pods.uids - wanted.keys():
            self._pods.thaw(uid)
        for uid, gpu in wanted.items():
            if uid in self._pods.uids:
                continue
            if refusal := self._pods.freeze(uid, now):
                self._refuse(gpu, uid, refusal, now)
            else:
                gpu.freezes += 1
        for uid, refusal in self._pods.settle(now).items():
            if uid in wanted:
                self._refuse(wanted[uid], uid, refusal, now)
        for uid in self._pods.still & wanted.keys():
            wanted[uid].refused.pop(uid, None)
            wanted[uid].retry_at.pop(uid, None)
        for gpu in self._gpus.values():
            self._say(gpu, now)
        if throttled:
            looks.append(now + READ_EVERY_SECONDS)
        if self._pods.uids - self._pods.still or self._pods.uids - wanted.keys():
            looks.append(now + NUDGE_EVERY_SECONDS)
        return min(looks)

    def thaw_all(self) -> bool:
        """Thaw every pod; return False if a cgroup refused."""
        for gpu in self._gpus.values():
            gpu.schedule = NOBODY
        return self._pods.thaw_all()

    def _rescan(self) -> None:
        for directory in gpu_directories(self._base):
            if directory.uuid not in self._gpus:
                self._gpus[directory.uuid] = _ThrottledGpu(
                    directory, throttle_reader(directory), decisions_reader(directory)
                )
        problem = self._freezer.problem()
        if problem and problem != self._problem:
            logger.error("no pod can be throttled on this node: %s", problem)
        self._problem = problem

    def _vet(self, gpu: _ThrottledGpu, now: float, elsewhere: set[str]) -> ThrottleAsks:
        """Return the asks that may be served; refuse the others, and count each new reason."""
        asks, decisions = gpu.asks.read(), gpu.decisions.read()
        live = asks.live(now)
        granted: dict[str, ThrottleAsk] = {}
        for uid, ask in live.items():
            refusal = self._refusal(uid, decisions, elsewhere)
            if refusal is not None:
                self._refuse(gpu, uid, refusal)
            elif now >= gpu.retry_at.get(uid, -math.inf):
                granted[uid] = ask
                if uid not in gpu.retry_at:
                    gpu.refused.pop(uid, None)
        for uid in gpu.refused.keys() - live.keys():
            del gpu.refused[uid]
        for uid in gpu.retry_at.keys() - live.keys():
            del gpu.retry_at[uid]
        return replace(asks, pods=granted)

    @staticmethod
    def _refusal(uid: str, decisions: Decisions, elsewhere: set[str]) -> FreezeRefused | None:
        decision = decisions.pods.get(uid)
        if decision is None:
            return FreezeRefused(ThrottleRefusal.NO_DECISION, "it is not decided on this GPU")
        if not decision.is_class_known:
            return FreezeRefused(ThrottleRefusal.UNKNOWN_CLASS, "its class is unknown to this version")
        if decision.job_class is not JobClass.THROUGHPUT:
            return FreezeRefused(ThrottleRefusal.LATENCY, f"pods of class {decision.job_class} are never frozen")
        if uid in elsewhere:
            return FreezeRefused(ThrottleRefusal.ANOTHER_GPU, "another GPU's throttle has it")
        return None

    def _refuse(self, gpu: _ThrottledGpu, uid: str, refusal: FreezeRefused, now: float | None = None) -> None:
        """Record a refusal; with `now`, if the freezer refused and it is to be tried again later."""
        known = gpu.refused.get(uid)
        if known is None or known.reason is not refusal.reason:
            gpu.refusals[str(refusal.reason)] += 1
            logger.warning(
                "pod %s on %s is not throttled: %s (%s)", uid, gpu.directory.uuid, refusal.detail, refusal.reason
            )
        gpu.refused[uid] = refusal
        if now is not None:
            gpu.retry_at[uid] = now + RETRY_SECONDS

    def _say(self, gpu: _ThrottledGpu, now: float) -> None:
        """Write the status when something changed, and about every second otherwise."""
        live: Mapping[str, ThrottleAsk] = gpu.asks.read().live(now)
        still = self._pods.still
        status = ThrottleStatus(
            beat=now,
            problem=self._problem,
            pods=tuple(
                PodThrottle(uid, duty_in_force(ask), uid in still and now < (ask.stopped_until or 0.0))
                for uid, ask in sorted(live.items())
                if uid not in gpu.refused and (ask.duty_ratio < 1.0 or ask.stopped_until is not None)
            ),
            refused=tuple(RefusedThrottle(uid, r.reason, r.detail) for uid, r in sorted(gpu.refused.items())),
            refusals=dict(gpu.refusals),
            freezes=gpu.freezes,
            started_at=self._started_at,
        )
        written = gpu.written
        is_news = written is None or replace(status, beat=0.0, freezes=0) != replace(written, beat=0.0, freezes=0)
        if not is_news and written is not None and now - written.beat < RESCAN_SECONDS:
            return
        gpu.written = status
        try:
            write_throttled(gpu.directory, status)
        except OSError as error:
            if is_news:
                logger.error("cannot write %s, throttling goes on without it: %s", gpu.directory.throttled, error)
