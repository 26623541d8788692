"""Run one session: the missing parts of the benchmark, as far as the time allows."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

from bench.sharing.launching import Ended, Launcher, Order
from bench.sharing.machine import Machine, describe
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
_WORLD_SECONDS: Final = 10.0
_FAULT_SECONDS: Final = 20.0  # jobs that a fault ended start again
_PATIENCE: Final = 2.5  # a run that takes this many times the expected duration is cut
# One after the other on the whole GPU, in the node's own world: what a workload's first pod alone would show.
SIGNATURES: Final = SharingPolicy("signatures", "alone", World.GPUSHARE, places=1, in_order=True)


class SignatureSource(StrEnum):
    """Source of the signatures that gpushare decides by."""

    AGENT = "agent"
    TABLE = "table"


@dataclass(frozen=True)
class SessionSettings:
    """Settings of a session.

    Attributes:
        budget_seconds: nothing is begun that would end later.
        alone_seconds: each program alone, in every session; serving programs twice that.
        signature_seconds: upper limit for measuring each program alone by the agent, once.
        faults: of the MPS server, in a run of ours apart from the compared ones; 0: no such run.
        signatures: whose: the agent's, or the table's, which cost no time (trace.table_signatures).
    """

    budget_seconds: float = 480.0
    repetitions: int = 3
    alone_seconds: float = 3.0
    signature_seconds: float = 20.0
    signatures: SignatureSource = SignatureSource.AGENT
    policies: tuple[str, ...] = tuple(POLICIES)
    faults: int = 0


@dataclass(frozen=True)
class Played:
    """Outcome of a run: each job's end by number, signatures by program, and seconds since jobs could come.

    Attributes:
        witnessed: what gpushare said meanwhile; None: under no policy of ours.
        faults: what became of each that was injected.
    """

    ended: Mapping[int, Ended]
    signatures: Mapping[str, Any]
    seconds: float
    witnessed: Witnessed | None = None
    faults: Sequence[Mapping[str, Any]] = ()


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

    def __post_init__(self) -> None:
        self._began = self.clock()

    def session(self) -> bool:
        """Do what is missing and fits; return whether the whole benchmark is complete."""
        number = sum(1 for _ in self.records.of("session"))
        if self.records.first("settings") is None:
            jobs = [as_record(job) for job in draw(self.trace)]
            self.records.add("settings", **asdict(self.trace), repetitions=self.settings.repetitions, list=jobs)
        self.records.add(
            "session",
            number=number,
            began=datetime.now(UTC).isoformat(timespec="seconds"),
            launcher=self.launcher.kind,
            **describe(self.machine),
        )
        self._alone(number)
        if not self._wants_signatures() or self._signatures():
            for policy, repetition in self._missing():
                expected = expected_seconds(policy, draw(self.trace), self.records)
                if expected > self._left():
                    self.say(f"{policy.name} of repetition {repetition} takes about {expected:.0f} s: too long")
                    continue
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

    def _alone(self, session: int) -> None:
        if self.records.first("rate") is None:
            self.say("serving programs, one request after the other")
            found = self._play(FIFO, self._alone_orders(SERVING, closed=True, seconds=self.settings.alone_seconds))
            for program, ended in found.items():
                self.records.add("rate", program=program, rate=_rate(ended))
        self.say("every program alone")
        found = self._play(FIFO, self._alone_orders(programs(), closed=False, seconds=self.settings.alone_seconds))
        for program, ended in found.items():
            story = ended.story
            self.records.add(
                "alone",
                session=session,
                program=program,
                rate=_rate(ended),
                ms=story.ms,
                work_ms=story.work_ms,
                start_seconds=_start_seconds(ended),
            )

    def _alone_orders(self, names: Sequence[str], *, closed: bool, seconds: float) -> list[Order]:
        orders = []
        for index, program in enumerate(names):
            job = TraceJob(900 + index, program, 0.0, seconds, 100, JobClass.THROUGHPUT, 1.0)
            rate = 0.0 if closed or program not in SERVING else self._request_rate(program)
            orders.append(Order(job, _ENDLESS, rate, 2.0 * seconds if rate else seconds))
        return orders

    def _play(self, policy: SharingPolicy, orders: Sequence[Order]) -> dict[str, Ended]:
        """Run each program alone; return how each ended that ended well."""
        limit = sum(each.seconds or 0.0 for each in orders) + 20.0 * len(orders)
        done = self.play(policy, orders, self.clock() + limit).ended
        names = {each.job.number: each.job.program for each in orders}
        for number, ended in done.items():
            if ended.status:
                self.say(f"{names[number]} failed: {ended.tail[-300:]}")
        well = {names[number]: ended for number, ended in done.items() if not ended.status}
        lost = sorted(set(names.values()) - set(well))
        if lost:
            raise RuntimeError(f"these programs do not run alone: {', '.join(lost)}")
        return well

    def _wants_signatures(self) -> bool:
        known = {line["program"] for line in self.records.of("signature")}
        return (
            (bool(self.settings.faults) or any(POLICIES[name].is_ours for name in self.settings.policies))
            and self.records.first("signatures") is None
            and not known >= set(programs())
        )

    def _signatures(self) -> bool:
        """Let the agent see every program alone, once; return whether there was time for it."""
        if self.settings.signatures is SignatureSource.TABLE:
            self._keep(table_signatures(self.machine.gpu.model), SignatureSource.TABLE)
            return True
        seconds = self.settings.signature_seconds
        if (0.7 * seconds + _START_SECONDS) * len(programs()) + _WORLD_SECONDS > self._left():
            self.say("no time left for the signatures")
            return False
        self.say("every program alone before the agent's eyes")
        orders = self._alone_orders(programs(), closed=False, seconds=seconds)
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
        played = self.play(SIGNATURES, orders, self.clock() + self._left())
        for tail in {ended.tail for ended in played.ended.values() if ended.status}:
            self.say(f"failed: {tail[-300:]}")
        self._keep(played.signatures, SignatureSource.AGENT)
        return True

    def _keep(self, found: Mapping[str, Any], source: SignatureSource) -> None:
        for program, signature in sorted(found.items()):
            self.records.add("signature", program=program, signature=signature)
        self.launcher.learn(found)
        self.records.add("signatures", known=sorted(found), source=source.value)
        self.say(f"{len(found)} of {len(programs())} programs have a signature")

    # -- the runs

    def _missing(self) -> Iterator[tuple[SharingPolicy, int]]:
        if self.settings.faults and not self.records.is_settled(FAULTED, 0):
            yield with_faults(self.settings.faults), 0
        for repetition in range(self.settings.repetitions):
            for policy in order(repetition):
                wanted = policy.name in self.settings.policies
                if wanted and not self.records.is_settled(policy.name, repetition):
                    yield policy, repetition

    def _run(self, policy: SharingPolicy, repetition: int, session: int) -> None:
        jobs = draw(self.trace)
        orders = [self._order(job) for job in jobs]
        self.say(f"{policy.name}, repetition {repetition}")
        name = f"{session}-{policy.name}-{repetition}"
        about = {"name": name, "session": session, "policy": policy.name, "repetition": repetition}
        began = self.clock()
        before = self.machine.energy_joules()
        left, patience = self._left(), _PATIENCE * expected_seconds(policy, jobs, self.records)
        try:
            played = self.play(policy, orders, began + min(left, patience))
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
        if played.witnessed is not None:
            self._keep_witnessed(name, orders, played.witnessed)
        for line in played.faults:
            self.records.add("fault", run=name, **line)
        for each in orders:
            if (ended := done.get(each.job.number)) is None:
                continue
            self.records.add(
                "job",
                run=name,
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

    def play(self, policy: SharingPolicy, orders: Sequence[Order], deadline: float) -> Played:
        """Let the jobs come when they come, until all have ended or the deadline."""
        watch: Watch | None = None
        try:
            self.launcher.begin(policy, orders)
            watch = self._watch(orders)
            began = self.clock()
            coming = sorted(orders, key=lambda each: (each.job.arrives, each.job.number))
            done: dict[int, Ended] = {}
            while len(done) < len(orders) and self.clock() < deadline:
                while coming and coming[0].job.arrives <= self.clock() - began:
                    self.launcher.submit(coming.pop(0))
                done |= self.launcher.poll()
                self.sleep(POLL_SECONDS)
            seconds = self.clock() - began
            witnessed, watch = watch.stop() if watch is not None else None, None
            return Played(done, self.launcher.signatures(), seconds, witnessed, self.launcher.faults())
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
        return self.settings.budget_seconds - (self.clock() - self._began)


def expected_seconds(policy: SharingPolicy, jobs: Sequence[TraceJob], records: Records) -> float:
    """Return the seconds that a run of a policy will take: as the longest so far, or by the work."""
    seen = [run["seconds"] for run in records.of("run", policy=policy.name, state=COMPLETE)]
    if seen:
        return 1.15 * max(seen) + _WORLD_SECONDS
    work = sum(job.seconds for job in jobs)
    if policy is FIFO:
        return 1.05 * work + _START_SECONDS * len(jobs) + _WORLD_SECONDS
    faults = _FAULT_SECONDS * policy.faults
    return faults + 0.75 * work + _START_SECONDS * len(jobs) / 2 + _WORLD_SECONDS


def _rate(ended: Ended) -> float:
    """Return iterations per second of work of a job alone, without its first quarter second."""
    points = ended.story.progress
    if len(points) < 3:
        raise RuntimeError("a program alone said too little of its progress")
    (_, first, began), (_, last, over) = points[1], points[-1]
    return round((last - first) / max(over - began, 1e-9), 4)


def _start_seconds(ended: Ended) -> float | None:
    story = ended.story
    return None if story.ready is None or story.started is None else round(story.ready - story.started, 3)
