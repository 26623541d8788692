"""Actions on one GPU's MPS from outside the gate: find its daemon, end clients."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gpushare.mps import commands
from gpushare.mps.control import REAL_EXECUTABLE, TWIN_EXECUTABLE, AsyncMpsControl, ControlProgram, SyncMpsControl
from gpushare.mps.ending import Endings, EndingStep, clients_being_ended
from gpushare.mps.errors import MpsError
from gpushare.mps.identity import ends_with, is_alive, is_namespace_init
from gpushare.mps.layout import GpuDirectory, status_reader

LOOK_SECONDS: Final = 0.1  # between two looks at clients that drain


GATE_SECONDS: Final = 30.0
"""How long a client is left to the gate that is ending it. That takes up to 3.5 s to drain and 4 s for the server
(gpushare.mps.ending, gpushare.mps.terminating), and twice more if something continues the client meanwhile."""


@dataclass(frozen=True, slots=True)
class EndResult:
    """Result of ending clients.

    Attributes:
        pids: the ended ones; by_gate: those of them that the gate was ending already.
        refused: those that could not be ended, with the reason.
        gone: those that had ended since the gate listed them.
    """

    pids: tuple[int, ...] = ()
    refused: tuple[tuple[int, str], ...] = ()
    by_gate: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()


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

    With a container's first process the kernel kills the whole container, so its other clients are ended too. If
    signals are not permitted, the daemon ends the clients; during large matrix products that ends their neighbours
    too (docs/facts.md 35).

    A client that the gate is ending is left to it for `GATE_SECONDS`: a second stop would keep it from answering
    the server, and a second kill would not wait for its kernel.
    """
    endings = endings or Endings()
    status = status_reader(gpu).read()
    known = {client.pid: client.start_ticks for client in (status.clients if status else ())}
    is_its_machine = status is not None and is_alive(status.gate_pid)
    ended: list[int] = []
    gone: list[int] = []
    refused = [(pid, "the gate lists no such client") for pid in pids if known.get(pid) is None]
    remaining = [pid for pid in pids if known.get(pid) is not None]
    for first in filter(is_namespace_init, tuple(remaining)):
        remaining += [pid for pid in known if pid not in remaining and known[pid] and ends_with(first, pid)]
    begun: set[int] = set()
    looks: Counter[int] = Counter()  # at which the gate was ending a client
    try:
        while remaining:
            looks.update(_of_gate(gpu, remaining, known))
            left = [pid for pid in remaining if 0 < looks[pid] <= GATE_SECONDS / LOOK_SECONDS]
            for pid in left:
                endings.leave(pid)
                begun.add(pid)
            for pid in list(remaining):
                if pid in left and is_alive(pid, known[pid]):
                    continue
                step = endings.end(pid, known[pid])
                if step is EndingStep.REFUSED:
                    try:
                        asyncio.run(_terminate(AsyncMpsControl(program_of(gpu)), pid))
                        ended.append(pid)
                    except MpsError as error:
                        again = "; trying again may help" if error.retryable else ""
                        refused.append((pid, f"{error}{again}"))
                elif step is EndingStep.GONE and pid not in begun and is_its_machine:
                    gone.append(pid)
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
        for pid in _of_gate(gpu, remaining, known):
            endings.leave(pid)
        endings.let_go()
    return EndResult(tuple(ended), tuple(refused), tuple(pid for pid in ended if looks[pid]), tuple(gone))


def _of_gate(gpu: GpuDirectory, pids: Sequence[int], start_ticks: Mapping[int, int | None]) -> list[int]:
    """Return those of the clients that the gate is ending."""
    begun = clients_being_ended(gpu.endings)
    return [pid for pid in pids if pid in begun and begun[pid] == start_ticks[pid]]


async def _terminate(control: AsyncMpsControl, pid: int) -> None:
    servers = await control.servers()
    if not servers:
        raise MpsError("no MPS server runs", retryable=True)
    await control.run(commands.terminate_client(servers[0], pid))


def sync_control(gpu: GpuDirectory) -> SyncMpsControl:
    """Return the synchronous client of a GPU's daemon."""
    return SyncMpsControl(program_of(gpu))
