"""End with the process that started this one."""

import ctypes
import signal
from typing import Final

_PR_SET_PDEATHSIG: Final = 1  # <linux/prctl.h>


def end_with_parent() -> None:
    """Make the kernel kill this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
