"""Turn a job's own log (work.py) into its record; pure, without files or clocks."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class JobStory:
    """One job's log, in seconds since its run began; None: it did not get that far.

    Attributes:
        progress: (seconds, iterations, seconds of work), the first at `ready` with nothing done.
        waited: seconds until it was its turn on the GPU, its libraries loaded.
        ms, work_ms: of each request, from its arrival to its answer, and the work of it.
        beside_rate: iterations per second of a second program of the same process; None: there was none.
    """

    started: float | None = None
    ready: float | None = None
    ended: float | None = None
    count: int | None = None
    progress: list[tuple[float, float, float]] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)
    work_ms: list[float] = field(default_factory=list)
    beside_rate: float | None = None
    waited: float = 0.0

    def as_record(self) -> dict[str, Any]:
        """Return it for the file."""
        return {
            "started": _rounded(self.started),
            "ready": _rounded(self.ready),
            "ended": _rounded(self.ended),
            "count": self.count,
            "progress": [[round(value, 3) for value in point] for point in self.progress],
            "ms": self.ms,
            "work_ms": self.work_ms,
        }


def story(lines: Iterable[str], began_wall: float) -> JobStory:
    """Read a log; what is no line of ours is passed over.

    Args:
        began_wall: when the run began, seconds since 1970 by the clock of the job's machine.
    """
    found = JobStory()
    offset = 0.0
    for text in lines:
        line = _event(text)
        if line is None:
            continue
        if line["event"] == "start":
            offset = line["wall"] - line["at"] - began_wall
            found.started = line["at"] + offset
        elif line["event"] == "loaded":
            found.waited = -line["at"]
        elif line["event"] == "turn":
            found.waited = round(found.waited + line["at"], 4)
        elif line["event"] == "ready":
            found.ready = line["at"] + offset
            found.progress.append((found.ready, 0.0, 0.0))
        elif line["event"] == "progress":
            found.progress.append((line["at"] + offset, line["count"], line["busy"]))
        elif line["event"] == "requests":
            found.ms += line["ms"]
            found.work_ms += line["work_ms"]
        elif line["event"] == "end":
            found.ended, found.count = line["at"] + offset, line["count"]
            found.beside_rate = line.get("beside_rate")
    return found


def _event(text: str) -> dict[str, Any] | None:
    if not text.startswith("{"):
        return None
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and "event" in line else None


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
