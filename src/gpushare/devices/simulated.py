"""The agent's access to simulated GPUs: the only module here that imports the twin, and only if asked to."""

from collections.abc import Callable
from pathlib import Path

from gpushare.core.gpu import Devices


def simulated_opener(
    text: str, node_name: str, directory: Path, clock: Callable[[], float]
) -> Callable[[], Devices]:
    """Return a function that opens the GPUs that `--simulated` asks for, such as "H200:2".

    Args:
        directory: the node's gpushare directory, where the twins write.
        clock: monotonic seconds.

    Raises:
        ValueError: not such a list; the message names what is allowed.
    """
    from gpushare.twin.devices import SimulatedDevices  # noqa: PLC0415 - a real node never loads the twin
    from gpushare.twin.gpus import parse_simulated  # noqa: PLC0415

    gpus = parse_simulated(text, node_name)
    return lambda: SimulatedDevices(gpus, directory, clock)
