"""Waits that end together: when they end beside rounds and without, on an event loop whose time is virtual."""

import asyncio
import itertools
import selectors
from collections.abc import Awaitable, Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.runtime.wakeups import LATE_RATIO, MOST_LATE_SECONDS, JointWakeups


class VirtualSelector(selectors.SelectSelector):
    """Lets the time pass for which the loop would wait."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or 0.0
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while everybody waits."""

    def __init__(self) -> None:
        self._virtual = VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run(scene: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await scene()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())


def now() -> float:
    return asyncio.get_running_loop().time()


async def rounds(wakeups: JointWakeups, lengths: Sequence[float], at: list[float]) -> None:
    """Rounds after these times; each says when the next one comes."""
    for length, following in itertools.pairwise((*lengths, lengths[-1])):
        await asyncio.sleep(length)
        at.append(now())
        wakeups.wake(following)


async def looks(wakeups: JointWakeups, seconds: float, begins_at: float, at: list[float]) -> None:
    """A task that looks at something once in so many seconds."""
    await asyncio.sleep(begins_at)
    while True:
        at.append(now())
        await wakeups.sleep(seconds)


async def watched(
    lengths: Sequence[float], tasks: Sequence[tuple[float, float]]
) -> tuple[list[float], list[list[float]]]:
    """When the rounds were, and each task's looks; a task is (seconds between looks, begins at)."""
    wakeups, round_times = JointWakeups(), list[float]()
    look_times: list[list[float]] = [[] for _ in tasks]
    running = [
        asyncio.create_task(looks(wakeups, seconds, begins_at, at))
        for (seconds, begins_at), at in zip(tasks, look_times, strict=True)
    ]
    await rounds(wakeups, lengths, round_times)
    for _ in range(5):
        await asyncio.sleep(0)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return round_times, look_times


def test_looks_once_a_second_follow_the_rounds_whenever_they_began() -> None:
    async def scene() -> None:
        round_times, look_times = await watched([1.0] * 6, [(1.0, 0.1), (1.0, 0.6), (1.0, 0.999)])
        for at in look_times:
            assert at[1:] == round_times
        jumped, looked = await watched([1.0, 1.0, 0.45, 1.0, 1.0], [(1.0, 0.1)])
        assert looked[0][-3:] == jumped[-3:], "rounds whose phase changes are followed too"

    run(scene)


def test_a_look_that_is_due_in_several_rounds_skips_the_others() -> None:
    async def scene() -> None:
        round_times, [seldom] = await watched([1.0] * 12, [(5.0, 0.3)])
        assert seldom[1:] == pytest.approx([5.0, 10.0])
        assert set(seldom[1:]) <= set(round_times)

    run(scene)


@given(
    st.lists(st.sampled_from([0.2, 0.45, 0.5, 1.0, 1.03, 7.0]), min_size=3, max_size=20),
    st.sampled_from([0.05, 0.5, 1.0, 5.0]),
    st.floats(0, 1),
)
def test_no_wait_is_longer_than_asked_but_for_the_grace(
    lengths: list[float], seconds: float, begins_at: float
) -> None:
    async def scene() -> None:
        _, [at] = await watched(lengths, [(seconds, begins_at)])
        waits = [after - before for before, after in itertools.pairwise(at)]
        assert all(each <= seconds + min(LATE_RATIO * seconds, MOST_LATE_SECONDS) + 1e-6 for each in waits)

    run(scene)


def test_without_rounds_a_wait_ends_by_itself() -> None:
    async def scene() -> None:
        wakeups = JointWakeups()
        for seconds in (0.05, 1.0, 10.0):
            began = now()
            await wakeups.sleep(seconds)
            assert seconds <= now() - began <= seconds + min(LATE_RATIO * seconds, MOST_LATE_SECONDS) + 1e-6

    run(scene)


def test_an_event_ends_the_wait_for_it() -> None:
    async def scene() -> None:
        wakeups, event = JointWakeups(), asyncio.Event()
        asyncio.get_running_loop().call_later(0.25, event.set)
        await wakeups.wait(event, 1.0)
        assert (now(), event.is_set()) == (0.25, True)
        wakeups.wake(100.0)  # nobody waits any more

    run(scene)


def test_a_cancelled_wait_is_cancelled_even_in_the_moment_of_a_round() -> None:
    async def scene() -> None:
        wakeups = JointWakeups()
        task = asyncio.create_task(wakeups.sleep(1.0))
        await asyncio.sleep(0.5)
        wakeups.wake(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(scene)
