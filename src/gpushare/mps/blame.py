"""What a fault's log lines and the ledger show together: a sentence for tenants, and a pod that caused it."""

from collections.abc import Sequence

from gpushare.mps.faultlog import Fault
from gpushare.mps.identity import is_alive
from gpushare.mps.ledger import Presence


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
        return f"{fault.line} (with {len(clients)} processes connected; the server does not tell which began it)"
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
