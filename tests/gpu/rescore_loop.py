"""Infer progress anew from a recorded session of loop_suite.py, and compare with what the jobs counted themselves.

    python tests/gpu/rescore_loop.py tests/data/loop/h200-loop.json [--without-clock] [--without-model]

Windows of two seconds, as the agent takes them while somebody is throttled; signatures from the same session's
runs alone; expectations of the shipped model under the throttles in force. Jobs that hardly use the GPU are left
out: they say nothing in its counters.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from counts import rate_of

from gpushare.core.control import ModelAnswer, Question, throttled_bound
from gpushare.core.control.node_signatures import IDLE_RATIO
from gpushare.core.gpu import COUNTERS, Counters, GpuSample
from gpushare.core.interference import expectation
from gpushare.core.progress import Predict, Prior, TenantLoad, attribute, evidence, no_prediction
from gpushare.data import default_model
from gpushare_deviceplugin.measuring import merge

GPU = "NVIDIA H200"
MERGED = 2  # samples of a second
START_SECONDS = 8.0  # of a job before its first count
LAG_SECONDS = 0.3  # of a duty until it is in the metrics


@dataclass(frozen=True)
class Alone:
    """A program alone: its signature, the clock meanwhile, iterations per second."""

    counters: Counters
    sm_clock_mhz: float | None
    rate: float


@dataclass(frozen=True)
class Miss:
    """One job in one window: inferred less counted progress; `live`: what the agent said then, less counted."""

    scene: str
    program: str
    is_throttled: bool
    error: float
    live: float | None


def sample_of(rows: Sequence[Mapping[str, Any]]) -> GpuSample:
    return merge(
        GpuSample(
            Counters(**{name: row[name] for name in COUNTERS if row.get(name) is not None}),
            row["seconds"],
            0,
            None,
            row.get("sm_clock_mhz"),
        )
        for row in rows
    )


def programs_alone(session: Mapping[str, Any]) -> dict[str, Alone]:
    """Return each program's signature, from the seconds in which it was at work."""
    found = {}
    for each in session["alone"]:
        half = median(row["sm_util"] for row in each["counters"]) / 2
        sample = sample_of([row for row in each["counters"] if row["sm_util"] >= half])
        found[each["program"]] = Alone(sample.counters, sample.sm_clock_mhz, each["iterations_per_s"])
    return found


def windows(
    scene: Mapping[str, Any], alone: Mapping[str, Alone]
) -> Iterator[tuple[GpuSample, list[Mapping[str, Any]], dict[str, float], dict[str, Any]]]:
    """Yield each window with its jobs, their counted progress, and the agent's line; none while a job starts."""
    rows = scene["counters"]
    for first in range(0, len(rows) - MERGED + 1, MERGED):
        part = rows[first : first + MERGED]
        begin, end = part[0]["at"] - part[0]["seconds"], part[-1]["at"]
        lines = [line for line in scene["series"] if line["at"] <= end + LAG_SECONDS]
        began = {name: counts[0][0] for name, counts in scene["counts"].items() if counts}
        jobs = [job for job in scene["jobs"] if began.get(job["program"], end) < begin]
        is_starting = any(begin <= at <= end + START_SECONDS for at in began.values())
        truth = {}
        for job in jobs:
            rate = rate_of(scene["counts"][job["program"]], begin, end)
            if rate is not None:
                truth[job["program"]] = rate / alone[job["program"]].rate
        if lines and jobs and len(truth) == len(jobs) and not is_starting:
            yield sample_of(part), jobs, truth, lines[-1]["jobs"]


def misses(session: Mapping[str, Any], *, with_clock: bool = True, with_model: bool = True) -> list[Miss]:
    """Return what inference misses by, of each job in each window; jobs that are called unknown are left out."""
    alone = programs_alone(session)
    predict = expectation(default_model().for_gpu(GPU)) if with_model else no_prediction
    answers: dict[tuple[str, ...], ModelAnswer] = {}
    found = []
    for scene in session["scenes"]:
        for sample, jobs, truth, line in windows(scene, alone):
            duties = [1.0 - (line[job["program"]]["throttle"] or 0.0) for job in jobs]
            loads = [_load(alone[job["program"]], job["cap"], with_clock=with_clock) for job in jobs]
            names = tuple(job["program"] for job in jobs)
            key = (scene["scene"], *names)
            if key not in answers:
                answers[key] = _answer(Question(GPU, names, tuple(loads)), predict)
            priors: Sequence[Prior | None] = answers[key].under(duties)
            known = [
                replace(each, bound=throttled_bound(each.bound, duty))
                for each, duty in zip(map(evidence, loads, priors), duties, strict=True)
            ]
            inferred = attribute(sample.counters, known, sample.sm_clock_mhz if with_clock else None)
            for name, each in zip(names, inferred, strict=True):
                if each.progress_ratio is None or (alone[name].counters.sm_util or 0.0) < IDLE_RATIO:
                    continue
                told = line[name]["inferred"]
                live = None if told is None else told - truth[name]
                is_throttled = any(duty < 1.0 for duty in duties)
                found.append(Miss(scene["scene"], name, is_throttled, each.progress_ratio - truth[name], live))
    return found


def _load(program: Alone, cap: int, *, with_clock: bool) -> TenantLoad:
    return TenantLoad(program.counters, cap, sm_clock_mhz=program.sm_clock_mhz if with_clock else None)


def _answer(question: Question, predict: Predict) -> ModelAnswer:
    parts = {running: tuple(predict(question.of(running).loads)) for running in question.parts()}
    return ModelAnswer(question, tuple(predict(question.loads)), parts)


def by_job(found: Sequence[Miss]) -> dict[tuple[str, bool, str], list[Miss]]:
    """Group by scene, whether somebody is throttled, and program."""
    groups: dict[tuple[str, bool, str], list[Miss]] = {}
    for miss in found:
        groups.setdefault((miss.scene, miss.is_throttled, miss.program), []).append(miss)
    return dict(sorted(groups.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("session", type=Path)
    parser.add_argument("--without-clock", action="store_true")
    parser.add_argument("--without-model", action="store_true")
    read = parser.parse_args()
    session = json.loads(read.session.read_text())
    found = misses(session, with_clock=not read.without_clock, with_model=not read.without_model)
    print(
        "| scene | somebody throttled | job | windows | mean error | bias | of the agent then |\n"
        + "|---" * 7
        + "|"
    )
    for (scene, is_throttled, program), each in by_job(found).items():
        live = [abs(miss.live) for miss in each if miss.live is not None]
        print(
            f"| {scene} | {'yes' if is_throttled else 'no'} | {program} | {len(each)} "
            f"| {fmean(abs(miss.error) for miss in each):.3f} | {fmean(miss.error for miss in each):+.3f} "
            f"| {f'{fmean(live):.3f}' if live else ''} |"
        )


if __name__ == "__main__":
    main()
