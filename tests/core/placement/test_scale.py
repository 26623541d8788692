"""What a decision costs on 100,000 GPUs: a small piece of bench/place_many.py."""

import time

import numpy as np
import pytest
from deciding import candidates, place

from gpushare.core.placement.policies import BestFit
from gpushare.core.placement.state import ClusterState, GpuSpec, NodeSpec, Placement, PlacementRequest

CPU_SECONDS_PER_POD = 500e-6
"""A million pods in 120 s are 120 microseconds each; four times that, for a machine that does other work."""


@pytest.mark.slow
def test_a_decision_on_100_000_gpus_is_cheap() -> None:
    state = ClusterState(
        NodeSpec(f"n{i}", tuple(GpuSpec(f"n{i}/{g}", "H200", 143_771) for g in range(8)), 192_000, 2**21)
        for i in range(12_500)
    )
    rng = np.random.default_rng(42)
    requests = [
        PlacementRequest(f"p{i}", share, cpu_milli=share * 10)
        for i, share in enumerate(rng.choice([50, 80, 100, 120, 150, 200], size=10_000).tolist())
    ]
    started = time.process_time()
    for request in requests:
        placed = place(request, state, BestFit())
        assert isinstance(placed, Placement)
        state.reserve(request.pod_uid, placed, request)
    assert time.process_time() - started < CPU_SECONDS_PER_POD * len(requests)
    assert 100_000_000 - state.share_free_milli.sum() == sum(request.share_milli for request in requests)
    assert len(candidates(PlacementRequest("x", 1000, 8), state, BestFit()).rows) < 12_500
