"""Parts of the agent that fail are counted and started again; what ends the agent ends them."""

import ast
import asyncio
import inspect
import logging
from pathlib import Path
from typing import Any, cast

import pytest
from tests.deviceplugin.fakes import Clock, make_pod

from gpushare_deviceplugin import agent
from gpushare_deviceplugin.decisions import DecisionWriter
from gpushare_deviceplugin.keep_running import keep_running
from gpushare_deviceplugin.state import NodeState
from gpushare_deviceplugin.status import StatusWriter


async def test_a_part_that_fails_is_counted_told_and_started_again(caplog: pytest.LogCaptureFixture) -> None:
    errors: list[str] = []
    runs: list[int] = []
    works = asyncio.Event()

    async def part() -> None:
        runs.append(len(runs))
        if len(runs) < 3:
            raise ValueError(f"failure {len(runs)}")
        works.set()
        await asyncio.Event().wait()

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        kept = tasks.create_task(keep_running("loop", part, errors.append, pause_seconds=0.0))
        await works.wait()
        kept.cancel()
    assert (runs, errors) == ([0, 1, 2], ["loop", "loop"])
    told = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert [each.getMessage() for each in told] == ["part loop failed, starting it again"] * 2
    assert all(each.exc_info for each in told), "with the trace, or nobody can mend it"


async def test_a_part_that_returns_is_started_again_and_is_no_error() -> None:
    errors: list[str] = []
    twice = asyncio.Event()
    runs = 0

    async def part() -> None:
        nonlocal runs
        runs += 1
        if runs == 2:
            twice.set()

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        kept = tasks.create_task(keep_running("heap", part, errors.append, pause_seconds=0.0))
        await twice.wait()
        kept.cancel()
    assert errors == []


async def test_a_part_whose_own_work_was_cancelled_is_counted_and_started_again() -> None:
    """Before, the part was over for good, and nobody was told."""
    errors: list[str] = []
    again = asyncio.Event()

    async def part() -> None:
        if errors:
            again.set()
        lost = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(lost.cancel)
        await lost

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        kept = tasks.create_task(keep_running("loop", part, errors.append, pause_seconds=0.0))
        await again.wait()
        kept.cancel()
    assert set(errors) == {"loop"}


async def test_parts_that_fail_again_and_again_leave_nothing_behind(state: NodeState, tmp_path: Path) -> None:
    """Each run that ended stayed subscribed to the state's changes."""

    def fail(*_: object) -> Any:
        raise ValueError("odd")

    state.put_pod(make_pod())
    for _ in range(3):
        for part in (StatusWriter(state, fail, cast("Any", None), Clock()), DecisionWriter(state, tmp_path, fail)):
            with pytest.raises(ValueError, match="odd"):
                await part.run()
    assert not state._waiters


@pytest.mark.parametrize("end", [SystemExit(3), KeyboardInterrupt()])
async def test_what_ends_the_agent_ends_its_parts(end: BaseException) -> None:
    errors: list[str] = []

    async def part() -> None:
        raise end

    running = keep_running("loop", part, errors.append, pause_seconds=0.0)
    with pytest.raises(type(end)):
        running.send(None)
    assert errors == []


def test_every_task_of_the_agent_is_kept_running() -> None:
    """A task that the agent makes by itself would end unseen."""
    made = [
        ast.unparse(node.args[0])
        for node in ast.walk(ast.parse(inspect.getsource(agent)))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in {"create_task", "ensure_future"}
    ]
    assert made == ["keep_running(name, run, self.state.counts.error)"]
