"""The loop of one GPU: what is done when a promise is broken, and what never is."""

from gpushare.core.api import JobClass
from gpushare.core.control import GpuWatch, WatchedTenant, WatchReason, WatchSettings, Window, watch

SETTINGS = WatchSettings()


def tenant(uid, progress, promise=0.5, job_class=JobClass.THROUGHPUT, **others):
    others = {"error": 0.03, "order": float(ord(uid[0])), **others}
    return WatchedTenant(uid, job_class, promise, progress, **others)


def watched(*windows, settings=SETTINGS, state=None, start=0.0):
    """Watch tuples of tenants, one window of a second each; return the last state, all actions."""
    state, seen = state or GpuWatch(), []
    for number, tenants in enumerate(windows, start=1):
        window = Window(start + number, tenants) if tenants is not None else None
        state, actions = watch(state, window, start + number, settings)
        seen.append(actions)
    return state, seen


def test_two_windows_below_a_promise_throttle_the_tenant_furthest_above_its_own():
    low = (tenant("a", 0.3), tenant("b", 0.7), tenant("c", 0.9))
    _, (first, second) = watched(low, low)
    assert not first.duties
    assert not first.broken
    assert second.broken == ("a",)
    assert 0.1 <= second.duties["c"] < second.duties.get("b", 1.0)
    assert [note.reason for note in second.notes][:2] == [WatchReason.PROMISE_BROKEN, WatchReason.THROTTLED]
    assert "0.30" in second.notes[0].message
    assert "0.50" in second.notes[0].message


def test_one_window_or_one_within_its_error_is_no_reason():
    low, well = (tenant("a", 0.3), tenant("b", 0.9)), (tenant("a", 0.6), tenant("b", 0.9))
    _, seen = watched(low, well, low, well, low, (tenant("a", None), tenant("b", 0.9)), low)
    assert not any(actions.duties or actions.broken for actions in seen)


def test_a_latency_pod_is_never_throttled():
    low = (tenant("a", 0.3), tenant("b", 0.9, job_class=JobClass.LATENCY))
    _, seen = watched(*[low] * 5)
    assert seen[-1].broken == ("a",)
    assert not any(actions.duties for actions in seen)
