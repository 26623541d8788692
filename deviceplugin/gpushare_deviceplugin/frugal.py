"""Keep the agent small: it runs on every node, beside the node's real work."""

import ctypes
import os
from typing import Final

from gpushare.runtime.heap import glibc  # loads nothing else

_M_ARENA_MAX: Final = -8  # malloc.h
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
# glibc's initial value; set explicitly, so that it does not grow with freed memory
_LARGE_BYTES: Final = 128 * 1024
_PR_SET_THP_DISABLE: Final = 41  # sys/prctl.h


def before_imports() -> None:
    """Set up the process before anything large is imported: one malloc arena, freed memory returned at once.

    - No huge pages: if the kernel gives them by default, each thread's stack and each arena takes 2 MB for the few
      kB that it uses, and gRPC has a dozen threads or more.
    - No BLAS threads in the forecaster, our child process: its matrices are 48 x 12.
    - gRPC's fork handlers are off. The only child of this process is started by vfork and exec, which needs none.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    libc = glibc()
    if libc is not None:
        libc.mallopt(_M_ARENA_MAX, 1)
        libc.mallopt(_M_TRIM_THRESHOLD, _LARGE_BYTES)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        no = ctypes.c_ulong(0)
        libc.prctl(_PR_SET_THP_DISABLE, ctypes.c_ulong(1), no, no, no)  # a kernel that refuses changes nothing
