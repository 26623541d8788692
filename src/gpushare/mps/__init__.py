"""Python interface to CUDA MPS, usable on its own, and the gate that makes sharing under it safe.

    from gpushare.mps import ControlProgram, SyncMpsControl
    mps = SyncMpsControl(ControlProgram(pipe=Path("/tmp/nvidia-mps"), log=Path("/var/log/nvidia-mps")))
    mps.start(); mps.clients(); mps.run(commands.set_active_thread_percentage(mps.servers()[0], 50))

docs/guide/mps.md has a complete program. `gpushare.mps.layout` and `gpushare.mps.status` define the files on the
node; `gpushare.mps.host` is the program that runs a node's daemons and gates; `gpushare.mps.actions` ends clients.
"""

from gpushare.mps import commands
from gpushare.mps.control import AsyncMpsControl, ControlProgram, MpsControl, SyncMpsControl
from gpushare.mps.errors import CommandRefusedError, ControlTimeoutError, DaemonDownError, MpsError

__all__ = [
    "AsyncMpsControl",
    "CommandRefusedError",
    "ControlProgram",
    "ControlTimeoutError",
    "DaemonDownError",
    "MpsControl",
    "MpsError",
    "SyncMpsControl",
    "commands",
]
