"""Run one session: the missing parts of the benchmark, as far as the time allows."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final

from bench.sharing.launching import Ended, Launcher, Order
from bench.sharing.machine import Machine, describe, why_not_the_tables
from bench.sharing.policies import FAULTED, FIFO, POLICIES, SharingPolicy, World, order, with_faults
from bench.sharing.records import BUDGET, COMPLETE, CUT, FAILED, PATIENCE, Records
from bench.sharing.trace import (
    SERVING_LOAD,
    TraceJob,
    TraceSettings,
    as_record,
    draw,
    known_truth,
    programs,
    table_signatures,
)
from bench.sharing.witness import SAMPLE_FIELDS, Watch, Witnessed
from gpushare.core.api import JobClass
from gpushare.data import default_model
from gpushare.mps.errors import MpsError
from gpushare.sim.table_trace import SERVING

POLL_SECONDS: Final = 0.02
_ENDLESS: Final = 10**9
_START_SECONDS: Final = 1.5  # of a job: context, build, warm-up; a first guess
_POD_START_SECONDS: Final = 8.0  # the same with PyTorch's import; a first guess
_POD_SECONDS: Final = 2.0  # of a pod, before its process begins
_END_SECONDS: Final = 10.0  # kept free at the end of a session: pods end, and the records are written
# For this long, what a program does alone on a machine is not measured again.
_SAME_MACHINE: Final = timedelta(minutes=60)
_MAY_FIT: Final = 0.65  # runs of twelve jobs on an H200 took 0.69 to 0.98 of what is expected at most
_TRIES: Final = 2  # of a program alone, and of its signature
_WORLD_SECONDS: Final = 10.0
_FAULT_SECONDS: Final = 20.0  # jobs that a fault ended start again
_PATIENCE: Final = 2.5  # a run that takes this many times the expected duration is cut
# One after the other on the whole GPU, in the node's own world: what a workload's first pod alone would show.
SIGNATURES: Final = SharingPolicy("signatures", "alone", World.GPUSHARE, places=1, in_order=True)


class SignatureSource(StrEnum):
    """Source of the signatures that gpushare decides by."""

    AGENT = "agent"
    TABLE = "table"
    NONE = "none"


@dataclass(frozen=True)
class SessionSettings:
    """Settings of a session.

    Attributes:
        budget_seconds: nothing is begun that would end later.
        alone_seconds: each program alone, in every session; serving programs twice that.
        signature_seconds: upper limit for measuring each program alone by the agent, once.
        to_the_end: in the time that is left for no other run, begin one that may not end in it.
        faults: of the MPS server, in a run of ours apart from the compared ones; 0: no such run.
        signatures: whose: the agent's, or the table's, which cost no time (trace.table_signatures); with none
            gpushare begins as on a new cluster, and profiles what it meets in place.
    """

    budget_seconds: float = 480.0
    repetitions: int = 3
    alone_seconds: float = 3.0
    signature_seconds: float = 20.0
    signatures: SignatureSource = SignatureSource.AGENT
    policies: tuple[str, ...] = tuple(POLICIES)
    faults: int = 0
    to_the_end: bool = False


@dataclass(frozen=True)
class Played:
    """Outcome of a run: each job's end by number, signatures by program, and seconds since jobs could come.

    Attributes:
        witnessed: what gpushare said meanwhile; None: under no policy of ours.
        faults: what became of each that was injected.
        refusals: what the scheduler said of jobs that waited.
        unfinished: where the jobs were that had not ended by the deadline, by number.
    """

    ended: Mapping[int, Ended]
    signatures: Mapping[str, Any]
    seconds: float
    witnessed: Witnessed | None = None
    faults: Sequence[Mapping[str, Any]] = ()
    refusals: Sequence[Mapping[str, Any]] = ()
    unfinished: Mapping[int, str] = field(default_factory=dict)


@dataclass
class Driver:
    """Driver of a session; `say` reports its progress to a person."""

    records: Records
    launcher: Launcher
    machine: Machine
    settings: SessionSettings
    trace: TraceSettings
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _began: float = field(init=False)
    _measured: int = field(init=False, default=0)
    """Number of the session whose rates alone count for this one's runs."""

    def __post_init__(self) -> None:
        self._began = self.clock()

    def session(self) -> bool:
        """Do what is missing and fits; return whether the whole benchmark is complete."""
        number = sum(1 for _ in self.records.of("session"))
        if self.records.first("settings") is None:
            jobs = [as_record(job) for job in draw(self.trace)]
            self.records.add("settings", **asdict(self.trace), repetitions=self.settings.repetitions, list=jobs)
        now = datetime.now(UTC)
        here = describe(self.machine)
        self._measured = self._same_machine(here, now, number)
        began = now.isoformat(timespec="seconds")
        self.records.add("session", number=number, began=began, launcher=self.launcher.kind, **here)
        if (words := why_not_the_tables(self.machine.gpu.model)) is not None:
            self.say(words)
        known = {line["program"]: line["signature"] for line in self.records.of("signature")}
        is_cold = self.settings.signatures is SignatureSource.NONE
        if is_cold and self.records.first("signatures") is None:
            self.records.add("signatures", known=[], source=SignatureSource.NONE.value)
        elif known and not is_cold:
            self.launcher.learn(known)
        self._alone()
        has_signatures = not self._wants_signatures() or self._signatures()
        too_long = []
        for policy, repetition in self._missing():
            if policy.is_ours and not has_signatures:
                continue
            expected = expected_seconds(policy, draw(self.trace), self.records, self.launcher.kind)
            if expected > self._left():
                self.say(f"{policy.name} of repetition {repetition} takes about {expected:.0f} s: too long")
                too_long.append((policy, repetition, expected))
                continue
            self._run(policy, repetition, number)
        for policy, repetition, expected in too_long:
            if self.settings.to_the_end and _MAY_FIT * expected <= self._left():
                self._run(policy, repetition, number)
        missing = [(policy.name, repetition) for policy, repetition in self._missing()]
        self.say(f"{len(missing)} runs are missing" if missing else "complete")
        return not missing

    def why_not_here(self) -> str | None:
        """Return why what was begun elsewhere must not go on here; None: it may."""
        begun = self.records.first("session")
        if begun is None:
            return None
        here = {
            "launcher": self.launcher.kind,
            "gpu": self.machine.gpu.model,
            "simulated": self.machine.is_simulated,
        }
        other = {name: begun[name] for name, value in here.items() if begun[name] != value}
        if not other:
            return None
        told = ", ".join(f"{name} {value}" for name, value in other.items())
        return f"{self.records.path} was begun with {told}: take another directory"

    # -- the programs alone

    def _same_machine(self, here: Mapping[str, Any], now: datetime, number: int) -> int:
        """Return the session that measured the programs alone on this machine and GPU just now, else this one."""
        for line in self.records.of("session", boot=here["boot"], gpu_uuid=here["gpu_uuid"]):
            recent = now - datetime.fromisoformat(line["began"]) < _SAME_MACHINE
            if here["boot"] and recent and self.records.first("alone", session=line["number"]) is not None:
                return int(line["number"])
        return number

    def _alone(self) -> None:
        def keep_rate(program: str, ended: Ended) -> None:
            self.records.add("rate", program=program, rate=_rate(ended))

        def keep_alone(program: str, ended: Ended) -> None:
            story = ended.story
            self.records.add(
                "alone",
                session=self._measured,
                program=program,
                rate=_rate(ended),
                ms=story.ms,
                work_ms=story.work_ms,
                start_seconds=_start_seconds(ended),
            )

        missing = [name for name in SERVING if self.records.first("rate", program=name) is None]
        self._each_alone(missing, "serving programs, one request after the other", keep_rate, closed=True)
        known = {line["program"] for line in self.records.of("alone", session=self._measured)}
        missing = [name for name in programs() if name not in known]
        self._each_alone(missing, "every program alone", keep_alone, closed=False)

    def _each_alone(
        self, missing: Sequence[str], what: str, keep: Callable[[str, Ended], None], *, closed: bool
    ) -> None:
        """Run programs alone, and once more those that fail; keep each one's result as it comes.

        Raises:
            RuntimeError: one does not run alone.
        """
        left = list(missing)

        def note(each: Order, ended: Ended) -> None:
            program = each.job.program
            try:
                if ended.status:
                    raise RuntimeError(ended.tail[-300:])
                keep(program, ended)
                left.remove(program)
            except RuntimeError as error:
                self.say(f"{program} failed: {error}")

        for again in range(_TRIES):
            if left:
                self.say(f"{what}, again: {', '.join(left)}" if again else what)
                orders = self._alone_orders(left, closed=closed, seconds=self.settings.alone_seconds)
                limit = sum(each.seconds or 0.0 for each in orders) + 20.0 * len(orders) + 60.0
                self.play(self.launcher.alone, orders, self.clock() + limit, note)
        if left:
            raise RuntimeError(f"these programs do not run alone: {', '.join(sorted(left))}")

    def _alone_orders(self, names: Sequence[str], *, closed: bool, seconds: float) -> list[Order]:
        orders = []
        for index, program in enumerate(names):
            job = TraceJob(900 + index, program, 0.0, seconds, 100, JobClass.THROUGHPUT, 1.0)
            rate = 0.0 if closed or program not in SERVING else self._request_rate(program)
            orders.append(Order(job, _ENDLESS, rate, 2.0 * seconds if rate else seconds))
        return orders

    def _unsigned(self) -> list[str]:
        known = {line["program"] for line in self.records.of("signature")}
        return [name for name in programs() if name not in known]

    def _wants_signatures(self) -> bool:
        return (
            self.settings.signatures is not SignatureSource.NONE
            and (bool(self.settings.faults) or any(POLICIES[name].is_ours for name in self.settings.policies))
            and sum(1 for _ in self.records.of("signatures")) < _TRIES
            and bool(self._unsigned())
        )

    def _signatures(self) -> bool:
        """Let the agent see each program alone that has no signature; return whether there was time for it."""
        if self.settings.signatures is SignatureSource.TABLE:
            self._keep_signatures(table_signatures(self.machine.gpu.model))
            self._end_signatures(SignatureSource.TABLE)
            return True
        seconds = self.settings.signature_seconds
        unsigned = self._unsigned()
        start = start_seconds(self.records, self.launcher.kind)
        if (0.7 * seconds + start) * len(unsigned) + _WORLD_SECONDS > self._left():
            self.say("no time left for the signatures")
            return False
        self.say("every program alone before the agent's eyes")
        orders = self._alone_orders(unsigned, closed=False, seconds=seconds)
        # Class latency: uncapped. A whole GPU would be given without MPS.
        orders = [
            Order(
                replace(each.job, share_percent=90, job_class=JobClass.LATENCY),
                each.count,
                each.rate,
                seconds,
                until_known=True,
            )
            for each in orders
        ]

        def note(each: Order, ended: Ended) -> None:
            if ended.status:
                self.say(f"{each.job.program} failed: {ended.tail[-300:]}")
            self._keep_signatures(self.launcher.signatures())

        limit = min(self._left(), (seconds + 20.0 + start) * len(orders))
        played = self.play(SIGNATURES, orders, self.clock() + limit, note)
        self._keep_signatures(played.signatures)
        self._end_signatures(SignatureSource.AGENT)
        return True

    def _keep_signatures(self, found: Mapping[str, Any]) -> None:
        """Write those that are new, and let the launcher know them."""
        unsigned = set(self._unsigned())
        new = {program: signature for program, signature in sorted(found.items()) if program in unsigned}
        for program, signature in new.items():
            self.records.add("signature", program=program, signature=signature)
        if new:
            self.launcher.learn(new)

    def _end_signatures(self, source: SignatureSource) -> None:
        known = sorted(set(programs()) - set(self._unsigned()))
        self.records.add("signatures", known=known, source=source.value)
        self.say(f"{len(known)} of {len(programs())} programs have a signature")

    # -- the runs

    def _missing(self) -> Iterator[tuple[SharingPolicy, int]]:
        if self.settings.faults and not self.records.is_settled(FAULTED, 0):
            yield with_faults(self.settings.faults), 0
        for repetition in range(self.settings.repetitions):
            for policy in order(repetition, self.settings.policies):
                if not self.records.is_settled(policy.name, repetition):
                    yield policy, repetition

    def _run(self, policy: SharingPolicy, repetition: int, session: int) -> None:
        jobs = draw(self.trace)
        orders = [self._order(job) for job in jobs]
        self.say(f"{policy.name}, repetition {repetition}")
        name = f"{session}-{policy.name}-{repetition}"
        about = {"name": name, "session": self._measured, "policy": policy.name, "repetition": repetition}
        began = self.clock()
        before = self.machine.energy_joules()
        left, patience = self._left(), _PATIENCE * expected_seconds(policy, jobs, self.records, self.launcher.kind)

        def keep(each: Order, ended: Ended) -> None:
            self._keep_job(name, each, ended)

        try:
            played = self.play(policy, orders, began + min(left, patience), keep)
        except (RuntimeError, TimeoutError, OSError, MpsError) as error:  # the other policies may go
            self.records.add("run", **about, state=FAILED, failed=len(jobs), error=str(error)[:500])
            self.say(f"{policy.name}, repetition {repetition}: failed: {str(error)[:300]}")
            return
        done = played.ended
        after = self.machine.energy_joules()
        seconds = self.clock() - began
        # A run that lacks a job is no run: its jobs would have had the GPU to themselves at the end.
        state = COMPLETE if len(done) == len(jobs) else CUT
        failed = sum(1 for ended in done.values() if ended.status)
        cut: dict[str, Any] = {}
        if state == CUT and patience < left:
            over = max(0.0, played.seconds - min(job.arrives for job in jobs))
            cut = {"cut_by": PATIENCE, "makespan_over": round(over, 2)}
        elif state == CUT:
            cut = {"cut_by": BUDGET}
        if played.unfinished:
            cut["unfinished"] = {str(number): words for number, words in sorted(played.unfinished.items())}
            self.say("; ".join(f"job {number}: {words}" for number, words in sorted(played.unfinished.items())))
        if played.witnessed is not None:
            self._keep_witnessed(name, orders, played.witnessed)
        for line in played.refusals:
            self.records.add("refusal", run=name, **line)
        for line in played.faults:
            self.records.add("fault", run=name, **line)
        self.records.add(
            "run",
            **about,
            state=state,
            **cut,
            failed=failed,
            seconds=round(seconds, 2),
            joules=None if before is None or after is None else round(after - before, 1),
        )
        self.say(f"{policy.name}, repetition {repetition}: {state} after {seconds:.0f} s, {failed} jobs failed")

    def _keep_job(self, run: str, each: Order, ended: Ended) -> None:
        self.records.add(
            "job",
            run=run,
            **as_record(each.job),
            asked=each.count,
            rate=each.rate,
            status=ended.status,
            cap=ended.cap,
            tail=ended.tail,
            restarts=ended.restarts,
            first_started=None if ended.first_started is None else round(ended.first_started, 3),
            **ended.story.as_record(),
        )

    def play(
        self,
        policy: SharingPolicy,
        orders: Sequence[Order],
        deadline: float,
        keep: Callable[[Order, Ended], None] | None = None,
    ) -> Played:
        """Let the jobs come when they come, until all have ended or the deadline; `keep` gets each end at once."""
        watch: Watch | None = None
        try:
            self.launcher.begin(policy, orders)
            watch = self._watch(orders)
            began = self.clock()
            coming = sorted(orders, key=lambda each: (each.job.arrives, each.job.number))
            by_number = {each.job.number: each for each in orders}
            done: dict[int, Ended] = {}
            while len(done) < len(orders) and self.clock() < deadline:
                while coming and coming[0].job.arrives <= self.clock() - began:
                    # A scheduler lets who found no room wait for longer and longer.
                    if policy is SIGNATURES and len(done) + len(coming) < len(orders):
                        break
                    self.launcher.submit(coming.pop(0))
                for number, ended in self.launcher.poll().items():
                    done[number] = ended
                    if keep is not None:
                        keep(by_number[number], ended)
                self.sleep(POLL_SECONDS)
            seconds = self.clock() - began
            unfinished = self.launcher.unfinished() if len(done) < len(orders) else {}
            witnessed, watch = watch.stop() if watch is not None else None, None
            faults = self.launcher.faults()
            refusals = self.launcher.refusals()
            return Played(done, self.launcher.signatures(), seconds, witnessed, faults, refusals, unfinished)
        finally:
            if watch is not None:
                watch.stop()
            self.launcher.end()

    def _watch(self, orders: Sequence[Order]) -> Watch | None:
        witness = self.launcher.witness()
        if witness is None:
            return None
        watch = Watch(witness, {each.job.name: each.job.program for each in orders}, default_model)
        watch.start()
        return watch

    def _keep_witnessed(self, run: str, orders: Sequence[Order], seen: Witnessed) -> None:
        """Write what gpushare said in a run: the thread's own account, the sets, and each job's samples."""
        self.records.add("watch", run=run, looks=seen.looks, failures=seen.failures, error=seen.error)
        for line in seen.sets:
            self.records.add("placed", run=run, **line)
        for each in orders:
            if rows := seen.samples.get(each.job.name):
                self.records.add("seen", run=run, number=each.job.number, fields=list(SAMPLE_FIELDS), samples=rows)

    def _order(self, job: TraceJob) -> Order:
        if job.is_serving:
            rate = self._request_rate(job.program)
            return Order(job, max(1, round(job.seconds * rate)), rate)
        first = self.records.first("alone", program=job.program)
        assert first is not None, "every program runs alone first"
        return Order(job, max(1, round(job.seconds * first["rate"])))

    def _request_rate(self, program: str) -> float:
        found = self.records.first("rate", program=program)
        return SERVING_LOAD * (found["rate"] if found is not None else known_truth().rate_alone(program))

    def _left(self) -> float:
        return self.settings.budget_seconds - _END_SECONDS - (self.clock() - self._began)


def start_seconds(records: Records, launcher: str) -> float:
    """Return the mean seconds from a job's creation to its first iteration: as measured alone, or a guess."""
    is_pods = launcher == "pods"
    last = {line["program"]: line["start_seconds"] for line in records.of("alone")}
    measured = [seconds for seconds in last.values() if seconds is not None]
    guess = _POD_START_SECONDS if is_pods else _START_SECONDS
    seconds = max(_START_SECONDS, sum(measured) / len(measured)) if measured else guess
    return seconds + _POD_SECONDS * is_pods


def expected_seconds(
    policy: SharingPolicy, jobs: Sequence[TraceJob], records: Records, launcher: str = "processes"
) -> float:
    """Return the seconds that a run of a policy will take: as the longest so far, or by work and starts."""
    seen = [run["seconds"] for run in records.of("run", policy=policy.name, state=COMPLETE)]
    if seen:
        return 1.15 * max(seen) + _WORLD_SECONDS
    work = sum(job.seconds for job in jobs)
    start = start_seconds(records, launcher)
    if policy is FIFO:
        return 1.05 * work + start * len(jobs) + _WORLD_SECONDS
    faults = _FAULT_SECONDS * policy.faults
    return faults + 0.75 * work + start * len(jobs) / 2 + _WORLD_SECONDS


def _rate(ended: Ended) -> float:
    """Return iterations per second of work of a job alone, without its first quarter second."""
    points = ended.story.progress
    if len(points) < 3:
        raise RuntimeError("a program alone said too little of its progress")
    (_, first, began), (_, last, over) = points[1], points[-1]
    return round((last - first) / max(over - began, 1e-9), 4)


def _start_seconds(ended: Ended) -> float | None:
    story = ended.story
    return (
        None
        if story.ready is None or story.started is None
        else round(story.ready - story.started - story.waited, 3)
    )
