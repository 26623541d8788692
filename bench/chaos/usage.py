"""Memory, descriptors and threads of each part while the load churns, and whether they stay flat."""

import contextlib
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.chaos import node
from bench.chaos.parts import ROLES, Component, processes_of

FLAT_RATIO: Final = 1.05  # the bar for memory
FLAT_COUNT: Final = 3  # descriptors and threads that may come and go with what is connected at the moment
WARM_UP_PART: Final = 0.25  # of the samples: caches fill, modules load
FEWEST_SAMPLES: Final = 8  # of which the first and the last third still have two each


@dataclass(frozen=True, slots=True)
class Usage:
    """Total use of a role's processes at one moment.

    Attributes:
        pids: of the processes; a different set means that one was restarted.
        memory_kib: proportional set size, so that what forks share counts once.
    """

    pids: tuple[int, ...]
    memory_kib: int
    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True)
class Growth:
    """A role's use in the first and in the last third after the warm-up, medians."""

    role: str
    processes: int
    memory_first_mib: float
    memory_last_mib: float
    descriptors_first: float
    descriptors_last: float
    threads_first: float
    threads_last: float
    restarts: int

    @property
    def memory_ratio(self) -> float:
        return self.memory_last_mib / self.memory_first_mib if self.memory_first_mib else 1.0

    @property
    def is_flat(self) -> bool:
        """Return whether it runs, nothing grew beyond the bar and nothing was restarted; shrinking is no leak."""
        return (
            self.processes > 0
            and self.restarts == 0
            and self.memory_ratio <= FLAT_RATIO
            and self.descriptors_last - self.descriptors_first <= FLAT_COUNT
            and self.threads_last - self.threads_first <= FLAT_COUNT
        )


def sample(parts: Mapping[str, Component]) -> dict[str, Usage]:
    """Measure every role now."""
    found = node.processes()
    return {name: _usage([one.pid for one in processes_of(role, parts, found)]) for name, role in ROLES.items()}


def _usage(pids: Sequence[int]) -> Usage:
    memory = descriptors = threads = 0
    for pid in pids:
        place = Path(f"/proc/{pid}")
        with contextlib.suppress(OSError):
            memory += _kib((place / "smaps_rollup").read_text(), "Pss:")
            descriptors += sum(1 for _ in (place / "fd").iterdir())
            threads += sum(1 for _ in (place / "task").iterdir())
    return Usage(tuple(pids), memory, descriptors, threads)


def _kib(text: str, name: str) -> int:
    for line in text.splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    return 0


def growth(role: str, samples: Sequence[Usage]) -> Growth:
    """Compare the first third of the samples with the last one, after the warm-up.

    Raises:
        ValueError: fewer than FEWEST_SAMPLES.
    """
    steady = samples[int(len(samples) * WARM_UP_PART) :]
    third = len(steady) // 3
    if len(samples) < FEWEST_SAMPLES:
        raise ValueError(f"{len(samples)} samples of {role} are too few to compare")
    first, last = steady[:third], steady[-third:]

    def median(chosen: Sequence[Usage], name: str) -> float:
        return float(statistics.median(getattr(one, name) for one in chosen))

    lasting, later = _lasting(first), _lasting(last)
    return Growth(
        role,
        len(later),
        median(first, "memory_kib") / 1024,
        median(last, "memory_kib") / 1024,
        median(first, "descriptors"),
        median(last, "descriptors"),
        median(first, "threads"),
        median(last, "threads"),
        len(lasting - later),
    )


def _lasting(samples: Sequence[Usage]) -> set[int]:
    """Return the pids that most samples have: helpers and forks come and go."""
    seen = Counter(pid for one in samples for pid in one.pids)
    return {pid for pid, count in seen.items() if count > len(samples) / 2}
