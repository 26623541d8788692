"""The twin's MPS server: clients with the ceilings they connected under, their memory, and their progress.

The server sends each client four pipes and a zero byte, and the client sends its credentials. Until then the
server serves no client; if the client leaves before, or closes a pipe, the server never serves again, as the real
one (docs/facts.md 37). Then clients exchange JSON packets on the socket they were given: `attach`, `alloc`,
`free`, `launch`, `fault`; they get `attached`, `allocated`, `refused`, a `tick` a second with their progress, and
`ended` when the server ends them.
"""

import contextlib
import json
import os
import select
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gpushare.core.api import MAX_CLIENTS_PER_GPU
from gpushare.core.gpu import ComputeMode, Counters, GpuInfo
from gpushare.mps.identity import PROC, RunState, is_alive, is_traced, run_state_of
from gpushare.mps.layout import write_atomically
from gpushare.mps.packets import CREDENTIALS, DESCRIPTOR
from gpushare.twin.contention import Plant, TwinLoad
from gpushare.twin.mps.state import MODE_FILE, OUTSIDE_COMM, REFUSAL, TwinClient, TwinState

TICK_SECONDS: Final = 1.0
LOOK_SECONDS: Final = 0.05  # between two looks at which clients the throttle has frozen
OUTSIDE_SECONDS: Final = 0.25  # between two searches for processes outside MPS, which a driver lists at once
# Memory that a CUDA context takes from a client's limit: 4,096 MiB read as 3,971 free (recipe gpu-cluster.md).
CONTEXT_MIB: Final = 125
FAULT_LINGER_SECONDS: Final = 10.0  # a client that does not go away after a fault is ended by then
OUT_OF_MEMORY: Final = "CUDA_ERROR_OUT_OF_MEMORY: out of memory"
# Tensor-pipe use from which terminate_client is modelled as a fault (docs/facts.md 35).
PRODUCTS: Final = 0.85
BUSY: Final = "CUDA-capable device(s) is/are busy or unavailable"  # docs/facts.md 9
ILLEGAL_ACCESS: Final = "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered"
MPS_LOST: Final = "CUDA_ERROR_MPS_RPC_FAILURE: connection to the MPS server was lost"
MAX_PACKET: Final = 65536
PIPES: Final = 4
KEPT_PROCESSES: Final = 1024


@dataclass(frozen=True, slots=True)
class Grant:
    """Limits in force when a client connected: daemon default, then the server's ceilings (docs/facts.md 11)."""

    default_percentage: float
    ceiling_percentage: float
    ceiling_mib: int


@dataclass(slots=True)
class _ConnectedClient:
    socket: socket.socket
    grant: Grant
    pid: int = 0
    sender: int = 0  # process that sent the first message
    context: int = 0  # number within its process; 0 is its first connection
    workload: str = ""
    solo: Counters = field(default_factory=Counters)
    solo_rate: float = 0.0
    percentage: float = 100.0
    sm_count: int = 0
    limit_mib: int = 0
    used_mib: int = 0
    progress: float = 0.0
    is_stopped: bool = False
    progressed: float = 0.0  # since its last tick: seconds of running alone
    ticked_at: float = 0.0
    kernel_until: float = 0.0  # when the longest kernel that it launched is over
    pipes: tuple[int, ...] = ()  # our ends
    has_spoken: bool = False


def nobody_stops(pid: int) -> bool:  # noqa: ARG001 - stands in for StoppedTenants.is_stopped
    """Return False: no process is ever frozen."""
    return False


def visible_sms(sm_count: int, percentage: float) -> int:
    """Return the SMs that a client sees under a cap: pairs, rounded down, at least 8.

    Measured with 132 SMs: 20% is 26, 10% is 12, 5% is 8 (facts.md 7, 11).
    """
    return max(8, int(sm_count * percentage / 100) // 2 * 2)


class TwinServer:
    """Clients of one simulated GPU; thread-safe, its own thread runs `run`.

    A client whose pod is frozen makes no progress, and the others run as the model predicts without it.
    What was queued on the GPU before (docs/facts.md 25) is not simulated: it evens out over a cycle.

    Args:
        is_stopped: whether a process is frozen now, by pid.
    """

    def __init__(
        self,
        gpu: GpuInfo,
        model: Plant,
        state_file: Path,
        log: Callable[[str], None],
        is_stopped: Callable[[int], bool] = nobody_stops,
    ) -> None:
        self.gpu, self._model, self._state_file, self._log = gpu, model, state_file, log
        self._is_stopped = is_stopped
        self._counters = Counters()
        self._counted: dict[str, float] = {}
        self._counted_at = time.monotonic()
        self._lock = threading.RLock()
        self._selector = selectors.DefaultSelector()
        self._clients: list[_ConnectedClient] = []
        self._faulted: list[tuple[float, socket.socket]] = []
        self._next_id = 0
        self.pid: int | None = None
        self.state = ""
        self.thread_ceiling: float | None = None
        self.memory_ceiling_mib: int | None = None
        self.default_memory_mib = gpu.memory_mib
        self.default_priority = 0
        self._closed = self._waits_in_vain = False
        self._numbers: dict[int, int] = {}  # next context number of each process that has attached
        self._outside: tuple[int, ...] = ()
        self._refused: set[int] = set()  # of those that still run

    def start(self, pid: int) -> None:
        """Start the server: it accepts clients, without ceilings at first."""
        with self._lock:
            self.pid, self.state = pid, "ACTIVE"
            self.thread_ceiling = self.memory_ceiling_mib = None
            self._waits_in_vain = False

    def stop(self) -> None:
        """Stop the server, which ends every client."""
        with self._lock:
            self.pid, self.state, self._waits_in_vain = None, "", False
            for client in list(self._clients):
                self._drop(client)
            for _, lingering in self._faulted:
                lingering.close()
            self._faulted.clear()

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self.stop()

    def ceilings(self) -> tuple[float, int]:
        """Return the thread percentage and the memory in MiB that apply to the next client."""
        return self.thread_ceiling or 100.0, self.memory_ceiling_mib or self.default_memory_mib

    def client_pids(self) -> tuple[int, ...]:
        """Return the pids of the attached clients."""
        with self._lock:
            return tuple(dict.fromkeys(client.pid for client in self._clients if client.pid))

    def ps(self) -> str:
        """Return the table that `ps` prints."""
        lines = ["PID       ID        SERVER         DEVICE                    NAMESPACE      COMMAND        "]
        with self._lock:
            of_process = {client.pid: client for client in reversed(self._clients) if client.pid}
            for number, client in enumerate(reversed(of_process.values())):
                lines.append(
                    f"{client.pid:<9} {number:<9} {self.pid:<14} {self.gpu.uuid[:22]:<25} {4026531836:<14} "
                    f"{client.workload}"
                )
        return "\n".join(lines) + "\n"

    def device_query(self) -> str:
        """Return the table that `device_query` prints."""
        header = "Device Ordinal  PCI IDs        UUID                                      Name         Attributes"
        table = f"{header}\n0               0000:00.06.00  {self.gpu.uuid}  {self.gpu.model}  N/A\n"
        return f"Default\n{table}" + (f"\nServer {self.pid}\n{table}" if self.pid else "")

    @property
    def is_waiting(self) -> bool:
        """Return whether it waits for a client's first message, perhaps for ever, serving no other."""
        with self._lock:
            return self._waits_in_vain or any(not client.has_spoken for client in self._clients)

    def admit(self, connection: socket.socket, grant: Grant) -> None:
        """Take the socket of a process, which becomes a client when it attaches."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        connection.setblocking(False)
        with self._lock:
            client = _ConnectedClient(connection, grant, pipes=_send_pipes(connection))
            self._clients.append(client)
            self._selector.register(connection, selectors.EVENT_READ, client)

    def withdraw(self, connection: socket.socket) -> None:
        """Forget one that was admitted, and that its process did not get."""
        with self._lock:
            for client in [each for each in self._clients if each.socket is connection]:
                client.has_spoken = True
                self._drop(client)

    def terminate(self, pid: int) -> bool:
        """End one client; False when it is not there. While it launches products the others fall with it."""
        with self._lock:
            found = [client for client in self._clients if client.pid == pid]
            for client in found:
                _tell(client.socket, {"event": "ended", "error": "terminated by terminate_client"})
                self._drop(client)
            is_held = run_state_of(pid) is RunState.STOPPED or is_traced(pid)
            launches = not is_held and not any(client.is_stopped for client in found)
            if launches and any((client.solo.any_tensor_util or 0.0) >= PRODUCTS for client in found):
                self.fault()
            return bool(found)

    def fault(self) -> None:
        """End every client of the server, as an illegal access does (docs/facts.md 4)."""
        with self._lock:
            if self.pid is None:
                return
            self.state = "FAULT"
            self._log_fault()
            now = time.monotonic()
            for client in list(self._clients):
                _tell(client.socket, {"event": "ended", "error": ILLEGAL_ACCESS})
                self._selector.unregister(client.socket)
                self._clients.remove(client)
                self._log_exit(client)
                _close(client.pipes)
                with contextlib.suppress(OSError):
                    client.socket.shutdown(socket.SHUT_WR)
                self._faulted.append((now, client.socket))

    def _log_fault(self) -> None:
        """Log as the real server does: it names some client, then lists all that the error reached."""
        pids = self.client_pids()
        if pids:
            self._log(f"Client {{PID: {pids[0]}, Context: 1}} encountered a fatal GPU error.")
        self._log("Server is handling a fatal GPU error.")
        self._log("The following client process have a sticky error set:")
        for pid in pids:
            self._log(str(pid))

    def run(self) -> None:
        """Serve clients until closed; a tick a second."""
        next_tick = next_look = next_search = time.monotonic()
        while not self._closed:
            for key, _ in self._selector.select(LOOK_SECONDS):
                with self._lock:
                    if key.data in self._clients:
                        self._receive(key.data)
            with self._lock:
                self._settle_fault()
                if time.monotonic() >= next_look:
                    next_look = time.monotonic() + LOOK_SECONDS
                    self._look_who_stopped()
                if time.monotonic() >= next_search:
                    next_search = time.monotonic() + OUTSIDE_SECONDS
                    self._look_who_is_outside()
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + TICK_SECONDS
                    self._tick()

    def _receive(self, client: _ConnectedClient) -> None:
        try:
            if not client.has_spoken:
                self._hear(client)
                return
            try:
                data, ancillary, _, _ = client.socket.recvmsg(MAX_PACKET, socket.CMSG_SPACE(12))
            except ConnectionResetError:  # it left with ticks unread
                data, ancillary = b"", []
            if not data:
                self._leave(client)
                return
            message = json.loads(data)
            answer = self._handle(client, message, _sender(ancillary))
        except BlockingIOError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            _tell(client.socket, {"event": "ended", "error": f"bad request: {error}"})
            if is_alive(client.sender):
                self._drop(client)
            else:  # said in its place
                self._leave(client)
            return
        if answer is not None:
            _tell(client.socket, answer)
        if message.get("op") in {"attach", "alloc", "free"}:
            self._update()

    def _hear(self, client: _ConnectedClient) -> None:
        """Take a client's first message: any will do, since the kernel adds the credentials."""
        try:
            word, ancillary, _, _ = client.socket.recvmsg(MAX_PACKET, socket.CMSG_SPACE(12))
        except BlockingIOError:
            return
        except OSError:  # it left, with pipes unread
            word, ancillary = b"", []
        client.has_spoken = True
        if not word or _is_broken(client.pipes):
            self._waits_in_vain = True
            self._log("User did not send valid credentials")
        if word != CREDENTIALS or self._waits_in_vain:
            self._drop(client)
        else:
            client.sender = _sender(ancillary)
            client.context = self._numbers.get(client.sender, 0)
            if len(self._numbers) > KEPT_PROCESSES:
                self._numbers = {pid: number for pid, number in self._numbers.items() if is_alive(pid)}
            self._numbers[client.sender] = client.context + 1
            self._log(f"Client {{PID: {client.sender}, Context ID: {client.context}}} connected")

    def _handle(self, client: _ConnectedClient, message: dict[str, Any], sender: int) -> dict[str, Any] | None:
        match message["op"]:
            case "query":
                return {"event": "device", "uuid": self.gpu.uuid, "model": self.gpu.model}
            case "attach":
                return self._attach(client, message, sender)
            case "alloc":
                wanted = int(message["mib"])
                in_use = sum(c.used_mib for c in self._clients)
                own = sum(c.used_mib for c in self._clients if c.pid == client.pid)
                if own + wanted > client.limit_mib or in_use + wanted > self.gpu.memory_mib:
                    free = max(0, min(client.limit_mib - own, self.gpu.memory_mib - in_use))
                    return {"event": "refused", "error": OUT_OF_MEMORY, "free_mib": free}
                client.used_mib += wanted
                return {"event": "allocated", "used_mib": client.used_mib}
            case "free":
                client.used_mib = max(CONTEXT_MIB, client.used_mib - int(message["mib"]))
                return {"event": "allocated", "used_mib": client.used_mib}
            case "launch":
                client.kernel_until = max(client.kernel_until, time.monotonic() + float(message["seconds"]))
                return None
            case "fault":
                self.fault()
                return None
            case other:
                raise ValueError(f"unknown operation {other!r}")

    def _attach(self, client: _ConnectedClient, message: dict[str, Any], sender: int) -> dict[str, Any]:
        if self.state != "ACTIVE" or len(self.client_pids()) >= MAX_CLIENTS_PER_GPU:
            return {"event": "refused", "error": BUSY}
        asked_percentage = message.get("percentage") or client.grant.default_percentage
        asked_mib = message.get("limit_mib") or self.gpu.memory_mib
        client.limit_mib = min(int(asked_mib), client.grant.ceiling_mib, self.gpu.memory_mib)
        if client.limit_mib < CONTEXT_MIB:
            return {"event": "refused", "error": BUSY}  # as seen on an H200: not CUDA's out of memory
        client.percentage = min(float(asked_percentage), client.grant.ceiling_percentage)
        client.sm_count = visible_sms(self.gpu.sm_count, client.percentage)
        client.solo = Counters(**message["counters"])
        client.solo_rate, client.workload = float(message["iterations_per_s"]), str(message["workload"])[:64]
        client.used_mib, client.pid = CONTEXT_MIB, sender
        client.ticked_at = time.monotonic()
        return {
            "event": "attached",
            "pid": sender,
            "uuid": self.gpu.uuid,
            "sms": client.sm_count,
            "limit_mib": client.limit_mib,
            "percentage": client.percentage,
        }

    def _leave(self, client: _ConnectedClient) -> None:
        """Drop a client that ended; if that was within a kernel, it takes the others along (docs/facts.md 35)."""
        self._drop(client)
        if time.monotonic() < client.kernel_until:
            self.fault()

    def _drop(self, client: _ConnectedClient) -> None:
        if client not in self._clients:
            return
        self._clients.remove(client)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client.socket)
        client.socket.close()
        _close(client.pipes)
        self._log_exit(client)
        if client.pid:
            self._update()

    def _log_exit(self, client: _ConnectedClient) -> None:
        if not client.context:  # a process's last connection speaks for it
            return
        left = sum(each.sender == client.sender and bool(each.context) for each in self._clients)
        self._log(
            f"Client {{PID: {client.sender}, Context ID: {client.context}}} exiting. "
            f"Number of active client contexts is {left}."
        )
        if not left:
            self._log(f"Client process {client.sender} disconnected")

    def _settle_fault(self) -> None:
        """Return to ACTIVE once the faulted clients' connections are closed (docs/facts.md 4)."""
        if self.state != "FAULT":
            return
        remaining = []
        for since, lingering in self._faulted:
            try:
                gone = lingering.recv(MAX_PACKET) == b""
            except BlockingIOError:
                gone = False
            except OSError:
                gone = True
            if gone or time.monotonic() - since > FAULT_LINGER_SECONDS:
                lingering.close()
            else:
                remaining.append((since, lingering))
        self._faulted = remaining
        if not remaining:
            self.state = "ACTIVE"
            self._update()

    def _look_who_stopped(self) -> None:
        changed = False
        for client in self._clients:
            if client.pid and (stopped := self._is_stopped(client.pid)) != client.is_stopped:
                client.is_stopped, changed = stopped, True
        if changed:
            self._update()

    def _update(self) -> None:
        attached = [client for client in self._clients if client.pid]
        self._count(attached)
        running = [client for client in attached if not client.is_stopped]
        loads = [TwinLoad(c.solo, max(1, round(c.percentage)), c.solo_rate or None, c.workload) for c in running]
        progress = self._model(loads)
        for client in attached:
            client.progress = 0.0
        for client, ratio in zip(running, progress, strict=True):
            client.progress = ratio
        self._counters = self._model.counters(loads, progress)
        self._write_state(attached)

    def _count(self, attached: list[_ConnectedClient]) -> None:
        """Add up what the device's counters read, and each client's progress, since the last change."""
        now = time.monotonic()
        seconds, self._counted_at = now - self._counted_at, now
        for name, value in self._counters.as_dict().items():
            self._counted[name] = self._counted.get(name, 0.0) + value * seconds
        for client in attached:
            client.progressed += client.progress * seconds

    def _tick(self) -> None:
        self._update()
        for client in list(self._clients):
            if client.pid:
                seconds, client.ticked_at = self._counted_at - client.ticked_at, self._counted_at
                progress, client.progressed = client.progressed / max(seconds, 1e-3), 0.0
                rate = client.solo_rate * progress
                _tell(client.socket, {"event": "tick", "progress": progress, "iterations_per_s": rate})

    def _look_who_is_outside(self) -> None:
        outside = self._processes_outside()
        if self.pid is not None and self._is_exclusive():  # the server has the GPU; who was there before stays
            refused = set(outside) - set(self._outside)
            for pid in refused - self._refused:  # once: a program that ends has no handler any more
                with contextlib.suppress(OSError):
                    os.kill(pid, REFUSAL)
            outside, self._refused = tuple(pid for pid in outside if pid not in refused), refused
        if outside != self._outside:
            self._outside = outside
            self._update()

    def _is_exclusive(self) -> bool:
        try:
            return self._state_file.with_name(MODE_FILE).read_text() == ComputeMode.EXCLUSIVE_PROCESS
        except OSError:
            return False

    def _processes_outside(self) -> tuple[int, ...]:
        """Return the processes that use this GPU without MPS, found by their name and the GPU's UUID."""
        found = []
        for entry in PROC.iterdir():
            with contextlib.suppress(OSError):
                if (
                    entry.name.isdigit()
                    and (entry / "comm").read_bytes().strip() == OUTSIDE_COMM.encode()
                    and self.gpu.uuid.encode() in (entry / "environ").read_bytes()
                ):
                    found.append(int(entry.name))
        return tuple(found)

    def _write_state(self, attached: list[_ConnectedClient]) -> None:
        clients = [
            TwinClient(
                c.pid,
                c.workload,
                True,
                round(c.percentage),
                c.sm_count,
                c.limit_mib,
                c.used_mib,
                c.progress,
                c.solo_rate * c.progress,
            )
            for c in attached
        ]
        clients += [
            TwinClient(pid, "", False, 100, self.gpu.sm_count, self.gpu.memory_mib, CONTEXT_MIB, 0.0, 0.0)
            for pid in self._outside
        ]
        state = TwinState(
            self.gpu.uuid,
            self.gpu.model,
            self.gpu.memory_mib,
            self.gpu.sm_count,
            time.time(),
            os.getpid(),
            self.pid,
            self.state,
            self._counters,
            sum(c.memory_used_mib for c in clients),
            tuple(clients),
            dict(self._counted),
            self._counted_at,
        )
        with contextlib.suppress(OSError):
            write_atomically(self._state_file, state.to_json())


def _sender(ancillary: list[tuple[int, int, bytes]]) -> int:
    """Return the pid of a packet's sender, as reported by the kernel."""
    return next((struct.unpack("3i", d)[0] for _, t, d in ancillary if t == socket.SCM_CREDENTIALS), 0)


def _send_pipes(connection: socket.socket) -> tuple[int, ...]:
    """Send the reading ends of four pipes, then a zero byte; return the writing ends."""
    ends = []
    for _ in range(PIPES):
        read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            socket.send_fds(connection, [DESCRIPTOR], [read])
            ends.append(write)
        except OSError:  # the kernel carries no more, or the client has left already, which is found at its socket
            os.close(write)
        finally:
            os.close(read)
    with contextlib.suppress(OSError):
        connection.send(bytes(1))
    return tuple(ends)


def _is_broken(pipes: tuple[int, ...]) -> bool:
    """Return whether the other end of one of these pipes is closed."""
    poll = select.poll()
    for each in pipes:
        poll.register(each, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _close(pipes: tuple[int, ...]) -> None:
    for each in pipes:
        with contextlib.suppress(OSError):
            os.close(each)


def _tell(connection: socket.socket, message: dict[str, Any]) -> None:
    # A client that does not read loses messages, not the others their time.
    with contextlib.suppress(OSError):
        connection.send(json.dumps(message).encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
