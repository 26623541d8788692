"""Actions on one GPU's MPS from outside the gate: find its daemon, end clients."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from gpushare.mps import commands
from gpushare.mps.control import REAL_EXECUTABLE, TWIN_EXECUTABLE, AsyncMpsControl, ControlProgram, SyncMpsControl
from gpushare.mps.ending import Endings, EndingStep
from gpushare.mps.errors import CommandRefusedError, MpsError
from gpushare.mps.layout import GpuDirectory, status_reader

LOOK_SECONDS: Final = 0.1  # between two looks at clients that drain


@dataclass(frozen=True, slots=True)
class EndResult:
    """Result of ending clients: the ended pids, and the pids that could not be ended, with the reason."""

    pids: tuple[int, ...] = ()
    refused: tuple[tuple[int, str], ...] = ()


def program_of(gpu: GpuDirectory) -> ControlProgram:
    """Return the control program of a directory: the twin's if a twin writes its state there, else the real."""
    return ControlProgram.of(gpu, TWIN_EXECUTABLE if gpu.twin_state.exists() else REAL_EXECUTABLE)


def clients_of_pod(gpu: GpuDirectory, pod_uid: str) -> tuple[int, ...]:
    """Return the pids of a pod's MPS clients as the gate last wrote them."""
    status = status_reader(gpu).read()
    return tuple(client.pid for client in status.clients if client.pod_uid == pod_uid) if status else ()


def end_clients(
    gpu: GpuDirectory,
    pids: Sequence[int],
    *,
    endings: Endings | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> EndResult:
    """Stop clients, give their kernels time to finish, and kill them, as the gate does; their neighbours go on.

    If signals are not permitted, the daemon ends the clients; during large matrix products that ends their
    neighbours too (docs/facts.md 35).

    Raises:
        MpsError: signals are not permitted, and the daemon does not answer.
    """
    endings = endings or Endings()
    status = status_reader(gpu).read()
    known = {client.pid: client.start_ticks for client in (status.clients if status else ())}
    ended: list[int] = []
    refused = [(pid, "the gate lists no such client") for pid in pids if known.get(pid) is None]
    remaining = [pid for pid in pids if known.get(pid) is not None]
    begun: set[int] = set()
    try:
        while remaining:
            for pid in list(remaining):
                step = endings.end(pid, known[pid])
                if step is EndingStep.REFUSED:
                    try:
                        asyncio.run(_terminate(AsyncMpsControl(program_of(gpu)), pid))
                        ended.append(pid)
                    except CommandRefusedError as error:
                        refused.append((pid, str(error)))
                elif step is EndingStep.GONE and pid not in begun:
                    refused.append((pid, "no such process is seen here: ask on the node or in the MPS host's pod"))
                elif step in {EndingStep.GONE, EndingStep.KILLED, EndingStep.DIES}:
                    ended.append(pid)
                else:
                    begun.add(pid)
                    continue
                remaining.remove(pid)
            if remaining:
                pause(LOOK_SECONDS)
    finally:
        endings.let_go()
    return EndResult(tuple(ended), tuple(refused))


async def _terminate(control: AsyncMpsControl, pid: int) -> None:
    servers = await control.servers()
    if not servers:
        raise MpsError("no MPS server runs", retryable=True)
    await control.run(commands.terminate_client(servers[0], pid))


def sync_control(gpu: GpuDirectory) -> SyncMpsControl:
    """Return the synchronous client of a GPU's daemon."""
    return SyncMpsControl(program_of(gpu))
