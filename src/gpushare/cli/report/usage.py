"""Usage of a cluster's GPUs over a span of time, and the figures that a report derives from it."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

Figures = NDArray[np.float64]
WorkloadName = tuple[str, str]  # namespace, name
# Shares are whole percents, so a recommendation closer than this means no change.
_SAME_SHARE: Final = 0.005


@dataclass(frozen=True, slots=True)
class Tenancy:
    """One pod on one GPU; each array has one value per moment, NaN if the pod was absent or the value is unknown.

    Attributes:
        broken_ratio: 1 while its node's loop finds the promise broken, 0 while it is kept.
        busiest_ratio: use of the pipe that it uses most.
        clients: its processes connected to MPS.
    """

    namespace: str
    pod: str
    workload: str
    gpu_uuid: str
    share_ratio: Figures
    progress_ratio: Figures
    progress_error_ratio: Figures
    promise_ratio: Figures
    broken_ratio: Figures
    throttle_ratio: Figures
    busiest_ratio: Figures
    clients: Figures

    @property
    def name(self) -> WorkloadName:
        """Return the workload with its namespace."""
        return self.namespace, self.workload

    @property
    def present(self) -> NDArray[np.bool_]:
        """Return for each moment whether the pod was on the GPU."""
        return ~np.isnan(self.share_ratio)

    @property
    def idle(self) -> NDArray[np.bool_]:
        """Return for each moment whether the pod is known to have no process."""
        has_none: NDArray[np.bool_] = self.clients == 0
        return has_none & np.isnan(self.progress_ratio)

    @property
    def active(self) -> NDArray[np.bool_]:
        """Return for each moment whether the pod is there and not known to do nothing, idle or asleep."""
        is_asleep: NDArray[np.bool_] = self.progress_ratio == 0
        return self.present & ~self.idle & ~is_asleep

    @property
    def work_ratio(self) -> Figures:
        """Return the progress, 0 while the pod is idle."""
        return np.where(self.idle, 0.0, self.progress_ratio)


@dataclass(frozen=True, slots=True)
class UsageHistory:
    """Input data of a report.

    Attributes:
        source: its origin, in words.
        times: seconds since the epoch, evenly spaced; each moment covers the step before it; one for a snapshot.
        step_seconds: time between two moments; 0 for a snapshot.
        gpus: number of known GPUs.
        healthy: number of GPUs that took tenants.
        requested_gpus: GPUs that a workload's pods request, waiting ones included; absent if unknown.
        recommended: share of a GPU that a workload's profile recommends for each pod.
        expected: progress alone that its profile predicts at the present share, and at the recommended one.
        retractions: number of pods moved away in this time; None if unknown.
        notes: sentences on what is missing and why.
        is_simulated: times are seconds since the simulation's start.
    """

    source: str
    times: Figures
    step_seconds: float
    gpus: Figures
    healthy: Figures
    tenancies: tuple[Tenancy, ...]
    requested_gpus: Mapping[WorkloadName, Figures] = field(default_factory=dict)
    recommended: Mapping[WorkloadName, float] = field(default_factory=dict)
    expected: Mapping[WorkloadName, tuple[float, float]] = field(default_factory=dict)
    retractions: float | None = None
    notes: tuple[str, ...] = ()
    is_simulated: bool = False

    @property
    def begin(self) -> float:
        """Return when the time that the first moment covers began, in seconds since the epoch."""
        return float(self.times[0]) - self.step_seconds

    @property
    def hours(self) -> float:
        """Return the weight of one moment: hours, or 1 for a snapshot."""
        return self.step_seconds / 3600 if self.step_seconds else 1.0

    @property
    def unit(self) -> str:
        """Return the unit of sums over moments."""
        return "GPU-hours" if self.step_seconds else "GPUs"


@dataclass(frozen=True, slots=True)
class UsageCourse:
    """The cluster's figures at each moment; None if unknown.

    Attributes:
        idle: GPUs in use on which no pod has a process.
        known: the other GPUs in use on which every pod's progress is known, as in `gpushare.core.control.Gain`. A
            pod of several whole GPUs has none (ADR 0030), nor has one without a profile beside others; one without
            a process makes none.
        known_progress: summed progress on these.
        progress: summed progress of all pods whose progress is known, whoever is beside them.
    """

    gpus: Figures
    in_use: Figures
    idle: Figures
    known: Figures
    known_progress: Figures
    given: Figures
    progress: Figures
    requested: Figures | None
    throttled: Figures
    broken: Figures

    @property
    def spared(self) -> Figures:
        """Return how many more GPUs the known GPUs' progress would have needed with one pod per GPU."""
        return np.clip(self.known_progress - self.known, 0, None)


@dataclass(frozen=True, slots=True)
class ShowbackRow:
    """Requested, held and progressed GPU-hours of one namespace or one workload.

    Attributes:
        progress_per_share: progress against the share given, over the time with known progress, which is 0 while a
            pod has no process; None if unknown.
        kept_ratio: part of the time with known promise and progress in which the promise was kept; None if
            unknown.
    """

    namespace: str
    workload: str
    pods: int
    asked: float | None
    given: float
    progressed: float | None
    progress_per_share: float | None
    kept_ratio: float | None


@dataclass(frozen=True, slots=True)
class NeighbourRow:
    """Progress that one workload lost to another.

    Attributes:
        shared_gpu_hours: for which both ran on one GPU.
        alone_ratio: progress without neighbours; 1 if that was never measured.
        beside_ratio: progress beside this neighbour.
        lost: GPU-hours of progress lost to it.
    """

    slowed: WorkloadName
    by: WorkloadName
    shared_gpu_hours: float
    alone_ratio: float
    beside_ratio: float
    lost: float


@dataclass(frozen=True, slots=True)
class FractionRow:
    """A workload whose profile recommends another share than its pods have.

    Attributes:
        freed: GPU-hours of shares that the recommended share would free; below 0 it takes more.
        faster: GPU-hours of progress that it would gain; below 0 it loses; None if the profile does not tell.
        gain: the sum of both, in GPU-hours of work.
    """

    workload: WorkloadName
    share_ratio: float
    recommended_ratio: float
    given: float
    freed: float
    faster: float | None
    gain: float


def course(history: UsageHistory) -> UsageCourse:
    """Return the cluster's figures at each moment."""
    count = len(history.times)
    given, progress, throttled, broken = (np.zeros(count) for _ in range(4))
    in_use, idle, known, known_progress = (np.zeros(count) for _ in range(4))
    by_gpu: dict[str, list[Tenancy]] = defaultdict(list)
    for one in history.tenancies:
        given += np.nan_to_num(one.share_ratio)
        progress += np.nan_to_num(one.progress_ratio)
        throttled += np.nan_to_num(one.throttle_ratio) > 0
        broken += _is_broken(one)
        by_gpu[one.gpu_uuid].append(one)
    for tenancies in by_gpu.values():
        used = np.any([one.present for one in tenancies], axis=0)
        runs = np.any([one.present & ~one.idle for one in tenancies], axis=0)
        is_known = runs & ~np.any([one.present & np.isnan(one.work_ratio) for one in tenancies], axis=0)
        in_use += used
        idle += used & ~runs
        known += is_known
        known_progress += np.sum([np.nan_to_num(one.progress_ratio) for one in tenancies], axis=0) * is_known
    requested = None
    if history.requested_gpus:
        requested = np.nan_to_num(np.array(list(history.requested_gpus.values()))).sum(axis=0)
    return UsageCourse(
        gpus=history.gpus,
        in_use=in_use,
        idle=idle,
        known=known,
        known_progress=known_progress,
        given=given,
        progress=progress,
        requested=requested,
        throttled=throttled,
        broken=broken,
    )


def _is_broken(one: Tenancy) -> NDArray[np.bool_]:
    """Return when the promise was broken, by the node's loop or else by progress more than its error below it."""
    with np.errstate(invalid="ignore"):
        below = one.progress_ratio + np.nan_to_num(one.progress_error_ratio) < one.promise_ratio
    return np.where(np.isnan(one.broken_ratio), below & _works(one), one.broken_ratio > 0)


def _works(one: Tenancy) -> NDArray[np.bool_]:
    """Return when its progress is known and above 0: neighbours slow a pod down, but one without any sleeps."""
    makes_some: NDArray[np.bool_] = one.progress_ratio > 0
    return makes_some


def _kept(tenancies: list[Tenancy]) -> float | None:
    told = broken = 0
    for one in tenancies:
        is_told = _works(one) & ~np.isnan(one.promise_ratio)
        told += int(is_told.sum())
        broken += int((_is_broken(one) & is_told).sum())  # a promise stays broken for a while without progress
    return 1 - broken / told if told else None


def kept_ratio(history: UsageHistory) -> float | None:
    """Return the part of all pods' time in which their promise was kept; None if no promise is known."""
    return _kept(list(history.tenancies))


def showback(history: UsageHistory, *, by_workload: bool = False) -> tuple[ShowbackRow, ...]:
    """Return a row for each namespace, or for each workload, largest share-hours first."""
    groups: dict[WorkloadName, list[Tenancy]] = defaultdict(list)
    asked: dict[WorkloadName, float] = defaultdict(float)

    def group(name: WorkloadName) -> WorkloadName:
        return name if by_workload else (name[0], "")

    for one in history.tenancies:
        groups[group(one.name)].append(one)
    for name, figures in history.requested_gpus.items():
        asked[group(name)] += float(np.nansum(figures)) * history.hours
    rows = []
    for name in groups.keys() | asked.keys():
        members = groups[name]
        known = any(not np.isnan(one.work_ratio).all() for one in members)
        progressed = sum(float(np.nansum(one.progress_ratio)) for one in members) * history.hours
        shares = sum(float(np.nansum(one.share_ratio[~np.isnan(one.work_ratio)])) for one in members)
        rows.append(
            ShowbackRow(
                name[0],
                name[1],
                len({(one.namespace, one.pod) for one in members}),
                asked.get(name) if history.requested_gpus else None,
                sum(float(np.nansum(one.share_ratio)) for one in members) * history.hours,
                progressed if known else None,
                progressed / (shares * history.hours) if shares else None,
                _kept(members),
            )
        )
    return tuple(sorted(rows, key=lambda row: (-row.given, -(row.asked or 0.0), row.namespace, row.workload)))


def neighbours(history: UsageHistory) -> tuple[NeighbourRow, ...]:
    """Return which workload lost progress to which, the largest loss first.

    A pod's loss relative to running alone is attributed to its neighbours of that moment in proportion to the use
    of each one's busiest pipe, or in equal parts if that is unknown. A pod that does nothing is no neighbour.
    """
    on_gpu: dict[str, list[Tenancy]] = defaultdict(list)
    for one in history.tenancies:
        on_gpu[one.gpu_uuid].append(one)
    alone = _alone(on_gpu)
    joint: dict[tuple[WorkloadName, WorkloadName], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for tenancies in on_gpu.values():
        active = np.array([one.active for one in tenancies])
        busy = np.array([np.nan_to_num(one.busiest_ratio) for one in tenancies]) * active
        for at, one in enumerate(tenancies):
            # Only the moments in which it works, and who does then: thousands of short pods take turns on a GPU.
            moments = np.flatnonzero(_works(one))
            beside = active[:, moments]
            beside[at] = False
            others = np.flatnonzero(beside.any(axis=1))
            beside, progress = beside[others], one.progress_ratio[moments]
            loss = np.clip(alone.get(one.name, 1.0) - progress, 0, None)
            weights = np.where(beside, busy[np.ix_(others, moments)], 0.0)
            silent = weights.sum(axis=0) == 0
            weights[:, silent] = beside[:, silent]
            losses = loss * weights / np.maximum(weights.sum(axis=0), 1e-12)
            for other, both, lost in zip(others.tolist(), beside, losses, strict=True):
                sums = joint[one.name, tenancies[other].name]
                sums[0] += both.sum()
                sums[1] += float(progress[both].sum())
                sums[2] += float(lost[both].sum())
    rows = [
        NeighbourRow(
            slowed,
            by,
            moments * history.hours,
            alone.get(slowed, 1.0),
            progress / moments,
            lost * history.hours,
        )
        for (slowed, by), (moments, progress, lost) in joint.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.lost, row.slowed, row.by)))


def _alone(on_gpu: Mapping[str, list[Tenancy]]) -> dict[WorkloadName, float]:
    """Return the mean progress of each workload while it works without a neighbour that does, if it ever did."""
    seen: dict[WorkloadName, list[float]] = defaultdict(list)
    for tenancies in on_gpu.values():
        count = np.sum([one.active for one in tenancies], axis=0)
        for one in tenancies:
            figures = one.progress_ratio[(count == 1) & _works(one)]
            if len(figures):
                seen[one.name].extend(map(float, figures))
    return {name: min(float(np.mean(figures)), 1.0) for name, figures in seen.items()}


def other_fractions(history: UsageHistory) -> tuple[FractionRow, ...]:
    """Return the workloads that would gain by the share that their profile recommends, the most first.

    Freed shares and additional progress count equally, as GPU-hours of work. A workload that would only take more,
    and whose profile does not tell its progress, is left out.
    """
    rows = []
    present: dict[WorkloadName, int] = defaultdict(int)
    for one in history.tenancies:
        present[one.name] += int(one.present.sum())
    for row in showback(history, by_workload=True):
        name = (row.namespace, row.workload)
        recommended, moments = history.recommended.get(name), present[name]
        if recommended is None or not moments:
            continue
        share = row.given / history.hours / moments
        if abs(recommended - share) < _SAME_SHARE:
            continue
        pod_hours = moments * history.hours
        freed, faster = (share - recommended) * pod_hours, None
        if name in history.expected:
            now, then = history.expected[name]
            faster = (then - now) * pod_hours
        gain = freed + (faster or 0.0)
        if gain > 0:
            rows.append(FractionRow(name, share, recommended, row.given, freed, faster, gain))
    return tuple(sorted(rows, key=lambda row: (-row.gain, row.workload)))
