"""The CUDA driver's side of the handshake, for the twin's tenants and for tests (docs/facts.md 12)."""

import array
import contextlib
import json
import os
import select
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpushare.twin.contention import SimulatedWorkload

HELLO: Final = b"OUTBHELL\0"
CREDENTIALS: Final = b"OUTBCRED\0"
DESCRIPTOR: Final = b"OUTBCUFD\0"
COMPUTE_TYPE: Final = bytes.fromhex("02000000")
CONTROL_TYPE: Final = bytes.fromhex("04000000")
ACKNOWLEDGED: Final = bytes(4)
MAX_PACKET: Final = 65536
PIPES_SECONDS: Final = 1.0
DEFAULT_PIPE_DIRECTORY: Final = "/tmp/nvidia-mps"  # noqa: S108 (CUDA's default)


class NoMpsError(Exception):
    """No daemon, or it closed the connection: CUDA goes on without MPS, on all SMs (docs/facts.md 6, 15)."""


class CudaError(Exception):
    """Error that CUDA would return, with CUDA's text."""


@dataclass(frozen=True, slots=True)
class Attached:
    """The SMs that a client sees, and its memory limit."""

    pid: int
    gpu_uuid: str
    sm_count: int
    limit_mib: int
    thread_percentage: float


def control_path(environment: Mapping[str, str]) -> Path:
    """Return the socket that CUDA connects to."""
    return Path(environment.get("CUDA_MPS_PIPE_DIRECTORY", DEFAULT_PIPE_DIRECTORY)) / "control"


def connect(path: Path, timeout_seconds: float | None = None) -> socket.socket:
    """Connect and read the greeting; without a timeout as CUDA does: it waits for as long as it is held.

    Raises:
        NoMpsError: nobody listens, or the other side closed.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(timeout_seconds)
    try:
        connection.connect(str(path))
        if connection.recv(MAX_PACKET) != HELLO:
            raise NoMpsError("closed without a greeting")
    except OSError as error:
        connection.close()
        raise NoMpsError(str(error)) from None
    except NoMpsError:
        connection.close()
        raise
    return connection


def request_server(path: Path, timeout_seconds: float | None = None) -> socket.socket:
    """Make one compute connection: send credentials and type, and return the server's socket.

    Raises:
        NoMpsError: the other side closed.
    """
    with connect(path, timeout_seconds) as connection:
        try:
            connection.send(CREDENTIALS)
            connection.send(COMPUTE_TYPE)
            data, ancillary, _, _ = connection.recvmsg(MAX_PACKET, socket.CMSG_SPACE(16))
        except OSError as error:
            raise NoMpsError(str(error)) from None
        descriptors = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(payload[: len(payload) // 4 * 4])
        if data != DESCRIPTOR or len(descriptors) != 1:
            for descriptor in descriptors:
                os.close(descriptor)
            raise NoMpsError("closed before the server's socket came")
        server = socket.socket(fileno=descriptors[0])
        with contextlib.suppress(OSError):
            connection.send(ACKNOWLEDGED)
    return server


def introduce(server: socket.socket) -> tuple[int, ...]:
    """Receive the server's pipes and send the first message; the caller closes them after the answer.

    They arrive with the socket. A twin of an earlier release sends none and expects no first message.

    Raises:
        CudaError: the server is gone.
    """
    pipes: list[int] = []
    if not select.select([server], [], [], PIPES_SECONDS)[0]:
        return ()
    try:
        while True:
            data, descriptors, _, _ = socket.recv_fds(server, MAX_PACKET, 1)
            pipes += descriptors
            if data != DESCRIPTOR:
                break
        server.send(CREDENTIALS)
    except OSError as error:
        for each in pipes:
            os.close(each)
        raise CudaError(f"CUDA_ERROR_MPS_RPC_FAILURE: {error}") from None
    return tuple(pipes)


class TwinContext:
    """A CUDA context of the twin: three connections, then allocations and ticks."""

    def __init__(
        self, environment: Mapping[str, str], workload: SimulatedWorkload, timeout_seconds: float | None = None
    ) -> None:
        path = control_path(environment)
        connect(path, timeout_seconds).close()
        with request_server(path, timeout_seconds) as first:
            _ask(first, {"op": "query"})
        self._server = request_server(path, timeout_seconds)
        self._server.settimeout(timeout_seconds)
        answer = _ask(
            self._server,
            {
                "op": "attach",
                "workload": workload.name,
                "counters": workload.solo.as_dict(),
                "iterations_per_s": workload.iterations_per_s,
                "percentage": _percentage(environment.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")),
                "limit_mib": _limit_mib(environment.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")),
            },
        )
        if answer["event"] != "attached":
            self._server.close()
            raise CudaError(answer["error"])
        self.attached = Attached(
            answer["pid"], answer["uuid"], answer["sms"], answer["limit_mib"], answer["percentage"]
        )

    def fileno(self) -> int:
        """Return the server's socket, for select."""
        return self._server.fileno()

    def allocate(self, mib: int) -> None:
        """Take device memory.

        Raises:
            CudaError: beyond the limit, in CUDA's words; or the server ended this client.
        """
        answer = self._request({"op": "alloc", "mib": mib})
        if answer["event"] != "allocated":
            raise CudaError(f"{answer['error']} (tried {mib} MiB, {answer['free_mib']} MiB free)")

    def free(self, mib: int) -> None:
        """Free device memory."""
        self._request({"op": "free", "mib": mib})

    def launch(self, seconds: float) -> None:
        """Launch a kernel and do not wait for it; who is killed within it ends the other clients."""
        with contextlib.suppress(OSError):
            self._server.send(json.dumps({"op": "launch", "seconds": seconds}).encode())

    def fault(self) -> None:
        """Cause an access to an illegal address."""
        with contextlib.suppress(OSError):
            self._server.send(json.dumps({"op": "fault"}).encode())

    def tick(self, timeout_seconds: float | None = None) -> dict[str, Any]:
        """Wait for the next tick.

        Raises:
            CudaError: the server ended this client or is gone.
            TimeoutError: no tick came in time.
        """
        self._server.settimeout(timeout_seconds)
        while True:
            message = self._receive()
            if message["event"] == "tick":
                return message

    def close(self) -> None:
        """End the context."""
        self._server.close()

    def _request(self, message: dict[str, Any]) -> dict[str, Any]:
        self._server.settimeout(None)
        try:
            self._server.send(json.dumps(message).encode())
        except OSError as error:
            raise CudaError(f"CUDA_ERROR_MPS_RPC_FAILURE: {error}") from None
        while True:
            answer = self._receive()
            if answer["event"] != "tick":
                return answer

    def _receive(self) -> dict[str, Any]:
        try:
            data = self._server.recv(MAX_PACKET)
        except TimeoutError:
            raise
        except OSError as error:
            raise CudaError(f"CUDA_ERROR_MPS_RPC_FAILURE: {error}") from None
        if not data:
            raise CudaError("CUDA_ERROR_MPS_RPC_FAILURE: the MPS server is gone")
        message: dict[str, Any] = json.loads(data)
        if message["event"] == "ended":
            raise CudaError(message["error"])
        return message


def _ask(server: socket.socket, message: dict[str, Any]) -> dict[str, Any]:
    """Send the first message and the request; return the answer."""
    pipes = introduce(server)
    try:
        server.send(json.dumps(message).encode())
        data = server.recv(MAX_PACKET)
    except OSError as error:
        raise CudaError(f"CUDA_ERROR_MPS_RPC_FAILURE: {error}") from None
    finally:
        for each in pipes:
            os.close(each)
    if not data:
        raise CudaError("CUDA_ERROR_MPS_RPC_FAILURE: the MPS server is gone")
    answer: dict[str, Any] = json.loads(data)
    if answer["event"] == "ended":
        raise CudaError(answer["error"])
    return answer


def _percentage(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if 0 < value <= 100 else None


def _limit_mib(text: str | None) -> int | None:
    """Return the limit of device 0 in "0=4G" or "0=8192M", MiB; None if missing or unreadable."""
    for item in (text or "").split(","):
        device, _, amount = item.partition("=")
        unit = {"M": 1, "G": 1024}.get(amount[-1:])
        if device.strip() == "0" and unit and amount[:-1].isdigit():
            return int(amount[:-1]) * unit
    return None
