"""Python interface to CUDA MPS, usable on its own, and the gate that makes sharing under it safe.

    from gpushare.mps import ControlProgram, SyncMpsControl
    mps = SyncMpsControl(ControlProgram(pipe=Path("/tmp/nvidia-mps"), log=Path("/var/log/nvidia-mps")))
    mps.start(); mps.clients(); mps.run(commands.set_active_thread_percentage(mps.servers()[0], 50))

docs/guide/mps.md has a complete program. `gpushare.mps.layout` and `gpushare.mps.status` define the files on the
node; `gpushare.mps.host` is the program that runs a node's daemons and gates; `gpushare.mps.actions` ends clients.

These names are loaded when they are first used: the thawer, a process in every GPU node's memory, uses none of
them (docs/adr/0229).
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpushare.mps import commands
    from gpushare.mps.control import AsyncMpsControl, ControlProgram, MpsControl, SyncMpsControl
    from gpushare.mps.errors import CommandRefusedError, ControlTimeoutError, DaemonDownError, MpsError
else:
    _MODULE_OF = {
        "AsyncMpsControl": "control",
        "CommandRefusedError": "errors",
        "ControlProgram": "control",
        "ControlTimeoutError": "errors",
        "DaemonDownError": "errors",
        "MpsControl": "control",
        "MpsError": "errors",
        "SyncMpsControl": "control",
    }

    def __getattr__(name: str) -> Any:
        """Load one of our names from its module."""
        if name == "commands":
            return importlib.import_module("gpushare.mps.commands")
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"gpushare.mps.{_MODULE_OF[name]}"), name)


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
