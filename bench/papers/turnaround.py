"""Gilman and Walls' comparison: an inference whose requests come when they come, beside training, four ways.

Jobs are started by the launcher of bench/sharing, which is the same code on the twin. A record is one run: what
the inference's requests took from their arrival, what the training made, and the device's counters meanwhile.
The training begins first and works until the last request was answered: a program that trains takes seconds longer
to be ready than one that answers, so two that are started together hardly meet.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from bench.figures import percentile
from bench.sharing.joblog import JobStory
from bench.sharing.launching import Ended, Launcher, Order
from bench.sharing.policies import SharingPolicy, World
from bench.sharing.records import Record, Records
from bench.sharing.trace import SERVING_LOAD, TraceJob
from gpushare.core.api import JobClass
from gpushare.research.calibration.counters import RunCounters

FILE: Final = "gilman.jsonl"
ROUNDS: Final = 2
# The chat program's requests are short and light, the pictures' ones heavy; so are their neighbours.
PAIRS: Final = (
    ("chat-app-bf16-b8", "wideresnet-app-bf16-b128"),
    ("convnext-infer-bf16-b48", "seq2seq-app-tf32-b96"),
)
SECONDS: Final = 3.0
INFERENCE_SHARE, TRAINING_SHARE = 30, 70
"""Percent. Ours lets a latency pod run uncapped and caps the training at its share, as docs/design.md 5 says."""
START_SECONDS: Final = 1.5  # of an inference: context, build, warm-up
TRAINING_START_SECONDS: Final = 4.8  # of a training
WORLD_SECONDS: Final = 6.0  # gate, agent and daemon
COUNTED_SECONDS: Final = 1.3  # of the counters' window, from when all are ready
_ENDLESS: Final = 10**9
_POLL_SECONDS: Final = 0.02
_LEAST_TOGETHER: Final = 0.8  # part of SECONDS
_PATIENCE_SECONDS: Final = 60.0
_JOIN: Final = "+"  # bench/sharing/gpujob.py: two programs of one process

ALONE: Final = SharingPolicy("alone", "alone", World.PLAIN, places=1, in_order=True)
STREAMS: Final = SharingPolicy("streams", "priority streams of one process", World.PLAIN, places=1)
SLICING: Final = SharingPolicy("slicing", "time slicing", World.PLAIN, places=2)
MPS: Final = SharingPolicy("mps", "MPS", World.MPS, places=2)
OURS: Final = SharingPolicy("ours", "gpushare", World.GPUSHARE, counts_shares=True, caps_at_share=True)
WAYS: Final = (STREAMS, SLICING, MPS, OURS)


class Watching(Launcher, Protocol):
    """A launcher that sees its jobs at work."""

    def is_ready(self, number: int) -> bool:
        """Return whether a job that was submitted is built and warm, or has ended."""
        ...

    def stop(self, number: int) -> None:
        """Ask a job to end soon; harmless where it has ended."""
        ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """One run: who runs, and how."""

    policy: SharingPolicy
    inference: str
    training: str
    round: int = 0

    @property
    def name(self) -> str:
        """Return the key of its record."""
        return f"{self.policy.name}:{self.inference}:{self.training}:{self.round}"

    @property
    def seconds(self) -> float:
        """Return about how long it takes on the GPU."""
        world = WORLD_SECONDS if self.policy.world is World.GPUSHARE else 1.0
        inference = START_SECONDS if self.inference and self.policy is not STREAMS else 0.0
        return SECONDS + inference + (TRAINING_START_SECONDS if self.training else 0.0) + world


def wanted() -> list[Wanted]:
    """Return every run in order: the programs alone, then the ways in turn, each round begun with another."""
    names = [(inference, "") for inference, _ in PAIRS] + [("", training) for _, training in PAIRS]
    runs = [Wanted(ALONE, inference, training) for inference, training in names]
    for number in range(ROUNDS):
        ways = WAYS[2 * number % len(WAYS) :] + WAYS[: 2 * number % len(WAYS)]
        runs += [Wanted(way, *pair, number) for pair in PAIRS for way in ways]
    return runs


def expected_seconds(records: Records) -> float:
    """Return what the missing runs take of the GPU, about."""
    rates = sum(START_SECONDS + SECONDS for inference, _ in PAIRS if not _rate_of(records, inference))
    return rates + sum(each.seconds for each in missing(records))


def missing(records: Records) -> list[Wanted]:
    """Return the runs that were not made, or whose two programs were not at work at the same time."""
    done = {line["name"] for line in records.of("run") if is_together(line)}
    return [each for each in wanted() if each.name not in done]


def is_together(line: Record) -> bool:
    """Return whether a run's programs worked at the same time, as far as it has two processes.

    Runs from before 2026-11-23 do not say: their two were started together, and did not meet.
    """
    one_process = line["way"] == STREAMS.name or not (line["inference"] and line["training"])
    return one_process or (line.get("together_s") or 0.0) >= _LEAST_TOGETHER * SECONDS


@dataclass
class Turnaround:
    """Makes what is missing; `clock` and `sleep` are the machine's."""

    records: Records
    launcher: Watching
    counters: RunCounters
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def session(self, budget_seconds: float) -> bool:
        """Make what is missing and fits; return whether nothing is missing any more."""
        began = self.clock()
        for inference, _ in PAIRS:
            if not _rate_of(self.records, inference):
                self._measure_rate(inference)
        for each in missing(self.records):
            if each.seconds > budget_seconds - (self.clock() - began):
                self.say(f"{each.name} takes about {each.seconds:.0f} s: too long for this call")
                continue
            self._measure(each)
        return not missing(self.records)

    def _measure_rate(self, inference: str) -> None:
        """Let the inference answer one request after the other, alone."""
        job = _job(0, inference, 100, JobClass.THROUGHPUT)
        ended, _ = self._play(ALONE, [Order(job, _ENDLESS, 0.0, SECONDS)])
        points = ended[0].story.progress
        (_, first, since), (_, last, until) = points[1], points[-1]
        self.records.add("rate", program=inference, rate=round((last - first) / max(until - since, 1e-9), 4))

    def _measure(self, each: Wanted) -> None:
        self.say(each.name)
        try:
            ended, device = self._play(each.policy, list(self._orders(each)))
        except (RuntimeError, TimeoutError, OSError) as error:
            self.records.add("failed", name=each.name, error=str(error)[:500])
            self.say(f"{each.name}: failed: {str(error)[:300]}")
            return
        answers = ended[0].story if each.inference else None
        work = ended[1].story if 1 in ended else None
        training = None
        if work is not None:
            training = _rate_while(work, answers)
        elif answers is not None:
            training = answers.beside_rate
        self.records.add(
            "run",
            name=each.name,
            way=each.policy.name,
            inference=each.inference,
            training=each.training,
            round=each.round,
            ms=answers.ms if answers is not None else [],
            training_rate=training,
            together_s=_joint_seconds(answers, work),
            device=device,
            caps={str(number): one.cap for number, one in ended.items()},
        )

    def _orders(self, each: Wanted) -> Iterator[Order]:
        rate = SERVING_LOAD * (_rate_of(self.records, each.inference) or 1.0)
        if each.policy is STREAMS:
            both = _job(0, f"{each.inference}{_JOIN}{each.training}", 100, JobClass.LATENCY)
            yield Order(both, _ENDLESS, rate, SECONDS)
            return
        if each.training:
            seconds = _PATIENCE_SECONDS if each.inference else SECONDS  # beside an inference it is told to end
            yield Order(_job(1, each.training, TRAINING_SHARE, JobClass.THROUGHPUT), _ENDLESS, 0.0, seconds)
        if each.inference:
            yield Order(_job(0, each.inference, INFERENCE_SHARE, JobClass.LATENCY), _ENDLESS, rate, SECONDS)

    def _play(self, policy: SharingPolicy, orders: Sequence[Order]) -> tuple[dict[int, Ended], dict[str, float]]:
        """Run the jobs until the last of them has ended; return how they ended, and the counters while all worked.

        Each begins once the one before it is ready, and those before the last are told to end when it has ended.

        Raises:
            RuntimeError: a job failed, or did not end.
        """
        done: dict[int, Ended] = {}
        device: dict[str, float] = {}
        try:
            self.launcher.begin(policy, orders)
            began = self.clock()
            opened: float | None = None
            begun, is_read = 0, False
            while len(done) < len(orders):
                if self.clock() - began > _PATIENCE_SECONDS:
                    raise RuntimeError("a job did not end")
                if opened is None and all(self.launcher.is_ready(order.job.number) for order in orders[:begun]):
                    if begun < len(orders):
                        self.launcher.submit(orders[begun])
                        begun += 1
                    else:
                        self.counters.start()
                        opened = self.clock()
                if opened is not None and not is_read and not done and self.clock() - opened >= COUNTED_SECONDS:
                    device, is_read = self.counters.stop(), True
                done |= self.launcher.poll()
                if orders[-1].job.number in done:
                    for order in orders[:-1]:
                        self.launcher.stop(order.job.number)
                self.sleep(_POLL_SECONDS)
        finally:
            self.launcher.end()
        for ended in done.values():
            if ended.status:
                raise RuntimeError(ended.tail[-300:] or f"a job ended with status {ended.status}")
        return done, device


def figures(line: Record) -> dict[str, float] | None:
    """Return mean, standard deviation, median and 99th percentile of a run's turnaround, ms; None of none."""
    ms: list[float] = line["ms"]
    if len(ms) < 2:
        return None
    return {
        "mean": statistics.fmean(ms),
        "deviation": statistics.stdev(ms),
        "p50": percentile(ms, 0.5),
        "p99": percentile(ms, 0.99),
    }


def _rate_while(work: JobStory, answers: JobStory | None) -> float | None:
    """Return a training's iterations/s while the inference answered; alone, those of all of its work."""
    points = work.progress[1:]
    if answers is not None:
        if answers.ready is None or answers.ended is None:
            return None
        points = [point for point in points if answers.ready <= point[0] <= answers.ended]
    if len(points) < 2:
        return None
    (since, first, _), (until, last, _) = points[0], points[-1]
    return round((last - first) / max(until - since, 1e-9), 4)


def _joint_seconds(*stories: JobStory | None) -> float | None:
    """Return the seconds that all were at work at the same time; None where one is not there or did not end."""
    spans = []
    for story in stories:
        if story is None or story.ready is None or story.ended is None:
            return None
        spans.append((story.ready, story.ended))
    return round(max(0.0, min(end for _, end in spans) - max(ready for ready, _ in spans)), 3)


def _job(number: int, program: str, share: int, job_class: JobClass) -> TraceJob:
    return TraceJob(number, program, 0.0, SECONDS, share, job_class, 1.0)


def _rate_of(records: Records, program: str) -> float | None:
    found: dict[str, Any] | None = records.first("rate", program=program)
    return None if found is None else float(found["rate"])
