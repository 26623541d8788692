"""How many contexts each client has, from the MPS server's log.

A process may make several contexts. The server lists it once, gives each context the ceiling in force, and so the
process that many times its part of the GPU: three contexts under 20% computed 2.99 times what one did
(docs/facts.md 37). No command tells their number; the log names each as it comes and goes. Of another driver's
log, whose lines are not known here, nothing is learnt, and each client counts as one.
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
KEPT_PROCESSES: Final = 1024  # a bound only; the latest
_SERVER: Final = re.compile(rb"Server +(\d+)\]")


class ContextLog:
    """The contexts of one GPU's clients; `read` takes what the server has logged since."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path, most=LOG_BYTES)
        self._server: bytes | None = None
        self._contexts: dict[int, set[int]] = {}
        self._heard: dict[int, int] = {}
        self._tells = False  # once one server has, the next of this driver does too

    def read(self) -> None:
        """Take new lines; those of another server mean that the former one's clients are gone."""
        for line in self._tail.lines():
            if (server := _SERVER.search(line)) and server[1] != self._server:
                self._server = server[1]
                self._contexts.clear()
                self._heard.clear()
            if came := _CAME.search(line):
                pid, number, self._tells = int(came[1]), int(came[2]), True
                self._heard[pid] = self._heard.pop(pid, 0) + 1
                if len(self._heard) > KEPT_PROCESSES:
                    del self._heard[next(iter(self._heard))]
                if number == 0:  # a process's first word: whoever had its pid before is gone
                    self._contexts.pop(pid, None)
                else:
                    self._contexts.setdefault(pid, set()).add(number)
                if len(self._contexts) > KEPT_PROCESSES:
                    self._contexts = {pid: numbers for pid, numbers in self._contexts.items() if is_alive(pid)}
            elif went := _WENT.search(line):
                contexts = self._contexts.get(int(went[1]), set())
                contexts.discard(int(went[2]))
                if not contexts:
                    self._contexts.pop(int(went[1]), None)
            elif left := _LEFT.search(line):
                self._contexts.pop(int(left[1]), None)

    def heard(self, pid: int) -> int | None:
        """Return how many first words of a process the server has heard; None where no log has told of any yet."""
        return self._heard.get(pid, 0) if self._tells else None

    def count(self, pid: int) -> int:
        """Return how many contexts a process has; 0 where the log tells of none."""
        return len(self._contexts.get(pid, ()))
