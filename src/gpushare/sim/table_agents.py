"""What agents and the operator know of the table's programs: only what was read where somebody ran.

The live code concludes everything that is concluded from counters: signatures and grown cap curves
(`core.control.NodeSignatures`, `choose_signature`), inference (`core.control.inferred`), drift (`DriftWatch`), the
model's part of inference (`ModelAnswer`), and whose turn it is to be read (`next_reading`). This module only draws
the counters' noise and keeps the time of what the agent does asynchronously.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from gpushare.core.api import GpuShare, GpuShareSpec, GpuShareStatus, LearnedEffect, WorkloadSignature
from gpushare.core.control import (
    ASLEEP_RATIO,
    DriftWatch,
    ModelAnswer,
    NodeSignatures,
    PastReadings,
    Question,
    ReadingTenant,
    SharingTenant,
    SoloSignature,
    choose_signature,
    inferred,
    is_asleep,
    next_reading,
    next_turn,
)
from gpushare.core.gpu import Counters, GpuSample
from gpushare.core.placement import KnownWorkload, known_of
from gpushare.core.progress import BAD_FIT, PhaseSearch, Predict, Prior, promise_of

# A signature's counters miss those of the table by this much, relative and absolute, for as long as the program
# runs (core.progress.counter_errors: work, floor), and those of one window by this much more: windows of a second
# of five programs alone miss their mean by at most 0.12 of the former (docs/measurements/attribution.md).
STANDING_ERROR: Final = 0.04
WINDOW_ERROR: Final = 0.01
FLOOR_ERROR: Final = 0.003

READING_SECONDS: Final = 1.2  # for which the neighbours are stopped (gpushare.mps.duty.MAX_STOP_SECONDS)
READ_SECONDS: Final = 0.6  # of them are counted: the rest is the freeze and its settling
# The last seconds alone teach nothing, as a client may be ending (the sampler of the agent).
ENDING_SECONDS: Final = 2.5
PUBLISH_SECONDS: Final = 10.0  # from a reading to the decision: an agent writes once in 10 s at most
# Ages of a tenant's time alone at which what was counted is learnt: the agent does so every second, but only a
# window that is `LONGER_WINDOW` times as long changes anything.
ALONE_LOOKS: Final = (5.0 + ENDING_SECONDS, 22.5, 82.5, 242.5)
_TENSOR_PIPES: Final = ("dfma_tensor_util", "hmma_tensor_util", "imma_tensor_util", "any_tensor_util")
_PARTS: Final = ("sm_occupancy", "fp64_util", "fp32_util", "fp16_util", *_TENSOR_PIPES)  # of the SM activity

NAMESPACE: Final = "default"


@dataclass(frozen=True, slots=True)
class CounterNoise:
    """Errors of counters, standard deviations: relative ones of a program's run and of a window, and the floor."""

    standing: float = STANDING_ERROR
    window: float = WINDOW_ERROR
    floor: float = FLOOR_ERROR

    def drawn(self, relative: float, rng: np.random.Generator) -> dict[str, tuple[float, float]]:
        """Draw the error of each counter, (factor, addition); the tensor pipes err together."""
        errors = rng.standard_normal((len(Counters.__slots__), 2)).tolist()
        found = {
            name: (1 + relative * one, self.floor * other)
            for name, (one, other) in zip(Counters.__slots__, errors, strict=True)
        }
        return found | dict.fromkeys(_TENSOR_PIPES, found["any_tensor_util"])


def as_read(counters: Counters, *errors: Mapping[str, tuple[float, float]]) -> Counters:
    """Return counters with errors; as on a device all are from 0 to 1, and no part is above its whole."""
    found: dict[str, float] = {}
    for name, value in counters.as_dict().items():
        for each in errors:
            factor, more = each[name]
            value = value * factor + (more if value else 0.0)  # noqa: PLW2901 - errors add up
        found[name] = min(1.0, max(0.0, value))
    most = found.get("sm_util", 1.0)
    return Counters(**{name: min(value, most) if name in _PARTS else value for name, value in found.items()})


@dataclass(frozen=True, slots=True)
class TablePod:
    """A job's pod, as signatures see it; its workload is the program's."""

    uid: str
    workload: str
    namespace: str = NAMESPACE


@dataclass(frozen=True, slots=True)
class ProfileOnNode:
    """Part of a GpuShare that agents read."""

    gpu_model: str
    signature: SoloSignature | None
    kept: WorkloadSignature | None
    window_seconds: float | None = None


@dataclass(slots=True)
class ProgramShares:
    """The operator's GpuShares: one for each program, as if all of its jobs had one `gpushare.io/workload`.

    Attributes:
        kept: the profile of each program that was read.
        version: rises when one changes.
    """

    gpu_model: str
    kept: dict[str, WorkloadSignature] = field(default_factory=dict)
    version: int = 0
    workload_of: dict[str, str] = field(default_factory=dict)
    _coming: list[tuple[float, str, WorkloadSignature]] = field(default_factory=list)

    def publish(self, workload: str, found: WorkloadSignature, now: float) -> None:
        """Accept what an agent found; it reaches the GpuShare after `PUBLISH_SECONDS`."""
        if not any(each[1:] == (workload, found) for each in self._coming):
            self._coming.append((now + PUBLISH_SECONDS, workload, found))

    def arrive(self, now: float) -> float:
        """Take what has arrived by now into the GpuShares; return when the next will arrive."""
        due = [each for each in self._coming if each[0] <= now + 1e-9]
        self._coming = [each for each in self._coming if each[0] > now + 1e-9]
        for _, workload, found in due:
            before = self.kept.get(workload)
            kept = choose_signature(before, [found], GpuShareSpec(), is_one_kind=True, now=f"{now:.0f}")
            if kept is not None and kept != before:
                self.kept[workload] = kept
                self.version += 1
        return min((each[0] for each in self._coming), default=math.inf)

    def profiles_of(self, _namespace: str, uid: str) -> Sequence[ProfileOnNode]:
        """Return what the agents read of the GpuShare of a pod."""
        kept = self.kept.get(self.workload_of[uid])
        if kept is None:
            return (ProfileOnNode("", None, None),)
        curve = {point.thread_percentage: point.progress_ratio for point in kept.cap_curve}
        return (ProfileOnNode(kept.gpu_model, SoloSignature(kept.as_counters(), curve), kept),)

    def known(self, workload: str, learned: LearnedEffect | None) -> KnownWorkload:
        """Return what a decision knows of a program, retractions left out."""
        status = GpuShareStatus(profile=self.kept.get(workload), learned=(learned,) if learned is not None else ())
        share = GpuShare(NAMESPACE, workload, workload, 1, (), GpuShareSpec(), status)
        return known_of(share, lambda _: -math.inf)


@dataclass(frozen=True, slots=True)
class SeenPod:
    """A tenant that works, under its cap and throttle; `may_stop`: whether it may be stopped for a reading."""

    pod: TablePod
    threads: int
    duty: float = 1.0
    may_stop: bool = True


@dataclass(frozen=True, slots=True)
class InferredTenant:
    """Conclusions of the agent about a tenant from a window."""

    progress: float | None
    error: float | None
    alone: float
    is_asleep: bool = False
    is_light: bool = False


@dataclass(frozen=True, slots=True)
class TableReading:
    """A reading that is under way: who is read under which cap, whom it stops, and from when until when."""

    pod: TablePod
    threads: int
    stopped: tuple[str, ...]
    begins: float
    ends: float


@dataclass(slots=True)
class GpuAgent:
    """The agent of one GPU, which is alone on its node.

    Args:
        expected: the model's predictions; None to infer by the counters alone.

    Attributes:
        reading: the reading under way.
        look_at: when to look again for somebody to read.
        learns_at: when to learn again from a tenant that is alone.
        predicted_errors: of the predictions by which the last window's progress was inferred, by uid.
        read_at: when the last reading ended.
    """

    shares: ProgramShares
    expected: Predict | None
    noise: CounterNoise
    rng: np.random.Generator
    tell: Callable[[str, float], None] = lambda _what, _seconds: None
    signatures: NodeSignatures = field(init=False)
    record: PastReadings = field(default_factory=PastReadings)
    reading: TableReading | None = None
    look_at: float = math.inf
    learns_at: float = math.inf
    predicted_errors: dict[str, float | None] = field(default_factory=dict)
    read_at: float = -math.inf
    _present: tuple[SeenPod, ...] = ()
    _alone_since: float = 0.0
    _learnt_until: float = 0.0
    _standing: dict[tuple[str, int], Mapping[str, tuple[float, float]]] = field(default_factory=dict)
    _drift: DriftWatch = field(default_factory=DriftWatch)
    _search: tuple[object, PhaseSearch] = (None, PhaseSearch())
    _answer: ModelAnswer | None = None
    _seen_at: float = 0.0

    def __post_init__(self) -> None:
        self.signatures = NodeSignatures(self.shares.profiles_of)

    @property
    def model(self) -> str:
        """Return the GPU's model."""
        return self.shares.gpu_model

    # -- tenants and readings ---------------------------------------------------------------------------------

    def changed(self, present: Sequence[SeenPod], counters: Callable[[SeenPod], Counters], now: float) -> None:
        """Note who works from now on, if others did until now; a reading under way fails.

        Args:
            counters: the true counters of a tenant alone under its cap.
        """
        whom = tuple(replace(each, duty=1.0) for each in present)
        if whom == self._present:
            return
        if len(self._present) == 1:
            self.learn_alone(counters(self._present[0]), now)
        self.end_reading(None, now)
        self._present, self._seen_at = whom, now
        self._standing = {key: each for key, each in self._standing.items() if key[0] in {w.pod.uid for w in whom}}
        self.record.look([each.pod.uid for each in whom], {each.pod.uid for each in whom}, now)
        self.look_at = now if len(whom) > 1 else math.inf
        self._alone_since = self._learnt_until = now
        self.learns_at = now + ALONE_LOOKS[0] if len(whom) == 1 else math.inf

    def learn_alone(self, counters: Counters, now: float) -> None:
        """Learn from the time since the last look in which the only tenant worked alone."""
        (only,) = self._present
        until, began = now - ENDING_SECONDS, self._learnt_until
        self.learns_at = min((at for at in ALONE_LOOKS if self._alone_since + at > now), default=math.inf)
        self.learns_at += self._alone_since
        if until <= began + 1.0:
            return
        self._learnt_until = until
        for _ in range(2):  # a single window may hold the program's start
            self._learn(only, counters, (until - began) / 2)
        self._publish(only, now)

    def plan(self, now: float, *, is_broken: bool) -> TableReading | None:
        """Begin the next reading if somebody's turn has come, else set when to look again."""
        self.record.look([each.pod.uid for each in self._present], {each.pod.uid for each in self._present}, now)
        tenants = [self._tenant(each) for each in self._present]
        read = next_reading(self.record, tenants, now, longest_stop=READING_SECONDS, is_broken=is_broken)
        if read is None:
            self.look_at = next_turn(self.record, tenants, now, is_broken=is_broken)
            return None
        whom = next(each for each in self._present if each.pod.uid == read.uid)
        stopped = tuple(each.pod.uid for each in self._present if each is not whom)
        self.reading = TableReading(whom.pod, whom.threads, stopped, now, now + READING_SECONDS)
        self.look_at = self.reading.ends
        return self.reading

    def end_reading(self, counters: Counters | None, now: float) -> None:
        """End the reading under way, if any, and learn from it.

        Args:
            counters: the true counters of who was read, alone under its cap; None: it failed.
        """
        done, self.reading = self.reading, None
        if done is None:
            return
        self.read_at = now
        self.record.ended(done.pod.uid, min(READING_SECONDS, now - done.begins), done.stopped, now)
        self.look_at = now
        whom = next((each for each in self._present if each.pod == done.pod), None)
        if counters is None or whom is None:
            return
        self.record.succeeded(done.pod.uid)
        is_new = self.signatures.of(done.pod, self.model) is None
        self._learn(whom, counters, READ_SECONDS, is_reading=True)
        if is_new and self.signatures.of(done.pod, self.model) is not None:
            self.record.quiet_since = now
            self.tell(done.pod.workload, now - self.record.since.get(done.pod.uid, now))
        self._publish(whom, now)

    def _tenant(self, each: SeenPod) -> ReadingTenant:
        known = self.signatures
        return ReadingTenant(
            each.pod.uid,
            has_signature=known.of(each.pod, self.model) is not None,
            is_light=known.is_light(each.pod, self.model),
            is_doubted=known.is_doubted(each.pod, self.model),
            lacks_cap=known.lacks(each.pod, self.model, each.threads),
            may_stop=each.may_stop,
        )

    def _learn(self, whom: SeenPod, counters: Counters, seconds: float, *, is_reading: bool = False) -> None:
        key = whom.pod.uid, whom.threads
        if key not in self._standing:
            self._standing[key] = self.noise.drawn(self.noise.standing, self.rng)
        read = as_read(counters, self._standing[key], self.noise.drawn(self.noise.window, self.rng))
        self.signatures.learn(
            whom.pod, self.model, GpuSample(read, seconds, 0, None), whom.threads, is_reading=is_reading
        )

    def _publish(self, whom: SeenPod, now: float) -> None:
        found = self.signatures.news(whom.pod, self.model)
        if found is not None:
            self.shares.publish(whom.pod.workload, found, now)

    # -- windows ------------------------------------------------------------------------------------------------

    def measure(self, counters: Counters, working: Sequence[SeenPod], now: float) -> list[InferredTenant]:
        """Infer the progress of the tenants that work from one window.

        Args:
            counters: the device's true counters under the caps and throttles in force.
        """
        seconds, self._seen_at = max(1.0, now - self._seen_at), now
        window = GpuSample(as_read(counters, self.noise.drawn(self.noise.window, self.rng)), seconds, 0, None)
        usual = [self.signatures.of(each.pod, self.model) for each in working]
        phases = [
            self.signatures.phases(each.pod, self.model) or (one,)
            for each, one in zip(working, usual, strict=True)
        ]
        alone = [
            1.0 if one is None else one.alone_ratio(each.threads) or 1.0
            for each, one in zip(working, usual, strict=True)
        ]
        if len(working) == 1 and working[0].threads == 100 and working[0].duty >= 1.0:
            return [InferredTenant(1.0, 0.0, 1.0)]
        known = [one for one in usual if one is not None]
        priors: Sequence[Prior | None] = [None] * len(working)
        if len(known) == len(working) > 1:
            priors = self._priors(working, known)
        self.predicted_errors = {
            each.pod.uid: None if prior is None else prior.error
            for each, prior in zip(working, priors, strict=True)
        }
        sharing = [
            SharingTenant(phase, each.threads, prior, each.duty)
            for phase, each, prior in zip(phases, working, priors, strict=True)
        ]
        key = tuple((each.pod.uid, each.threads) for each in working), tuple(phases)
        before, search = self._search
        phased = inferred(window, sharing, search if before == key else None)
        self._search = key, phased.search
        if len(working) > 1:
            self._note_misfit(working, phased.misfit, seconds)
        if len(working) > 1 and phased.misfit is not None and phased.misfit <= BAD_FIT:
            for each, phase, found in zip(working, phased.phases, phased.found, strict=True):
                if found.progress_ratio is not None and found.progress_ratio >= ASLEEP_RATIO:
                    self.signatures.saw(each.pod, self.model, phase, seconds)
        return [
            InferredTenant(
                found.progress_ratio,
                found.error_ratio,
                own,
                is_asleep(found, prior),
                self.signatures.is_light(each.pod, self.model),
            )
            for each, found, own, prior in zip(working, phased.found, alone, priors, strict=True)
        ]

    def promise(self, pod: TablePod, share_percent: int, max_slowdown: float, *, is_auto: bool) -> float:
        """Return the promise that the agent keeps to a pod, from what it knows now; it must hold in each phase."""
        ratios = [each.alone_ratio(share_percent) for each in self.signatures.phases(pod, self.model)]
        known = [ratio for ratio in ratios if ratio is not None]
        alone = min(known) if known and ratios[0] is not None else None
        return promise_of(alone, share_percent, max_slowdown, is_auto=is_auto)

    def _priors(self, working: Sequence[SeenPod], known: Sequence[SoloSignature]) -> Sequence[Prior | None]:
        """Return the model's predictions; the answer to a new question is there at once (live after a second)."""
        if self.expected is None:
            return [None] * len(working)
        loads = tuple(one.load(each.threads) for one, each in zip(known, working, strict=True))
        duties = tuple(each.duty for each in working)
        asked = Question(self.model, tuple(each.pod.uid for each in working), loads, duties)
        answer = self._answer
        if answer is None or not asked.is_near(answer.question):
            answer = ModelAnswer(asked, tuple(self.expected(loads)), {})
        if not answer.parts and any(duty < 1.0 for duty in duties):
            before = answer.question
            parts = {each: tuple(self.expected(before.of(each).loads)) for each in before.parts()}
            answer = replace(answer, parts=parts)
        self._answer = answer
        return answer.under(duties)

    def _note_misfit(self, working: Sequence[SeenPod], misfit: float | None, seconds: float) -> None:
        self._drift = self._drift.after([each.pod.uid for each in working], misfit, seconds)
        if self._drift.is_suspected:
            for each in working:
                self.signatures.doubt(each.pod, self.model)
            self.look_at = min(self.look_at, self._seen_at)
