"""The profile that is assumed for an unknown workload, to protect known neighbours from it in advance."""

from typing import Final

from gpushare.core.gpu import Counters
from gpushare.core.interference import Profile

STAND_IN: Final = Profile(
    Counters(
        sm_util=0.795,
        sm_occupancy=0.375,
        fp64_util=0.0,
        dfma_tensor_util=0.0,
        fp32_util=0.003,
        fp16_util=0.006,
        hmma_tensor_util=0.283,
        imma_tensor_util=0.0,
        any_tensor_util=0.283,
        integer_util=0.114,
        dram_bw_util=0.378,
        graphics_util=0.973,
    )
)
"""Counters of mlp-train-fp16-b1024 on an H200. Of the dataset's 53 workloads under a cap of their share, it is the
fifth in what it costs its neighbours, and it suffers more than most (docs/adr/0121)."""
