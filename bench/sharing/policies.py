"""The six ways of sharing, and which waiting jobs may start.

In Kubernetes the cluster decides that; the rules here are the same ones for the launcher without it: so many
devices of an extended resource, or shares that are counted, as kube-scheduler does it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from bench.sharing.trace import TraceJob
from gpushare.core.api import JobClass

PLACES: Final = 4
"""Replicas of one GPU under time slicing and equal MPS, as in the job simulator (gpushare.sim.table_policies)."""


class World(StrEnum):
    """Layer between the jobs and the GPU."""

    PLAIN = "plain"  # no layer: the driver makes processes take turns
    MPS = "mps"  # one MPS daemon, as NVIDIA's device plugin starts it
    GPUSHARE = "gpushare"  # gate, throttle and agent, as the chart installs them


@dataclass(frozen=True, slots=True)
class SharingPolicy:
    """One way.

    Attributes:
        places: jobs at once at most; None: shares decide.
        percentage: the daemon's default active thread percentage; its default memory limit is the same part of the
            GPU's memory, as NVIDIA's device plugin sets both. None: neither.
        counts_shares: jobs at once ask for at most 100% in sum.
        caps_at_share: each throughput job runs under its share as thread percentage.
        in_order: no job overtakes.
        takes_turns: all load their libraries side by side; then one after the other has the GPU (work.py).
        is_ours: gpushare decides, and its word is kept (witness.py).
        faults: of its MPS server, injected while jobs come.
    """

    name: str
    title: str
    world: World
    places: int | None = None
    percentage: int | None = None
    counts_shares: bool = False
    caps_at_share: bool = False
    in_order: bool = False
    takes_turns: bool = False
    is_ours: bool = False
    faults: int = 0

    def cap(self, job: TraceJob) -> int | None:
        """Return the thread percentage that a job's own environment requests; None if it requests none."""
        if not self.caps_at_share or job.job_class is JobClass.LATENCY:
            return None
        return job.share_percent


FIFO: Final = SharingPolicy("fifo", "exclusive, first come first served", World.PLAIN, places=1, in_order=True)
SLICING: Final = SharingPolicy("time-slicing", f"time slicing, {PLACES} replicas", World.PLAIN, places=PLACES)
EQUAL: Final = SharingPolicy(
    "mps-equal", f"MPS, {PLACES} equal parts", World.MPS, places=PLACES, percentage=100 // PLACES
)
PAIRS: Final = SharingPolicy("mps-pairs", "MPS, uncapped pairs", World.MPS, places=2)
HARD: Final = SharingPolicy(
    "hard-caps", "MPS, shares as hard caps", World.MPS, counts_shares=True, caps_at_share=True
)
TURNS: Final = SharingPolicy("turns", "alone, in turns", World.PLAIN, places=16, takes_turns=True)
"""For programs alone as pods: what each needs to import is imported at once, so ten take as long as one."""
OURS: Final = SharingPolicy("gpushare", "gpushare", World.GPUSHARE, counts_shares=True, is_ours=True)
FAULTED: Final = "gpushare-faults"

POLICIES: Final = {each.name: each for each in (FIFO, SLICING, EQUAL, PAIRS, HARD, OURS)}


def with_faults(number: int) -> SharingPolicy:
    """Return gpushare with so many faults of its MPS server: a run of its own, which is in no comparison."""
    return replace(OURS, name=FAULTED, title=f"gpushare, {number} MPS faults", faults=number)


def may_start(policy: SharingPolicy, waiting: Sequence[TraceJob], running: Sequence[TraceJob]) -> list[TraceJob]:
    """Return who of those that wait starts now, in the order in which they came; ours is decided elsewhere."""
    chosen: list[TraceJob] = []
    for job in sorted(waiting, key=lambda each: (each.arrives, each.number)):
        tenants = [*running, *chosen]
        if policy.places is not None and len(tenants) >= policy.places:
            break
        if policy.counts_shares and sum(each.share_percent for each in tenants) + job.share_percent > 100:
            if policy.in_order:
                break
            continue
        chosen.append(job)
    return chosen


def order(repetition: int, names: Sequence[str] = tuple(POLICIES)) -> list[SharingPolicy]:
    """Return the policies of one repetition: each begins with another, so that drift meets them all.

    Args:
        names: of the policies, in the order of the first repetition.
    """
    first = 2 * repetition % len(names)
    turned = [POLICIES[name] for name in (*names[first:], *names[:first])]
    return turned if repetition % 2 == 0 else turned[::-1]
