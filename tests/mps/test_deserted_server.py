"""A keeper that starts anew while the twin's server hangs: it replaces that server, with nobody to tell it."""

import asyncio
import contextlib
import dataclasses
import json
import time

import pytest

from gpushare.mps import keeper as keeping
from gpushare.mps.control import AsyncMpsControl, SyncMpsControl
from gpushare.mps.host import listen
from gpushare.mps.layout import GpuDirectory, status_reader
from gpushare.mps.status import GateState, GateStatus
from gpushare.twin.gpus import parse_simulated
from gpushare.twin.mps.client import request_server

from .conftest import PATIENCE, eventually, twin_program

pytestmark = pytest.mark.slow

DESERTED_SECONDS = 3.0
ANSWER_SECONDS = 6.0  # for which a command waits: a busy machine's twin needs some


class Hasty(AsyncMpsControl):
    """The twin's control, whose commands give up soon."""

    async def run(self, command, timeout_seconds=ANSWER_SECONDS):
        return await super().run(command, timeout_seconds)


@contextlib.asynccontextmanager
async def keeping_on(gpu: GpuDirectory, listener, copies=None, *, ends_strangers=True):
    [info] = parse_simulated("H200:1", "test")
    setup = keeping.setup_of(gpu, json.dumps(dataclasses.asdict(info)), ends_strangers=ends_strangers)
    kept = keeping.Keeper(gpu, dataclasses.replace(setup, control=Hasty(setup.control.program)), copies=copies)
    task = asyncio.create_task(kept.run(listener))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture
def gpu(twin_gpu):
    """One without a daemon: the keeper starts it."""
    yield twin_gpu
    SyncMpsControl(twin_program(twin_gpu)).stop(2.0)


async def test_a_restarted_keeper_replaces_a_server_that_hangs_after_the_usual_time(gpu, monkeypatch):
    monkeypatch.setattr(keeping, "DESERTED_SECONDS", DESERTED_SECONDS)
    status = status_reader(gpu)

    def now() -> GateStatus | None:
        return status.read()

    with contextlib.closing(listen(gpu)) as listener:
        async with keeping_on(gpu, listener):
            await eventually(lambda: now() and now().state is GateState.ACTIVE, "it serves", 2 * PATIENCE)
        before = now()
        # Somebody takes the server's socket and leaves without its first word (docs/facts.md 37).
        (await asyncio.to_thread(request_server, gpu.pipe / "control", PATIENCE)).close()
        began = time.monotonic()
        async with keeping_on(gpu, listener):
            await eventually(lambda: now().state is GateState.DOWN, "no answer", 2 * PATIENCE)
            await eventually(lambda: now().daemon_restarts > before.daemon_restarts, "another", 2 * PATIENCE)
            assert time.monotonic() - began >= DESERTED_SECONDS, "its silence counts from this keeper's start"
            await eventually(lambda: now().state is GateState.ACTIVE, "it serves again", 2 * PATIENCE)
            assert now().daemon_pid != before.daemon_pid
