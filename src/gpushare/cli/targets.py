"""A pod's own target as people read it: what it names, what was measured, and whether it is met."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from gpushare.core.api import ConditionStatus, PodView, RateSlo, Rejection, Slo, TenantSlo, in_time, parse_slo
from gpushare.core.control import why_unknown

_UNPLACED: Final = "it is not placed yet"
_UNREAD: Final = "its GpuNode was not read"
_LONGEST_RATE: Final = 1e12  # a counter that jumps may show hundreds of digits
_WORDS: Final = {ConditionStatus.TRUE: "met", ConditionStatus.FALSE: "missed", ConditionStatus.UNKNOWN: "unknown"}


@dataclass(frozen=True, slots=True)
class PodTarget:
    """A pod's own target and how the pod fares against it.

    Attributes:
        target: as the pod names it; None if that cannot be read.
        met: as its node's agent reports it.
        reason: as in the condition SLOMet, or `InvalidAnnotation`; None for a pod of which no agent could be read.
        why: why it is unknown, in the words of the condition or of the refusal; empty if it is met or missed.
        target_seconds, measured_seconds: of a latency.
        target_per_second, measured_per_second: of a rate.
    """

    target: str | None
    met: ConditionStatus = ConditionStatus.UNKNOWN
    reason: str | None = None
    why: str = ""
    target_seconds: float | None = None
    measured_seconds: float | None = None
    target_per_second: float | None = None
    measured_per_second: float | None = None

    @property
    def is_missed(self) -> bool:
        """Return whether the pod misses its target."""
        return self.met is ConditionStatus.FALSE


def target_of(pod: PodView, reports: Iterable[TenantSlo | None], *, was_read: bool) -> PodTarget | None:
    """Return a pod's own target; None if it names none.

    Args:
        reports: what its node's agent reports of it, by GPU.
        was_read: whether GpuNodes could be read, so that no report means that no agent reports.
    """
    named = parse_slo(pod.annotations)
    if named is None:
        return None
    if isinstance(named, Rejection):
        return PodTarget(None, reason=named.reason.value, why=str(named))
    if (reported := next((each for each in reports if each is not None), None)) is not None:
        return reported_target(reported)
    if pod.node is None or not was_read:
        return _unreported(named, None, _UNPLACED if pod.node is None else _UNREAD)
    return _unreported(named, *why_unknown(None))


def reported_target(slo: TenantSlo) -> PodTarget:
    """Return a target as its node's agent reports it."""
    return PodTarget(
        slo.target,
        slo.met,
        slo.reason,
        why_unknown(slo)[1] if slo.met is ConditionStatus.UNKNOWN else "",
        slo.target_seconds,
        slo.measured_seconds,
        slo.target_per_second,
        slo.measured_per_second,
    )


def figures_of(target: PodTarget) -> str:
    """Return a target for a table, with the measured figure within it, such as "p99 31ms<50ms"."""
    if target.target is None:
        return "invalid"
    sign = "<" if "<" in target.target else ">"
    name, found, limit = target.target.partition(sign)
    measured = _measured(target)
    figures = f"{name} {measured}{sign}{limit}" if found and measured else target.target
    return figures if target.met is ConditionStatus.TRUE else f"{figures} {_WORDS[target.met]}"


def target_line(pod: str, target: PodTarget) -> str:
    """Say what a pod's target is, what was measured, and whether it is met, or why that is not known."""
    if target.target is None:
        return f"{pod}: its target cannot be read: {target.why}."
    measured = _measured(target)
    seen = (
        f", measured {measured}{' a second' if target.measured_per_second is not None else ''}" if measured else ""
    )
    why = f", {target.why}" if target.why else ""
    return f"{pod}: target {target.target}{seen}: {_WORDS[target.met]}{why}."


def _unreported(named: Slo | RateSlo, reason: str | None, why: str) -> PodTarget:
    return PodTarget(
        str(named),
        reason=reason,
        why=why,
        target_seconds=named.target_seconds if isinstance(named, Slo) else None,
        target_per_second=named.target_per_second if isinstance(named, RateSlo) else None,
    )


def _measured(target: PodTarget) -> str:
    """Return what was measured, in the unit of the target; empty if nothing was."""
    if target.measured_seconds is not None:
        return in_time(target.measured_seconds)
    rate = target.measured_per_second
    if rate is None:
        return ""
    return f"{rate:.0f}" if 1000 <= rate < _LONGEST_RATE else f"{rate:.4g}"
