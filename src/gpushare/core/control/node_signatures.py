"""Each workload's GPU use alone: from its GpuShare's profile, else as measured alone or in place on a node."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from gpushare.core.api import MOST_OTHER_PHASES, CapPoint, PhaseReading, WorkloadPhase, WorkloadSignature
from gpushare.core.backoff import Backoff
from gpushare.core.control.sharing import KeptProfile, ProfilesOf, ReadPod, SoloSignature
from gpushare.core.control.signatures import grown_curve, merged_phases
from gpushare.core.gpu import COUNTERS, Counters, GpuSample
from gpushare.core.progress import BAD_FIT, FAR_FIT, at_full_threads, shape_misfit

__all__ = [
    "DOUBT_READINGS",
    "IDLE_RATIO",
    "LIGHT_READINGS",
    "MAX_PHASES",
    "MIN_SECONDS",
    "TURNED",
    "NodeSignatures",
]

_T = TypeVar("_T")
_Key = tuple[str, str]  # workload and GPU model
MIN_SECONDS: Final = 5.0  # of running alone, before the average counts as a signature
MIN_READINGS: Final = 2  # with its neighbours stopped, each the settled end of about a second
MIN_READING_SECONDS: Final = 1.0
MEMORY_SECONDS: Final = 120.0  # older windows fade, so that a workload's later phases replace its first ones
DIGITS: Final = 4  # of a counter on the wire
IDLE_RATIO: Final = 0.01  # of the SMs: a client that only waits uses less, and tells nothing about its workload
LIGHT_READINGS: Final = 6  # that show so little use, until a program counts as one that uses no more
START_SECONDS: Final = 30.0  # longest start of a program; PyTorch's client idles for 7 to 9 s
PHASE_SECONDS: Final = 10.0  # of other work than the signature knows of, until it counts as a phase of the program
DOUBT_READINGS: Final = 2 * MIN_READINGS  # of a workload that is read anew
# The usual one among them; of the others the one that was not seen for longest is forgotten.
MAX_PHASES: Final = 1 + MOST_OTHER_PHASES
# Of phases, without the usual work in between: from then on the one that was seen for most of it is the usual one.
# Twice as long each time, lest a workload's pods on two nodes, at different work, replace each other's for ever.
TURNED: Final = Backoff(first_seconds=900.0, longest_seconds=900.0 * 2**8)
# A cap within this factor of one that was seen is known well enough: neither read nor news.
NEAR_CAP: Final = 1.34
WORTH_READING_RATIO: Final = 0.1  # of the SMs
MAX_WORKLOADS: Final = 1000  # of one node; the one not seen for longest is forgotten


def _tell_nobody(pod: ReadPod, what: str) -> None:
    """Ignore what a workload was seen to do."""


@dataclass(frozen=True, slots=True)
class _SoloUse:
    """A workload's average use while alone.

    Attributes:
        pod_uid: the pod observed last.
        start_seconds: seconds of this pod left out because they look like its start; None once it works.
        may_hold_start: whether it is a single window, whose first part may be the start.
        readings: number of windows in which its neighbours were stopped.
        sm_clock_mhz: mean SM clock; None: not known for all of it.
    """

    counters: Counters
    seconds: float
    pod_uid: str
    start_seconds: float | None = None
    may_hold_start: bool = False
    readings: int = 0
    sm_clock_mhz: float | None = None

    @property
    def is_signature(self) -> bool:
        """Return whether it shows a program that works, for long enough."""
        is_read = self.readings >= MIN_READINGS and self.seconds >= MIN_READING_SECONDS
        is_long = self.seconds >= MIN_SECONDS or is_read
        return is_long and not self.may_hold_start and not self._is_idle

    @property
    def is_light(self) -> bool:
        """Return whether use was almost zero for longer than a start; this node then accepts it as signature."""
        is_long = self.seconds >= START_SECONDS or self.readings >= LIGHT_READINGS
        return is_long and not self.may_hold_start and self._is_idle

    @property
    def _is_idle(self) -> bool:
        return self.counters.activity_ratio() < IDLE_RATIO

    def next(self, pod_uid: str, sample: GpuSample, readings: int = 0) -> "_SoloUse":
        """Return the average with one more window.

        Args:
            readings: 1 for a window in which neighbours were stopped.
        """
        skipped = self.start_seconds if pod_uid == self.pod_uid else 0.0
        counters, seconds, clock = sample.counters, sample.window_seconds, sample.sm_clock_mhz
        if counters.is_far_more_active(self.counters):
            return _SoloUse(counters, seconds, pod_uid, may_hold_start=True, readings=readings, sm_clock_mhz=clock)
        if self.may_hold_start and counters.activity_ratio() > self.counters.activity_ratio():
            return _SoloUse(counters, seconds, pod_uid, readings=readings, sm_clock_mhz=clock)
        if skipped is not None and skipped < START_SECONDS:
            if self.counters.is_far_more_active(counters):
                return replace(self, pod_uid=pod_uid, start_seconds=skipped + seconds)
            if skipped and counters.activity_ratio() < self.counters.activity_ratio():
                return replace(self, pod_uid=pod_uid, start_seconds=None)  # it may contain the end of the start
        total = min(MEMORY_SECONDS, self.seconds) + seconds
        weight = seconds / total
        means = {
            name: new if (old := getattr(self.counters, name)) is None else old + weight * (new - old)
            for name in COUNTERS
            if (new := getattr(counters, name)) is not None
        }
        if self.seconds and self.sm_clock_mhz is not None and clock is not None:
            clock = self.sm_clock_mhz + weight * (clock - self.sm_clock_mhz)
        elif self.seconds:
            clock = None
        return _SoloUse(Counters(**means), total, pod_uid, readings=self.readings + readings, sm_clock_mhz=clock)


@dataclass(frozen=True, slots=True)
class _OtherPhase:
    """Other work of a program than its signature describes, observed under one cap.

    Attributes:
        lasted_seconds: seconds it was observed since the usual work was.
        all_seconds: total seconds it was observed.
        cap_curve: its progress under caps, from its GpuShare.
    """

    cap: int
    seen: _SoloUse
    lasted_seconds: float = 0.0
    all_seconds: float = 0.0
    cap_curve: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def read_back(cls, kept: WorkloadPhase) -> "_OtherPhase":
        """Rebuild a phase, as observed under its cap, from a GpuShare."""
        cap = kept.thread_percentage or 100
        curve = {point.thread_percentage: point.progress_ratio for point in kept.cap_curve}
        seen = kept.as_signature("").seen_counters()
        readings = MIN_READINGS if kept.reading is PhaseReading.IN_PLACE else 0
        window = kept.window_seconds or 0.0
        read = _SoloUse(seen, window, "", readings=readings, sm_clock_mhz=kept.sm_clock_mhz)
        return cls(cap, read, cap_curve=curve)

    def published(self, total_seconds: float) -> WorkloadPhase:
        """Return it for the workload's GpuShare.

        Args:
            total_seconds: total seconds the workload was observed.
        """
        counters, progress = at_full_threads(self.seen.counters, self.cap / 100)
        return WorkloadPhase(
            _on_the_wire(counters),
            round(self.all_seconds / total_seconds, 2) if self.all_seconds else None,
            PhaseReading.IN_PLACE if self.seen.readings else PhaseReading.ALONE,
            None if self.cap == 100 else self.cap,
            () if self.cap == 100 else (CapPoint(self.cap, round(progress, DIGITS)),),
            float(int(self.seen.seconds)),
            round(self.seen.sm_clock_mhz, 1) if self.seen.sm_clock_mhz else None,
        )

    def fits(self, cap: int, sample: GpuSample) -> bool:
        """Return whether a window under a cap shows this work."""
        return cap == self.cap and _fits(self.seen.counters, self.seen.sm_clock_mhz, sample, BAD_FIT)

    @property
    def lasts(self) -> bool:
        """Return whether it was observed for long enough to count as a phase."""
        return self.seen.is_signature and (
            self.seen.seconds >= PHASE_SECONDS or self.seen.readings >= MIN_READINGS
        )

    @property
    def signature(self) -> SoloSignature:
        """Return its signature with all threads."""
        solo = _solo(self.cap, self.seen)
        return replace(solo, cap_curve={**solo.cap_curve, **self.cap_curve})


def _fits(signature: Counters, taken_mhz: float | None, sample: GpuSample, bar: float) -> bool:
    missed = shape_misfit(signature, sample.counters, taken_mhz, sample.sm_clock_mhz)
    return missed is None or missed <= bar


def _on_the_wire(counters: Counters) -> dict[str, float]:
    return {name: round(min(1.0, value), DIGITS) for name, value in counters.as_dict().items()}


def _as_told(gpu_model: str, cap: int, seen: _SoloUse, revision: int | None) -> WorkloadSignature:
    counters, progress = at_full_threads(seen.counters, cap / 100)
    return WorkloadSignature(
        gpu_model,
        _on_the_wire(counters),
        cap_curve=() if cap == 100 else (CapPoint(cap, round(progress, DIGITS)),),
        window_seconds=float(int(seen.seconds)),
        thread_percentage=None if cap == 100 else cap,
        sm_clock_mhz=round(seen.sm_clock_mhz, 1) if seen.sm_clock_mhz else None,
        revision=revision or None,
    )


def _is_near(cap: int, known: Iterable[int]) -> bool:
    """Return whether a cap is near a known one."""
    return any(cap <= NEAR_CAP * at and at <= NEAR_CAP * cap for at in known)


def _has_new_points(kept: WorkloadSignature, found: WorkloadSignature) -> bool:
    known = {kept.cap, *(point.thread_percentage for point in kept.cap_curve)}
    is_more = any(not _is_near(point.thread_percentage, known) for point in found.cap_curve)
    return is_more and grown_curve(kept, [found]) != kept.cap_curve


def _is_new_point(kept: WorkloadSignature, cap: int, seen: _SoloUse) -> bool:
    is_known = _is_near(cap, (kept.cap, *(point.thread_percentage for point in kept.cap_curve)))
    return cap < kept.cap and seen.is_signature and not is_known


def _solo(cap: int, seen: _SoloUse) -> SoloSignature:
    counters, progress = at_full_threads(seen.counters, cap / 100)
    return SoloSignature(counters, {} if cap == 100 else {cap: progress}, sm_clock_mhz=seen.sm_clock_mhz)


class NodeSignatures:
    """Signatures that a node knows.

    Args:
        profiles_of: the profiles that GpuShares hold now.
        tell: called when a workload is seen to do other work, with a sentence about the workload.
    """

    def __init__(self, profiles_of: ProfilesOf, tell: Callable[[ReadPod, str], None] = _tell_nobody) -> None:
        self._profiles_at = profiles_of
        self._tell = tell
        self._seen: dict[_Key, dict[int, _SoloUse]] = {}  # then by cap
        self._phases: dict[_Key, tuple[_OtherPhase, ...]] = {}  # besides the signature, the one seen last first
        self._candidates: dict[_Key, _OtherPhase] = {}
        self._doubts: dict[_Key, int] = {}  # readings that are still wanted
        self._revisions: dict[_Key, int] = {}  # of signatures that were taken anew here
        self._read: dict[
            _Key, tuple[WorkloadPhase, ...]
        ] = {}  # phases that GpuShares hold, as they were read last
        self._usual_seconds: dict[_Key, float] = {}  # seen at the usual work
        self._curves: dict[_Key, tuple[object, Mapping[int, float]]] = {}  # what `_grown` last made, of what
        self._told: dict[
            _Key, tuple[object, WorkloadSignature | None]
        ] = {}  # what `_phase_news` last said, of what

    def of(self, pod: ReadPod, gpu_model: str) -> SoloSignature | None:
        """Return a pod's signature on a GPU model; None until it was measured on one, alone or in place.

        A program that hardly uses the GPU has one too, which is not published: without it, its neighbours'
        progress would stay unknown.
        """
        kept = self._kept(pod, gpu_model)
        if kept is not None:
            return self._grown(pod, gpu_model, kept)
        found = self._best(pod, gpu_model)
        if found is None:
            light = [seen for seen in self._caps_of(pod, gpu_model).values() if seen.is_light]
            return SoloSignature(light[0].counters, {}, sm_clock_mhz=light[0].sm_clock_mhz) if light else None
        curve = {p.thread_percentage: p.progress_ratio for p in self._found(pod, gpu_model, *found).cap_curve}
        return replace(_solo(*found), cap_curve=curve)

    def lacks(self, pod: ReadPod, gpu_model: str, cap: int) -> bool:
        """Return whether a known workload was never observed near a cap: its progress there is extrapolated.

        So is its progress with all threads if it was observed under caps only. False for one that hardly uses the
        SMs: a cap costs it little, and a short reading says little about it.
        """
        usual = self.of(pod, gpu_model)
        if usual is None or (usual.counters.sm_util or 0.0) < WORTH_READING_RATIO:
            return False
        return not _is_near(cap, (*usual.cap_curve, self._cap_of(pod, gpu_model)))

    def _cap_of(self, pod: ReadPod, gpu_model: str) -> int:
        """Return the cap that a known workload's signature was taken under."""
        kept = self._kept(pod, gpu_model)
        if kept is not None:
            return 100 if kept.kept is None else kept.kept.cap
        found = self._best(pod, gpu_model)
        return 100 if found is None else found[0]

    def phases(self, pod: ReadPod, gpu_model: str) -> tuple[SoloSignature, ...]:
        """Return a pod's signature, then those of its other phases, from any node; empty without a signature."""
        self._adopt(pod, gpu_model)
        usual = self.of(pod, gpu_model)
        others = self._phases.get((pod.workload, gpu_model), ())
        return () if usual is None else (usual, *(phase.signature for phase in others))

    def doubt(self, pod: ReadPod, gpu_model: str) -> None:
        """Mark a pod's workload for measuring again, because its use does not match its signatures."""
        self._doubts[pod.workload, gpu_model] = DOUBT_READINGS
        _trim(self._doubts)

    def is_doubted(self, pod: ReadPod, gpu_model: str) -> bool:
        """Return whether a pod's workload is to be measured again."""
        return (pod.workload, gpu_model) in self._doubts

    def saw(self, pod: ReadPod, gpu_model: str, phase: int, seconds: float) -> None:
        """Record which of its `phases` a pod's workload was in.

        If only phases other than the usual one are observed for long, the most frequent of them becomes the usual
        one.
        """
        key = (pod.workload, gpu_model)
        phases = self._phases.get(key, ())
        if phase == 0:
            self._usual_seconds[key] = self._usual_seconds.pop(key, 0.0) + seconds
            _trim(self._usual_seconds)
        if phase > len(phases) or not phases:  # forgotten, or the usual one, since `phases` was asked
            return
        if phase == 0:
            self._phases[key] = tuple(replace(each, lasted_seconds=0.0) for each in phases)
            return
        of = phases[phase - 1]
        now = replace(of, lasted_seconds=of.lasted_seconds + seconds, all_seconds=of.all_seconds + seconds)
        self._phases[key] = phases = (*phases[: phase - 1], now, *phases[phase:])
        revision = self._revisions.get(key, 0)
        lasted = sum(each.lasted_seconds for each in phases)
        if lasted < TURNED.seconds(revision + 1):
            return
        usual = max(phases, key=lambda each: each.lasted_seconds)
        others = tuple(replace(each, lasted_seconds=0.0) for each in phases if each is not usual)
        del self._phases[key]
        if others:
            self._phases[key] = others
        self._seen[key] = {usual.cap: usual.seen}
        self._usual_seconds[key] = usual.all_seconds
        self._revisions[key] = revision + 1
        _trim(self._revisions)
        self._tell(pod, "has changed: the signature of what it does now takes the place of the former one")

    def _adopt(self, pod: ReadPod, gpu_model: str) -> None:
        """Adopt what other nodes or a previous agent found, from the pod's GpuShares.

        Older observations of this node are forgotten if another node has found since that the workload changed its
        work.
        """
        key = (pod.workload, gpu_model)
        written = [each.kept for each in self._profiles_of(pod) if each.kept and each.gpu_model in ("", gpu_model)]
        latest = max(map(_revision, written), default=0)
        if latest > self._revisions.get(key, 0):
            self._revisions[key] = latest
            _trim(self._revisions)
            for older in (self._seen, self._phases, self._candidates, self._read, self._usual_seconds):
                older.pop(key, None)
        phases = next((each.phases for each in written if each.phases and _revision(each) == latest), ())
        if phases and latest == self._revisions.get(key, 0) and self._read.get(key) != phases:
            self._read.pop(key, None)
            self._read[key] = phases
            _trim(self._read)
            self._read_back(key, phases)

    def _read_back(self, key: _Key, phases: tuple[WorkloadPhase, ...]) -> None:
        """Add a GpuShare's phases to those observed here, as far as there is room."""
        own = self._phases.get(key, ())
        for each in map(_OtherPhase.read_back, phases):
            shown = GpuSample(each.seen.counters, each.seen.seconds, 0, None, each.seen.sm_clock_mhz)
            if len(own) < MAX_PHASES - 1 and not any(phase.fits(each.cap, shown) for phase in own):
                own = (*own, each)
        self._phases[key] = own
        _trim(self._phases)

    def is_light(self, pod: ReadPod, gpu_model: str) -> bool:
        """Return whether a pod's workload is only known to have hardly used the GPU so far."""
        if any(each.signature is not None for each in self._profiles_of(pod)) or self._best(pod, gpu_model):
            return False
        return any(seen.is_light for seen in self._caps_of(pod, gpu_model).values())

    def news(self, pod: ReadPod, gpu_model: str) -> WorkloadSignature | None:
        """Return the measured signature of a pod's workload, for its GpuShare; None if that has one as good.

        It includes the phases, and is returned also if only these are new.
        """
        self._adopt(pod, gpu_model)
        key = (pod.workload, gpu_model)
        best = self._best(pod, gpu_model)
        kept = next((each.kept for each in self._profiles_of(pod) if each.kept is not None), None)
        if best is None:
            is_ours = kept is not None and kept.gpu_model == gpu_model and not kept.contradiction()
            return self._phase_news(key, kept, kept) if is_ours else None
        found = self._found(pod, gpu_model, *best)
        if kept is None or kept.gives_way(found) or _has_new_points(kept, found):
            return replace(found, phases=merged_phases(found, self._published(key)))
        return self._phase_news(key, kept, found)

    def _found(self, pod: ReadPod, gpu_model: str, cap: int, seen: _SoloUse) -> WorkloadSignature:
        """Return the signature observed under a cap; its cap curve has the progress observed under other caps."""
        revision = self._revisions.get((pod.workload, gpu_model))
        found = _as_told(gpu_model, cap, seen, revision)
        by_cap = self._caps_of(pod, gpu_model)
        if len(by_cap) == 1:
            return found
        others = (
            _as_told(gpu_model, other, each, revision)
            for other, each in by_cap.items()
            if other < cap and each.is_signature
        )
        return replace(found, cap_curve=grown_curve(found, others))

    def _phase_news(
        self, key: _Key, kept: WorkloadSignature | None, found: WorkloadSignature | None
    ) -> WorkloadSignature | None:
        """Return `found` with the phases observed here, if they would change the GpuShare.

        Only much longer readings would, so this is computed again only after one has become twice as long.
        """
        phases = self._phases.get(key, ())
        if not phases or kept is None or found is None or _revision(kept) != _revision(found):
            return None
        lengths = [(each.cap, math.frexp(each.seen.seconds)[1]) for each in phases]
        asked = (kept, lengths)
        before, answer = self._told.get(key, (None, None))
        if before != asked:
            found = replace(found, phases=merged_phases(found, self._published(key)), taken_at=None)
            is_news = merged_phases(kept, (*kept.phases, *found.phases)) != kept.phases
            answer = found if is_news else None
            self._told.pop(key, None)
            self._told[key] = asked, answer
            _trim(self._told)
        return answer

    def _published(self, key: _Key) -> tuple[WorkloadPhase, ...]:
        phases = self._phases.get(key, ())
        total = self._usual_seconds.get(key, 0.0) + sum(each.all_seconds for each in phases)
        return tuple(each.published(total) for each in phases)

    def _profiles_of(self, pod: ReadPod) -> Sequence[KeptProfile]:
        """Return the profiles of a pod's GpuShares: only those in its own namespace."""
        return self._profiles_at(pod.namespace, pod.uid)

    def _kept(self, pod: ReadPod, gpu_model: str) -> KeptProfile | None:
        """Return the pod's GpuShare that holds a signature."""
        return next(
            (
                each
                for each in self._profiles_of(pod)
                if each.signature is not None
                and each.gpu_model in ("", gpu_model)
                and _revision(each.kept) >= self._revisions.get((pod.workload, gpu_model), 0)
            ),
            None,
        )

    def _grown(self, pod: ReadPod, gpu_model: str, kept: KeptProfile) -> SoloSignature:
        """Return a GpuShare's signature plus the cap-curve points observed here that it does not have yet."""
        assert kept.signature is not None
        written = kept.kept
        by_cap = self._caps_of(pod, gpu_model).items()
        new = {} if written is None else {cap: seen for cap, seen in by_cap if _is_new_point(written, cap, seen)}
        if written is None or not new:
            return kept.signature
        key = (pod.workload, gpu_model)
        asked = (written, [(cap, math.frexp(seen.seconds)[1]) for cap, seen in new.items()])
        before, curve = self._curves.get(key, (None, {}))
        if before != asked:
            told = [_as_told(gpu_model, cap, seen, written.revision) for cap, seen in new.items()]
            points = grown_curve(replace(written, gpu_model=gpu_model), told)
            curve = {point.thread_percentage: point.progress_ratio for point in points}
            self._curves.pop(key, None)
            self._curves[key] = asked, curve
            _trim(self._curves)
        return replace(kept.signature, cap_curve=curve)

    def _best(self, pod: ReadPod, gpu_model: str) -> tuple[int, _SoloUse] | None:
        """Return the highest observed cap, with the use under it."""
        by_cap = self._caps_of(pod, gpu_model)
        return max(((cap, seen) for cap, seen in by_cap.items() if seen.is_signature), default=None, key=_cap)

    def _caps_of(self, pod: ReadPod, gpu_model: str) -> Mapping[int, _SoloUse]:
        return self._seen.get((pod.workload, gpu_model), {})

    def learn(
        self, pod: ReadPod, gpu_model: str, sample: GpuSample, cap: int = 100, *, is_reading: bool = False
    ) -> None:
        """Learn from a window in which this pod ran alone under a cap, or its neighbours were stopped.

        A program's start hardly uses the GPU. So earlier windows are forgotten when one is more than twice as
        active, and that one too if the next is more active still, since it may include the end of the start.
        Windows in which a later pod of a known workload starts are left out.

        A window of other work than its signature describes does not change the signature: if such work lasts, it
        becomes a phase of the program with its own signature.
        """
        key = (pod.workload, gpu_model)
        self._adopt(pod, gpu_model)
        is_other = self._is_other_work(pod, gpu_model, sample, cap)
        self._settle(key, is_other=is_other, is_reading=is_reading)
        if is_other:
            if self._learn_phase(key, pod, sample, cap, int(is_reading)):
                self.saw(pod, gpu_model, 1, 0.0 if is_reading else sample.window_seconds)
            return
        self.saw(pod, gpu_model, 0, sample.window_seconds)
        self._candidates.pop(key, None)
        by_cap = self._seen.pop(key, {})
        before = by_cap.get(cap) or _SoloUse(Counters(), 0.0, pod.uid)
        self._seen[key] = by_cap | {cap: before.next(pod.uid, sample, int(is_reading))}
        _trim(self._seen)

    def _settle(self, key: _Key, *, is_other: bool, is_reading: bool) -> None:
        """Count a reading of a doubted workload, twice where it shows the usual work.

        A workload that runs alone is observed all the time and needs none.
        """
        left = self._doubts.pop(key, 0) - (1 if is_other else 2)
        if is_reading and left > 0:
            self._doubts[key] = left

    def _is_other_work(self, pod: ReadPod, gpu_model: str, sample: GpuSample, cap: int) -> bool:
        """Return whether a window shows other work of a program than its signature describes."""
        if sample.counters.activity_ratio() < IDLE_RATIO:
            return False
        seen = self._caps_of(pod, gpu_model).get(cap)
        if seen is not None and seen.is_signature:
            known, mhz, bar = seen.counters, seen.sm_clock_mhz, BAD_FIT
        elif (usual := self._kept(pod, gpu_model)) is not None and usual.signature is not None:
            known, mhz, bar = usual.signature.counters, usual.signature.sm_clock_mhz, FAR_FIT
        else:
            return False
        return not sample.counters.is_far_more_active(known) and not _fits(known, mhz, sample, bar)

    def _learn_phase(self, key: _Key, pod: ReadPod, sample: GpuSample, cap: int, readings: int) -> bool:
        """Learn from a window of other work; return whether it shows a phase, which is then listed first."""
        phases = self._phases.get(key, ())
        at = next((at for at, phase in enumerate(phases) if phase.fits(cap, sample)), None)
        if at is not None:
            found = replace(phases[at], seen=phases[at].seen.next(pod.uid, sample, readings))
            del self._phases[key]
            self._phases[key] = (found, *phases[:at], *phases[at + 1 :])
            self._candidates.pop(key, None)
            return True
        candidate = self._candidates.get(key)
        if candidate is None or not candidate.fits(cap, sample):
            candidate = _OtherPhase(cap, _SoloUse(Counters(), 0.0, pod.uid))
        candidate = replace(candidate, seen=candidate.seen.next(pod.uid, sample, readings))
        self._candidates[key] = candidate
        _trim(self._candidates)
        if not candidate.lasts:
            return False
        del self._candidates[key]
        self._doubts.pop(key, None)
        before = max(0.0, candidate.seen.seconds - sample.window_seconds)
        self._phases[key] = (replace(candidate, all_seconds=before), *phases)[: MAX_PHASES - 1]
        _trim(self._phases)
        seconds = f"{candidate.seen.seconds:.0f} s"
        self._tell(pod, f"does other work than its signature says, for {seconds}: a phase with one of its own")
        return True


def _revision(kept: WorkloadSignature | None) -> int:
    return 0 if kept is None else kept.revision or 0


def _trim(by_workload: dict[_Key, _T]) -> None:
    """Forget the workload that was not observed for longest, if there are too many."""
    if len(by_workload) > MAX_WORKLOADS:
        del by_workload[next(iter(by_workload))]


def _cap(found: tuple[int, _SoloUse]) -> int:
    return found[0]
