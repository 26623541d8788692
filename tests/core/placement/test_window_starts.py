"""A window begins with the container, whatever the node's clock says and however late kubelet takes the pod up."""

from dataclasses import replace
from typing import Any

import pytest

from gpushare.core.api import PodView, names
from gpushare.core.placement import WindowStarts
from gpushare.core.placement.window_starts import REPORT_SECONDS, START_SECONDS
from gpushare.runtime.moments import unix_seconds

DECIDED = 1_795_402_800.0  # 2026-11-23T03:00:00Z
PULL_SECONDS = 10.0  # from kubelet's taking it up to the start
SEEN_SECONDS = 1.0  # from the start to the event that reports it
CLOCKS = [-600.0, -30.0, 0.0, 30.0, 600.0]  # how far the node's is ahead
LATE = [0.0, 0.5, 30.0, 60.0, 120.0]  # when kubelet takes it up, after the decision


def moment(seconds: float) -> str:
    """A time as kubelet writes it: whole seconds."""
    minutes, rest = divmod(int(seconds // 1) - int(DECIDED) + 3 * 3600, 60)
    return f"2026-11-23T{minutes // 60:02d}:{minutes % 60:02d}:{rest:02d}Z"


def pod(*, accepted: float | None = None, started: float | None = None, node: str | None = "n0") -> PodView:
    status: dict[str, Any] = {}
    if accepted is not None:
        status["startTime"] = moment(accepted)
    if started is not None:
        status["containerStatuses"] = [{"state": {"running": {"startedAt": moment(started)}}}]
    annotations = {
        names.GPU: "g0",
        names.THREAD_PERCENTAGE: "25",
        names.MEMORY_LIMIT: "0=100M",
        names.DECIDED_AT: "2026-11-23T03:00:00.000Z",
        names.PROBATION_SECONDS: "80",
    }
    metadata = {"uid": "u", "name": "web-1", "namespace": "shop", "annotations": annotations}
    return PodView.from_object({"metadata": metadata, "spec": {"nodeName": node}, "status": status})


def begin(*, late: float, ahead: float, saw_it_wait: bool, seen: float = SEEN_SECONDS) -> tuple[float, float]:
    """When the window begins and the container really started, after the decision."""
    starts, started = WindowStarts(unix_seconds), DECIDED + late + PULL_SECONDS
    waits = pod(accepted=DECIDED + late + ahead)
    runs = pod(accepted=DECIDED + late + ahead, started=started + ahead)
    if saw_it_wait:
        starts.look(None, waits, DECIDED + late + 1.0)
        starts.look(waits, runs, started + seen)
    else:
        starts.look(None, runs, started + seen)
    found = starts.of(runs)
    starts.look(runs, runs, started + seen + 500.0)
    assert starts.of(runs) == found, "noted once"
    return found - DECIDED, started - DECIDED


@pytest.mark.parametrize("ahead", CLOCKS)
@pytest.mark.parametrize("late", LATE)
def test_who_saw_it_wait_knows_when_it_started(late: float, ahead: float) -> None:
    """Before: by the node's clock alone, a pod that kubelet took up a minute late had 20 s of 80."""
    begins, started = begin(late=late, ahead=ahead, saw_it_wait=True)
    assert started - 1.0 <= begins <= started + SEEN_SECONDS, "kubelet writes whole seconds"


@pytest.mark.parametrize("late", LATE)
def test_who_looks_later_believes_a_node_whose_times_are_possible(late: float) -> None:
    begins, started = begin(late=late, ahead=0.0, saw_it_wait=False, seen=40.0)
    assert started - 1.0 <= begins <= started


@pytest.mark.parametrize("ahead", [-600.0, -30.0, 600.0])
def test_who_looks_later_takes_times_that_cannot_be_for_those_of_a_prompt_kubelet(ahead: float) -> None:
    begins, started = begin(late=0.5, ahead=ahead, saw_it_wait=False)
    assert begins == pytest.approx(started, abs=1.0)


def test_what_is_seen_soon_after_is_told_by_the_nodes_second() -> None:
    for seen, begins in ((REPORT_SECONDS, 10.0), (REPORT_SECONDS + 1.0, 16.0), (-1.0, 9.0)):
        assert begin(late=0.0, ahead=0.0, saw_it_wait=True, seen=seen)[0] == begins


def test_it_begins_no_earlier_than_the_decision_and_not_much_later() -> None:
    starts = WindowStarts(unix_seconds)
    assert starts.of(pod()) == DECIDED + START_SECONDS, "of a pod that waits still"
    assert begin(late=START_SECONDS, ahead=0.0, saw_it_wait=True)[0] == START_SECONDS
    before = pod(started=DECIDED - 20.0)
    starts.look(None, before, DECIDED)
    assert starts.of(before) == DECIDED, "kubelet does not say when it took it up"


def test_a_container_that_starts_again_is_told_by_the_same_clock() -> None:
    starts, ahead = WindowStarts(unix_seconds), 600.0
    waits = pod(accepted=DECIDED + ahead)
    crashed = pod(accepted=DECIDED + ahead, started=DECIDED + ahead + 10.0)
    again = pod(accepted=DECIDED + ahead, started=DECIDED + ahead + 50.0)
    starts.look(waits, crashed, DECIDED + 10.0)
    starts.look(crashed, waits, DECIDED + 12.0)
    assert starts.of(waits) == DECIDED + START_SECONDS
    starts.look(waits, again, DECIDED + 59.0)
    assert starts.of(again) == DECIDED + 50.0


def test_nothing_is_kept_of_pods_that_are_gone_or_have_no_node_any_more() -> None:
    runs = pod(accepted=DECIDED + 600.0, started=DECIDED + 610.0)
    starts = WindowStarts(unix_seconds)
    for end in (starts.forget, lambda _: starts.look(runs, replace(runs, node=None), DECIDED)):
        starts.look(pod(), runs, DECIDED + 10.0)
        assert starts.of(runs) == DECIDED + 10.0
        end(runs.uid)
        assert starts.of(runs) == DECIDED + START_SECONDS, "by the node's time"


@pytest.mark.parametrize("by", [-3600.0, 3600.0])
@pytest.mark.parametrize("saw_it_wait", [True, False])
def test_windows_move_with_the_callers_clock_if_it_is_set(by: float, saw_it_wait: bool) -> None:
    was_set = [0.0]
    starts = WindowStarts(unix_seconds, lambda: was_set[0])
    waits, runs = pod(accepted=DECIDED), pod(accepted=DECIDED, started=DECIDED + 10.0)
    if saw_it_wait:
        starts.look(None, waits, DECIDED + 1.0)
        was_set[0] = by
        assert starts.of(waits) == DECIDED + by + START_SECONDS
        starts.look(waits, runs, DECIDED + by + 11.0)
        assert starts.of(runs) == pytest.approx(DECIDED + by + 10.0, abs=1.0), "the nodes' clocks were not set"
    else:
        starts.look(None, runs, DECIDED + 11.0)
        was_set[0] = by
        assert starts.of(runs) == DECIDED + by + 10.0
    before = starts.of(runs)
    was_set[0] = 0.0
    assert starts.of(runs) == before - by


def test_a_decision_of_the_future_counts_as_made_when_it_is_seen() -> None:
    starts = WindowStarts(unix_seconds)
    starts.look(None, pod(), DECIDED - 3600.0)
    assert starts.of(pod()) == DECIDED - 3600.0 + START_SECONDS
    starts.look(pod(), pod(), DECIDED - 3500.0)
    assert starts.of(pod()) == DECIDED - 3600.0 + START_SECONDS, "noted once"
    near = WindowStarts(unix_seconds)
    near.look(None, pod(), DECIDED - REPORT_SECONDS)
    assert near.of(pod()) == DECIDED + START_SECONDS, "clocks of two nodes always differ a little"


def test_pods_without_a_probation_are_not_noted() -> None:
    runs = pod(accepted=DECIDED + 600.0, started=DECIDED + 610.0)
    assert runs.decision is not None
    usual = replace(runs, decision=replace(runs.decision, probation_seconds=None))
    starts = WindowStarts(unix_seconds)
    starts.look(None, usual, DECIDED + 10.0)
    starts.look(None, runs, DECIDED + 10.0)
    assert starts.of(runs) == DECIDED + 10.0
