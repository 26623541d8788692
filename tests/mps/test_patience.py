import asyncio
import threading

import pytest

from gpushare.mps.patience import HangingError, PatientCaller

from .conftest import eventually


async def test_a_hanging_call_blocks_nobody_and_is_not_repeated_meanwhile():
    """Before: the gate's loop stood still for as long as the driver did."""
    caller, release, calls = PatientCaller(), threading.Event(), []

    def hangs() -> int:
        calls.append(1)
        release.wait(120)
        return 1

    with pytest.raises(HangingError, match="no answer within"):
        await caller.call(hangs, 0.01)
    for _ in range(10):
        with pytest.raises(HangingError, match="the call before hangs"):
            await caller.call(hangs, 120)
    assert len(calls) == 1
    assert caller.hangs_seconds > 0
    release.set()
    await eventually(lambda: caller.hangs_seconds == 0, "it came back")
    assert await caller.call(lambda: 7, 120) == 7


async def test_callers_at_the_same_time_take_turns():
    caller = PatientCaller()
    assert sorted(await asyncio.gather(*(caller.call(lambda n=n: n, 120) for n in range(5)))) == [0, 1, 2, 3, 4]


async def test_what_the_call_raises_is_the_callers():
    def fails() -> None:
        raise OSError("no driver")

    caller = PatientCaller()
    with pytest.raises(OSError, match="no driver"):
        await caller.call(fails, 120)
    assert caller.hangs_seconds == 0
