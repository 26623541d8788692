"""What the threads of a process took, by name: processor time and wake-ups, from /proc."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROC = Path("/proc")


@dataclass(frozen=True)
class ThreadTime:
    """One thread.

    Attributes:
        name: "main" for the first one of its process.
        processor_ms: on a core; switches: times that it waited of its own will.
    """

    name: str
    processor_ms: float
    switches: int


Looked = dict[tuple[int, int], ThreadTime]


def thread_times(pids: Iterable[int], proc: Path = PROC) -> Looked:
    """Return what each thread took so far, by process and thread id; without those that end meanwhile."""
    found: Looked = {}
    for pid in pids:
        try:
            tasks = list((proc / str(pid) / "task").iterdir())
        except OSError:
            continue
        for task in tasks:
            try:
                lines = (task / "status").read_text().splitlines()
                milliseconds = int((task / "schedstat").read_text().split()[0]) / 1e6
            except OSError:
                continue
            values = dict(line.split(":", 1) for line in lines if ":" in line)
            name = "main" if int(task.name) == pid else values["Name"].strip()
            found[pid, int(task.name)] = ThreadTime(name, milliseconds, int(values["voluntary_ctxt_switches"]))
    return found


def each_second(before: Looked, after: Looked, seconds: float) -> dict[str, dict[str, Any]]:
    """Return what was spent in between by threads' names, the dearest first; who has ended by then is left out.

    Each name's `ms` and `switches` are sums, a second; `each_ms` are its threads, the dearest first.
    """
    spent: dict[str, list[ThreadTime]] = {}
    for key, now in after.items():
        was = before.get(key, ThreadTime(now.name, 0.0, 0))
        difference = ThreadTime(now.name, now.processor_ms - was.processor_ms, now.switches - was.switches)
        spent.setdefault(now.name, []).append(difference)
    rows = {
        name: {
            "ms": round(sum(each.processor_ms for each in threads) / seconds, 3),
            "switches": round(sum(each.switches for each in threads) / seconds, 1),
            "each_ms": sorted((round(each.processor_ms / seconds, 3) for each in threads), reverse=True),
        }
        for name, threads in spent.items()
    }
    return dict(sorted(rows.items(), key=lambda item: -item[1]["ms"]))
