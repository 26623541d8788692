"""What was measured of a complete table of programs: alone under caps, and in sets, of which some hold one twice.

The truth of the twin's tenants that are the table's programs, and of `sim jobs --truth table`:

- Alone: the mean window under each cap, made to rise with the cap (a cap never speeds a program up; where it seems
  to, the windows of both caps are pooled). Below the lowest measured cap progress falls by a power of the cap with
  an exponent halfway between what was last measured and 1, in proportion.
- Sessions: a program is alone as in the first session that has it alone. A set is relative to the windows alone of
  its own session, since a program that depends on its host has other rates on another one.
- A measured set under measured caps: its window's rates relative to alone on the whole GPU, at most 1.
- Members that are the same program are exchangeable: a window of a under 75% beside a under 25% is also one of a
  under 25% beside a under 75%, and under equal caps each makes the mean of both.
- A set is known only with all of its subsets, which run while one of it is frozen.
- Other caps of a measured set: each tenant keeps of its progress alone under its cap the mean of what it kept
  under the measured caps of that same set, weighted by the inverse square of the distance in the caps' logarithms.
  Above the highest cap that was measured of a set nothing is known: a higher cap counts as that one.
- Counters alone under a cap: linear between the measured caps. Below the lowest measured cap they fall with the
  progress, as the work per unit of progress hardly depends on the cap, except the part of the time with a kernel.
- Counters of a set: the sum of its tenants' counters alone under their caps, each times the part of its progress
  alone that it keeps, and what the device showed beyond that sum under the measured caps, with the same weights.
"""

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpushare.core.gpu import COUNTERS, Counters, mean_counters

MOST_TENANTS: Final = 4
_WHOLE: Final = 100
_IS_WORK: Final = np.array([name != "graphics_util" for name in COUNTERS])  # else a part of the time
_SAME: Final = 1e-12  # square of a distance in the caps' logarithms that is rounding

Floats = NDArray[np.float64]
Caps = tuple[int, ...]


class LacksProgramError(Exception):
    """A program was not measured alone on the whole GPU; `workload` names it."""

    def __init__(self, workload: str) -> None:
        super().__init__(f"the table lacks {workload} alone on the whole GPU")
        self.workload = workload


@dataclass(frozen=True, slots=True)
class MeasuredWindow:
    """One measured window.

    Attributes:
        workloads, caps: of each tenant; caps in percent of threads.
        rates: iterations/s of each.
        counters: the device's ratios; None where they were not read.
        memory_mib: device memory of each, where it was read.
        session: in which it was measured.
    """

    workloads: tuple[str, ...]
    caps: Caps
    rates: tuple[float, ...]
    counters: Counters | None = None
    memory_mib: tuple[int | None, ...] = ()
    session: str = ""


_Windows = dict[Caps, list[MeasuredWindow]]


class MeasuredSets:
    """Progress and counters of sets of at most four programs, of which several may be the same.

    Args:
        windows: in the order in which they were measured.

    Raises:
        LacksProgramError: a program was never alone on the whole GPU.
    """

    def __init__(self, windows: Iterable[MeasuredWindow]) -> None:
        every = tuple(windows)
        solo: dict[tuple[str, str], dict[int, list[MeasuredWindow]]] = {}
        for each in every:
            if len(each.workloads) == 1:
                key = each.session, each.workloads[0]
                solo.setdefault(key, {}).setdefault(each.caps[0], []).append(each)
        self._whole: dict[tuple[str, str], float] = {}  # iterations/s alone on the whole GPU
        self._sessions: dict[str, str] = {}
        self._alone: dict[str, dict[int, float]] = {}
        for (session, workload), caps in solo.items():
            if _WHOLE in caps:
                self._whole[session, workload], curve = _rising(caps)
                if workload not in self._alone:
                    self._sessions[workload], self._alone[workload] = session, curve
        for _, workload in solo:
            if workload not in self._alone:
                raise LacksProgramError(workload)
        self._solo = {workload: solo[session, workload] for workload, session in self._sessions.items()}
        self._windows = _with_subsets(self._of_sets(every))
        self._sets: dict[tuple[str, ...], dict[Caps, Floats]] = {
            names: {
                caps: np.mean([self._progress(each) for each in found], axis=0) for caps, found in of_set.items()
            }
            for names, of_set in self._windows.items()
        }

    @property
    def workloads(self) -> Sequence[str]:
        """Return the names of the programs."""
        return sorted(self._alone)

    def offers(self, workloads: Sequence[str]) -> bool:
        """Return whether these programs were measured together, under any caps; one alone always was, if known."""
        if len(workloads) == 1:
            return workloads[0] in self._alone
        return tuple(sorted(workloads)) in self._sets

    def rate_alone(self, workload: str) -> float:
        """Return iterations/s alone on the whole GPU."""
        return self._whole[self._sessions[workload], workload]

    def session_of(self, workload: str) -> str:
        """Return the session in which a program is taken alone."""
        return self._sessions[workload]

    def memory_mib(self, workload: str) -> int:
        """Return the peak over its windows alone on the whole GPU."""
        found = (each.memory_mib[0] if each.memory_mib else None for each in self._solo[workload][_WHOLE])
        return max((mib or 0 for mib in found), default=0)

    def caps_alone(self, workload: str) -> Sequence[int]:
        """Return the caps under which a program was measured alone, in order; `alone` needs two."""
        return sorted(self._alone[workload])

    def alone(self, workload: str, thread_percentage: float) -> float:
        """Return the progress alone under a cap; 1 on the whole GPU."""
        curve = self._alone[workload]
        low, second = sorted(curve)[:2]
        if thread_percentage >= low:
            points = sorted(curve)
            return float(np.interp(thread_percentage, points, [curve[point] for point in points]))
        last = math.log(curve[second] / curve[low]) / math.log(second / low)
        return float(curve[low] * (thread_percentage / low) ** ((last + 1.0) / 2.0))

    def under(self, workloads: Sequence[str], caps: Sequence[Sequence[float]] | Floats) -> Floats:
        """Return the progress of one set under many caps: choices x tenants, like `caps`.

        Raises:
            KeyError: these programs were not measured together.
        """
        asked = np.asarray(caps, float)
        if len(workloads) == 1:
            return np.array([[self.alone(workloads[0], cap)] for (cap,) in asked.tolist()])
        order = sorted(range(len(workloads)), key=lambda index: workloads[index])
        found = np.empty_like(asked)
        found[:, order] = self._under(tuple(workloads[index] for index in order), asked[:, order])
        return found

    def caps_of(self, workloads: Sequence[str]) -> Sequence[Caps]:
        """Return the caps under which a set was measured, in the order of the workloads; empty if it was not."""
        if len(workloads) == 1:
            return [(cap,) for cap in sorted(self._alone.get(workloads[0], ()))]
        order = sorted(range(len(workloads)), key=lambda index: workloads[index])
        found = []
        for caps in sorted(self._sets.get(tuple(sorted(workloads)), {})):
            given = [0] * len(caps)
            for index, cap in zip(order, caps, strict=True):
                given[index] = cap
            found.append(tuple(given))
        return found

    def pairs(self) -> Sequence[tuple[str, str, float]]:
        """Return the pairs that ran with both caps at 100%, and their summed progress."""
        return [
            (names[0], names[1], float(caps[_WHOLE, _WHOLE].sum()))
            for names, caps in sorted(self._sets.items())
            if len(names) == 2 and (_WHOLE, _WHOLE) in caps
        ]

    def counters_alone(self, workload: str) -> Counters:
        """Return the device's counters of a program alone on the whole GPU, 0 where none was read."""
        return _as_counters(self._counters_under(workload, _WHOLE))

    def counters(self, workloads: Sequence[str], caps: Sequence[float]) -> Counters:
        """Return the device's counters of one set under its caps.

        Raises:
            KeyError: these programs were not measured together.
        """
        order = sorted(range(len(workloads)), key=lambda index: workloads[index])
        names = tuple(workloads[index] for index in order)
        asked = np.array([caps[index] for index in order], float)
        found = self._drawn(names, asked)
        if len(names) > 1:
            found = found + _mean(asked[None], *self._beyond(names))[0]
        return _as_counters(np.clip(found, 0.0, 1.0))

    def _drawn(self, names: tuple[str, ...], caps: Floats) -> Floats:
        """Return the sum of what a sorted set's tenants use alone under their caps, as far as they progress."""
        alone = self._alone_under(names, caps[None])[0]
        kept = self.under(names, caps[None])[0] / alone
        return np.asarray(kept @ np.array([self._counters_under(*each) for each in zip(names, caps, strict=True)]))

    def _beyond(self, names: tuple[str, ...]) -> tuple[Floats, Floats]:
        """Return measured caps of a sorted set, and what the device showed under each beyond its tenants' sum."""
        caps, beyond = [], []
        for each, found in self._windows[names].items():
            read = [one.counters for one in found if one.counters is not None]
            if read:
                caps.append(each)
                beyond.append(_vector(mean_counters(read)) - self._drawn(names, np.array(each, float)))
        if not caps:
            return np.full((1, len(names)), float(_WHOLE)), np.zeros((1, len(COUNTERS)))
        return np.array(caps, float), np.array(beyond)

    def _counters_under(self, workload: str, cap: float) -> Floats:
        """Return the device's counters of a program alone under a cap, 0 where none was read."""
        caps, read = self._solo_counters[workload]
        found = np.array([np.interp(cap, caps, each) for each in read.T])
        if cap < caps[0]:
            slower = self.alone(workload, cap) / self.alone(workload, caps[0])
            found = np.where(_IS_WORK, slower * found, found)
        return found

    @cached_property
    def _solo_counters(self) -> Mapping[str, tuple[Sequence[int], Floats]]:
        """Return each program's measured caps, rising, and its counters alone under each: caps x counters."""
        found = {}
        for workload, caps in self._solo.items():
            read = {
                cap: [each.counters for each in caps[cap] if each.counters is not None] for cap in sorted(caps)
            }
            means = {cap: _vector(mean_counters(each)) for cap, each in read.items() if each}
            found[workload] = list(means) or [_WHOLE], np.array(list(means.values()) or [np.zeros(len(COUNTERS))])
        return found

    def _under(self, names: tuple[str, ...], caps: Floats) -> Floats:
        """Return the progress of a sorted set under any caps: choices x tenants."""
        known = self._sets[names]
        measured = np.array(list(known), float)
        rates = np.array(list(known.values()))
        kept = rates / self._alone_under(names, measured)
        clipped = np.minimum(caps, measured.max(axis=0))
        return np.asarray(np.minimum(1.0, _mean(clipped, measured, kept) * self._alone_under(names, clipped)))

    def _alone_under(self, names: Sequence[str], caps: Floats) -> Floats:
        """Return each one's progress alone under its cap: choices x tenants."""
        found = np.empty_like(caps)
        for at, name in enumerate(names):
            distinct, inverse = np.unique(caps[:, at], return_inverse=True)
            found[:, at] = np.array([self.alone(name, cap) for cap in distinct.tolist()])[inverse.reshape(-1)]
        return found

    def _progress(self, window: MeasuredWindow) -> list[float]:
        """Return the progress of each tenant of a window, in its order."""
        alone = [self._whole[window.session, name] for name in window.workloads]
        return [min(1.0, rate / whole) for rate, whole in zip(window.rates, alone, strict=True)]

    def _of_sets(self, every: Iterable[MeasuredWindow]) -> dict[tuple[str, ...], _Windows]:
        """Return sorted programs -> their caps -> the windows that measured them, members in that order.

        A window of a program twice or more is in it once for each order of the members that are the same.
        """
        found: dict[tuple[str, ...], _Windows] = {}
        for each in every:
            is_known = all((each.session, name) in self._whole for name in each.workloads)
            if not 2 <= len(each.workloads) <= MOST_TENANTS or not is_known:
                continue
            names = tuple(sorted(each.workloads))
            of_set = found.setdefault(names, {})
            for order in itertools.permutations(range(len(names))):
                if tuple(each.workloads[at] for at in order) == names:
                    ordered = _in_order(each, order)
                    of_set.setdefault(ordered.caps, []).append(ordered)
        return found


def windows_of(lines: Iterable[str], session: str = "") -> Iterable[MeasuredWindow]:
    """Yield the windows of a shipped colocation dataset, whose lines are known to be well formed.

    Args:
        session: of the lines that name none.
    """
    rows = iter(lines)
    next(rows)  # the header
    for line in rows:
        row = json.loads(line)
        tenants = row["tenants"]
        yield MeasuredWindow(
            tuple(each["workload"] for each in tenants),
            tuple(each["thread_percentage"] for each in tenants),
            tuple(row["iterations_per_s"]),
            Counters(**row["device"]),
            tuple(row["memory_mib"]),
            row.get("session") or session,
        )


def _in_order(window: MeasuredWindow, order: Sequence[int]) -> MeasuredWindow:
    return replace(
        window,
        workloads=tuple(window.workloads[at] for at in order),
        caps=tuple(window.caps[at] for at in order),
        rates=tuple(window.rates[at] for at in order),
        memory_mib=tuple(window.memory_mib[at] for at in order) if window.memory_mib else (),
    )


def _with_subsets(sets: Mapping[tuple[str, ...], _Windows]) -> dict[tuple[str, ...], _Windows]:
    """Return the sets of which all subsets of two and more are there too."""
    found: dict[tuple[str, ...], _Windows] = {}
    for names in sorted(sets, key=len):
        if len(names) == 2 or all(less in found for less in itertools.combinations(names, len(names) - 1)):
            found[names] = sets[names]
    return found


def _as_counters(values: Floats) -> Counters:
    return Counters(**dict(zip(COUNTERS, values.tolist(), strict=True)))


def _vector(counters: Counters) -> Floats:
    return np.array([getattr(counters, name) or 0.0 for name in COUNTERS])


def _mean(asked: Floats, measured: Floats, values: Floats) -> Floats:
    """Average what was seen under measured caps by the inverse square of their distance in logarithms.

    Args:
        asked: caps, choices x tenants; measured: caps, rows x tenants; values: rows x anything.
    """
    squares = (np.log(asked[:, None, :] / measured[None]) ** 2).sum(axis=2)
    is_there = squares < _SAME
    weights = 1.0 / np.where(is_there, 1.0, squares)
    weights = np.where(is_there.any(axis=1, keepdims=True), is_there, weights)
    return np.asarray(weights @ values / weights.sum(axis=1, keepdims=True))


def _rising(caps: Mapping[int, Sequence[MeasuredWindow]]) -> tuple[float, dict[int, float]]:
    """Return the rate alone on the whole GPU, and progress by cap: means, pooled where they fall as caps rise."""
    points = sorted(caps)
    pools: list[tuple[float, int, int]] = []  # mean, windows, caps
    for cap in points:
        rates = [each.rates[0] for each in caps[cap]]
        pools.append((sum(rates) / len(rates), len(rates), 1))
        while len(pools) > 1 and pools[-2][0] >= pools[-1][0]:
            (one, n, i), (other, m, j) = pools[-2:]
            pools[-2:] = [((one * n + other * m) / (n + m), n + m, i + j)]
    means = [mean for mean, _, count in pools for _ in range(count)]
    return means[-1], {cap: mean / means[-1] for cap, mean in zip(points, means, strict=True)}
