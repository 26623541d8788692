"""Measure the cost of attribution while no phase explains the windows: `python -m bench.phases`.

Needs `src` on PYTHONPATH. Tenants with three signatures each, drawn with a seed, on a GPU that does work which
none of them knows of, in windows of a second. Prints a line for each number of tenants; time is of the processor.
"""

import argparse
import random
import time
from dataclasses import replace

from gpushare.core.gpu import COUNTERS, Counters
from gpushare.core.progress import PhaseSearch, Prior, TenantEvidence, attribute_phases

UNKNOWN_PIPES = {"fp64_util": 0.9, "imma_tensor_util": 0.9}
CLOCKS_MHZ = (1900.0, 1800.0)  # of the signatures and of the windows
PHASES = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for count in (4, 8, 16):
        rng = random.Random(options.seed)
        choices = [[_tenant(rng) for _ in range(PHASES)] for _ in range(count)]
        base, search, spans, bad = _drawn(rng), PhaseSearch(), [], 0
        for _ in range(options.windows):
            device = Counters(
                **{name: min(1.0, value * rng.uniform(0.9, 1.1)) for name, value in base.as_dict().items()}
                | UNKNOWN_PIPES
            )
            begin = time.process_time()
            found = attribute_phases(device, choices, CLOCKS_MHZ[1], search)
            spans.append(1000 * (time.process_time() - begin))
            search = found.search
            bad += found.misfit is not None and found.misfit > 1
        print(
            f"{count:2} tenants: mean {sum(spans) / len(spans):.1f} ms, worst {max(spans):.1f} ms a window, "
            f"{bad} of {len(spans)} unexplained"
        )


def _tenant(rng: random.Random) -> TenantEvidence:
    signature = replace(_drawn(rng), **dict.fromkeys(UNKNOWN_PIPES, 0.0))
    return TenantEvidence(signature, prior=Prior(0.4, 0.1), sm_clock_mhz=CLOCKS_MHZ[0])


def _drawn(rng: random.Random) -> Counters:
    return Counters(**{name: rng.random() for name in COUNTERS})


if __name__ == "__main__":
    main()
