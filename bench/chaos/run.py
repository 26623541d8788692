"""The chaos run: fault after fault, each followed by looks until all has settled; one JSON line for each."""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.chaos import auditor
from bench.chaos.auditor import Allowance, Violation
from bench.chaos.faults import Injected, Injector, NotPossibleError, lasting_seconds
from bench.chaos.freezes import FreezeWatch
from bench.chaos.lasting import Differences, Unwoken
from bench.chaos.load import Load
from bench.chaos.look import Eye
from bench.chaos.picture import Picture
from bench.chaos.plan import FaultKind, PlannedFault, fault
from bench.chaos.room import Fullness, fullness

SETTLED_SECONDS: Final = 60.0
# Settled means in two looks this far apart: a killed part is still Ready for a moment.
CONFIRM_SECONDS: Final = 1.5
LOOK_EVERY_SECONDS: Final = 0.4
GIVE_UP_SECONDS: Final = 240.0
FAULTS_FILE, RUN_FILE = "faults.jsonl", "run.json"


@dataclass(frozen=True, slots=True)
class FaultOutcome:
    """Outcome of one fault.

    Attributes:
        settled_seconds: from the fault, or from when it was taken back; None when it did not settle at all.
        ended: names of the tenants that the fault itself ended.
        longest_freeze_seconds: of any pod, since the fault before.
        skipped: why it could not be made; such a fault does not count.
        waited_for: what was still missing when the time was up.
        longest_gap_seconds: without a look at the freezers, since the fault before; older runs did not tell.
        unwatched: pods whose freezer was not found.
        last_missing: what was still missing in the look before all had settled, which is where the time went.
        commit: of what was tested; a resumed run may be of several.
        waiting_by_design: pods that waited in the last look since a promise could not be kept: with all other pods
            running, that counts as settled. Older runs did not tell.
        waiting_for_room: pods for which no GPU had room in the last look, likewise.
        shares_ratio: of all shares, those in use in the last look; memory_ratio: of the memory; used_ratio: of the
            memory, what clients had allocated; clients: of the GPU with the most. Older runs did not tell.
    """

    number: int
    kind: str
    target: str = ""
    seconds: float = 0.0
    settled_seconds: float | None = None
    ended: tuple[str, ...] = ()
    longest_freeze_seconds: float = 0.0
    violations: tuple[str, ...] = ()
    skipped: str = ""
    waited_for: tuple[str, ...] = ()
    pods: int = 0
    load_average: float = 0.0
    longest_gap_seconds: float | None = None
    unwatched: int = 0
    commit: str = ""
    last_missing: tuple[str, ...] = ()
    waiting_by_design: int | None = None
    waiting_for_room: int | None = None
    shares_ratio: float | None = None
    memory_ratio: float | None = None
    used_ratio: float | None = None
    clients: int | None = None

    @property
    def rules(self) -> tuple[str, ...]:
        """Return the rules that did not hold."""
        return tuple(text.partition(": ")[0] for text in self.violations)


def read_outcomes(directory: Path) -> list[FaultOutcome]:
    """Return what a run has written so far; a line that a crash cut off is left out."""
    try:
        lines = (directory / FAULTS_FILE).read_text().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            values = json.loads(line)
        except ValueError:
            continue
        read: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
        found.append(FaultOutcome(**read))
    return found


class _Violations:
    """Collector of violations during one fault, each once."""

    def __init__(self) -> None:
        self.violations: dict[str, Violation] = {}
        self.ended: set[str] = set()

    def add(self, found: Sequence[Violation]) -> None:
        for one in found:
            self.violations.setdefault(f"{one.rule}: {one.detail}", one)


class ChaosRun:
    """Faults against a cluster under load."""

    def __init__(
        self,
        eye: Eye,
        load: Load,
        injector: Injector,
        freezes: FreezeWatch,
        directory: Path,
        *,
        population: int,
        commit: str = "",
        diagnose: Callable[[Path], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._eye, self._load, self._injector, self._freezes = eye, load, injector, freezes
        self._directory, self._population, self._diagnose = directory, population, diagnose
        self._clock, self._sleep, self._commit = clock, sleep, commit
        self._differences, self._unwoken = Differences(), Unwoken()
        self._last_missing: list[str] = []
        self._waiting_by_design = self._waiting_for_room = 0
        self._fullness = Fullness()

    def settle_first(self) -> list[str]:
        """Bring up the load; return what is still missing when the time is up, or broken already."""
        self._load.fill(self._population)
        judge = _Violations()
        settled, waiting = self._until_settled(judge, Allowance(), GIVE_UP_SECONDS)
        self._freezes.report(self._clock())
        return [*judge.violations, *([] if settled is not None else [*waiting, self._load.last_refusal])]

    def run(
        self,
        seed: int,
        numbers: Sequence[int],
        kinds: Sequence[FaultKind],
        *,
        until: float,
        most: int | None = None,
    ) -> list[FaultOutcome]:
        """Make these faults, as many as the time allows; stop where the cluster does not come back.

        Args:
            most: end after so many that could be made.
        """
        outcomes: list[FaultOutcome] = []
        for number in numbers:
            if self._clock() >= until or sum(not one.skipped for one in outcomes) == most:
                break
            outcome = self.one(fault(seed, number, kinds))
            outcomes.append(outcome)
            self._write(outcome)
            _say(outcome)
            if outcome.violations:
                self._diagnose(self._directory / f"broken-{outcome.number}")
            if outcome.settled_seconds is None and not outcome.skipped:
                break
        return outcomes

    def one(self, planned: PlannedFault) -> FaultOutcome:
        """Make one fault and judge what comes of it."""
        try:
            injected = self._injector.make(planned)
        except NotPossibleError as error:
            return FaultOutcome(planned.number, planned.kind, skipped=str(error), commit=self._commit)
        judge = _Violations()
        self._load.churn(planned.churn, self._population)
        try:
            self._while_in_force(planned, injected, judge)
        finally:
            injected.take_back()
        settled, waiting = self._until_settled(judge, injected.allowance, GIVE_UP_SECONDS)
        if settled is None or settled > SETTLED_SECONDS:
            judge.add([auditor.lateness(waiting or self._last_missing)])
        freezes = self._freezes.report(self._clock())
        judge.add(auditor.left_frozen(freezes))
        return FaultOutcome(
            planned.number,
            planned.kind,
            injected.target,
            round(lasting_seconds(planned), 2),
            None if settled is None else round(settled, 1),
            tuple(sorted(judge.ended)),
            round(max(freezes.longest.values(), default=0.0), 2),
            tuple(judge.violations),
            waited_for=tuple(waiting) if settled is None or settled > SETTLED_SECONDS else (),
            pods=len(self._load.expected),
            load_average=round(os.getloadavg()[0], 1),
            longest_gap_seconds=round(freezes.gap_seconds, 2),
            unwatched=len(freezes.unwatched),
            commit=self._commit,
            last_missing=tuple(self._last_missing),
            waiting_by_design=self._waiting_by_design,
            waiting_for_room=self._waiting_for_room,
            **dataclasses.asdict(self._fullness),
        )

    def _while_in_force(self, planned: PlannedFault, injected: Injected, judge: _Violations) -> None:
        until = self._clock() + lasting_seconds(planned)
        while self._clock() < until:
            self._look(judge, injected.allowance)
            self._sleep(min(LOOK_EVERY_SECONDS, max(0.0, until - self._clock())))

    def _until_settled(
        self, judge: _Violations, allowance: Allowance, patience_seconds: float
    ) -> tuple[float | None, list[str]]:
        """Look until nothing is missing; return after how many seconds, and what was missing at the bar."""
        begun = self._clock()
        good_since: float | None = None
        late: list[str] = []
        self._last_missing = []
        self._unwoken = Unwoken()  # while the fault was in force, kube-scheduler may have stood still
        while True:
            seconds = self._clock() - begun
            waiting = self._look(judge, allowance)
            if waiting:
                good_since, self._last_missing = None, waiting
            elif good_since is None:
                good_since = seconds
            elif seconds - good_since >= CONFIRM_SECONDS:
                return good_since, late
            if seconds > SETTLED_SECONDS and waiting and not late:
                late = waiting
            if seconds > patience_seconds:
                return None, waiting or late
            self._sleep(LOOK_EVERY_SECONDS)

    def _look(self, judge: _Violations, allowance: Allowance) -> list[str]:
        """Take one picture, judge it, let the load go on; return what has not settled."""
        picture = self._eye.picture()
        expected, leaving = self._load.expected, self._load.leaving
        judge.add(auditor.broken(picture, expected, allowance))
        judge.add(self._differences.look(picture, self._clock()))
        judge.add(self._unwoken.look(picture, expected, self._clock()))
        for uid in self._unwoken.due:
            if self._load.ask_again(uid):
                self._unwoken.asked(uid, self._clock())
        waiting = auditor.unsettled(picture, expected, leaving) + self._differences.late
        self._waiting_by_design = auditor.waiting_by_design(picture, expected)
        self._waiting_for_room = auditor.waiting_for_room(picture, expected)
        self._fullness = fullness(picture)
        if not self._load.is_idle:
            waiting.append(f"the load waits for the API server or admission ({self._load.last_refusal})")
        self._freezes.watch(self._load.running(picture), self._clock())
        self._let_load_go_on(picture, allowance, judge)
        return waiting

    def _let_load_go_on(self, picture: Picture, allowance: Allowance, judge: _Violations) -> None:
        if picture.pods is not None:
            gone = []
            for one in self._load.expected:
                pod = picture.pods.get(one.uid)
                if pod is None or pod.is_deleting:
                    self._load.forget(one.uid)  # lost, and reported
                elif pod.is_over or pod.restarts or one.uid in picture.outside:
                    gone.append(one.uid)
                    if allowance.covers(pod):
                        judge.ended.add(pod.name)
            self._load.replace_ended(picture, gone)
        self._load.fill(self._population)
        self._load.step(picture)

    def _write(self, outcome: FaultOutcome) -> None:
        with (self._directory / FAULTS_FILE).open("a") as file:
            file.write(json.dumps(dataclasses.asdict(outcome)) + "\n")


def _say(outcome: FaultOutcome) -> None:
    if outcome.skipped:
        text = f"skipped: {outcome.skipped}"
    elif outcome.violations:
        text = f"settled after {outcome.settled_seconds} s, BROKEN: {'; '.join(outcome.violations)[:400]}"
    else:
        text = f"settled after {outcome.settled_seconds} s"
        text += f", ended {len(outcome.ended)} tenants itself" if outcome.ended else ""
    print(f"fault {outcome.number:4} {outcome.kind:20} {text}", flush=True)


def write_header(directory: Path, values: dict[str, Any]) -> None:
    """Record what this run is, so that it can be resumed as the same."""
    (directory / RUN_FILE).write_text(json.dumps(values, indent=1) + "\n")


def read_header(directory: Path) -> dict[str, Any]:
    """Return what `write_header` recorded."""
    found: dict[str, Any] = json.loads((directory / RUN_FILE).read_text())
    return found
