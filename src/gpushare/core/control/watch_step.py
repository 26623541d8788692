"""Explain one step of `watch`: the estimates that it acted by, and which rule decided about each tenant."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from gpushare.core.control.judgement import doubt_of, is_by_neighbours, known_tenants
from gpushare.core.control.relief import KnownTenants, relieved
from gpushare.core.control.watch_state import GpuWatch, TenantWatch
from gpushare.core.control.window import FREE, WatchedTenant, WatchSettings, WatchWindow


class StepRule(StrEnum):
    """The rule of `watch` that decided whether neighbours are throttled for a tenant."""

    THROTTLED = "throttled"
    KEPT = "kept"
    WINDOW_UNUSED = "window-unused"  # not usable, or seen before
    CHANGE_NOT_SHOWN = "change-not-shown"  # the window began before the last change took effect
    UNKNOWN = "progress-unknown"
    ALONE = "no-neighbour-works"
    WITHIN_ERROR = "within-error"  # below its promise, but not with confidence
    FEW_WINDOWS = "too-few-windows"  # with confidence, but not yet in enough windows in a row
    NOT_BY_NEIGHBOURS = "not-by-neighbours"  # with every neighbour stopped it would miss its promise too
    ENOUGH_ROOM = "estimate-has-room"  # broken, but expected to keep half the margin under the present duties
    NO_STEP = "nobody-can-give"
    SMALL_STEP = "step-too-small"


class LooseningRule(StrEnum):
    """The rule of `watch` that decided whether a throttle is loosened."""

    LET_GO = "let-go"
    WINDOW_UNUSED = "window-unused"
    BROKEN = "promise-broken"
    UNKNOWN = "progress-unknown"  # of a tenant that works
    TARGET = "latency-target"
    SETTLING = "changed-lately"
    NO_ROOM = "no-room"


@dataclass(frozen=True, slots=True)
class TenantStep:
    """The figures of one tenant in one step of `watch`, and the rule that decided.

    Attributes:
        duty: in force during the window.
        progress, error: as measured in the window, and its standard error; None if unknown.
        estimate: expected progress under the duties of the window, from all windows; None if unknown.
        doubt: by how much `estimate` may be wrong before it is believed; None if unknown.
        below, kept: windows in a row that showed the promise broken, and kept again.
    """

    uid: str
    duty: float
    promise: float
    progress: float | None
    error: float | None
    estimate: float | None
    doubt: float | None
    below: int
    kept: int
    is_broken: bool
    rule: StepRule

    @property
    def room(self) -> float | None:
        """Return how far the estimate is above the promise; None if unknown."""
        return None if self.estimate is None else self.estimate - self.promise

    def __str__(self) -> str:
        """Return the figures as key=value, "-" for those that are unknown."""
        figures = {
            "pod": self.uid,
            "duty": _text(self.duty),
            "progress": _text(self.progress),
            "error": _text(self.error),
            "promise": _text(self.promise),
            "estimate": _text(self.estimate),
            "room": _text(self.room),
            "doubt": _text(self.doubt),
            "below": str(self.below),
            "kept": str(self.kept),
            "broken": "yes" if self.is_broken else "no",
            "rule": self.rule.value,
        }
        return " ".join(f"{key}={value}" for key, value in figures.items())


@dataclass(frozen=True, slots=True)
class WatchStep:
    """One step of `watch` on a GPU with a promise that is short or a throttle in force.

    Attributes:
        at: end of the window, in seconds by its clock; seconds: its length.
        duties: of the throttled tenants from now on.
        loosening: why throttles stay; None without any.
        tenants: those below their promise or throttled.
    """

    at: float
    seconds: float
    duties: Mapping[str, float]
    loosening: LooseningRule | None
    tenants: tuple[TenantStep, ...]

    @property
    def rules(self) -> tuple[tuple[str, StepRule], ...]:
        """Return the rule for each tenant whose promise is broken."""
        return tuple((each.uid, each.rule) for each in self.tenants if each.is_broken)

    def __str__(self) -> str:
        """Return one line: the GPU's figures, then those of each tenant after a semicolon."""
        duties = ",".join(f"{uid}:{duty:g}" for uid, duty in self.duties.items()) or "-"
        of_gpu = f"at={self.at:.2f} seconds={self.seconds:.2f} duties={duties} loosening={self.loosening or '-'}"
        return "; ".join([of_gpu, *map(str, self.tenants)])


def explain(
    before: GpuWatch, after: GpuWatch, window: WatchWindow, now: float, settings: WatchSettings
) -> WatchStep | None:
    """Return what one call of `watch` acted by; None if no promise was short and no throttle in force.

    Args:
        before: the state that `watch` was given with this window; after: the state that it returned.
        now: seconds, as `watch` was given.
    """
    is_short = any(_is_short(each) for each in window.tenants)
    if not (is_short or before.duties or any(each.is_broken for each in after.tenants.values()) or after.duties):
        return None
    during = {
        each.uid: replace(after.tenants.get(each.uid, TenantWatch()), duty=_duty(before, each.uid))
        for each in window.tenants
    }
    known = known_tenants(replace(after, tenants=during), window)
    unused = _unused(before, after, window, settings)
    broken = [uid for uid in known.responses if during[uid].is_broken and is_by_neighbours(known, uid, settings)]
    tenants = []
    for each in window.tenants:
        record, uid = during[each.uid], each.uid
        if not (_is_short(each) or record.is_broken or min(record.duty, _duty(after, uid)) < FREE):
            continue
        is_estimated = uid in known.responses
        tenants.append(
            TenantStep(
                uid,
                record.duty,
                each.promise,
                each.progress,
                each.error,
                known.progress(uid, known.duties) if is_estimated else None,
                doubt_of(known, uid, known.duties, settings) if is_estimated else None,
                record.below,
                record.kept,
                record.is_broken,
                unused or _rule(known, each, record, after.duties, broken=broken, settings=settings),
            )
        )
    loosening = _loosening(before, after, broken, now, settings) if before.duties or after.duties else None
    if loosening is not None and unused is not None and loosening is not LooseningRule.LET_GO:
        loosening = LooseningRule.WINDOW_UNUSED
    return WatchStep(window.ends_at, window.seconds, after.duties, loosening, tuple(tenants))


def _text(figure: float | None) -> str:
    return "-" if figure is None else f"{figure:.3f}"


def _is_short(tenant: WatchedTenant) -> bool:
    return tenant.active and tenant.progress is not None and tenant.progress < tenant.promise


def _duty(state: GpuWatch, uid: str) -> float:
    return state.tenants[uid].duty if uid in state.tenants else FREE


def _unused(before: GpuWatch, after: GpuWatch, window: WatchWindow, settings: WatchSettings) -> StepRule | None:
    """Return why the window changed no estimate; None if it was used."""
    if not window.usable or after.last_ends_at == before.last_ends_at:
        return StepRule.WINDOW_UNUSED
    is_early = after.last_ends_at - window.seconds < after.changed_at + settings.delay_seconds
    return StepRule.CHANGE_NOT_SHOWN if is_early and after.duties == before.duties else None


def _rule(
    known: KnownTenants,
    tenant: WatchedTenant,
    record: TenantWatch,
    throttles: Mapping[str, float],
    *,
    broken: list[str],
    settings: WatchSettings,
) -> StepRule:
    """Return which rule decided about one tenant, in the order in which `watch` applies them."""
    uid = tenant.uid
    if uid not in known.responses:
        return StepRule.UNKNOWN
    if not record.is_broken:
        if record.below:
            return StepRule.FEW_WINDOWS
        if not _is_short(tenant):
            return StepRule.KEPT
        return StepRule.ALONE if len(known.duties) < 2 else StepRule.WITHIN_ERROR
    if uid not in broken:
        return StepRule.NOT_BY_NEIGHBOURS
    duties = {each: throttles.get(each, FREE) for each in known.duties}
    if any(duties[each] < duty for each, duty in known.duties.items()):
        return StepRule.THROTTLED
    if known.room(uid, duties) >= settings.margin / 2:
        return StepRule.ENOUGH_ROOM
    found = relieved(known, duties, broken, settings, margin=settings.margin, max_step=settings.max_step_down)
    return StepRule.SMALL_STEP if found != duties else StepRule.NO_STEP


def _loosening(
    before: GpuWatch, after: GpuWatch, broken: list[str], now: float, settings: WatchSettings
) -> LooseningRule:
    """Return which rule decided about the throttles, in the order in which `watch` applies them."""
    if any(each.duty > _duty(before, uid) for uid, each in after.tenants.items()):
        return LooseningRule.LET_GO
    if broken:
        return LooseningRule.BROKEN
    if any(0 < each.unknown_seconds < settings.blind_seconds for each in after.tenants.values()):
        return LooseningRule.UNKNOWN
    if any(each.slo.holds(now) for each in after.tenants.values()):
        return LooseningRule.TARGET
    return LooseningRule.SETTLING if now - after.changed_at < settings.let_go_seconds else LooseningRule.NO_ROOM
