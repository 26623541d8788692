"""What a fault's log lines and the ledger show together: a sentence for tenants, and a pod that caused it."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpushare.mps.faultlog import Fault
from gpushare.mps.identity import is_alive
from gpushare.mps.ledger import ClientLedger, Presence


@dataclass(frozen=True, slots=True)
class FaultNews:
    """News of a fault for tenants.

    Attributes:
        sentence: for an event.
        pods: uids of the pods whose processes it ended, or the server turned away meanwhile.
        begun_by: the pod that caused it; None if unknown.
    """

    sentence: str
    pods: tuple[str, ...]
    begun_by: str | None


def news_of(fault: Fault, ledger: ClientLedger, *, read_before: float, now: float, unix_now: float) -> FaultNews:
    """Return what log and ledger show about a fault.

    Args:
        read_before: when the log was read before, in seconds of the ledger's clock, as is `now`.
        unix_now: the same moment in Unix time, as the log's stamps are.
    """
    earliest, latest = fault.span(now=now, unix_now=unix_now, read_before=read_before)
    clients = ledger.connected(earliest, latest)
    # Processes that the server names were clients, even if the line's stamp is too coarse to show it.
    clients += tuple(
        each
        for each in ledger.connected(min(earliest, read_before), now)
        if each.pid in fault.pids and each not in clients
    )
    hurt = (*clients, *ledger.lost_in_their_turn(earliest))  # who came meanwhile fails by it too
    return FaultNews(
        fault_sentence(fault, clients),
        tuple(dict.fromkeys(each.pod_uid for each in hurt if each.pod_uid is not None)),
        killed_in_kernel(fault, clients),
    )


def fault_sentence(fault: Fault, clients: Sequence[Presence]) -> str:
    """Describe a fault for tenants, naming only the processes that the log names.

    Args:
        clients: processes connected when it began, by the ledger.
    """
    if len(fault.pids) > 1:
        return f"{fault.line} (in {len(fault.pids)} processes; the server does not tell which began it)"
    if fault.pids:
        pods = {client.pod_uid for client in clients if client.pid == fault.pids[0]} - {None}
        if len(pods) == 1:
            return f"{fault.line} (in process {fault.pids[0]} of pod {pods.pop()} alone)"
        return f"{fault.line} (in process {fault.pids[0]} alone)"
    if clients:
        connected = "1 process" if len(clients) == 1 else f"{len(clients)} processes"
        return f"{fault.line} (with {connected} connected; the server does not tell which began it)"
    return fault.line


def killed_in_kernel(fault: Fault, clients: Sequence[Presence]) -> str | None:
    """Return the pod whose process caused a fault by being killed within a kernel; None if unknown.

    The server lists the processes that a fault reached, without a killed one (gpushare.mps.faultlog). So a client
    that has ended and is not in that list was killed. If all such processes belong to one pod, that pod caused the
    fault. A process that still runs was just connecting or leaving, and caused nothing.

    Args:
        clients: processes connected when it began, by the ledger.
    """
    unlisted = {
        client.pod_uid
        for client in clients
        if client.listed and client.pid not in fault.pids and not is_alive(client.pid, client.start_ticks)
    }
    reached = {client.pod_uid for client in clients if client.pid in fault.pids} - unlisted
    return unlisted.pop() if reached and len(unlisted) == 1 else None
