"""Choose the programs that replace the papers'; only `suite` here needs PyTorch.

Pan's seven programs are not named in any source that this project holds, so these are seven of our own suite that
together lean on every pipe: the comparison is of the same kind, not of the same programs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from gpushare.research.calibration.workload import Workload

FP32, TENSOR, FP64 = "fp32", "tensor", "fp64"
SEVEN: Final = {
    "resnet50-train-fp32-b32": FP32,
    "lstm-train-fp32-b64": FP32,
    "resnet50-train-bf16-b64": TENSOR,
    "bert-train-bf16-b16": TENSOR,
    "resnet18-infer-fp16-b64": TENSOR,
    "montecarlo-fp64-pi": FP64,
    "cholesky-fp64-1024x16": FP64,
}
"""Each with the arithmetic that its name and the H200's counters say it leans on."""
_NAMES: Final = tuple(SEVEN)
DIFFERENT: Final = (
    (_NAMES[0], _NAMES[5]),
    (_NAMES[2], _NAMES[5]),
    (_NAMES[0], _NAMES[3]),
    (_NAMES[6], _NAMES[2]),
)
SAME: Final = (
    (_NAMES[0], _NAMES[1]),
    (_NAMES[2], _NAMES[3]),
    (_NAMES[3], _NAMES[4]),
    (_NAMES[5], _NAMES[6]),
)
TOGETHER: Final = (2, 3, 4, 7)
"""How many of the seven run together, besides one alone."""
CROWD: Final = "bert-infer-fp16-b1"
"""A light program, 0.9 GiB a process: as many of it as MPS takes clients fit an H200."""
CROWDS: Final = (1, 2, 4, 8, 16, 32, 48)
BATCHES: Final = {"resnet50-train-fp32": (4, 64), "bert-train-bf16": (2, 64)}
"""A small and a large batch of each."""
CAPS: Final = (100, 90, 75, 50, 25, 10)
# For the dry run: the program of the H200's dataset that replaces one that it lacks.
_KNOWN_AS: Final = {
    "resnet50-train-fp32-b4": "resnet18-infer-fp32-b1",
    "resnet50-train-fp32-b64": "resnet50-train-fp32-b32",
    "bert-train-bf16-b2": "bert-infer-fp16-b1",
    "bert-train-bf16-b64": "bert-train-bf16-b16",
}


def copy_of(program: str, number: int) -> str:
    """Return the name of one of several processes of a program."""
    return f"{program}#{number}"


def batched(program: str, batch: int) -> str:
    """Return the name of a program at a batch size."""
    return f"{program}-b{batch}"


def known_as(name: str) -> str:
    """Return the program of the H200's dataset that replaces this one in a dry run."""
    plain = name.partition("#")[0]
    return _KNOWN_AS.get(plain, plain)


def suite(names: Sequence[str]) -> dict[str, Workload]:
    """Return what these names run; needs PyTorch."""
    from gpushare.research.calibration.suite import SUITE, training  # noqa: PLC0415 - there on GPU machines only

    sized = {
        batched(program, batch): training.at_batch(program, batch)
        for program, sizes in BATCHES.items()
        for batch in sizes
    }
    known = SUITE | sized
    return {name: replace(known[name.partition("#")[0]], name=name) for name in names}
