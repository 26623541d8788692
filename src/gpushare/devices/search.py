"""Look for GPUs in a process of its own.

A GPU that was reset, or has started late, is found only by opening NVML again. That costs the other GPUs a window
and the XID events of that moment, and may take many seconds while a GPU is broken: another process tries it first.
"""

import logging
import subprocess
import sys
from typing import Final

_log = logging.getLogger(__name__)

LISTING: Final = (sys.executable, "-m", "gpushare.devices.listing")


class GpuSearch:
    """One process at a time, never waited for: a call into the driver may hang so that nothing can end it.

    Args:
        command: prints the UUIDs of the GPUs that answer, and ends by itself.
    """

    def __init__(self, command: tuple[str, ...] = LISTING) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin to look, unless a process still does."""
        if self._process is not None:
            return
        nothing = subprocess.DEVNULL
        try:
            self._process = subprocess.Popen(self._command, stdin=nothing, stdout=subprocess.PIPE, stderr=nothing)
        except OSError as error:
            _log.warning("missing GPUs cannot be looked for: %s", error)

    def found(self) -> frozenset[str] | None:
        """Return the GPUs that answered, once; None before the process has ended, and if none was started."""
        if self._process is None or self._process.poll() is None:
            return None
        with self._process as ended:
            answer = ended.stdout.read() if ended.stdout is not None else b""
        self._process = None
        return frozenset(answer.decode(errors="replace").split())

    def close(self) -> None:
        """End the process, as far as it can be ended."""
        if self._process is not None:
            self._process.kill()
