"""Values that an event loop computes for another thread."""

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpushare.runtime.onloop import ComputedOnLoop, LoopStuckError

SOON = 60.0


@pytest.fixture
async def other() -> AsyncIterator[ThreadPoolExecutor]:
    """The other thread."""
    with ThreadPoolExecutor(1) as executor:
        yield executor


async def test_a_value_is_computed_in_the_loops_thread(other: ThreadPoolExecutor) -> None:
    ask = ComputedOnLoop(threading.get_ident)
    loop = asyncio.get_running_loop()
    assert await loop.run_in_executor(other, ask) == threading.get_ident()
    assert await loop.run_in_executor(other, ask) == threading.get_ident()


async def test_what_computing_raises_is_raised_where_it_was_asked(other: ThreadPoolExecutor) -> None:
    def fail() -> None:
        raise TimeoutError("not in time")

    with pytest.raises(TimeoutError, match="not in time"):
        await asyncio.get_running_loop().run_in_executor(other, ComputedOnLoop(fail))


async def test_a_stuck_loop_is_waited_for_once(other: ThreadPoolExecutor) -> None:
    counted = iter(range(1, 10))
    ask = ComputedOnLoop(lambda: next(counted), wait_seconds=0.01)
    first, second = other.submit(ask), other.submit(ask)
    assert "stuck for 0.01 s" in str(first.exception(SOON))  # this blocks the loop
    assert str(second.exception(SOON)) == "the event loop is still stuck"
    await asyncio.sleep(0)  # the loop runs again, and has no backlog
    ask = ComputedOnLoop(lambda: next(counted))
    assert await asyncio.get_running_loop().run_in_executor(other, ask) == 2


async def test_who_waits_is_released_when_the_loop_ends(
    other: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()
    loop = asyncio.get_running_loop()
    ask = ComputedOnLoop(lambda: None, wait_seconds=SOON)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "call_soon_threadsafe", lambda *_: asked.set())
        waiting = other.submit(ask)
        assert asked.wait(SOON)
    ask.close()
    with pytest.raises(LoopStuckError, match="is ending"):
        waiting.result(SOON)  # the loop waits for that thread, as at its end
    with pytest.raises(LoopStuckError, match="is ending"):
        await loop.run_in_executor(other, ask)
