"""What both sides of MpsControl promise: the twin's everywhere, the real one's where there is a GPU."""

import asyncio
import os
import shutil
import signal
import subprocess

import pytest

from gpushare.mps import (
    AsyncMpsControl,
    CommandRefusedError,
    ControlProgram,
    DaemonDownError,
    MpsError,
    SyncMpsControl,
    commands,
)
from gpushare.mps.commands import ServerState
from gpushare.mps.control import REAL_EXECUTABLE
from gpushare.mps.identity import is_alive
from gpushare.mps.layout import GpuDirectory

from .conftest import twin_program, until


def _real_program(short_path) -> ControlProgram:
    if shutil.which(REAL_EXECUTABLE[0]) is None or shutil.which("nvidia-smi") is None:
        pytest.skip("no NVIDIA GPU with MPS here")
    listed = subprocess.run(
        ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    uuids = [line for line in listed.stdout.split() if line.startswith("GPU-")]
    if not uuids:
        pytest.skip("no NVIDIA GPU here")
    gpu = GpuDirectory.of(short_path, uuids[0])
    gpu.create()
    return ControlProgram.of(gpu)


@pytest.fixture(params=["twin", pytest.param("real", marks=pytest.mark.gpu)])
def program(request, short_path, twin_gpu):
    return twin_program(twin_gpu) if request.param == "twin" else _real_program(short_path)


@pytest.fixture
def control(program):
    control = SyncMpsControl(program)
    yield control
    control.stop(5.0)


@pytest.fixture
def server(control):
    control.start()
    control.run(commands.start_server(0))
    until(
        lambda: control.servers() and control.server_state(control.servers()[0]) is ServerState.ACTIVE, "a server"
    )
    return control.servers()[0]


def test_without_a_daemon_every_command_says_so(control):
    assert control.program.daemon_pid() is None
    with pytest.raises(DaemonDownError):
        control.servers()


def test_start_adopts_what_runs_and_stop_leaves_nothing(control):
    pid = control.start()
    assert is_alive(pid)
    assert control.start() == pid == control.program.daemon_pid()
    assert control.servers() == ()
    control.stop()
    assert not is_alive(pid)
    assert control.program.daemon_pid() is None


def test_a_killed_daemon_can_be_started_again(control):
    pid = control.start()
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_alive(pid), "the daemon gone")
    assert control.program.daemon_pid() is None
    assert control.start() != pid


def test_a_server_starts_without_clients_and_stays(control, server):
    assert is_alive(server)
    assert control.run(commands.client_list(server)) == ()
    assert control.clients() == ()
    control.run(commands.start_server(0))
    assert control.servers() == (server,)


def test_thread_percentages_read_back(control, server):
    control.run(commands.set_active_thread_percentage(server, 20))
    assert control.run(commands.get_active_thread_percentage(server)) == 20
    control.run(commands.set_default_active_thread_percentage(60))
    assert control.run(commands.get_default_active_thread_percentage()) == 60


def test_several_changes_go_in_one_run(control, server):
    control.apply(
        [commands.set_active_thread_percentage(server, 30), commands.set_device_pinned_mem_limit(server, 0, 4096)]
    )
    assert control.run(commands.get_active_thread_percentage(server)) == 30


def test_what_is_not_there_is_refused(control, server):
    with pytest.raises(MpsError):
        control.run(commands.client_list(server + 100_000))
    with pytest.raises(CommandRefusedError):
        control.run(commands.Command("no_such_command", commands.check))


def test_async_says_the_same(control, server):
    async def ask():
        same = AsyncMpsControl(control.program)
        return await same.servers(), await same.server_state(server), await same.clients()

    assert asyncio.run(ask()) == ((server,), ServerState.ACTIVE, ())


def test_a_killed_server_is_gone_from_the_list(control, server):
    os.kill(server, signal.SIGKILL)
    until(lambda: server not in control.servers(), "the server gone")


def test_the_log_has_a_tail(control, server):
    assert control.program.log_tail("control.log", 5)
    assert control.program.log_tail("missing.log") == ()


def test_nothing_of_our_environment_reaches_the_daemon(control, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "10")
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in control.program.env()
    assert control.program.env()["CUDA_VISIBLE_DEVICES"] == control.program.gpu_uuid
