"""`python -m gpushare_deviceplugin.forecaster`: print the shipped interference model's predictions, then exit.

Standard input: a JSON list of `{"gpu_model": ..., "loads": [Load, ...]}`. Standard output: for each, a list with
`[mean, error]` or null for each load (`gpushare.core.progress.attribution.Prior`).
"""

import os
import sys
from collections.abc import Mapping
from typing import Any, Final

import orjson

from gpushare.core.gpu import Counters
from gpushare.core.interference import expectation
from gpushare.core.progress import TenantLoad
from gpushare.data import default_model

NICENESS: Final = 10  # nobody waits for the answer


def answer(raw: bytes) -> bytes:
    """Return the answers to the questions."""
    model = default_model()
    answers = []
    for question in orjson.loads(raw):
        loads = [_load(each) for each in question["loads"]]
        priors = expectation(model.for_gpu(question["gpu_model"]))(loads)
        answers.append([[prior.mean, prior.error] if prior else None for prior in priors])
    return orjson.dumps(answers)


def _load(written: Mapping[str, Any]) -> TenantLoad:
    return TenantLoad(
        Counters(**written["signature"]),
        written["thread_percentage"],
        {int(cap): progress for cap, progress in written["cap_curve"].items()},
        {int(cap): Counters(**counters) for cap, counters in written["capped"].items()},
        written["iterations_per_s"],
    )


def main() -> None:
    """Read questions from standard input, write the answers to standard output."""
    os.nice(NICENESS)
    sys.stdout.buffer.write(answer(sys.stdin.buffer.read()))


if __name__ == "__main__":
    main()
