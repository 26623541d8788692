"""Real programs: training, inference and HPC in every precision, on random data, with nothing to download."""

from gpushare.research.calibration.suite.hpc import WORKLOADS as HPC
from gpushare.research.calibration.suite.inference import WORKLOADS as INFERENCE
from gpushare.research.calibration.suite.paced import WORKLOADS as PACED
from gpushare.research.calibration.suite.probes import WORKLOADS as PROBE_WORKLOADS
from gpushare.research.calibration.suite.training import WORKLOADS as TRAINING
from gpushare.research.calibration.workload import Stage, Workload

# Interleaved so that every slice of the list holds training, inference, HPC and host-bound programs.
_BY_KIND = (TRAINING, INFERENCE, HPC, PACED)
SUITE: dict[str, Workload] = {
    kind[rank].name: kind[rank]
    for rank in range(max(len(kind) for kind in _BY_KIND))
    for kind in _BY_KIND
    if rank < len(kind)
}

PROBES: dict[str, Workload] = {each.name: each for each in PROBE_WORKLOADS}

__all__ = ["PROBES", "SUITE", "Stage", "Workload"]
