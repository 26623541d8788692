"""The device memory of a GPU by the model's name, as NVML reports both."""

import re
from typing import Final

# nvidia-smi's figures where a name says more: an H100 keeps a part of its 80 GB, and GH200's 480 GB are the CPU's.
_BY_NAME: Final = (
    ("GH200 480GB", 97871),
    ("H100 80GB", 81559),
    ("H100 PCIE", 81559),
    ("H100 NVL", 95830),
)
_BY_MODEL: Final = (
    ("H200", 143771),
    ("H100", 81559),
    ("L40", 46068),
    ("L40S", 46068),
    ("L4", 23034),
    ("T4", 15360),
)
"""Models of one size."""
_STATED: Final = re.compile(r"\b(\d+) ?GB\b")


def gpu_memory_mib(gpu_model: str) -> int | None:
    """Return a GPU's memory; None if its name neither states it nor is that of a model of one size."""
    words = set(re.split(r"[\s-]+", gpu_model.upper()))
    for name, memory_mib in _BY_NAME:
        if words.issuperset(name.split()):
            return memory_mib
    if stated := _STATED.search(gpu_model):
        return int(stated[1]) * 1024
    return next((memory_mib for model, memory_mib in _BY_MODEL if model in words), None)
