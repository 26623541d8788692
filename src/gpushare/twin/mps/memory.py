"""Device memory of each process on a simulated GPU, as NVML reports it for a real one."""

from collections import Counter
from collections.abc import Mapping

from gpushare.mps.layout import GpuDirectory
from gpushare.twin.mps.state import state_reader


class TwinMemory:
    """Memory by process, read from the twin's state file."""

    def __init__(self, gpu: GpuDirectory) -> None:
        self._reader = state_reader(gpu)

    def used_mib(self) -> Mapping[int, int] | None:
        """Read it now; None until the twin's daemon wrote once."""
        state = self._reader.read()
        if state is None:
            return None
        used: Counter[int] = Counter()
        for client in state.clients:  # a process with several contexts is several clients
            used[client.pid] += client.memory_used_mib
        return used
