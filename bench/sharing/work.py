"""Do one job's work and write its log: a fixed count of iterations, or of requests that arrive by themselves.

The log is JSON lines: `start`, `ready` (the program is built and warm: work begins), four times a second
`progress` (iterations so far, seconds of work so far), `requests` (milliseconds from a request's arrival to its
answer, and of those the work), `end`. One that takes turns says `loaded` and `turn` before `ready`. Seconds are of
the machine's monotonic clock, which `start` also gives as seconds since 1970.
"""

import contextlib
import fcntl
import json
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TextIO

SAY_SECONDS: Final = 0.25
_MOST_REQUESTS: Final = 500  # of one line
_LOADED: Final = ".loaded"
_OTHERS_SECONDS: Final = 60.0  # one that never loads does not keep the others waiting


@dataclass
class JobLog:
    """Writer of the log's lines."""

    file: TextIO
    monotonic: Callable[[], float] = time.monotonic
    stop: Path | None = None
    reported_at: float = 0.0
    looked: float = 0.0
    requests: list[tuple[float, float]] = field(default_factory=list)

    def say(self, event: str, **values: Any) -> None:
        """Write one line, at once."""
        self.file.write(json.dumps({"event": event, "at": round(self.monotonic(), 4), **values}) + "\n")
        self.file.flush()

    def progress(self, count: float, busy: float, *, now: bool = False) -> None:
        """Say how far it is, four times a second at most."""
        if now or self.monotonic() - self.reported_at >= SAY_SECONDS:
            self.reported_at = self.monotonic()
            self.say("progress", count=round(count, 3), busy=round(busy, 4))
        if self.requests and (now or len(self.requests) >= _MOST_REQUESTS):
            self.say(
                "requests",
                ms=[round(1000 * whole, 2) for whole, _ in self.requests],
                work_ms=[round(1000 * work, 2) for _, work in self.requests],
            )
            self.requests.clear()

    def is_over(self, until: float) -> bool:
        """Return whether the job must end before its work is done; check the file four times a second at most."""
        now = self.monotonic()
        if now > until or self.stop is None:
            return now > until
        if now - self.looked < SAY_SECONDS:
            return False
        self.looked = now
        return self.stop.exists()

    def request(self, whole: float, work: float) -> None:
        """Note one request."""
        self.requests.append((whole, work))


def serve(
    step: Callable[[], None],
    requests: int,
    rate: float,
    log: JobLog,
    *,
    seed: int,
    sleep: Callable[[float], None] = time.sleep,
    until: float = float("inf"),
) -> int:
    """Answer a number of requests of a Poisson process, one after the other; return how many were answered.

    Args:
        step: answers one request and returns when the answer is there.
        rate: of the requests, per second.
        until: monotonic time after which no request is begun.
    """
    chance = random.Random(seed)
    arrives = log.monotonic()
    busy, answered = 0.0, 0
    for _ in range(requests):
        arrives += chance.expovariate(rate)
        while (wait := arrives - log.monotonic()) > 0:
            log.progress(answered, busy)
            sleep(min(wait, SAY_SECONDS))
        began = log.monotonic()
        if log.is_over(until):
            break
        step()
        ended = log.monotonic()
        busy += ended - began
        answered += 1
        log.request(ended - arrives, ended - began)
        log.progress(answered, busy)
    log.progress(answered, busy, now=True)
    return answered


@contextlib.contextmanager
def turn(folder: Path, of: int, log: JobLog, sleep: Callable[[float], None] = time.sleep) -> Iterator[None]:
    """Wait until every job has loaded its libraries, then until no other works; keep the others waiting inside.

    Args:
        folder: the same for all of them, and new.
        of: how many they are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mine = folder / f"{socket.gethostname()}-{os.getpid()}"  # a pod's pids are its own
    mine.with_name(mine.name + _LOADED).touch()
    log.say("loaded")
    until = log.monotonic() + _OTHERS_SECONDS
    while sum(1 for path in folder.iterdir() if path.name.endswith(_LOADED)) < of and log.monotonic() < until:
        sleep(0.05)
    with (folder / "turn").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        log.say("turn")
        yield
