"""Probes: three fixed programs that a workload is measured beside, both uncapped (docs/interference.md).

What a workload does to a probe and the probe to it says how it competes, which no counter of a solo run shows
(after Bubble-Up: Mars et al., MICRO 2011, who measure pressure and sensitivity of CPU programs by a bubble).
"""

from typing import Final

import torch

from gpushare.core.interference.profile import PROBES
from gpushare.research.calibration.suite import cuda_kernels
from gpushare.research.calibration.workload import Stage, Step, Workload


def _memory(stage: Stage) -> Step:
    a = torch.randn(2**25, device=stage.device)
    b = torch.empty_like(a)
    return lambda: b.copy_(a)


WORKLOADS: Final = (
    # Four full waves of blocks of some 45 us: competes for SMs with blocks that come and go.
    Workload(PROBES[0], cuda_kernels.spin(132 * 32, 256, 2000, 1), needs_cuda=True),
    # Copies of 128 MiB: competes for DRAM bandwidth.
    Workload(PROBES[1], _memory, needs_cuda=True),
    # Sixteen kernels of one small block an SM and some microseconds: shows how long others hold the SMs.
    Workload(PROBES[2], cuda_kernels.spin(132, 128, 400, 16), in_flight=0, needs_cuda=True),
)
