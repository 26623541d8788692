import asyncio
import os
import socket
import sys
from pathlib import Path

import pytest

from gpushare.mps import AsyncMpsControl, ControlProgram, ControlTimeoutError, MpsError, SyncMpsControl, commands


def program(tmp_path: Path, *executable: str) -> ControlProgram:
    return ControlProgram(tmp_path / "pipe", tmp_path / "log", None, executable)


def test_a_program_that_is_not_there_is_an_error_that_no_retry_mends(tmp_path):
    missing = program(tmp_path, str(tmp_path / "missing"))
    for ask in (
        lambda: SyncMpsControl(missing).servers(),
        lambda: asyncio.run(AsyncMpsControl(missing).servers()),
    ):
        with pytest.raises(MpsError, match="cannot run") as error:
            ask()
        assert not error.value.retryable


def test_a_hung_program_ends_with_a_timeout_error(tmp_path):
    hung = program(tmp_path, sys.executable, "-c", "import time; time.sleep(60)")
    with pytest.raises(ControlTimeoutError, match=r"get_server_list: no answer within 0\.2 s") as error:
        SyncMpsControl(hung).run(commands.server_list(), 0.2)
    assert error.value.retryable
    with pytest.raises(ControlTimeoutError):
        asyncio.run(AsyncMpsControl(hung).run(commands.server_list(), 0.2))


def test_what_is_printed_on_either_stream_is_the_answer(tmp_path):
    talks = program(tmp_path, sys.executable, "-c", "import sys; sys.stderr.write('Insufficient privileges')")
    with pytest.raises(MpsError, match="get_server_list: Insufficient privileges"):
        SyncMpsControl(talks).servers()


def test_a_daemon_that_has_no_time_to_accept_is_one_all_the_same(tmp_path):
    """Where it counted as none, a second daemon would be started over its files."""
    busy = program(tmp_path, "none")
    busy.pipe.mkdir()
    (busy.pipe / "nvidia-cuda-mps-control.pid").write_text(str(os.getpid()))
    assert busy.daemon_pid() is None, "nothing listens"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as daemon:
        daemon.bind(str(busy.socket))
        daemon.listen(0)
        waiting = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        for one in waiting:
            one.setblocking(False)
        waiting[0].connect(str(busy.socket))
        with pytest.raises(BlockingIOError):
            waiting[1].connect(str(busy.socket))
        assert busy.is_listening()
        assert busy.daemon_pid() == os.getpid()
        for one in waiting:
            one.close()
