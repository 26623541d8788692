"""How long a process could have run and had no CPU: who is slow on a starved node does not sit in its turn."""

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Final

from gpushare.mps.identity import PROC

MAX_THREADS: Final = 256  # a bound on the work; a program that begins to use CUDA has few


def run_delays(pid: int, proc: Path = PROC) -> dict[str, float]:
    """Return how long each thread of a process has waited for a CPU in its life, seconds; empty when it is gone.

    Source: the second number of /proc/<pid>/task/<tid>/schedstat, ns; a kernel without it gives nothing.
    """
    delays: dict[str, float] = {}
    try:
        for thread in islice((proc / str(pid) / "task").iterdir(), MAX_THREADS):
            delays[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return delays
    return delays


def starved_seconds(before: Mapping[str, float], now: Mapping[str, float]) -> float:
    """Return how long the thread that was starved most waited between two looks; new threads count from zero."""
    return max((delay - before.get(thread, 0.0) for thread, delay in now.items()), default=0.0)
