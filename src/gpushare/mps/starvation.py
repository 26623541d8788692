"""How long a process could have run but got no CPU, so that a starved node does not use up its turn."""

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Final

from gpushare.mps.identity import PROC

MAX_THREADS: Final = 256  # bounds the work; a program that starts to use CUDA has few threads


def run_delays(pid: int, proc: Path = PROC) -> dict[str, float]:
    """Return how many seconds each thread of a process has waited for a CPU so far; empty if it is gone.

    Source: the second number of /proc/<pid>/task/<tid>/schedstat, in ns; empty if the kernel has no such file.
    """
    delays: dict[str, float] = {}
    try:
        for thread in islice((proc / str(pid) / "task").iterdir(), MAX_THREADS):
            delays[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return delays
    return delays


def starved_seconds(before: Mapping[str, float], now: Mapping[str, float]) -> float:
    """Return how long the most starved thread waited between two looks; new threads count from zero."""
    return max((delay - before.get(thread, 0.0) for thread, delay in now.items()), default=0.0)
