"""Number of contexts of each client, from the MPS server's log.

A process may make several contexts. The server lists the process once and gives each context the ceiling in force,
so the process gets its part of the GPU that many times: three contexts under 20% computed 2.99 times what one did
(docs/facts.md 37). No command returns the number; the log reports each context as it comes and goes. If the log
has unknown lines, as of another driver, each client counts as one.
"""

import re
from pathlib import Path
from typing import Final

from gpushare.mps.identity import is_alive
from gpushare.mps.logs import LIMIT_BYTES
from gpushare.mps.tail import Tail

_CAME: Final = re.compile(rb"Client \{PID: (\d+), Context ID: (\d+)\} connected")
_WENT: Final = re.compile(rb"Client \{PID: (\d+), Context ID: ([1-9]\d*)\} exiting")
_LEFT: Final = re.compile(rb"Client process (\d+) disconnected")
LOG_BYTES: Final = 2 * LIMIT_BYTES
KEPT_PROCESSES: Final = 1024  # only a bound; the latest are kept
_SERVER: Final = re.compile(rb"Server +(\d+)\]")


class ContextLog:
    """The contexts of one GPU's clients; `read` processes new lines of the log."""

    def __init__(self, path: Path) -> None:
        self._path, self._tail = path, Tail(path, most=LOG_BYTES)
        self._server: bytes | None = None
        self._contexts: dict[int, set[int]] = {}
        self._heard: dict[int, int] = {}
        self._whole: set[int] = set()  # processes whose whole time as a client the log shows
        self._tells = False  # whether the log of this driver reports contexts

    def read(self) -> None:
        """Process new lines; a line of another server means that the former server's clients are gone."""
        for line in self._tail.lines():
            if (server := _SERVER.search(line)) and server[1] != self._server:
                if self._server is not None:  # the first one is that of the contexts that `at_least` noted
                    self._contexts.clear()
                    self._heard.clear()
                    self._whole.clear()
                self._server = server[1]
            if came := _CAME.search(line):
                pid, number, self._tells = int(came[1]), int(came[2]), True
                self._heard[pid] = self._heard.pop(pid, 0) + 1
                if len(self._heard) > KEPT_PROCESSES:
                    del self._heard[next(iter(self._heard))]
                if number == 0:  # a process connected: a former one with its pid is gone
                    self._contexts.pop(pid, None)
                    self._whole.add(pid)
                    if len(self._whole) > KEPT_PROCESSES:
                        self._whole = set(filter(is_alive, self._whole))
                else:
                    self._contexts.setdefault(pid, set()).add(number)
                if len(self._contexts) > KEPT_PROCESSES:
                    self._contexts = {pid: numbers for pid, numbers in self._contexts.items() if is_alive(pid)}
            elif went := _WENT.search(line):
                contexts = self._contexts.get(int(went[1]), set())
                if (number := int(went[2])) in contexts:
                    contexts.discard(number)
                elif unnumbered := {each for each in contexts if each < 0}:
                    contexts.discard(unnumbered.pop())
                if not contexts:
                    self._contexts.pop(int(went[1]), None)
            elif left := _LEFT.search(line):
                self._contexts.pop(int(left[1]), None)
                self._whole.discard(int(left[1]))

    def at_least(self, pid: int, count: int) -> None:
        """Note contexts of a process that a former reader knew; the log that told of them may have been trimmed.

        No effect if the log shows when the process came. Contexts that it does not show get a negative number
        each; the first contexts to go whose numbers are unknown take them away.
        """
        if count <= 0 or pid in self._whole:
            return
        self._tells = True
        contexts = self._contexts.setdefault(pid, set())
        contexts.update(range(-1, len(contexts) - count - 1, -1))

    def heard(self, pid: int) -> int | None:
        """Return how many connections of a process the server log shows; None before it shows any."""
        return self._heard.get(pid, 0) if self._tells else None

    @property
    def read_bytes(self) -> int:
        """Return how far the log has been written by now, as far as its lines are whole."""
        self.read()
        return self._tail.position

    def has_heard(self, pid: int, since_bytes: int) -> bool | None:
        """Return whether the log shows a connection of a process after this position; None if it never shows any.

        A log that is shorter was shortened meanwhile, and all of it counts.
        """
        self.read()
        if not self._tells:
            return None
        tail = Tail(self._path, most=LOG_BYTES)
        tail.seek(since_bytes)
        return any((came := _CAME.search(line)) and int(came[1]) == pid for line in tail.lines())

    def count(self, pid: int) -> int:
        """Return how many contexts a process has; 0 if the log shows none."""
        return len(self._contexts.get(pid, ()))
