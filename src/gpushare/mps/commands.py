"""The commands of nvidia-cuda-mps-control as values: text, and parser of the answer (docs/facts.md 5, 10, 11)."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, TypeVar

from gpushare.mps.errors import CommandRefusedError, DaemonDownError, MpsError, NotSentError

T = TypeVar("T")

NO_DAEMON: Final = "Cannot find MPS control daemon process"
NOT_SENT: Final = "Cannot send command to MPS control daemon process"  # seen on an H200, one call in a hundred
_REFUSALS: Final = re.compile(
    r"insufficient privileges|invalid|not found|no such|unknown|unrecogni[sz]ed|cannot|failed|error|usage",
    re.IGNORECASE,
)


class ServerState(StrEnum):
    """State of an MPS server as get_server_status prints it."""

    INITIALIZING = "INITIALIZING"
    ACTIVE = "ACTIVE"
    FAULT = "FAULT"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class PsEntry:
    """One line of `ps`: a client and the server it is connected to."""

    pid: int
    client_id: int
    server_pid: int
    device: str
    command: str


@dataclass(frozen=True, slots=True)
class Command(Generic[T]):
    """One command: its text and the parser of its answer."""

    text: str
    parse: Callable[[str], T]


def check(answer: str) -> str:
    """Return the answer, unless it is a refusal.

    Raises:
        DaemonDownError: the program found no daemon.
        CommandRefusedError: the daemon refused; the message is its own.
    """
    text = answer.strip()
    _check_sent(text)
    if _REFUSALS.search(text):
        raise CommandRefusedError(text)
    return text


def _check_sent(text: str) -> None:
    if NO_DAEMON in text:
        raise DaemonDownError(text)
    if NOT_SENT in text:
        raise NotSentError(text)


def _pids(answer: str) -> tuple[int, ...]:
    lines = check(answer).split()
    if not all(word.isdigit() for word in lines):
        raise MpsError(f"not a list of pids: {answer.strip()[:200]!r}", retryable=True)
    return tuple(int(word) for word in lines)


def _done(answer: str) -> None:
    check(answer)


def _percentage(answer: str) -> float:
    text = check(answer)
    try:
        return float(text.split()[-1])
    except (ValueError, IndexError):
        raise MpsError(f"not a percentage: {text[:200]!r}", retryable=True) from None


def _state(answer: str) -> ServerState:
    _check_sent(answer)
    return next((state for state in ServerState if state in answer.upper()), ServerState.UNKNOWN)


def _ps(answer: str) -> tuple[PsEntry, ...]:
    _check_sent(answer)
    entries = []
    for line in answer.splitlines():
        words = line.split(None, 5)
        if len(words) >= 4 and words[0].isdigit() and words[1].isdigit() and words[2].isdigit():
            command = words[5] if len(words) > 5 else ""
            entries.append(PsEntry(int(words[0]), int(words[1]), int(words[2]), words[3], command.strip()))
    return tuple(entries)


def _number(value: int, low: int, high: int, what: str) -> int:
    if not low <= value <= high:
        raise CommandRefusedError(f"{what} {value} is not {low} to {high}")
    return value


def server_list() -> Command[tuple[int, ...]]:
    """List the pids of the running servers."""
    return Command("get_server_list", _pids)


def server_status(server_pid: int) -> Command[ServerState]:
    """Get the state of one server."""
    return Command(f"get_server_status {server_pid:d}", _state)


def start_server(uid: int) -> Command[None]:
    """Start a server for a uid before any client connects (docs/facts.md 16)."""
    return Command(f"start_server -uid {uid:d}", _done)


def shutdown_server(server_pid: int, *, force: bool = False) -> Command[None]:
    """End one server; `force` ends its clients with it."""
    return Command(f"shutdown_server {server_pid:d}" + (" -f" if force else ""), _done)


def client_list(server_pid: int) -> Command[tuple[int, ...]]:
    """List the pids of a server's clients."""
    return Command(f"get_client_list {server_pid:d}", _pids)


def ps() -> Command[tuple[PsEntry, ...]]:
    """List all clients with their servers."""
    return Command("ps", _ps)


def terminate_client(server_pid: int, client_pid: int) -> Command[None]:
    """End one client; during large matrix products its neighbours end with it (docs/facts.md 5, 35)."""
    return Command(f"terminate_client {server_pid:d} {client_pid:d}", _done)


def get_default_active_thread_percentage() -> Command[float]:
    """Get the thread percentage of a client that asks for none."""
    return Command("get_default_active_thread_percentage", _percentage)


def set_default_active_thread_percentage(percentage: int) -> Command[None]:
    """Change the thread percentage of a client that asks for none; not a ceiling (docs/facts.md 11)."""
    return Command(
        f"set_default_active_thread_percentage {_number(percentage, 1, 100, 'thread percentage')}", _done
    )


def get_active_thread_percentage(server_pid: int) -> Command[float]:
    """Get a server's ceiling, percent."""
    return Command(f"get_active_thread_percentage {server_pid:d}", _percentage)


def set_active_thread_percentage(server_pid: int, percentage: int) -> Command[None]:
    """Change a server's ceiling; it applies to clients that connect from now on (docs/facts.md 5, 11)."""
    value = _number(percentage, 1, 100, "thread percentage")

    def confirmed(answer: str) -> None:
        # The daemon prints the value in force afterwards. A value that it does not accept changes nothing and
        # causes no error.
        if f"{value}.0" not in check(answer).split():
            raise CommandRefusedError(f"asked for {value}%, in force is {answer.strip()}")

    return Command(f"set_active_thread_percentage {server_pid:d} {value}", confirmed)


def set_default_device_pinned_mem_limit(device: int, limit_mib: int) -> Command[None]:
    """Change the default memory limit of servers started from now on."""
    value = _number(limit_mib, 1, 2**31, "memory limit in MiB")
    return Command(f"set_default_device_pinned_mem_limit {device:d} {value}M", _done)


def set_device_pinned_mem_limit(server_pid: int, device: int, limit_mib: int) -> Command[None]:
    """Change a server's memory ceiling; it applies to each client that connects from now on (docs/facts.md 11)."""
    value = _number(limit_mib, 1, 2**31, "memory limit in MiB")
    return Command(f"set_device_pinned_mem_limit {server_pid:d} {device:d} {value}M", _done)


def get_device_pinned_mem_limit(server_pid: int, device: int) -> Command[str]:
    """Get a server's memory ceiling as the daemon prints it."""
    return Command(f"get_device_pinned_mem_limit {server_pid:d} {device:d}", check)


def set_default_client_priority(priority: int) -> Command[None]:
    """Set the priority of new clients: 0 normal, 1 below; best effort, not a limit (docs/facts.md 18)."""
    return Command(f"set_default_client_priority {_number(priority, 0, 1, 'client priority')}", _done)


def device_query() -> Command[str]:
    """Get the daemon's description of its devices, as printed."""
    return Command("device_query", str.strip)


def quit_daemon(timeout_seconds: int | None = None) -> Command[None]:
    """End the daemon; with a timeout, it waits no longer than that for clients."""
    return Command("quit" if timeout_seconds is None else f"quit -t {timeout_seconds:d}", _done)
