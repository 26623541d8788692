"""Place many pods on many GPUs, with `src` on PYTHONPATH: `python -m bench.place_many --policy bestfit`.

Nodes of 8 GPUs, pods of ten sizes (5% to 20%) drawn with a seed, about what the GPUs hold; prints one JSON object.
Time is that of placing and reserving, without making nodes and requests.
"""

import argparse
import json
import time
from collections import Counter

import numpy as np

from gpushare.core.api import Rejection
from gpushare.core.placement import (
    NO_PROBATION,
    ClusterState,
    DecisionContext,
    GpuSpec,
    Judge,
    NodeSpec,
    PlacementRequest,
    Settings,
    decide,
)
from gpushare.core.placement.policies import NAMES
from gpushare.data import default_model

SHARES = (50, 50, 50, 80, 80, 100, 100, 120, 150, 200)  # mean 98: ten pods a GPU fill it
GPUS_PER_NODE = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pods", type=int, default=1_000_000)
    parser.add_argument("--gpus", type=int, default=100_000)
    parser.add_argument("--policy", choices=NAMES, default="bestfit")
    parser.add_argument("--seed", type=int, default=42)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    state = ClusterState(
        NodeSpec(
            f"n{i}", tuple(GpuSpec(f"n{i}/{g}", "H200", 143_771) for g in range(GPUS_PER_NODE)), 192_000, 2**21
        )
        for i in range(options.gpus // GPUS_PER_NODE)
    )
    drawn = rng.choice(SHARES, size=options.pods).tolist()
    mix = Counter(PlacementRequest("", share).shape for share in SHARES)
    requests = [PlacementRequest(f"p{i}", share, cpu_milli=share * 10) for i, share in enumerate(drawn)]
    settings = Settings(options.policy, probation=NO_PROBATION)
    context = DecisionContext.of(state, settings, Judge(default_model), history=mix, rng=rng)
    rejected = 0
    wall, cpu = time.perf_counter(), time.process_time()
    for request in requests:
        placed = decide(request, context)
        if isinstance(placed, Rejection):
            rejected += 1
        else:
            state.reserve(request.pod_uid, placed, request)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    used = 1 - state.share_free_milli.sum() / (1000 * options.gpus)
    found = {
        "policy": options.policy,
        "pods": options.pods,
        "gpus": options.gpus,
        "seconds": round(wall, 1),
        "cpu_seconds": round(cpu, 1),
        "microseconds_per_pod": round(cpu / options.pods * 1e6, 1),
        "rejected": rejected,
        "allocated_gpu_percent": round(100 * float(used), 2),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
