"""A task that runs as long as its process does not end without anybody noticing."""

import ast
import asyncio
from pathlib import Path

import pytest

from gpushare.runtime.tasks import TaskEndedError, end_if_asked, is_asked_to_end, without_end

ROOT = Path(__file__).resolve().parents[2]
# Tasks of a group that end by themselves, and the agent's, which are started again.
WITH_AN_END = {
    "self.read(uuid, plan)",
    "self._step(pods[uid], room)",
    "finish_handovers(self._copies, self._server_answered, self._ledger.has_heard)",
    "keep_running(name, run, self.state.counts.error)",
}


async def cancelled_from_within() -> None:
    lost = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(lost.cancel)
    await lost


async def returns() -> None:
    await asyncio.sleep(0)


async def for_ever() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(("work", "why"), [(cancelled_from_within, "was cancelled"), (returns, "has ended")])
async def test_a_group_ends_with_a_child_that_ends(work, why):
    async def run() -> None:
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(without_end("the gate", work()))
            group.create_task(without_end("its status", for_ever()))

    with pytest.raises(ExceptionGroup) as caught:
        await run()
    [error] = caught.value.exceptions
    assert isinstance(error, TaskEndedError)
    assert str(error).startswith(f"the gate {why}")


async def test_a_bare_group_goes_on_without_such_a_child():
    """That is why: if this fails, asyncio says it by itself now, and the module can go."""
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(cancelled_from_within())
        group.create_task(returns())
        await asyncio.sleep(0.01)


async def test_a_cancellation_that_a_library_lost_ends_the_task_all_the_same():
    """Python 3.11's `wait_for` returns what has come, though its task was cancelled in that turn of the loop."""
    has_come, rounds = asyncio.get_running_loop().create_future(), 0

    async def loop() -> None:
        nonlocal rounds
        while True:
            end_if_asked()
            rounds += 1
            try:
                await has_come
            except asyncio.CancelledError:
                continue

    task = asyncio.create_task(loop())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task}, timeout=60)
    assert task.cancelled()
    assert rounds == 1


async def test_a_failure_of_the_work_stays_what_it_is():
    async def fails() -> None:
        raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):
        await without_end("the gate", fails())


async def test_who_cancels_the_task_ends_it_as_usual():
    task = asyncio.create_task(without_end("the gate", for_ever()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_time_out_around_it_is_a_time_out():
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await without_end("the gate", for_ever())


async def test_only_a_cancellation_can_be_asked_for():
    assert not is_asked_to_end(ValueError())
    assert not is_asked_to_end(asyncio.CancelledError()), "nobody cancelled this test"


def test_every_endless_child_of_a_group_is_noticed_when_it_ends():
    """A new one is wrapped in `without_end`, or named above as one that ends by itself."""
    made = {
        ast.unparse(node.args[0])
        for room in ("src", "operator", "deviceplugin")
        for path in (ROOT / room).rglob("*.py")
        if "twin" not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "create_task"
        and ast.unparse(node.func.value) in {"group", "tasks"}
    }
    bare = {each for each in made if not each.startswith("without_end(")}
    assert bare == WITH_AN_END
    assert len(made) > 10
