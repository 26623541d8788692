"""Pods that make no good use of their share: reported and, by policy, replaced or given no new neighbours.

Pure: observations and the time are arguments (docs/adr/0146).
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from gpushare.core.api import GroupReplacements, TroubleKind
from gpushare.core.backoff import Backoff
from gpushare.core.control.retraction import SILENT_SECONDS, Resident, within_a_minute

IDLE_SM_RATIO: Final = 0.005  # of a window; all tenants of a GPU below this do nothing
FAULT_SECONDS: Final = 120.0  # by then kubelet has restarted a container that a fault ended (first back-off 10 s)
PAUSE: Final = Backoff(first_seconds=300.0, longest_seconds=86_400.0)  # by the number of a group's replacements
QUARANTINE_SECONDS: Final = 600.0  # how long a GPU gets no new pods after a fault, if the policy is drain
FORGOTTEN_SECONDS: Final = 86_400.0  # after a group's last replacement; then the next one counts as its first
_AHEAD_SECONDS: Final = 300.0  # by which the clock of the node where the operator ran before may be ahead
_RATE_SECONDS: Final = 60.0


class HygieneAction(StrEnum):
    """The consequence of a pod's trouble, besides the report."""

    REPORT = "report"
    REPLACE = "replace"
    DRAIN = "drain"


@dataclass(frozen=True, slots=True)
class HygieneSettings:
    """The chart's settings.

    Attributes:
        stalled_seconds: how long a pod may do nothing before that counts as trouble.
    """

    stalled: HygieneAction = HygieneAction.REPORT
    outside_mps: HygieneAction = HygieneAction.REPORT
    fault: HygieneAction = HygieneAction.REPORT
    stalled_seconds: float = 1800.0

    def action_of(self, kind: TroubleKind) -> HygieneAction:
        """Return the action for one kind of trouble."""
        actions = {
            TroubleKind.STALLED: self.stalled,
            TroubleKind.OUTSIDE_MPS: self.outside_mps,
            TroubleKind.GPU_FAULT: self.fault,
        }
        return actions[kind]


@dataclass(frozen=True, slots=True)
class HygieneLook:
    """One observation of one GPU.

    Attributes:
        tenants: uids of its pods.
        connected: those with processes under MPS; None if unknown.
        idle: those that certainly did nothing in the window; None if nothing was measured.
        seconds: length of that window.
        faults: number of faults of the MPS server, as its gate counts them; None if unknown.
        fault_pods: pods whose processes the last fault ended.
        lost_pods: pods that have connected no process since a fault ended theirs, as the gate reports.
        fault_age_seconds: time since the last fault; None if there was none, or unknown.
    """

    tenants: frozenset[str]
    connected: frozenset[str] | None = None
    idle: frozenset[str] | None = None
    seconds: float = 0.0
    faults: int | None = None
    fault_pods: frozenset[str] = frozenset()
    lost_pods: frozenset[str] = frozenset()
    fault_age_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class HygieneWatch:
    """State of the watch over one GPU; start with `HygieneWatch()`.

    Attributes:
        idle_seconds: how long each pod has done nothing, in measured windows.
        measured_at: end of the last measured window.
        lost_since: since when each pod is known to have been without a process after a fault.
        faults: last count of faults; None if never counted.
        fault_at: when the last fault was; for one from before the first look by its age then.
    """

    idle_seconds: Mapping[str, float] = field(default_factory=dict)
    measured_at: float = float("-inf")
    lost_since: Mapping[str, float] = field(default_factory=dict)
    faults: int | None = None
    fault_at: float = float("-inf")

    def after(self, look: HygieneLook, now: float) -> "HygieneWatch":
        """Return the state after an observation; unmeasured time counts neither as idle nor as work."""
        watch = self
        if look.idle is not None:
            elapsed = max(0.0, min(look.seconds, now - self.measured_at))
            before = self.idle_seconds
            idle = {uid: before[uid] + elapsed if uid in before else 0.0 for uid in look.idle & look.tenants}
            watch = replace(watch, idle_seconds=idle, measured_at=now)
        else:
            present = {uid: seconds for uid, seconds in self.idle_seconds.items() if uid in look.tenants}
            watch = replace(watch, idle_seconds=present)
        lost = {uid: at for uid, at in self.lost_since.items() if uid in look.tenants}
        if look.faults is not None:
            if self.faults is not None and look.faults > self.faults:
                lost |= dict.fromkeys(look.fault_pods & look.tenants, now)
                watch = replace(watch, fault_at=now)
            elif self.faults is None and look.fault_age_seconds is not None and look.fault_age_seconds >= 0:
                watch = replace(watch, fault_at=now - look.fault_age_seconds)
            watch = replace(watch, faults=look.faults)
        lost = dict.fromkeys(look.lost_pods & look.tenants, now) | lost
        if look.connected is not None:
            lost = {uid: at for uid, at in lost.items() if uid not in look.connected or at == now}
        return replace(watch, lost_since=lost)

    def stalled(self, settings: HygieneSettings) -> frozenset[str]:
        """Return the pods that have done nothing for too long."""
        limit = settings.stalled_seconds
        return frozenset(uid for uid, seconds in self.idle_seconds.items() if seconds >= limit)

    def lost(self, now: float) -> frozenset[str]:
        """Return the pods that a fault left without a process for `FAULT_SECONDS`."""
        return frozenset(uid for uid, since in self.lost_since.items() if now - since >= FAULT_SECONDS)

    def is_quarantined(self, now: float) -> bool:
        """Return whether the last fault was so recent that new pods should go elsewhere."""
        return now - self.fault_at < QUARANTINE_SECONDS


@dataclass(frozen=True, slots=True)
class ReplacementAsk:
    """A request to replace a pod in trouble.

    Attributes:
        reason: the agent's sentence.
        silent_seconds: time since the agent last wrote, by the reader's clock.
        is_confirmed: the agent has written since this process first saw its GpuNode.
    """

    pod_uid: str
    gpu: str
    kind: TroubleKind
    reason: str
    silent_seconds: float = 0.0
    is_confirmed: bool = True


@dataclass(frozen=True, slots=True)
class Replacements:
    """Recent replacements and evictions.

    Attributes:
        of_share: by GpuShare, how many pods of it were replaced, and when the last one was.
        evicted: when each pod was evicted for any reason, by uid.
        last_left: when a pod was last seen moving out of each GPU, by GPU UUID.
        refused: pods whose eviction was refused a moment ago.
    """

    of_share: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    evicted: Mapping[str, float] = field(default_factory=dict)
    last_left: Mapping[str, float] = field(default_factory=dict)
    refused: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class ReplacementPlan:
    """The next step: which pod to evict now, and why the others wait or are never evicted, by uid."""

    evict: str | None = None
    waiting: Mapping[str, str] = field(default_factory=dict)
    never: Mapping[str, str] = field(default_factory=dict)


def plan_replacement(
    asks: Iterable[ReplacementAsk],
    residents: Mapping[str, tuple[Resident, ...]],
    done: Replacements,
    *,
    per_minute: int,
    calm_seconds: float,
    now: float,
) -> ReplacementPlan:
    """Choose at most one pod to evict now, so that its controller creates another.

    The limits are those of retraction: a rate over the cluster, one pod at a time on a GPU and then a pause, and
    PodDisruptionBudgets, which the API enforces. If a group's new pods get into trouble too, the pauses get
    longer.

    Args:
        residents: the pods on every GPU that an ask names.
    """
    waiting: dict[str, str] = {}
    never: dict[str, str] = {}
    due: list[tuple[str, str]] = []
    for ask in asks:
        on_gpu = residents.get(ask.gpu, ())
        pod = next((one for one in on_gpu if one.uid == ask.pod_uid), None)
        if pod is None or pod.leaving or pod.ended or ask.silent_seconds > SILENT_SECONDS:
            continue
        was_left_lately = 0.0 <= now - done.last_left.get(ask.gpu, float("-inf")) < calm_seconds
        if pod.why_final is not None:
            never[pod.uid] = pod.why_final
        elif not ask.is_confirmed:
            waiting[pod.uid] = "its node's agent has not written since the operator started"
        elif was_left_lately or any(one.is_moving_out for one in on_gpu):
            waiting[pod.uid] = "a pod leaves its GPU, or left it moments ago"
        elif pod.uid in done.refused or pod.uid in done.evicted:
            waiting[pod.uid] = "its eviction was just asked for"
        elif not pod.share:
            waiting[pod.uid] = "it has no GpuShare yet, which counts the replacements of its group"
        elif pause := _pause(done.of_share.get(pod.share), now):
            waiting[pod.uid] = f"a pod of its group was replaced lately, and the next may be {pause:.0f} s later"
        else:
            due.append((ask.gpu, pod.uid))
    lately = sum(0.0 <= now - at < _RATE_SECONDS for at in done.evicted.values())
    if lately >= per_minute:
        waiting |= {uid: within_a_minute(lately, "evicted") for _, uid in due}
        return ReplacementPlan(None, waiting, never)
    return ReplacementPlan(min(due)[1] if due else None, waiting, never)


def count_replacement(before: tuple[int, float] | None, now: float) -> tuple[int, float]:
    """Return a group's count and time of replacements after one more."""
    is_forgotten = before is None or now - before[1] >= FORGOTTEN_SECONDS
    return (1 if before is None or is_forgotten else before[0] + 1, now)


def lately_replaced(
    kept: GroupReplacements | None, now: float, seconds: Callable[[str | None], float]
) -> GroupReplacements | None:
    """Return a group's replacements if they still matter: not those of long ago, nor of a clock that was set back.

    Args:
        now: Unix time.
        seconds: parses a time of the API into Unix time; returns a time long ago if it is invalid.
    """
    if kept is None or not -_AHEAD_SECONDS <= now - seconds(kept.at) < FORGOTTEN_SECONDS:
        return None
    return kept


def _pause(before: tuple[int, float] | None, now: float) -> float:
    """Return how long after its last replacement a group has to wait; 0 if it need not wait any more."""
    if before is None or now - before[1] >= FORGOTTEN_SECONDS:
        return 0.0
    pause = PAUSE.seconds(before[0])
    return pause if now < before[1] + pause else 0.0
