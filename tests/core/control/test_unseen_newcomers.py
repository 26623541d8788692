"""A newcomer slows its neighbours before anything tells of it: such windows show nobody alone."""

from dataclasses import replace

import pytest

from gpushare.core.api import JobClass
from gpushare.core.control import GpuWatch, WatchActions, WatchedTenant, WatchSettings, WatchWindow, watch

SETTINGS = WatchSettings()
PROMISE = 2 / 3


def window(at: float, victim: float, newcomer: float | None, seconds: float = 0.5) -> WatchWindow:
    """A window of both; the newcomer has no process yet as far as is known where its progress is None."""
    return WatchWindow(
        at,
        (
            WatchedTenant("victim", JobClass.THROUGHPUT, PROMISE, victim, error=0.05, order=1.0),
            WatchedTenant(
                "newcomer",
                JobClass.THROUGHPUT,
                0.044,
                newcomer,
                error=None if newcomer is None else 0.06,
                order=2.0,
                active=newcomer is not None,
            ),
        ),
        seconds=seconds,
    )


def watched(windows: list[WatchWindow], state: GpuWatch | None = None) -> tuple[GpuWatch, WatchActions]:
    state, actions = state or GpuWatch(), None
    for each in windows:
        state, actions = watch(state, each, each.ends_at, SETTINGS)
    assert actions is not None
    return state, actions


def test_a_newcomer_that_slowed_the_others_before_it_was_seen_is_throttled_all_the_same() -> None:
    """As the live loop recorded it: two half seconds of a neighbour that is not known yet, 0.82 and 0.49 of alone.

    Taken for the victim alone they say that it makes 0.54 without neighbours, less than its promise: no throttle
    would help, and nothing was done for as long as the newcomer ran.
    """
    alone = [window(1.0, 0.99, None), window(1.5, 0.82, None), window(2.0, 0.49, None)]
    _, actions = watched([*alone, window(3.0, 0.15, 0.89), window(3.5, 0.12, 0.95), window(4.0, 0.12, 0.95)])
    assert actions.broken == ("victim",)
    assert actions.duties["newcomer"] < 0.5


@pytest.mark.parametrize("alone", [0.4, 0.6])
def test_what_was_seen_of_a_tenant_alone_for_longer_still_counts(alone: float) -> None:
    """A promise that a tenant does not keep alone is no reason to stop anybody."""
    windows = [window(0.5 * number, alone, None) for number in range(1, 20)]
    state, _ = watched(windows)
    level = state.tenants["victim"].response
    assert level is not None
    beside = [window(10.5, 0.15, 0.89), window(11.0, 0.12, 0.95), window(11.5, 0.12, 0.95)]
    state, actions = watched(beside, state)
    assert not actions.duties
    after = state.tenants["victim"].response
    assert after is not None
    assert after.level == pytest.approx(level.level, abs=0.05)


def test_a_neighbour_that_wakes_again_takes_nothing_back() -> None:
    """Its process is known, so its work is seen from the first window on."""
    seen = [window(1.0, 0.99, None), window(2.0, 0.6, 0.9), window(3.0, 0.6, 0.9)]
    quiet = [window(4.0 + number, 0.7, None, 1.0) for number in range(6)]
    state, _ = watched([*seen, *quiet])
    before = state.tenants["victim"].response
    state, _ = watched([window(10.0, 0.5, 0.9, 1.0)], state)
    after = state.tenants["victim"].response
    assert before is not None
    assert after is not None
    assert after.windows == before.windows + 1


def beside_two(at: float, victim: float, first: float | None, second: float | None) -> WatchWindow:
    """A window with two newcomers; one has no process yet as far as is known where its progress is None."""
    alone = window(at, victim, first)
    newcomer = alone.tenants[1]
    late = replace(newcomer, uid="late", order=3.0, progress=second, error=None if second is None else 0.06)
    return replace(alone, tenants=(*alone.tenants, replace(late, active=second is not None)))


def test_a_second_newcomer_brings_nothing_back_that_was_taken_back_for_the_first() -> None:
    """The windows that the first one was in unseen are still among the last ones as the second begins to work."""
    alone = [
        beside_two(1.0, 0.99, None, None),
        beside_two(1.5, 0.55, None, None),
        beside_two(2.0, 0.49, None, None),
    ]
    state, _ = watched([*alone, beside_two(3.0, 0.15, 0.89, None)])
    before = state.tenants["victim"].response
    assert before is not None
    assert before.level > PROMISE
    state, actions = watched([beside_two(4.0, 0.10, 0.8, 0.5)], state)
    after = state.tenants["victim"].response
    assert after is not None
    assert after.level > PROMISE, "it was seen to make 0.99 alone, and never less"
    assert actions.broken == ("victim",)
