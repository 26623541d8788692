"""Each workload's GPU use alone: from its GpuShare's profile, else as measured alone or in place on a node."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from gpushare.core.api import MOST_OTHER_PHASES, CapPoint, WorkloadPhase, WorkloadSignature
from gpushare.core.backoff import Backoff
from gpushare.core.control.sharing import JointOf, KeptProfile, ProfilesOf, ReadPod, SoloSignature
from gpushare.core.control.signatures import grown_curve, merged_phases
from gpushare.core.control.solo_use import (
    DIGITS,
    IDLE_RATIO,
    LIGHT_READINGS,
    MEMORY_SECONDS,
    MIN_READINGS,
    MIN_SECONDS,
    OtherPhase,
    SoloUse,
    fits,
    on_the_wire,
    solo_of,
)
from gpushare.core.gpu import Counters, GpuSample
from gpushare.core.progress import BAD_FIT, FAR_FIT, at_full_threads

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
DOUBT_READINGS: Final = 2 * MIN_READINGS  # of a workload that is read anew
# The usual one among them; of the others the one that was not seen for longest is forgotten.
MAX_PHASES: Final = 1 + MOST_OTHER_PHASES
# How long only other phases than the usual one must be seen until the longest of them becomes the usual one. Twice
# as long each time; otherwise a workload's pods on two nodes, at different work, would replace each other's usual
# work for ever.
TURNED: Final = Backoff(first_seconds=900.0, longest_seconds=900.0 * 2**8)
# A cap within this factor of one that was seen is known well enough: it is neither read nor published.
NEAR_CAP: Final = 1.34
# Memory above the profile's peak by this factor is published; smaller steps are not, as memory grows in many.
MORE_MEMORY: Final = 1.05
WORTH_READING_RATIO: Final = 0.1  # of the SMs
MAX_WORKLOADS: Final = 1000  # of one node; the one not seen for longest is forgotten


def _tell_nobody(pod: ReadPod, what: str) -> None:
    """Ignore what a workload was seen to do."""


def _as_published(gpu_model: str, cap: int, seen: SoloUse, revision: int | None) -> WorkloadSignature:
    """Return what was seen alone under a cap (1 to 100) as the signature that a GpuNode publishes."""
    counters, progress = at_full_threads(seen.counters, cap / 100)
    return WorkloadSignature(
        gpu_model,
        on_the_wire(counters),
        cap_curve=() if cap == 100 else (CapPoint(cap, round(progress, DIGITS)),),
        window_seconds=float(int(seen.seconds)),
        thread_percentage=None if cap == 100 else cap,
        sm_clock_mhz=round(seen.sm_clock_mhz, 1) if seen.sm_clock_mhz else None,
        revision=revision or None,
        reading=seen.reading,
    )


def _is_near(cap: int, known: Iterable[int]) -> bool:
    """Return whether a cap is near a known one."""
    return any(cap <= NEAR_CAP * at and at <= NEAR_CAP * cap for at in known)


def _has_new_points(kept: WorkloadSignature, found: WorkloadSignature) -> bool:
    known = {kept.cap, *(point.thread_percentage for point in kept.cap_curve)}
    is_more = any(not _is_near(point.thread_percentage, known) for point in found.cap_curve)
    return is_more and grown_curve(kept, [found]) != kept.cap_curve


def _is_new_point(kept: WorkloadSignature, cap: int, seen: SoloUse) -> bool:
    is_known = _is_near(cap, (kept.cap, *(point.thread_percentage for point in kept.cap_curve)))
    return cap < kept.cap and seen.is_signature and not is_known


class NodeSignatures:
    """Signatures that a node knows.

    Args:
        profiles_of: the profiles that GpuShares hold now.
        tell: called when a workload is seen to do other work, with a sentence about the workload.
        joint_of: the profiles of joined workloads; by default no workload is joined.
    """

    def __init__(
        self,
        profiles_of: ProfilesOf,
        tell: Callable[[ReadPod, str], None] = _tell_nobody,
        joint_of: JointOf = lambda _pod, _model: None,
    ) -> None:
        self._profiles_at = profiles_of
        self._joint_at = joint_of
        self._tell = tell
        self._seen: dict[_Key, dict[int, SoloUse]] = {}  # then by cap
        self._phases: dict[_Key, tuple[OtherPhase, ...]] = {}  # besides the signature, the one seen last first
        self._candidates: dict[_Key, OtherPhase] = {}
        self._doubts: dict[_Key, int] = {}  # readings that are still wanted
        self._revisions: dict[_Key, int] = {}  # of signatures that were taken anew here
        # Phases that GpuShares hold, as they were read last.
        self._read: dict[_Key, tuple[WorkloadPhase, ...]] = {}
        self._usual_seconds: dict[_Key, float] = {}  # seen at the usual work
        self._peaks: dict[_Key, int] = {}  # most device memory of a pod, MiB
        # The inputs and the result of the last `_grown`, and of the last `_phase_news`.
        self._curves: dict[_Key, tuple[object, Mapping[int, float]]] = {}
        self._phase_answers: dict[_Key, tuple[object, WorkloadSignature | None]] = {}

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
        return replace(solo_of(*found), cap_curve=curve)

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
        if sum(each.lasted_seconds for each in phases) >= TURNED.seconds(self._revisions.get(key, 0) + 1):
            self._make_usual(key, max(phases, key=lambda each: each.lasted_seconds))
            self._tell(pod, "has changed: the signature of what it does now takes the place of the former one")

    def _make_usual(self, key: _Key, usual: OtherPhase) -> None:
        """Make one of a workload's phases its usual work, under a new revision; forget the former usual work."""
        phases = self._phases.pop(key)
        if others := tuple(replace(each, lasted_seconds=0.0) for each in phases if each is not usual):
            self._phases[key] = others
        self._seen[key] = {usual.cap: usual.seen}
        self._usual_seconds[key] = usual.all_seconds
        self._revisions[key] = self._revisions.get(key, 0) + 1
        _trim(self._revisions)

    def used(self, pod: ReadPod, gpu_model: str, memory_mib: int) -> None:
        """Record how much device memory a pod uses now, neighbours or not."""
        key = (pod.workload, gpu_model)
        if memory_mib > 0:
            self._peaks[key] = max(memory_mib, self._peaks.pop(key, 0))
            _trim(self._peaks)

    def _adopt(self, pod: ReadPod, gpu_model: str) -> None:
        """Adopt what other nodes or a previous agent found, from the pod's GpuShares.

        Older observations of this node are forgotten if another node has found since that the workload changed its
        work.
        """
        key = (pod.workload, gpu_model)
        written = [
            each.kept
            for each in self._profiles_of(pod, gpu_model)
            if each.kept and each.gpu_model in ("", gpu_model)
        ]
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
        for each in map(OtherPhase.read_back, phases):
            shown = GpuSample(each.seen.counters, each.seen.seconds, 0, None, each.seen.sm_clock_mhz)
            if len(own) < MAX_PHASES - 1 and not any(phase.fits(each.cap, shown) for phase in own):
                own = (*own, each)
        self._phases[key] = own
        _trim(self._phases)

    def is_light(self, pod: ReadPod, gpu_model: str) -> bool:
        """Return whether a pod's workload is only known to have hardly used the GPU so far."""
        if any(each.signature is not None for each in self._profiles_of(pod, gpu_model)) or self._best(
            pod, gpu_model
        ):
            return False
        return any(seen.is_light for seen in self._caps_of(pod, gpu_model).values())

    def news(self, pod: ReadPod, gpu_model: str) -> WorkloadSignature | None:
        """Return the measured signature of a pod's workload, for its GpuShare; None if that has one as good.

        It includes the phases and the memory's peak, and is returned also if only these are new.
        """
        self._adopt(pod, gpu_model)
        kept = next((each.kept for each in self._profiles_of(pod, gpu_model) if each.kept is not None), None)
        peak = self._peaks.get((pod.workload, gpu_model))
        found = self._signature_news(pod, gpu_model, kept)
        if found is None and peak is not None and kept is not None and kept.gpu_model == gpu_model:
            is_more = peak >= MORE_MEMORY * (kept.memory_peak_mib or 0) and not kept.contradiction()
            found = replace(kept, taken_at=None) if is_more else None
        return None if found is None else replace(found, memory_peak_mib=peak)

    def _signature_news(
        self, pod: ReadPod, gpu_model: str, kept: WorkloadSignature | None
    ) -> WorkloadSignature | None:
        key = (pod.workload, gpu_model)
        best = self._best(pod, gpu_model)
        if best is None:
            is_ours = kept is not None and kept.gpu_model == gpu_model and not kept.contradiction()
            return self._phase_news(key, kept, kept) if is_ours else None
        found = self._found(pod, gpu_model, *best)
        if kept is None or kept.gives_way(found) or _has_new_points(kept, found):
            return replace(found, phases=merged_phases(found, self._published(key)))
        return self._phase_news(key, kept, found)

    def _found(self, pod: ReadPod, gpu_model: str, cap: int, seen: SoloUse) -> WorkloadSignature:
        """Return the signature observed under a cap; its cap curve has the progress observed under other caps."""
        revision = self._revisions.get((pod.workload, gpu_model))
        found = _as_published(gpu_model, cap, seen, revision)
        by_cap = self._caps_of(pod, gpu_model)
        if len(by_cap) == 1:
            return found
        others = (
            _as_published(gpu_model, other, each, revision)
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
        inputs = (kept, lengths)
        before, answer = self._phase_answers.get(key, (None, None))
        if before != inputs:
            found = replace(found, phases=merged_phases(found, self._published(key)), taken_at=None)
            is_news = merged_phases(kept, (*kept.phases, *found.phases)) != kept.phases
            answer = found if is_news else None
            self._phase_answers.pop(key, None)
            self._phase_answers[key] = inputs, answer
            _trim(self._phase_answers)
        return answer

    def _published(self, key: _Key) -> tuple[WorkloadPhase, ...]:
        phases = self._phases.get(key, ())
        total = self._usual_seconds.get(key, 0.0) + sum(each.all_seconds for each in phases)
        return tuple(each.published(total) for each in phases)

    def _profiles_of(self, pod: ReadPod, gpu_model: str) -> Sequence[KeptProfile]:
        """Return the profiles of a pod's GpuShares: those in its own namespace.

        If these have none yet, that of its workload on this GPU model follows, where it is joined (ADR 0249).
        """
        own = self._profiles_at(pod.namespace, pod.uid)
        joint = None if any(each.kept is not None for each in own) else self._joint_at(pod, gpu_model)
        return own if joint is None else (*own, joint)

    def _kept(self, pod: ReadPod, gpu_model: str) -> KeptProfile | None:
        """Return the pod's GpuShare that holds a signature."""
        return next(
            (
                each
                for each in self._profiles_of(pod, gpu_model)
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
        inputs = (written, [(cap, math.frexp(seen.seconds)[1]) for cap, seen in new.items()])
        before, curve = self._curves.get(key, (None, {}))
        if before != inputs:
            seen_here = [_as_published(gpu_model, cap, seen, written.revision) for cap, seen in new.items()]
            points = grown_curve(replace(written, gpu_model=gpu_model), seen_here)
            curve = {point.thread_percentage: point.progress_ratio for point in points}
            self._curves.pop(key, None)
            self._curves[key] = inputs, curve
            _trim(self._curves)
        return replace(kept.signature, cap_curve=curve)

    def _best(self, pod: ReadPod, gpu_model: str) -> tuple[int, SoloUse] | None:
        """Return the highest observed cap, with the use under it."""
        by_cap = self._caps_of(pod, gpu_model)
        return max(((cap, seen) for cap, seen in by_cap.items() if seen.is_signature), default=None, key=_cap)

    def _caps_of(self, pod: ReadPod, gpu_model: str) -> Mapping[int, SoloUse]:
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
        before = by_cap.get(cap) or SoloUse(Counters(), 0.0, pod.uid)
        memory = max(
            MEMORY_SECONDS, *(each.window_seconds or 0.0 for each in self._profiles_of(pod, gpu_model)), 0.0
        )
        self._seen[key] = by_cap | {cap: before.next(pod.uid, sample, int(is_reading), memory)}
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
        return not sample.counters.is_far_more_active(known) and not fits(known, mhz, sample, bar)

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
            candidate = OtherPhase(cap, SoloUse(Counters(), 0.0, pod.uid))
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


def _cap(found: tuple[int, SoloUse]) -> int:
    return found[0]
