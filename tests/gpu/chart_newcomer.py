"""A newcomer of chart_suite.py: an unknown workload is read in place; one that breaks a promise is throttled."""

import time
from collections.abc import Sequence
from typing import NamedTuple

from chart_bench import ChartBench, Details, Failed, NotHere, must
from chart_trouble import KEPT_BAR, PROFILE_SECONDS, TOLERANCE, profile_of, set_share, slowdown_to_break
from livecluster import NotYet, wait_for

# Both read memory all the time: an equal part of the SMs does not part the memory's bandwidth between them.
VICTIM, NEWCOMER, FRACTION = "fft", "memory_stream", "0.5"
READ_BAR, READING_PART_BAR = 30.0, 0.1  # seconds from first kernel to profile; of the neighbours' time meanwhile
WATCH_SECONDS = 35.0
STEADY_SECONDS = 3.0  # a promise counts as kept when it is kept for so long


class Look(NamedTuple):
    """What a program made, relative to alone, `at` seconds after the newcomer's first kernel."""

    at: float
    own: float


def newcomer(bench: ChartBench) -> Details:
    """An unknown workload is read beside a neighbour; placed again, it breaks a promise for 10 s at most."""
    if bench.simulated:
        raise NotHere("the twin's side is tests/e2e/test_loop.py")
    for number in range(1, len(bench.gpus())):  # the two are to meet, whatever GPUs there are
        bench.start(bench.pod(f"filler-{number}", bench.cuda("run", 300), "1"))
        bench.until(f"filler-{number}", "rate")
    for share in ("victim", "newcomer"):
        set_share(bench, share, 10.0)
    _start(bench, "alone", VICTIM, "1", 60, part="victim")
    wait_for("a profile of the victim", lambda: profile_of(bench, "victim"), seconds=PROFILE_SECONDS)
    alone = bench.rate("alone", 6)
    bench.delete("alone")
    _start(bench, "victim", VICTIM, FRACTION, 170, part="victim")

    read = _read_in_place(bench, alone)
    time.sleep(5)
    beside = _own(bench, alone, 4)
    bench.delete("newcomer")
    under_share = 10.0 * (bench.of_pod("gpushare_pod_promise_ratio", "victim") or 0.0)
    slowdown = slowdown_to_break(under_share, beside)
    set_share(bench, "victim", slowdown)  # now more is promised than it makes beside the newcomer
    wait_for(
        "the new promise",
        lambda: (bench.of_pod("gpushare_pod_promise_ratio", "victim") or 0) > under_share / slowdown / 2,
        seconds=20,
    )
    promise = bench.of_pod("gpushare_pod_promise_ratio", "victim") or 1.0
    before = _own(bench, alone, 2)
    must(before >= promise - TOLERANCE, f"the promise of {promise:.2f} is broken by nobody: {before:.2f} is made")

    kernel = _start(bench, "newcomer", NEWCOMER, FRACTION, 60, part="newcomer")
    looks: list[Look] = []
    while (at := time.time() - kernel) < WATCH_SECONDS:
        looks.append(Look(round(at, 2), _own(bench, alone, 2)))
        time.sleep(0.5)
    kept = kept_again(looks, promise - TOLERANCE)
    if kept is None:
        raise Failed(f"the promise of {promise:.2f} is not kept again: {looks[-6:]}")
    return {
        "unknown": read,
        "beside": beside,
        "under_share": round(under_share, 3),
        "slowdown_asked": slowdown,
        "promise": promise,
        "before": before,
        "lowest": min(look.own for look in looks),
        "broken_for_s": kept,
        "after": _own(bench, alone, 8),
        "inferred_after": bench.of_pod("gpushare_pod_progress_ratio", "victim"),
        "throttle_of_newcomer": bench.of_pod("gpushare_pod_throttle_ratio", "newcomer"),
        "looks": looks,
        "events": sorted(bench.reasons("victim") | bench.reasons("newcomer")),
        "met": kept <= KEPT_BAR and read["met"],
    }


def _read_in_place(bench: ChartBench, alone: float) -> Details:
    """Start a workload that nobody knows beside the victim, until it has a profile."""
    before = _own(bench, alone, 3)
    stopped = _reading_seconds(bench)
    kernel = _start(bench, "newcomer", NEWCOMER, FRACTION, 60, part="newcomer")
    try:
        wait_for("a profile of the newcomer", lambda: profile_of(bench, "newcomer"), seconds=50, every=0.5)
    except NotYet as late:
        raise Failed(f"{late}; {bench.metrics('gpushare_profile_')}") from None
    took = round(time.time() - kernel, 1)
    part = round((_reading_seconds(bench) - stopped) / 60, 3)
    return {
        "victim_before": before,
        "first_kernel_to_profile_s": took,
        "part_of_the_neighbours_minute": part,
        "readings": bench.metrics("gpushare_profile_readings_total"),
        "met": took <= READ_BAR and part <= READING_PART_BAR,
    }


def kept_again(looks: Sequence[Look], least: float) -> float | None:
    """Seconds from the first look below `least` until it is reached for STEADY_SECONDS: 0 where none is below.

    None where it is not reached for so long before the looks end.
    """
    broken = next((look.at for look in looks if look.own < least), None)
    if broken is None:
        return 0.0
    since: float | None = None
    for look in looks:
        if look.at < broken:
            continue
        if look.own < least:
            since = None
        elif since is None:
            since = look.at
        if since is not None and look.at - since >= STEADY_SECONDS:
            return round(since - broken, 1)
    return None


def _start(bench: ChartBench, name: str, program: str, fraction: str, seconds: float, *, part: str) -> float:
    """Start a pod and wait until it counts; return when its first kernel was done, by the wall clock."""
    command = bench.torch(program, seconds)
    memory = None if fraction == "1" else "16Gi"
    bench.start(bench.pod(name, command, fraction, memory, workload=program, labels={"part": part}))
    at = float(bench.until(name, "kernel")["t"])
    bench.until(name, "rate")
    return at


def _own(bench: ChartBench, alone: float, newest: int) -> float:
    """The victim's progress by its own count, a rate each second."""
    return round(bench.rate("victim", newest) / alone, 3)


def _reading_seconds(bench: ChartBench) -> float:
    return sum(bench.metrics("gpushare_profile_reading_seconds_total").values())
