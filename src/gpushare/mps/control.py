"""Python interface to nvidia-cuda-mps-control: typed, with timeouts, sync and async, without a shell.

The same two client classes drive the real program and the twin's; only `ControlProgram.executable` differs.
"""

import asyncio
import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol, TypeVar

from gpushare.mps import commands
from gpushare.mps.commands import Command, PsEntry, ServerState
from gpushare.mps.errors import ControlTimeoutError, DaemonDownError, MpsError, NotSentError
from gpushare.mps.identity import is_alive
from gpushare.mps.layout import GpuDirectory
from gpushare.mps.packets import is_listening

T = TypeVar("T")

REAL_EXECUTABLE: Final = ("nvidia-cuda-mps-control",)
TWIN_EXECUTABLE: Final = (
    sys.executable,
    "-I",
    "-S",
    str(Path(__file__).parents[1] / "twin" / "mps" / "control.py"),
)
# A silent connection blocks the daemon for 10 s (docs/facts.md 14), so a command may be served only after that
# time.
COMMAND_TIMEOUT_SECONDS: Final = 15.0
START_TIMEOUT_SECONDS: Final = 20.0
KILLED_SECONDS: Final = 5.0  # a killed program that hangs in the driver may take longer; we do not wait for it
# A busy daemon sometimes accepts a connection but no command (NotSentError): number of tries.
ATTEMPTS: Final = 4
PAUSE_SECONDS: Final = 0.02
PID_FILE: Final = "nvidia-cuda-mps-control.pid"
# Variables passed on from our own environment: search paths of programs and libraries, nothing of CUDA's.
_KEPT_ENVIRONMENT: Final = ("PATH", "LD_LIBRARY_PATH", "HOME", "LANG", "TZ", "GPUSHARE_TWIN_GPU")


@dataclass(frozen=True, slots=True)
class ControlProgram:
    """Command and environment to reach one GPU's daemon.

    Attributes:
        pipe: the daemon's private pipe directory.
        log: the daemon's private log directory.
        gpu_uuid: the one GPU that the daemon serves; None leaves the choice of devices to the environment.
        executable: argument list of the control program, the real one or the twin's.
        environment: further variables of the daemon, such as the twin's GPU.
    """

    pipe: Path
    log: Path
    gpu_uuid: str | None = None
    executable: tuple[str, ...] = REAL_EXECUTABLE
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        gpu: GpuDirectory,
        executable: tuple[str, ...] = REAL_EXECUTABLE,
        environment: Mapping[str, str] | None = None,
    ) -> "ControlProgram":
        """Return the control program for the daemon of one GPU directory."""
        return cls(gpu.pipe, gpu.log, gpu.uuid, executable, environment or {})

    @property
    def socket(self) -> Path:
        """Return the path of the daemon's `control` socket."""
        return self.pipe / "control"

    def env(self) -> dict[str, str]:
        """Return the environment of one call: of our own variables only the listed ones."""
        values = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
        values.update(CUDA_MPS_PIPE_DIRECTORY=str(self.pipe), CUDA_MPS_LOG_DIRECTORY=str(self.log))
        if self.gpu_uuid is not None:
            values["CUDA_VISIBLE_DEVICES"] = self.gpu_uuid
        values.update(self.environment)
        return values

    def daemon_pid(self) -> int | None:
        """Return the running daemon's pid, from its pid file or else its socket; None if it does not run."""
        try:
            pid = int((self.pipe / PID_FILE).read_text().strip())
        except (OSError, ValueError):
            pid = self._listener_pid() or 0
        return pid if pid > 0 and is_alive(pid) and self.is_listening() else None

    def is_listening(self) -> bool:
        """Return whether the daemon's socket accepts connections; costs the daemon one empty connection."""
        return is_listening(self.socket)

    def _listener_pid(self) -> int | None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(self.socket))
                return int(struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])
            except OSError:
                return None

    def log_tail(self, name: str = "server.log", lines: int = 50) -> tuple[str, ...]:
        """Return the last lines of the daemon's control.log or server.log; empty if it does not exist."""
        try:
            with (self.log / name).open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - 400 * lines))
                return tuple(file.read().decode(errors="replace").splitlines()[-lines:])
        except OSError:
            return ()


class MpsControl(Protocol):
    """One GPU's MPS daemon; the real program and the twin pass the same contract test.

    Every method raises MpsError: DaemonDownError without a daemon, ControlTimeoutError when it does not answer,
    CommandRefusedError when it refuses.
    """

    program: ControlProgram

    def run(self, command: Command[T]) -> T:
        """Run one command of `gpushare.mps.commands`."""
        ...

    def apply(self, changes: Sequence[Command[None]]) -> None:
        """Run several commands that change settings in one call, in their order."""
        ...

    def start(self) -> int:
        """Start the daemon in multi-user mode, or adopt the one that runs; return its pid."""
        ...

    def stop(self, timeout_seconds: float = 10.0) -> None:
        """End the daemon and all its clients; return when it is gone."""
        ...


class SyncMpsControl:
    """MpsControl that runs the control program once for each command."""

    def __init__(self, program: ControlProgram) -> None:
        self.program = program

    def run(self, command: Command[T], timeout_seconds: float = COMMAND_TIMEOUT_SECONDS) -> T:
        """Run one command and parse its answer."""
        for _ in range(ATTEMPTS - 1):
            with contextlib.suppress(NotSentError):
                return self._run_once(command, timeout_seconds)
            time.sleep(PAUSE_SECONDS)
        return self._run_once(command, timeout_seconds)

    def _run_once(self, command: Command[T], timeout_seconds: float) -> T:
        try:
            done = subprocess.run(
                self.program.executable,
                input=command.text + "\n",
                env=self.program.env(),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ControlTimeoutError(f"{command.text}: no answer within {timeout_seconds:g} s") from None
        except OSError as error:
            raise _not_runnable(self.program, error) from None
        return _answer(command, done.stdout, done.stderr)

    def apply(self, changes: Sequence[Command[None]]) -> None:
        """Run several commands that change settings in one call, in their order."""
        self.run(_joined(changes))

    def start(self) -> int:
        """Start the daemon in multi-user mode, or adopt the one that runs; return its pid."""
        if (pid := self.program.daemon_pid()) is not None:
            return pid
        _prepare(self.program)
        try:
            done = subprocess.run(
                (*self.program.executable, "-d", "-multiuser-server"),
                env=self.program.env(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=START_TIMEOUT_SECONDS,
                start_new_session=True,
                cwd="/",
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ControlTimeoutError(f"daemon did not start within {START_TIMEOUT_SECONDS:g} s") from None
        except OSError as error:
            raise _not_runnable(self.program, error) from None
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while (pid := self.program.daemon_pid()) is None:
            if time.monotonic() > deadline:
                tail = " / ".join(self.program.log_tail("control.log", 3))
                raise DaemonDownError(f"daemon did not come up (exit status {done.returncode}): {tail}")
            time.sleep(0.02)
        return pid

    def stop(self, timeout_seconds: float = 10.0) -> None:
        """End the daemon and all its clients; return when it is gone."""
        pid = self.program.daemon_pid()
        if pid is None:
            return
        with contextlib.suppress(MpsError):
            self.run(commands.quit_daemon(int(timeout_seconds)), timeout_seconds)
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + timeout_seconds / 2
            while is_alive(pid) and time.monotonic() < deadline:
                time.sleep(0.02)
            if not is_alive(pid):
                return
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def servers(self) -> tuple[int, ...]:
        """Return the pids of the running servers."""
        return self.run(commands.server_list())

    def clients(self) -> tuple[PsEntry, ...]:
        """Return all clients of all servers."""
        return self.run(commands.ps())

    def server_state(self, server_pid: int) -> ServerState:
        """Return the state of one server."""
        return self.run(commands.server_status(server_pid))


class AsyncMpsControl:
    """MpsControl for asyncio: nothing blocks the loop."""

    def __init__(self, program: ControlProgram) -> None:
        self.program = program
        self._sync = SyncMpsControl(program)

    async def run(self, command: Command[T], timeout_seconds: float = COMMAND_TIMEOUT_SECONDS) -> T:
        """Run one command and parse its answer."""
        for _ in range(ATTEMPTS - 1):
            with contextlib.suppress(NotSentError):
                return await self._run_once(command, timeout_seconds)
            await asyncio.sleep(PAUSE_SECONDS)
        return await self._run_once(command, timeout_seconds)

    async def _run_once(self, command: Command[T], timeout_seconds: float) -> T:
        try:
            process = await asyncio.create_subprocess_exec(
                *self.program.executable,
                env=self.program.env(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            raise _not_runnable(self.program, error) from None
        try:
            async with asyncio.timeout(timeout_seconds):
                out, err = await process.communicate(command.text.encode() + b"\n")
        except TimeoutError:
            raise ControlTimeoutError(f"{command.text}: no answer within {timeout_seconds:g} s") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(KILLED_SECONDS):
                        await process.wait()
        return _answer(command, out.decode(errors="replace"), err.decode(errors="replace"))

    async def apply(self, changes: Sequence[Command[None]]) -> None:
        """Run several commands that change settings in one call, in their order."""
        await self.run(_joined(changes))

    async def start(self) -> int:
        """Start the daemon in multi-user mode, or adopt the one that runs; return its pid."""
        return await asyncio.to_thread(self._sync.start)

    async def stop(self, timeout_seconds: float = 10.0) -> None:
        """End the daemon and all its clients; return when it is gone."""
        await asyncio.to_thread(self._sync.stop, timeout_seconds)

    async def servers(self) -> tuple[int, ...]:
        """Return the pids of the running servers."""
        return await self.run(commands.server_list())

    async def clients(self) -> tuple[PsEntry, ...]:
        """Return all clients of all servers."""
        return await self.run(commands.ps())

    async def server_state(self, server_pid: int) -> ServerState:
        """Return the state of one server."""
        return await self.run(commands.server_status(server_pid))


def _joined(changes: Sequence[Command[None]]) -> Command[None]:
    def parse(answer: str) -> None:
        # Answers have no separator between them; each command searches all of them for what it needs.
        for change in changes:
            change.parse(answer)

    return Command("\n".join(change.text for change in changes), parse)


def _answer(command: Command[T], out: str, err: str) -> T:
    # The exit status does not tell whether the command worked; the program prints failures, on either stream.
    text = out if out.strip() else err
    try:
        return command.parse(text)
    except MpsError as error:
        error.args = (f"{command.text}: {error}",)
        raise


def _not_runnable(program: ControlProgram, error: OSError) -> MpsError:
    return MpsError(f"cannot run {program.executable[0]}: {error}", retryable=False)


def _prepare(program: ControlProgram) -> None:
    """Make the directories, and remove a killed daemon's files from them, which would prevent a new one."""
    for directory in (program.pipe, program.log):
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o700)
    for name in ("control", "control_privileged", "control_lock", PID_FILE):
        (program.pipe / name).unlink(missing_ok=True)
