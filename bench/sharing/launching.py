"""Interface by which the driver starts jobs: as processes here (local.py) or as pods of a cluster (pods.py)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bench.sharing.joblog import JobStory
from bench.sharing.policies import SharingPolicy
from bench.sharing.trace import TraceJob
from bench.sharing.witness import Witness


@dataclass(frozen=True, slots=True)
class Order:
    """A job with the count that its work came to on this GPU.

    Attributes:
        rate: of its requests, per second; 0: it works as fast as it can.
        seconds: after which it ends in any case; None: it does its count.
        until_known: it ends once the node agent has published its program's signature.
    """

    job: TraceJob
    count: int
    rate: float = 0.0
    seconds: float | None = None
    until_known: bool = False

    def arguments(self) -> list[str]:
        """Return the job program's command line, without what the launcher adds."""
        limit = [] if self.seconds is None else ["--seconds", f"{self.seconds:g}"]
        requests = ["--rate", f"{self.rate:.4f}", "--seed", str(self.job.number)] if self.rate else []
        return [self.job.program, str(self.count), *requests, *limit]


@dataclass(frozen=True, slots=True)
class Ended:
    """End of a job.

    Attributes:
        status: of its process; 0 is well.
        cap: thread percentage that it ran under; None: none, or whatever the daemon's default was.
        restarts: how often its pod was taken away, so that it started again.
        first_started: of such a job, when its first pod ran, in seconds since its run began; None: none ran.
    """

    status: int
    cap: int | None
    story: JobStory
    tail: str = ""
    restarts: int = 0
    first_started: float | None = None


class Launcher(Protocol):
    """Starts jobs under one policy after the other."""

    kind: str
    alone: SharingPolicy
    """By which programs are measured alone on the GPU."""

    def begin(self, policy: SharingPolicy, orders: Sequence[Order]) -> None:
        """Make ready for a policy and the jobs that will come."""
        ...

    def submit(self, order: Order) -> None:
        """Accept a job that arrives."""
        ...

    def poll(self) -> dict[int, Ended]:
        """Start who may start; return the jobs that ended since the last call, by number."""
        ...

    def signatures(self) -> dict[str, Any]:
        """Return what was learnt of programs that ran since `begin`, by name, as a GpuShare would hold it."""
        ...

    def learn(self, signatures: Mapping[str, Any]) -> None:
        """Use these signatures from the next `begin` on."""
        ...

    def witness(self) -> Witness | None:
        """Return who can tell what is predicted and inferred under the policy that has begun; None: nobody."""
        ...

    def unfinished(self) -> Mapping[int, str]:
        """Return where the jobs are that have come and not ended, one sentence each, by number."""
        ...

    def refusals(self) -> Sequence[Mapping[str, Any]]:
        """Return why jobs of the run waited, as the scheduler told it, in the form of their records."""
        ...

    def faults(self) -> Sequence[Mapping[str, Any]]:
        """Return what became of the policy's faults so far, as it goes into their records."""
        ...

    def end(self) -> None:
        """End whoever still runs, and what the policy needed; also where `begin` failed."""
        ...

    def close(self) -> None:
        """End everything."""
        ...
