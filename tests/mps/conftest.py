import asyncio
import contextlib
import dataclasses
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpushare.mps import commands
from gpushare.mps.contexts import ContextLog
from gpushare.mps.control import TWIN_EXECUTABLE, AsyncMpsControl, ControlProgram, SyncMpsControl
from gpushare.mps.gate import Backend, Gate
from gpushare.mps.host import listen
from gpushare.mps.layout import Decisions, GpuDirectory, PodDecision, write_decisions
from gpushare.mps.ledger import ClientLedger
from gpushare.mps.packets import HELLO
from gpushare.mps.policy import CeilingPolicy
from gpushare.mps.status import GateState, HoldReason
from gpushare.twin.contention import WORKLOADS
from gpushare.twin.gpus import parse_simulated
from gpushare.twin.mps.client import TwinContext
from gpushare.twin.mps.memory import TwinMemory

SRC = Path(__file__).parents[2] / "src"
PATIENCE = 60.0  # seconds that a loaded machine may take for anything here


def until(condition: Callable[[], object], what: str, patience: float = PATIENCE) -> None:
    """Wait for real processes; says what did not happen."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, f"not within {patience} s: {what}"
        time.sleep(0.01)


async def eventually(condition: Callable[[], object], what: str, patience: float = PATIENCE) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, f"not within {patience} s: {what}"
        await asyncio.sleep(0.01)


def is_stopped(pid: int) -> bool:
    """Whether a signal stopped the process."""
    return state_of(pid) == "T"


def state_of(pid: int) -> str:
    """The letter of the process's first thread."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


# A tenant's main thread may end while another thread goes on computing: 60 is exit, of this thread alone.
HEADLESS = """
import ctypes, threading, time
def work():
    while True:
        time.sleep(0.01)
threading.Thread(target=work).start()
ctypes.CDLL(None).syscall(60, 0)
"""


@pytest.fixture
def headless():
    """A process whose first thread has exited."""
    if platform.machine() != "x86_64":
        pytest.skip("the number of the system call is x86_64's")
    process = subprocess.Popen([sys.executable, "-c", HEADLESS], stdin=subprocess.DEVNULL)
    try:
        until(lambda: state_of(process.pid) == "Z", "its first thread has exited")
        assert process.poll() is None
        yield process
    finally:
        process.kill()
        process.wait(60)


@pytest.fixture
def short_path():
    """A directory whose name leaves room for a socket's (108 bytes at most)."""
    path = Path(tempfile.mkdtemp(prefix="gs", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def twin_gpu(short_path):
    info = parse_simulated("H200:1", "test")[0]
    gpu = GpuDirectory.of(short_path, info.uuid)
    gpu.create()
    return gpu


def twin_program(gpu: GpuDirectory) -> ControlProgram:
    info = dataclasses.asdict(parse_simulated("H200:1", "test")[0])
    return ControlProgram.of(gpu, TWIN_EXECUTABLE, {"GPUSHARE_TWIN_GPU": json.dumps(info)})


@pytest.fixture
def twin(twin_gpu):
    """A running twin daemon's control, without a server yet."""
    control = SyncMpsControl(twin_program(twin_gpu))
    control.start()
    yield control
    control.stop(2.0)


class TenantProcess:
    """A tenant of the twin as its own process; `lines` are what it logged."""

    def __init__(self, directory: Path, *arguments: str, env: dict[str, str] | None = None) -> None:
        descriptor, name = tempfile.mkstemp(prefix="tenant", dir=directory.parent.parent)
        self.log = Path(name)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpushare.twin.mps.tenant", *arguments],
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": str(SRC),
                "CUDA_MPS_PIPE_DIRECTORY": str(directory),
                **(env or {}),
            },
            stdout=descriptor,
            stderr=descriptor,
            stdin=subprocess.DEVNULL,
        )
        os.close(descriptor)

    @property
    def pid(self) -> int:
        return self.process.pid

    def text(self) -> str:
        return self.log.read_text()

    def is_connected(self) -> bool:
        return "connected after" in self.text()

    def value(self, name: str) -> str:
        found = [word.partition("=")[2] for word in self.text().split() if word.startswith(f"{name}=")]
        assert found, f"no {name} in {self.text()!r}"
        return found[-1]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@pytest.fixture
def tenants():
    """Starts tenants and ends what is left of them."""
    started: list[TenantProcess] = []

    def start(directory: Path, *arguments: str, env: dict[str, str] | None = None) -> TenantProcess:
        tenant = TenantProcess(directory, *arguments, env=env)
        started.append(tenant)
        return tenant

    yield start
    for tenant in started:
        tenant.end()


def decide(gpu: GpuDirectory, *, processes: int = 1, **pods: tuple[int, int]) -> None:
    """Write decisions: pod uid -> (thread percentage, memory in MiB), for pods of so many processes each."""
    decisions = {uid: PodDecision(*ceiling, processes=processes) for uid, ceiling in pods.items()}
    write_decisions(gpu, Decisions(decisions))


@contextlib.contextmanager
def raw_connection(path: Path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(PATIENCE)
        connection.connect(str(path))
        yield connection


class Stage:
    """A gate, its daemon and what the tests say of pids."""

    def __init__(self, gpu, server_pid: int) -> None:
        self.gpu, self.server_pid = gpu, server_pid
        self.pods: dict[int, str] = {}
        self.default_pod: str | None = None
        self.control = AsyncMpsControl(twin_program(gpu))
        contexts = ContextLog(gpu.log / "server.log")
        self.ledger = ClientLedger(TwinMemory(gpu), identify=self.identify, contexts=contexts)
        self.trouble: list[Exception] = []
        self.gate = Gate(
            self.control, CeilingPolicy(gpu), self.ledger, on_trouble=self.trouble.append, identify=self.identify
        )

    def identify(self, pid: int) -> str | None:
        return self.pods.get(pid, self.default_pod)

    async def look(self) -> tuple[int, ...]:
        """What the keeper does once a second."""
        self.ledger.observe_memory(asyncio.get_running_loop().time())
        clients = await self.control.run(commands.client_list(self.server_pid))
        return self.ledger.note_clients(clients, self.gate.current_pid)

    def reasons(self) -> dict[int, HoldReason]:
        return {waiting.pid: waiting.reason for waiting in self.gate.held()}


@pytest.fixture
async def stage(twin, twin_gpu):
    twin.run(commands.start_server(0))
    # As after a self-test, the server's log has told of a client.
    TwinContext({"CUDA_MPS_PIPE_DIRECTORY": str(twin_gpu.pipe)}, WORKLOADS["latency-probe"], PATIENCE).close()
    stage = Stage(twin_gpu, twin.servers()[0])
    await stage.look()
    listener = listen(twin_gpu)
    task = asyncio.create_task(stage.gate.serve(listener))
    stage.gate.set_backend(Backend(GateState.ACTIVE, stage.server_pid))
    yield stage
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    listener.close()


async def speak(path, *packets: bytes) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setblocking(False)
    connection.connect(str(path))
    loop = asyncio.get_running_loop()
    assert await loop.sock_recv(connection, 100) == HELLO
    for packet in packets:
        connection.send(packet)
    return connection
