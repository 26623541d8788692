"""Whose turn it is to be read in place, beside neighbours stopped for about a second (docs/facts.md 25, 26).

Pure: time and the tenants are arguments. The agent carries the readings out, the simulator of jobs simulates them.
No pod of class latency is stopped, none whose probe would fail, and none for more than a tenth of any minute.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from gpushare.core.backoff import Backoff

__all__ = [
    "FAILED",
    "FIRST_SECONDS",
    "MINUTE_SECONDS",
    "MOST_STOPPED_SECONDS",
    "PATIENT_BROKEN_SECONDS",
    "PATIENT_READINGS",
    "QUIET_SECONDS",
    "PastReadings",
    "ReadingTenant",
    "next_reading",
    "next_turn",
]

MINUTE_SECONDS: Final = 60.0
MOST_STOPPED_SECONDS: Final = 6.0  # of any minute, each pod
APART_SECONDS: Final = 3.0  # between two readings on a GPU
FIRST_SECONDS: Final = 2.0  # age of a process before its first reading
PATIENT_READINGS: Final = 8  # without a result; after these, a workload is read only rarely
PATIENT_SECONDS: Final = 120.0
# After a tenant change, a new profile or a reading, before a known workload is read: the loop acts first.
QUIET_SECONDS: Final = 10.0
PATIENT_BROKEN_SECONDS: Final = 30.0  # further wait of such a reading while a promise is broken
# Of doubted workloads, which have a profile meanwhile: 9 failed readings in the first hour, then 2 in each.
FAILED: Final = Backoff(first_seconds=10.0, longest_seconds=1800.0)
_SOON: Final = 1e-9
_AGAIN_SECONDS: Final = 2.0  # between two guesses at when a turn comes that others' minutes put off


@dataclass(frozen=True, slots=True)
class ReadingTenant:
    """One active tenant of a GPU, as the choice of the next reading sees it.

    Attributes:
        has_signature: whether a signature of its workload is known, a light one included.
        is_light: whether its workload is only known to have hardly used the GPU.
        is_doubted: whether its workload is to be measured again.
        lacks_cap: whether its workload was never observed near its cap.
        may_read: whether its counters can be read; `may_profile`: whether its workload may be profiled.
        may_stop: whether it can be stopped for as long as a reading takes.
    """

    uid: str
    has_signature: bool
    is_light: bool = False
    is_doubted: bool = False
    lacks_cap: bool = False
    may_read: bool = True
    may_profile: bool = True
    may_stop: bool = True

    @property
    def is_known(self) -> bool:
        """Return whether its workload is known well enough not to be read at once."""
        return self.has_signature and not self.is_doubted

    @property
    def is_read_anew(self) -> bool:
        """Return whether its workload has a signature, and is to be measured again."""
        return self.has_signature and self.is_doubted


@dataclass(slots=True)
class PastReadings:
    """A GPU's readings of the last minute, and by pod when it was read.

    Attributes:
        active: the pods with clients.
        quiet_since: since when the set is unchanged and none of its workloads became known.
        stops: of each reading, when it ended, how many seconds it took, and the pods that it stopped.
        failed: by pod, how many of its last readings failed, and when the last one did.
        is_any_unknown: whether one of them is to be read as soon as may be, as its workload is unknown.
    """

    active: frozenset[str] = frozenset()
    quiet_since: float = 0.0
    stops: list[tuple[float, float, tuple[str, ...]]] = field(default_factory=list)
    read_at: dict[str, list[float]] = field(default_factory=dict)
    since: dict[str, float] = field(default_factory=dict)
    failed: dict[str, tuple[int, float]] = field(default_factory=dict)
    is_any_unknown: bool = False

    def look(self, active: Sequence[str], known: Collection[str], now: float) -> None:
        """Record who is active now, and forget what lies more than a minute back.

        Args:
            known: the GPU's pods, active or not.
        """
        self.is_any_unknown = False
        self.since = {uid: self.since.get(uid, now) for uid in active}
        self.read_at = {uid: at for uid, at in self.read_at.items() if uid in known}
        self.failed = {uid: failures for uid, failures in self.failed.items() if uid in known}
        if self.active != (present := frozenset(active)):
            self.active, self.quiet_since = present, now
        self.stops = [stop for stop in self.stops if now - stop[0] < MINUTE_SECONDS]

    def ended(self, uid: str, spent_seconds: float, stopped: tuple[str, ...], now: float) -> None:
        """Record a reading that has ended; it counts as failed until `succeeded`."""
        self.stops.append((now, spent_seconds, stopped))
        self.read_at.setdefault(uid, []).append(now)
        self.failed[uid] = self.failed.get(uid, (0, 0.0))[0] + 1, now

    def succeeded(self, uid: str) -> None:
        """Record that a pod's last reading gave a result."""
        self.failed.pop(uid, None)

    def settled(self, uids: Collection[str]) -> None:
        """Forget the failed readings of pods that are not to be read anew."""
        self.failed = {uid: failures for uid, failures in self.failed.items() if uid not in uids}

    def anew_at(self, uid: str) -> float:
        """Return when a pod whose workload is doubted may be read, by the failed readings of all such pods.

        Most failures are the GPU's, so its tenants share the back-off: one neighbour pays for the readings of all
        others. A pod without a failed reading may be read at once.
        """
        if uid not in self.failed:
            return -math.inf
        failures = sum(count for count, _ in self.failed.values())
        return max(at for _, at in self.failed.values()) + FAILED.seconds(failures)


def next_reading(
    record: PastReadings, tenants: Sequence[ReadingTenant], now: float, *, longest_stop: float, is_broken: bool
) -> ReadingTenant | None:
    """Return whom to read now, if it is time for somebody; all others of `tenants` are to be stopped for it.

    Args:
        record: brought up to date by `look`; it is told here whether an unknown workload waits to be read.
        tenants: the active ones.
        longest_stop: most seconds that one reading stops its neighbours.
        is_broken: whether the promise of any is broken.
    """
    if len(tenants) < 2:
        return None
    record.settled({each.uid for each in tenants if not each.is_read_anew})
    wanted = [each for each in tenants if each.may_read and _is_wanted(each, record, now)]
    unknown = [each for each in wanted if not each.is_known]
    record.is_any_unknown = bool(unknown)
    apart = now - record.stops[-1][0] if record.stops else math.inf
    if not wanted or apart < APART_SECONDS:
        return None
    # A reading takes windows that the loop needs: a known workload waits until the loop has had its own.
    quiet = min(apart, now - record.quiet_since)
    is_calm = quiet >= (PATIENT_BROKEN_SECONDS if is_broken else QUIET_SECONDS)
    due = [each for each in (wanted if is_calm else unknown) if now - record.since[each.uid] >= FIRST_SECONDS]
    # Unknown ones first, then those read least.
    for each in sorted(due, key=lambda one: (one.is_known, len(record.read_at.get(one.uid, ())), one.uid)):
        others = [other for other in tenants if other.uid != each.uid]
        are_free = all(other.may_stop and _has_time_left(other.uid, record, longest_stop) for other in others)
        if are_free and each.may_profile:
            return each
    return None


def next_turn(record: PastReadings, tenants: Sequence[ReadingTenant], now: float, *, is_broken: bool) -> float:
    """Return when to ask `next_reading` again at the latest, after it named nobody; inf: not before a change.

    For callers that cannot ask all the time; a change of the tenants, or of what is known of them, comes earlier.
    """
    last = max((at for at, _, _ in record.stops), default=-math.inf)
    patience = PATIENT_BROKEN_SECONDS if is_broken else QUIET_SECONDS
    turns = []
    for each in tenants:
        is_read_up = each.is_known and not each.is_light and not each.lacks_cap
        if is_read_up or not all(other.may_stop for other in tenants if other is not each):
            continue
        at = max(record.since[each.uid] + FIRST_SECONDS, last + APART_SECONDS)
        if each.is_known:
            at = max(at, record.quiet_since + patience, last + patience)
        if each.is_read_anew:
            at = max(at, record.anew_at(each.uid))
        elif _is_seldom(each, record):
            at = max(at, record.read_at[each.uid][-1] + PATIENT_SECONDS)
        turns.append(at)
    if not turns:
        return math.inf
    return min(turns) if min(turns) > now + _SOON else now + _AGAIN_SECONDS


def _is_wanted(tenant: ReadingTenant, record: PastReadings, now: float) -> bool:
    """Return whether a pod is to be read: soon if its workload is unknown, rarely if readings give nothing.

    A workload whose windows contradict its signature is read again, with a back-off while readings fail: its
    signature counts meanwhile. So is one under a cap near which it was never observed: its promise depends on its
    progress under that cap.
    """
    if tenant.is_read_anew:
        return now >= record.anew_at(tenant.uid) - _SOON
    if not tenant.is_light and tenant.has_signature and not tenant.lacks_cap:
        return False
    return not _is_seldom(tenant, record) or now - record.read_at[tenant.uid][-1] >= PATIENT_SECONDS


def _is_seldom(tenant: ReadingTenant, record: PastReadings) -> bool:
    """Return whether readings of a pod have given nothing, so that it is read only rarely."""
    read = record.read_at.get(tenant.uid, [])
    return bool(read) and (tenant.is_light or len(read) >= PATIENT_READINGS)


def _has_time_left(uid: str, record: PastReadings, longest_stop: float) -> bool:
    """Return whether one more reading leaves a pod the rest of its minute."""
    spent = sum(seconds for _, seconds, stopped in record.stops if uid in stopped)
    return spent + longest_stop <= MOST_STOPPED_SECONDS
