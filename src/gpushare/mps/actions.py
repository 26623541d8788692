"""Actions on one GPU's MPS from outside the gate: find its daemon, end a pod's clients cleanly."""

import asyncio
from dataclasses import dataclass

from gpushare.mps import commands
from gpushare.mps.control import REAL_EXECUTABLE, TWIN_EXECUTABLE, AsyncMpsControl, ControlProgram, SyncMpsControl
from gpushare.mps.errors import CommandRefusedError, MpsError
from gpushare.mps.layout import GpuDirectory, status_reader


@dataclass(frozen=True, slots=True)
class Ended:
    """Result of ending a pod's clients: pids ended, and pids that the daemon refused to end, with its message."""

    pids: tuple[int, ...] = ()
    refused: tuple[tuple[int, str], ...] = ()


def program_of(gpu: GpuDirectory) -> ControlProgram:
    """Return the control program of a directory: the twin's where a twin writes its state, else the real one."""
    return ControlProgram.of(gpu, TWIN_EXECUTABLE if gpu.twin_state.exists() else REAL_EXECUTABLE)


def clients_of_pod(gpu: GpuDirectory, pod_uid: str) -> tuple[int, ...]:
    """Return the pids of a pod's MPS clients as the gate last wrote them."""
    status = status_reader(gpu).read()
    return tuple(client.pid for client in status.clients if client.pod_uid == pod_uid) if status else ()


async def terminate_pod_clients(gpu: GpuDirectory, pod_uid: str) -> Ended:
    """End a pod's clients cleanly, unlike a kill of a busy client; its neighbours go on (docs/facts.md 5).

    Raises:
        MpsError: the daemon does not answer; nothing of the pod runs then, or will once it is back.
    """
    control = AsyncMpsControl(program_of(gpu))
    ended, refused = [], []
    for pid in clients_of_pod(gpu, pod_uid):
        try:
            await _terminate(control, pid)
            ended.append(pid)
        except CommandRefusedError as error:
            refused.append((pid, str(error)))
    return Ended(tuple(ended), tuple(refused))


async def _terminate(control: AsyncMpsControl, pid: int) -> None:
    servers = await control.servers()
    if not servers:
        raise MpsError("no MPS server runs", retryable=True)
    await control.run(commands.terminate_client(servers[0], pid))


def terminate_client(gpu: GpuDirectory, pid: int) -> None:
    """End one client cleanly, from synchronous code.

    Raises:
        MpsError: no server, or the daemon refused.
    """
    asyncio.run(_terminate(AsyncMpsControl(program_of(gpu)), pid))


def sync_control(gpu: GpuDirectory) -> SyncMpsControl:
    """Return the synchronous client of a GPU's daemon."""
    return SyncMpsControl(program_of(gpu))
