"""Keep the agent small: it runs on every node, beside the node's real work."""

import ctypes
import importlib.util
import os
import sys
import types
from typing import Any, Final

from gpushare.runtime.heap import glibc  # loads nothing else

_PACKAGES: Final = ("kubernetes", "kubernetes.aio", "kubernetes.aio.client")
_M_ARENA_MAX: Final = -8  # malloc.h
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
# glibc's initial value; set explicitly, so that it does not grow with freed memory
_LARGE_BYTES: Final = 128 * 1024
_PR_SET_THP_DISABLE: Final = 41  # sys/prctl.h


def before_imports() -> None:
    """Set up the process before anything large is imported: one malloc arena, freed memory returned at once.

    - No huge pages: where the kernel gives them unasked, each thread's stack and each arena takes 2 MB for the few
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
    if _PACKAGES[0] not in sys.modules:
        _load_transport_only()


def _load_transport_only() -> None:
    """Import gpushare.kube without the Kubernetes package's generated clients and models.

    gpushare.kube uses the package's configuration and REST transport. Importing these runs the parent packages'
    `__init__`, which load a synchronous and an asynchronous client of every API with pydantic, requests and OAuth:
    19 MB resident that the agent never calls. So the parent packages are put into sys.modules without running
    their code. If a release of the package fails that way, it is imported as usual.
    """
    try:
        for name in _PACKAGES:
            _enter_bare(name)
        client: Any = sys.modules[_PACKAGES[-1]]
        client.ApiClient = object  # named in a signature that is not used
        client.Configuration = importlib.import_module(f"{_PACKAGES[-1]}.configuration").Configuration
        importlib.import_module("gpushare.kube")
    except (ImportError, AttributeError):
        for name in [
            n for n in sys.modules if n.partition(".")[0] == _PACKAGES[0] or n.startswith("gpushare.kube")
        ]:
            del sys.modules[name]


def _enter_bare(name: str) -> None:
    """Put a package into sys.modules by its folder, without running its own code."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(name)
    bare = types.ModuleType(name)
    bare.__spec__, bare.__path__ = spec, list(spec.submodule_search_locations)
    sys.modules[name] = bare
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, bare)
