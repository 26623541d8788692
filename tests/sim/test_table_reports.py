"""Counters of the simulator's jobs: what they count is what was truly made, read as by the agent."""

import math

import numpy as np
import pytest

from gpushare.core.api import ConditionStatus, JobClass
from gpushare.core.control import WatchedTenant, WatchSettings, rate_sign
from gpushare.sim.table_reports import READ_SECONDS, SCATTER, TableReports

ALONE = 30.0  # iterations/s
PROMISED = 0.4
SETTINGS = WatchSettings()


def reports(job: int = 7, now: float = 0.0) -> TableReports:
    made = TableReports(np.random.default_rng(3))
    made.begin(job, PROMISED * ALONE, ALONE, now)
    return made


def tenant(progress: float = 0.6) -> WatchedTenant:
    return WatchedTenant("7", JobClass.THROUGHPUT, PROMISED, progress, 0.06, 0.0)


def seen(made: TableReports, now: float, since: float = -math.inf) -> WatchedTenant:
    [found] = made.seen([tenant()], now, SETTINGS, since=since, predicted_errors={}, throttled=())
    return found


def test_a_job_is_read_every_few_seconds_and_its_true_progress_is_found_again() -> None:
    made, found = reports(), []
    for span in range(1, 60):
        made.advance(7, 0.5, 7.0 * span)
        found.append(seen(made, 7.0 * span).progress)
    counter = made.counters[7]
    assert counter.record.met is ConditionStatus.TRUE
    assert 0 <= 7.0 * 59 - counter.record.trail[-1].at <= READ_SECONDS
    late = np.array(found[5:])
    assert late.mean() == pytest.approx(0.5, abs=0.01)
    assert 0.3 * SCATTER < late.std() / 0.5 < 3 * SCATTER


def test_nothing_is_known_before_two_readings_after_a_change() -> None:
    made = reports()
    made.advance(7, 0.5, 60.0)
    assert seen(made, 60.0).progress != 0.6
    assert made.awaits([7], 60.0, 60.0)
    assert not made.awaits([8], 60.0, 60.0)
    made.advance(7, 0.3, 62.0)
    sign = rate_sign(made.counters[7].record, made.counters[7].target)
    assert sign is not None
    assert sign.since(60.4, 62.0) is None
    made.advance(7, 0.3, 75.0)
    assert not made.awaits([7], 60.0, 75.0)
    assert seen(made, 75.0, since=60.0).progress == pytest.approx(0.3, abs=0.05)


def test_a_long_quiet_stretch_costs_no_more_readings_than_the_agent_keeps() -> None:
    made = reports()
    made.advance(7, 0.5, 1e6)
    trail = made.counters[7].record.trail
    assert len(trail) < 30
    assert trail[-1].total == pytest.approx(0.5 * ALONE * 1e6, rel=0.001)
    assert seen(made, 1e6).progress == pytest.approx(0.5, abs=0.06)


def test_a_job_that_was_away_is_another_pod_and_one_that_does_not_report_is_as_inferred() -> None:
    made = reports()
    made.advance(7, 0.5, 60.0)
    made.begin(7, PROMISED * ALONE, ALONE, 60.0)
    assert made.counters[7].record.trail, "it has run without a break"
    made.begin(7, PROMISED * ALONE, ALONE, 90.0)
    assert not made.counters[7].record.trail
    other = WatchedTenant("8", JobClass.LATENCY, 0.5, 0.4, 0.06, 1.0)
    assert made.seen([other], 90.0, SETTINGS, since=0.0, predicted_errors={}, throttled=()) == (other,)
