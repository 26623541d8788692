"""Programs of the table that report their own rate: a counter of iterations, read every few seconds.

The live code concludes all that is concluded from it (`core.control.read_target`, `believed`); this module only
counts what a job has truly done, with the scatter that the table's windows have.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from gpushare.core.api import PodSeries, RateSlo
from gpushare.core.control import (
    CounterReading,
    RateBelief,
    SloRecord,
    WatchedTenant,
    WatchSettings,
    believed,
    rate_sign,
    read_target,
)

READ_SECONDS: Final = 5.0
"""Between two readings of a page, as of the agent (`gpushare_deviceplugin.slo`)."""
SCATTER: Final = 0.04 * math.sqrt(1.5 / READ_SECONDS)
"""Relative, of what is counted between two readings: the table's windows of 1.5 s scatter by 0.04."""
_KEPT_SECONDS: Final = 90.0  # more than the agent keeps of a counter's readings


@dataclass(slots=True)
class JobCounter:
    """The counter of one job, and what the agent knows of it.

    Attributes:
        target: what the job makes at its promised progress.
        alone_per_second: its iterations/s alone on the whole GPU.
        due: when it is read next.
        at: until when it has counted: `shown` up to the last reading, `unread` since.
    """

    target: RateSlo
    alone_per_second: float
    due: float
    at: float
    shown: float = 0.0
    unread: float = 0.0
    record: SloRecord = field(default_factory=SloRecord)
    belief: RateBelief = field(default_factory=RateBelief)

    def advance(self, progress: float, until: float, rng: np.random.Generator) -> None:
        """Count on at a constant progress, and read what is due meanwhile."""
        per_second = progress * self.alone_per_second
        skipped = math.floor((until - self.due - _KEPT_SECONDS) / READ_SECONDS) * READ_SECONDS
        if skipped > 0:  # readings that old are forgotten by now
            self.shown += self.unread + per_second * skipped
            self.at, self.due, self.unread = self.at + skipped, self.due + skipped, 0.0
        while self.due <= until:
            self.unread += per_second * (self.due - self.at)
            self.shown += self.unread * max(0.0, 1 + SCATTER * rng.standard_normal())
            reading = CounterReading(float(math.floor(self.shown)))
            self.record = read_target(self.record, reading, self.due, self.target)
            self.at, self.unread, self.due = self.due, 0.0, self.due + READ_SECONDS
        self.unread += per_second * (until - self.at)
        self.at = until


@dataclass(slots=True)
class TableReports:
    """The counters of all jobs that report; `rng` draws when each is read, and how its rate scatters."""

    rng: np.random.Generator
    counters: dict[int, JobCounter] = field(default_factory=dict)

    def begin(self, job: int, promised_per_second: float, alone_per_second: float, now: float) -> None:
        """Make a job known that reports its rate; it is first read within the interval of readings.

        One that was retracted and runs again is another pod.
        """
        known = self.counters.get(job)
        if known is None or known.at < now:
            target = RateSlo(promised_per_second, PodSeries(9100, "iterations"))
            due = now + READ_SECONDS * self.rng.random()
            self.counters[job] = JobCounter(target, alone_per_second, due, now)

    def advance(self, job: int, progress: float, until: float) -> None:
        """Count on at a constant true progress."""
        self.counters[job].advance(progress, until, self.rng)

    def seen(
        self,
        tenants: Sequence[WatchedTenant],
        now: float,
        settings: WatchSettings,
        *,
        since: float,
        predicted_errors: Mapping[str, float | None],
        throttled: Collection[str],
    ) -> tuple[WatchedTenant, ...]:
        """Return the tenants with the progress that they report, as the agent's loop does.

        Args:
            since: when duties of the GPU last changed, or a reading in place ended.
            predicted_errors: of the predictions that each tenant's progress was inferred with.
            throttled: uids.
        """
        found = []
        for each in tenants:
            counter = self.counters.get(int(each.uid))
            if counter is None:
                found.append(each)
                continue
            beside = {other.uid for other in tenants} - {each.uid}
            counter.belief, tenant = believed(
                counter.belief,
                each,
                rate_sign(counter.record, counter.target),
                now,
                settings,
                since=since + settings.delay_seconds,
                predicted_error=predicted_errors.get(each.uid),
                beside=beside,
                is_eased=any(uid in throttled for uid in beside),
            )
            found.append(tenant)
        return tuple(found)

    def awaits(self, jobs: Collection[int], since: float, now: float) -> bool:
        """Return whether one of these jobs reports and was not read twice since a moment, nor long after it."""
        is_soon = now < since + 3 * READ_SECONDS
        return is_soon and any(
            (sign := rate_sign(each.record, each.target)) is None or sign.since(since, now) is None
            for job, each in self.counters.items()
            if job in jobs
        )
