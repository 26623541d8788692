"""Run a whole collection: `gpushare calibrate` and `python -m gpushare.research.calibration`."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from gpushare.research.calibration.collector import Log, PoolMaker, Timing, collect, pools_of
from gpushare.research.calibration.counters import DcgmCounters, DriverCounters, NoCounters, RunCounters, take_gpu
from gpushare.research.calibration.daemon import mps_daemon
from gpushare.research.calibration.plan import CalibrationPhase, expected_seconds, left_of, phases
from gpushare.research.calibration.resume import SIMULATED, earlier_runs
from gpushare.research.calibration.workload import Stage, Workload
from gpushare.research.dataset import Mechanism

# A reading of dcgm-exporter is the mean over one of its intervals: the last one within a window needs two of them.
_INTERVALS: Final = 2.2


@dataclass(frozen=True, slots=True)
class CalibrationOrder:
    """Order for a collection: what to measure, and how.

    Attributes:
        phase_count, runs_per_phase, seed: of the plan; of its phases those from `skip_phases` to before
            `stop_phases` are made.
        workloads: names of the suite; empty for all.
        probes: whether every workload is measured beside each probe too.
        dry_run: tiny sizes on the CPU, without counters.
        simulated: GPU model to make up, such as "NVIDIA L4"; empty for the GPU of this machine.
        dcgm_url: dcgm-exporter's metrics, for GPUs without GPM; dcgm_seconds: its interval.
    """

    phase_count: int = 5
    runs_per_phase: int = 140
    seed: int = 1
    workloads: tuple[str, ...] = ()
    skip_phases: int = 0
    stop_phases: int | None = None
    probes: bool = True
    time_slicing: bool = False
    dry_run: bool = False
    simulated: str = ""
    dcgm_url: str = ""
    dcgm_seconds: float = 1.0

    @property
    def mechanism(self) -> Mechanism:
        """Return how the programs of a run share the GPU."""
        return Mechanism.TIME_SLICING if self.time_slicing else Mechanism.MPS

    @property
    def timing(self) -> Timing:
        """Return how long a run takes."""
        usual = Timing()
        if not self.dcgm_url:
            return usual
        window = max(usual.shared_seconds, _INTERVALS * self.dcgm_seconds)
        return Timing(usual.warm_seconds, window, window)


@dataclass(frozen=True, slots=True)
class CalibrationPlan:
    """Plan of a collection.

    Attributes:
        phases: the workers and runs of each.
        left: runs that the output does not hold yet; seconds: that these take, workers' starts included.
        beside: probes.
    """

    phases: tuple[CalibrationPhase, ...]
    left: int
    seconds: float
    beside: tuple[str, ...]

    def words(self, budget_seconds: float) -> str:
        """Say it in a sentence."""
        workers = max((len(phase.cells) for phase in self.phases), default=0)
        total = sum(len(phase.runs) for phase in self.phases)
        within = (
            "" if self.seconds <= budget_seconds else f"; {budget_seconds / 60:.1f} are given, so call it again"
        )
        return (
            f"{self.left} of {total} runs in {len(self.phases)} phases of at most {workers} workers, about "
            f"{self.seconds / 60:.1f} minutes of the GPU{within}"
        )


def plan_of(order: CalibrationOrder, output: Path) -> CalibrationPlan:
    """Plan an order, less what the output holds.

    Raises:
        RuntimeError: no PyTorch, an unknown workload, or an output that cannot be resumed; one sentence.
    """
    names, probes = _names(order)
    if unknown := [name for name in order.workloads if name not in names]:
        raise RuntimeError(f"no workload is called {', '.join(unknown)}; known are {', '.join(names)}")
    beside = probes if order.probes and not order.dry_run and not order.time_slicing else ()
    planned = phases(
        order.workloads or names,
        count=order.phase_count,
        runs_per_phase=order.runs_per_phase,
        seed=order.seed,
        capped=not order.time_slicing,
        probes=beside,
    )[order.skip_phases : order.stop_phases]
    earlier = earlier_runs(output)
    if order.simulated:
        earlier.check({"gpu_model": order.simulated, "driver": SIMULATED}, order.mechanism.value)
    left = left_of(planned, earlier.runs)
    seconds = expected_seconds(left, **asdict(order.timing))
    return CalibrationPlan(planned, sum(len(phase.runs) for phase in left), seconds, beside)


def calibrate(
    output: Path,
    order: CalibrationOrder,
    *,
    budget_seconds: float,
    progress: Callable[[int, int], None],
    log: Log,
) -> int:
    """Measure what the output lacks of the order, within the budget; return the number of runs written.

    Raises:
        RuntimeError: no PyTorch, no GPU, no MPS, or an unknown workload; one sentence.
    """
    plan = plan_of(order, output)
    log(plan.words(budget_seconds))
    with contextlib.ExitStack() as stack:
        pools, counters = _sides(order, plan.beside, stack)
        return collect(
            plan.phases,
            output,
            pools=pools,
            mechanism=order.mechanism,
            timing=order.timing,
            budget_seconds=budget_seconds,
            counters=counters,
            progress=progress,
            log=log,
        )


def _names(order: CalibrationOrder) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the programs and of the probes."""
    if order.simulated:
        from gpushare.research.calibration.simulated import known_programs  # noqa: PLC0415 -- megabytes of JSON

        data = known_programs()
        probes = {tenant.workload for run in data.runs for tenant in run.tenants if tenant.probe}
        return tuple(name for name in data.solo if name not in probes), tuple(sorted(probes))
    usable, probe_programs = _suite(order)
    return tuple(usable), tuple(probe_programs)


def _suite(order: CalibrationOrder) -> tuple[dict[str, Workload], dict[str, Workload]]:
    try:
        from gpushare.research.calibration.suite import PROBES, SUITE  # noqa: PLC0415 -- PyTorch is there on GPU machines only
    except ImportError as error:
        raise RuntimeError(f"calibrating needs PyTorch on this machine ({error})") from None
    usable = {name: each for name, each in SUITE.items() if not (order.dry_run and each.needs_cuda)}
    return usable, PROBES


def _sides(
    order: CalibrationOrder, beside: Sequence[str], stack: contextlib.ExitStack
) -> tuple[PoolMaker, RunCounters]:
    """Return what runs the programs and what reads the counters, on a GPU or simulated."""
    if order.simulated:
        from gpushare.research.calibration.simulated import SimulatedCounters, simulated_pools  # noqa: PLC0415

        return simulated_pools(order.mechanism, probes=beside), SimulatedCounters(order.simulated)
    usable, probe_programs = _suite(order)
    counters: RunCounters
    if not order.dry_run:
        take_gpu()
    if order.dry_run:
        counters = NoCounters()
    elif order.dcgm_url:
        counters = DcgmCounters(order.dcgm_url)
    else:
        counters = DriverCounters()
    environment = None if order.time_slicing else {} if order.dry_run else stack.enter_context(mps_daemon())
    stage = Stage("cpu" if order.dry_run else "cuda", order.dry_run)
    return pools_of(usable | probe_programs, stage, environment, probes=beside), counters
