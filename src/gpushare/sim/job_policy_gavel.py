"""Gavel's space sharing of pairs as stated in its paper (Narayanan et al., OSDI'20, sections 3.1 and 4.1).

X[c] is the share of time that a combination c (one job, or two side by side) spends on a GPU. Max-min fairness
maximises the least normalised effective throughput, then (water filling's second step, as the paper's
implementation) total throughput without lowering that least, under: a job's combinations sum to at most 1 in time,
all combinations to at most the number of GPUs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from gpushare.research.dataset import Mechanism
from gpushare.sim.job_policies import equal_kinds
from gpushare.sim.jobs import JobCluster, SimulationError

_FLOOR_KEPT = 0.999  # of the least throughput, in the second step: margin for the solver's tolerance


@dataclass(slots=True)
class GavelPairs:
    """A fluid policy: rates are the optimum's effective throughputs, solved again when the set of jobs changes."""

    name: str = "gavel"
    mechanism: Mechanism = Mechanism.MPS
    _last: tuple[tuple[int, ...], dict[int, float]] = field(default=((), {}))

    def schedule(self, cluster: JobCluster) -> None:
        """Do nothing: this policy shares time and places no job."""

    def rates(self, cluster: JobCluster) -> Mapping[int, float]:
        """Return the effective throughput of every active job, relative to alone."""
        active = tuple(sorted(cluster.remaining_seconds))
        if active != self._last[0]:
            self._last = (active, self._solve(cluster, active))
        return self._last[1]

    def _solve(self, cluster: JobCluster, active: tuple[int, ...]) -> dict[int, float]:
        if not active:
            return {}
        try:
            from scipy.optimize import linprog  # noqa: PLC0415 - an extra, needed by this policy alone
            from scipy.sparse import csr_matrix, hstack, vstack  # noqa: PLC0415
        except ImportError:
            raise SimulationError(
                'policy gavel needs scipy: pip install ".[fit]" in gpushare\'s repository'
            ) from None
        # Jobs of one kind have equal rates in the optimum, so the linear program is over workloads, not jobs.
        kinds = sorted({cluster.jobs[job].workload for job in active})
        counts = np.array(
            [sum(cluster.jobs[job].workload == kind for job in active) for kind in kinds], dtype=float
        )
        combos: list[tuple[int, ...]] = [(kind,) for kind in range(len(kinds))]
        gains: list[tuple[float, ...]] = [(1.0,)] * len(kinds)
        for one in range(len(kinds)):
            for other in range(one, len(kinds)):
                if one == other and counts[one] < 2:
                    continue
                if not _memory_fits(cluster, kinds[one], kinds[other]):
                    continue
                rates = cluster.rates_of(equal_kinds((kinds[one], kinds[other])))
                if sum(rates) > 1:
                    combos.append((one, other))
                    gains.append(rates)
        throughput = np.zeros((len(kinds), len(combos)))
        time = np.zeros((len(kinds), len(combos)))
        for column, (combo, gain) in enumerate(zip(combos, gains, strict=True)):
            for kind, rate in zip(combo, gain, strict=True):
                throughput[kind, column] += rate / counts[kind]
                time[kind, column] += 1 / counts[kind]
        gpus = np.ones((1, len(combos)))
        limits = vstack([csr_matrix(time), csr_matrix(gpus)])
        bounds_right = np.concatenate([np.ones(len(kinds)), [float(len(cluster.gpus))]])
        # First: maximise z with throughput >= z for every kind (each normalised by running alone: equal shares).
        least = linprog(
            c=np.concatenate([np.zeros(len(combos)), [-1.0]]),
            A_ub=vstack(
                [
                    hstack([limits, csr_matrix((limits.shape[0], 1))]),
                    hstack([csr_matrix(-throughput), csr_matrix(np.ones((len(kinds), 1)))]),
                ]
            ),
            b_ub=np.concatenate([bounds_right, np.zeros(len(kinds))]),
            method="highs",
        )
        floor = _FLOOR_KEPT * float(least.x[-1])
        best = linprog(
            c=-(counts @ throughput),
            A_ub=vstack([limits, csr_matrix(-throughput)]),
            b_ub=np.concatenate([bounds_right, np.full(len(kinds), -floor)]),
            method="highs",
        )
        if best.x is None:
            raise SimulationError("policy gavel: the linear program has no solution")
        effective = dict(zip(kinds, (throughput @ best.x).tolist(), strict=True))
        return {job: effective[cluster.jobs[job].workload] for job in active}


def _memory_fits(cluster: JobCluster, one: str, other: str) -> bool:
    truth = cluster.truth
    return truth.memory_mib(one) + truth.memory_mib(other) <= max(truth.gpu_memory_mib, 0)
