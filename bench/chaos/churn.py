"""Replace pods at a steady rate and audit them; the common part of a soak and an upgrade."""

import time
from collections.abc import Callable
from typing import Final

from bench.chaos import auditor
from bench.chaos.auditor import Allowance, Violation
from bench.chaos.freezes import FreezeWatch
from bench.chaos.lasting import Differences, Starts
from bench.chaos.load import Load
from bench.chaos.look import Eye

LOOK_EVERY_SECONDS: Final = 2.0


class Churn:
    """The load of a cluster without faults.

    Attributes:
        longest_freeze_seconds: of any pod; `longest_gap_seconds` without a look at the freezers.
        unwatched: uids of pods whose freezer was not found.
    """

    def __init__(
        self,
        eye: Eye,
        load: Load,
        freezes: FreezeWatch,
        *,
        pods_per_minute: float,
        population: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.load = load
        self.longest_freeze_seconds = self.longest_gap_seconds = 0.0
        self.unwatched: set[str] = set()
        self._eye, self._freezes, self._clock = eye, freezes, clock
        self._pods_per_minute, self._population = pods_per_minute, population
        self._differences, self._starts = Differences(), Starts()
        self._begun, self._churned = clock(), 0
        freezes.report(clock())
        load.fill(population)

    def look(self, *, replace: bool = True) -> tuple[list[Violation], list[str]]:
        """Look once and replace whom the rate demands; return what is broken, and what has not settled.

        Args:
            replace: whether pods go on to be replaced.
        """
        load, now = self.load, self._clock()
        picture = self._eye.picture()
        wrong = auditor.broken(picture, load.expected, Allowance())
        wrong += self._differences.look(picture, self._clock())
        refusal = None if load.is_idle else load.last_refusal
        wrong += self._starts.look(picture, load.expected, self._clock(), refusal=refusal)
        waiting = auditor.unsettled(picture, load.expected, load.leaving) + self._differences.late
        if picture.pods is not None:
            for pod in load.expected:
                seen = picture.pods.get(pod.uid)
                if seen is None or seen.is_over:
                    load.forget(pod.uid)
        due = int((now - self._begun) / 60 * self._pods_per_minute)
        if due > self._churned:
            if replace:
                load.churn(due - self._churned, self._population)
            self._churned = due
        load.fill(self._population)
        load.step(picture)
        self._freezes.watch(load.running(picture), self._clock())
        seen_frozen = self._freezes.report(self._clock())
        self.longest_freeze_seconds = max([self.longest_freeze_seconds, *seen_frozen.longest.values()])
        self.longest_gap_seconds = max(self.longest_gap_seconds, seen_frozen.gap_seconds)
        self.unwatched |= seen_frozen.unwatched.keys()
        return wrong + auditor.left_frozen(seen_frozen), waiting
