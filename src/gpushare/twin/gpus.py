"""Simulated GPUs of a node without real ones (docs/design.md 3, the twin)."""

import re
import uuid
from typing import Final

from gpushare.core.gpu import GpuInfo

# Fixed, so that the MPS host and the agent of one node give the same UUIDs without talking to each other.
_NAMESPACE: Final = uuid.UUID("7d3a2f0e-9d0b-5b0a-8f63-6770757368aa")
_ITEM: Final = re.compile(r"^([A-Za-z0-9-]+)(?::(\d+))?$")

# Name -> (product name as NVML prints it, memory MiB as NVML prints it, SMs). NVIDIA data sheets and nvidia-smi.
MODELS: Final[dict[str, tuple[str, int, int]]] = {
    "V100": ("Tesla V100-SXM2-16GB", 16384, 80),
    "T4": ("Tesla T4", 15360, 40),
    "L4": ("NVIDIA L4", 23034, 58),
    "L40S": ("NVIDIA L40S", 46068, 142),
    "A100-40GB": ("NVIDIA A100-SXM4-40GB", 40960, 108),
    "A100-80GB": ("NVIDIA A100-SXM4-80GB", 81920, 108),
    "H100": ("NVIDIA H100 80GB HBM3", 81559, 132),
    "H200": ("NVIDIA H200", 143771, 132),
}
# Product name -> MHz at which the twin's SMs always run: the highest clock that NVML prints.
SM_CLOCKS: Final[dict[str, int]] = {
    "Tesla V100-SXM2-16GB": 1530,
    "Tesla T4": 1590,
    "NVIDIA L4": 2040,
    "NVIDIA L40S": 2520,
    "NVIDIA A100-SXM4-40GB": 1410,
    "NVIDIA A100-SXM4-80GB": 1410,
    "NVIDIA H100 80GB HBM3": 1980,
    "NVIDIA H200": 1980,
}
MAX_GPUS_PER_NODE: Final = 64  # no node carries more; a typing error should not fill a disk with directories


def gpu_uuid(node_name: str, index: int) -> str:
    """Return the UUID of a node's simulated GPU: always the same, different for each node and index."""
    return f"GPU-{uuid.uuid5(_NAMESPACE, f'{node_name}/{index}')}"


def parse_simulated(text: str, node_name: str) -> tuple[GpuInfo, ...]:
    """Parse "H200:2" or "H200:1,A100-40GB:2" into a node's GPUs.

    Raises:
        ValueError: unknown model, malformed item or too many GPUs; the message names what is allowed.
    """
    gpus: list[GpuInfo] = []
    for item in text.split(","):
        match = _ITEM.match(item.strip())
        if match is None or match[1] not in MODELS:
            raise ValueError(f'simulated GPUs "{item}": allowed is MODEL:COUNT, MODEL one of {", ".join(MODELS)}')
        model, memory_mib, sm_count = MODELS[match[1]]
        count = int(match[2] or 1)
        if not 1 <= count <= MAX_GPUS_PER_NODE - len(gpus):
            raise ValueError(f'simulated GPUs "{text}": allowed are 1 to {MAX_GPUS_PER_NODE} GPUs on a node')
        gpus += [
            GpuInfo(gpu_uuid(node_name, index), index, model, memory_mib, sm_count)
            for index in range(len(gpus), len(gpus) + count)
        ]
    return tuple(gpus)
