"""Keep the agent small: it runs on every node, beside the work that the node is for."""

import asyncio
import ctypes
import gc
import importlib.util
import os
import sys
import types
from typing import Any, Final

FIRST_TRIM_SECONDS: Final = 20.0  # first lists, first connections
TRIM_SECONDS: Final = 60.0  # takes 1 to 2 ms
_PACKAGES: Final = ("kubernetes", "kubernetes.aio", "kubernetes.aio.client")
_M_ARENA_MAX: Final = -8  # malloc.h
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_LARGE_BYTES: Final = 128 * 1024  # glibc's own first value; set, so that it does not grow with what is freed
_PR_SET_THP_DISABLE: Final = 41  # sys/prctl.h


def before_imports() -> None:
    """Before anything large is loaded: one malloc arena, and memory given back as it is freed.

    And no huge pages: where the kernel gives them unasked, each thread's stack and each arena takes 2 MB for the
    few kB that it uses. The forecaster, our child, has no use for BLAS threads either (its products are 48 x 12).
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    libc = _libc()
    if libc is not None:
        libc.mallopt(_M_ARENA_MAX, 1)
        libc.mallopt(_M_TRIM_THRESHOLD, _LARGE_BYTES)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        no = ctypes.c_ulong(0)
        libc.prctl(_PR_SET_THP_DISABLE, ctypes.c_ulong(1), no, no, no)  # a kernel that refuses changes nothing
    if _PACKAGES[0] not in sys.modules:
        _load_transport_only()


async def keep_small() -> None:
    """Once everything is loaded: keep the collector off what stays, and give back what was for a moment."""
    gc.collect()
    gc.freeze()
    libc = _libc()
    if libc is None:
        return
    delay = FIRST_TRIM_SECONDS
    while True:
        libc.malloc_trim(0)
        await asyncio.sleep(delay)
        delay = TRIM_SECONDS


def _load_transport_only() -> None:
    """Load gpushare.kube without the Kubernetes package's generated clients and models.

    gpushare.kube uses the package's configuration and REST transport, but importing these loads, on the way, a
    synchronous and an asynchronous client of every API with pydantic, requests and OAuth: 19 MB resident that no
    agent ever calls. So the packages on the way are entered bare. A release of theirs that does not stand this is
    loaded as it is.
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
    """Make a package known by its folder, without running its own code."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(name)
    bare = types.ModuleType(name)
    bare.__spec__, bare.__path__ = spec, list(spec.submodule_search_locations)
    sys.modules[name] = bare
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, bare)


def _libc() -> ctypes.CDLL | None:
    """glibc; None on a libc without these two calls (musl)."""
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "malloc_trim") and hasattr(libc, "mallopt") else None
