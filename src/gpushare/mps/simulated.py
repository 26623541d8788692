"""The MPS host's access to simulated GPUs: the only module here that imports the twin, and only if asked to."""

from gpushare.core.gpu import GpuInfo
from gpushare.mps.layout import GpuDirectory
from gpushare.mps.memory import MemoryReader


def simulated_gpus(text: str, node_name: str) -> tuple[GpuInfo, ...]:
    """Return the GPUs that `--simulated` asks for, such as "H200:2".

    Raises:
        ValueError: not such a list; the message names what is allowed.
    """
    from gpushare.twin.gpus import parse_simulated  # noqa: PLC0415 - a real node never loads the twin

    return parse_simulated(text, node_name)


def simulated_memory(gpu: GpuDirectory) -> MemoryReader:
    """Return a reader of a simulated GPU's memory by process."""
    from gpushare.twin.mps.memory import TwinMemory  # noqa: PLC0415 - a real node never loads the twin

    return TwinMemory(gpu)
