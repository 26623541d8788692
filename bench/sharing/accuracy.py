"""Compare predictions for sets of jobs, and the agent's inference, with what the jobs logged themselves.

- *Predicted*: of a set of jobs at work, by the model at the moment when the set was seen first (witness.py).
  Observed is each job's progress over all the time that exactly these were at work and none was throttled, and it
  counts where that is two seconds or more. While another job builds and warms up on the GPU nothing is compared.
- *Inferred*: of one job over one window of the agent, which ends where its figure first appears in the samples,
  and begins where the one before ended, or a second earlier where there is none: the agent discards its window
  whenever a tenant comes or goes. Throttled or not, all windows count that lie between `ready` and end.
- *Observed* is iterations over seconds of work, relative to alone. What a serving job does between requests is no
  work; the agent sees the counters of both, so its figure is compared with the answers over the requests that
  came.
- *Alone* is the program's rate over its whole jobs under exclusive use, if the session ran that; otherwise its
  short run alone. Three seconds alone differ from that by up to 40% for programs that depend on the host (H200,
  2026-11-26). The policies' slowdowns stay relative to the short run.

Of a job alone the agent says 1 without looking, so these windows are in no figure of the report.
Runs with a failed job, cut ones and those of other policies count nowhere. What was not recorded is absent.
"""

import itertools
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final

from bench.figures import percentile
from bench.sharing.analysis import countable, progress_at, rate_alone, rate_over_whole_jobs
from bench.sharing.policies import OURS
from bench.sharing.records import Record, Records
from bench.sharing.trace import SERVING_LOAD

LEAST_SECONDS: Final = 2.0
PREDICTED_BAR: Final = 0.08
INFERRED_BAR: Final = 0.05
SAMPLE_SECONDS: Final = 1.0  # of the agent: its first window after a tenant came or went
MOST_WINDOW_SECONDS: Final = 5.0  # it merges five samples at most
LATE_SECONDS: Final = 1.5  # from a client's connection until the samples show it

STARTING: Final = "another job started on the GPU"
THROTTLED: Final = "somebody was throttled"
SHORT: Final = f"together for less than {LEAST_SECONDS:g} s"
UNKNOWN: Final = "no prediction recorded"


class Reference(Enum):
    """The rate that an observed progress is relative to, as the report names it."""

    WHOLE_JOB = "the program's whole jobs under exclusive use on the same machine"
    SHORT_RUN = "its short run alone"
    REQUESTS = "the requests that came"


@dataclass(frozen=True, slots=True)
class Compared:
    """One job in one set, or in one window of the agent; progress relative to alone.

    Attributes:
        beside: how many others were at work.
        expected: of a window: what the model expected under the throttles in force; None: the agent did not say.
    """

    run: str
    number: int
    program: str
    is_serving: bool
    beside: int
    seconds: float
    told: float
    observed: float
    reference: Reference
    expected: float | None = None

    @property
    def error(self) -> float:
        """Return the reported less the observed value."""
        return self.told - self.observed


@dataclass(frozen=True)
class Accuracy:
    """Comparable data of all runs.

    Attributes:
        is_recorded: some run has samples.
        left_out: job-seconds of work that no prediction was compared over, by reason.
        looks, failures: at the agent.
    """

    is_recorded: bool
    predicted: tuple[Compared, ...] = ()
    inferred: tuple[Compared, ...] = ()
    sets: int = 0
    left_out: Mapping[str, float] = field(default_factory=dict)
    looks: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True)
class _LoggedJob:
    """A job as its own log has it.

    Attributes:
        on_gpu: from when on it may have used the GPU, before it was ready.
        alone: iterations per second of work; alone_by: where that comes from.
        offered: of a serving job, iterations per second that were asked for; 0 of the others.
    """

    number: int
    name: str
    program: str
    on_gpu: float
    ready: float
    ended: float
    progress: Sequence[Sequence[float]]
    alone: float
    alone_by: Reference
    offered: float
    samples: Sequence[Mapping[str, float | None]]

    def reference(self, *, by_work: bool) -> Reference:
        """Return the rate that its observed progress is relative to."""
        return self.alone_by if by_work or not self.offered else Reference.REQUESTS

    def observed(self, spans: Sequence[tuple[float, float]], *, by_work: bool) -> float | None:
        """Return its progress over stretches of time; None where it did no work."""
        is_by_requests = self.reference(by_work=by_work) is Reference.REQUESTS
        count = worked = 0.0
        for begin, end in spans:
            (before, busy), (after, over) = progress_at(self.progress, begin), progress_at(self.progress, end)
            count += after - before
            worked += end - begin if is_by_requests else over - busy
        rate = self.offered if is_by_requests else self.alone
        return count / worked / rate if worked > 1e-6 else None


def accuracy(records: Records) -> Accuracy:
    """Compare what the records hold."""
    source = records.first("signatures")
    is_table = source is not None and source["source"] == "table"
    predicted: list[Compared] = []
    inferred: list[Compared] = []
    left: dict[str, float] = {}
    looks = failures = sets = 0
    is_recorded = False
    for run in countable(records):
        watch = records.first("watch", run=run["name"])
        if run["policy"] != OURS.name or watch is None:
            continue
        looks, failures = looks + watch["looks"], failures + watch["failures"]
        jobs = _jobs(records, run, is_table=is_table)
        is_recorded |= any(job.samples for job in jobs)
        found = list(_sets(run["name"], jobs, list(records.of("placed", run=run["name"])), left))
        sets += len(found)
        predicted += itertools.chain.from_iterable(found)
        present = _present(jobs)
        inferred += [each for job in jobs for each in _windows(run["name"], job, jobs, present)]
    return Accuracy(is_recorded, tuple(predicted), tuple(inferred), sets, left, looks, failures)


def report(found: Accuracy) -> list[str]:
    """Return it as lines of Markdown."""
    title = "Predicted and inferred progress against what the jobs logged"
    if not found.is_recorded:
        return [f"{title}: not recorded."]
    heads = ("progress relative to alone", "compared", "mean absolute error", "bar", "bias", "p90")
    lines = [f"{title}:", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for title, values, bar in (
        (f"predicted, each job of {found.sets} sets", found.predicted, PREDICTED_BAR),
        ("inferred, each window of each job", found.inferred, INFERRED_BAR),
    ):
        beside = [each for each in values if each.beside]
        lines += [
            _row(f"{title}: beside others", beside, bar),
            _row("of these, as fast as they can", [each for each in beside if not each.is_serving]),
            _row("of these, serving", [each for each in beside if each.is_serving]),
        ]
    expected = [replace(each, told=each.expected) for each in found.inferred if each.expected is not None]
    lines += [
        _row("predicted, alone on the GPU", [each for each in found.predicted if not each.beside]),
        _row("expected by the agent under the throttles in force, each window: beside others", expected),
    ]
    left = "; ".join(f"{reason} {seconds:.0f}" for reason, seconds in sorted(found.left_out.items()))
    compared = sum(each.seconds for each in found.predicted)
    told = f"Predictions are compared over {compared:.0f} job-seconds of work"
    lines += ["", f"{told}; left out, job-seconds: {left or 'none'}.", *_references(found)]
    return [*lines, f"The agent was looked at {found.looks} times, {found.failures} of them in vain."]


def _references(found: Accuracy) -> Iterator[str]:
    """Yield which rates the observed progress is relative to, and for how many of those in the table."""
    windows = [each for each in found.inferred if each.beside]
    for what, values in (("predictions", found.predicted), ("inferred windows", windows)):
        counts = Counter(each.reference for each in values)
        parts = [f"{counts[each]} to {each.value}" for each in Reference if counts[each]]
        if parts:
            yield f"Of {len(values)} {what}, observed progress is relative: {'; '.join(parts)}."


def _row(name: str, values: Sequence[Compared], bar: float | None = None) -> str:
    goal = "" if bar is None else f"<= {bar:.2f}"
    if not values:
        return f"| {name} | 0 | not recorded | {goal} | | |"
    errors = [abs(each.error) for each in values]
    figures = statistics.fmean(errors), statistics.fmean(each.error for each in values), percentile(errors, 0.9)
    mean, bias, high = figures
    return f"| {name} | {len(values)} | {mean:.3f} | {goal} | {bias:+.3f} | {high:.3f} |"


def _jobs(records: Records, run: Record, *, is_table: bool) -> list[_LoggedJob]:
    found = []
    for line in records.of("job", run=run["name"]):
        seen = records.first("seen", run=run["name"], number=line["number"])
        rows = [] if seen is None else [dict(zip(seen["fields"], row, strict=True)) for row in seen["samples"]]
        whole = rate_over_whole_jobs(records, run, line["program"])
        # The table's signatures are of programs that answer without a pause, the agent's of what they did.
        offered = line["rate"] / (SERVING_LOAD if is_table else 1.0)
        found.append(
            _LoggedJob(
                line["number"],
                f"job-{line['number']:03d}",
                line["program"],
                _on_gpu(line, rows),
                line["ready"],
                line["ended"],
                line["progress"],
                rate_alone(records, run, line["program"]) if whole is None else whole,
                Reference.SHORT_RUN if whole is None else Reference.WHOLE_JOB,
                offered,
                rows,
            )
        )
    return found


def _on_gpu(line: Record, rows: Sequence[Mapping[str, float | None]]) -> float:
    """Return from when on a job may have used the GPU: not while the agent saw no client of it."""
    first: float = line["started"] if line["started"] is not None else line["ready"]
    began = line.get("first_started")
    if began is not None:
        return min(first, began)
    idle = [
        row["at"] for row in rows if row["clients"] == 0 and row["at"] is not None and row["at"] < line["ready"]
    ]
    return max([first, *(at - LATE_SECONDS for at in idle)])


def _sets(
    run: str, jobs: Sequence[_LoggedJob], placed: Sequence[Record], left: dict[str, float]
) -> Iterator[list[Compared]]:
    """Yield the jobs of each set that was at work together; add to `left` what cannot be compared."""
    throttled = [row["at"] for job in jobs for row in job.samples if row["throttle"] and row["at"] is not None]
    edges = {edge for job in jobs for edge in (job.on_gpu, job.ready, job.ended)}
    edges |= {edge for at in throttled for edge in (at - SAMPLE_SECONDS, at + SAMPLE_SECONDS)}
    spans: dict[frozenset[int], list[tuple[float, float]]] = {}
    for begin, end in itertools.pairwise(sorted(edges)):
        middle = (begin + end) / 2
        working = frozenset(job.number for job in jobs if job.ready <= middle < job.ended)
        if not working:
            continue
        if any(job.on_gpu <= middle < job.ready for job in jobs):
            _add(left, STARTING, len(working) * (end - begin))
        elif any(abs(middle - at) <= SAMPLE_SECONDS for at in throttled):
            _add(left, THROTTLED, len(working) * (end - begin))
        else:
            spans.setdefault(working, []).append((begin, end))
    by_number = {job.number: job for job in jobs}
    forecasts = {frozenset(line["members"]): line["members"] for line in placed if "unknown" not in line}
    for working, pieces in spans.items():
        seconds = sum(end - begin for begin, end in pieces)
        members = [by_number[number] for number in sorted(working)]
        told = forecasts.get(frozenset(job.name for job in members))
        if told is None or seconds < LEAST_SECONDS:
            _add(left, UNKNOWN if seconds >= LEAST_SECONDS else SHORT, len(members) * seconds)
            continue
        yield [
            Compared(
                run,
                job.number,
                job.program,
                bool(job.offered),
                len(members) - 1,
                seconds,
                told[job.name]["predicted"],
                observed,
                job.reference(by_work=True),
            )
            for job in members
            if (observed := job.observed(pieces, by_work=True)) is not None
        ]


def _windows(
    run: str, job: _LoggedJob, jobs: Sequence[_LoggedJob], present: Mapping[float, frozenset[int]]
) -> Iterator[Compared]:
    """Yield each window over which the agent inferred a job's progress."""
    before: Mapping[str, Any] | None = None
    ended: float | None = None
    running: frozenset[int] = frozenset()
    for row in job.samples:
        inferred, at = row["inferred"], row["at"]
        if at is not None and (now := present.get(at, frozenset())) != running:
            ended, running = None, now  # the agent started a new window, although no sample shows a gap
        if inferred is None or at is None:
            before, ended = None, None
            continue
        if before is not None and (before["inferred"], before["error"]) == (inferred, row["error"]):
            continue
        end = at - SAMPLE_SECONDS / 2  # it appeared between this sample and the one before
        begin = end - SAMPLE_SECONDS if ended is None else max(ended, end - MOST_WINDOW_SECONDS)
        before, ended = row, end
        if begin < job.ready or end > job.ended:
            continue
        observed = job.observed([(begin, end)], by_work=False)
        if observed is None:
            continue
        middle = (begin + end) / 2
        beside = sum(1 for each in jobs if each is not job and each.on_gpu <= middle < each.ended)
        yield Compared(
            run,
            job.number,
            job.program,
            bool(job.offered),
            beside,
            end - begin,
            inferred,
            observed,
            job.reference(by_work=False),
            row["expected"] if beside else None,
        )


def _present(jobs: Sequence[_LoggedJob]) -> dict[float, frozenset[int]]:
    """Return which jobs had clients at each look."""
    found: dict[float, set[int]] = {}
    for job in jobs:
        for row in job.samples:
            if row["at"] is not None and row["clients"]:
                found.setdefault(row["at"], set()).add(job.number)
    return {at: frozenset(numbers) for at, numbers in found.items()}


def _add(left: dict[str, float], reason: str, seconds: float) -> None:
    left[reason] = left.get(reason, 0.0) + seconds
