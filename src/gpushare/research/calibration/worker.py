"""A worker process: one program under one cap, kept ready and run for one window at a time."""

import contextlib
import itertools
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gpushare.research.calibration.workload import Stage, Workload

_WARM_SECONDS = 0.8
_FIRST_STEPS = 3
# After the window all run on for a moment, so that a slow one does not finish its last iteration alone.
_TAIL_SECONDS = 0.08


WindowOrder = tuple[int, float, float, float]  # CPU; when to begin, count from and count to, monotonic seconds


def completed(finished: Sequence[float], began: float, moment: float) -> float:
    """Return the iterations done by `moment`, fractions included, from the times at which each ended."""
    previous = began
    for done, end in enumerate(finished):
        if end >= moment:
            return done + max(0.0, moment - previous) / max(end - previous, 1e-9)
        previous = end
    return float(len(finished))


def serve(workload: Workload, percentage: int, stage: Stage, link: Connection, *, mps: bool) -> None:
    """Run the worker process: set the cap, build, report ready, then run windows until told to stop.

    The parent must not have initialised CUDA; the cap is read by CUDA's client library at its first call.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if mps:
        os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(percentage)
    try:
        import torch  # noqa: PLC0415 -- loaded once by the parent

        torch.set_num_threads(1)
        step = workload.build(stage)
        _warm(torch, step, stage)
        link.send(("ready", _facts(torch, stage)))
        while (order := link.recv()) is not None:
            link.send(("ran", _window(torch, step, workload, stage, order)))
    except EOFError:
        pass
    except Exception:  # noqa: BLE001 -- any error of a workload is reported by name and does not affect the others
        link.send(("failed", traceback.format_exc(limit=4)))
    sys.stdout.flush()
    os._exit(0)


def _warm(torch: Any, step: Any, stage: Stage) -> None:
    """Run until lazy loading, autotuning and copy-on-write are over, then free spare memory."""
    enough = time.monotonic() + (0.05 if stage.tiny else _WARM_SECONDS)
    for count in itertools.count():
        step()
        if stage.device == "cuda":
            torch.cuda.synchronize()
            if count == _FIRST_STEPS:
                torch.cuda.empty_cache()
        if count > _FIRST_STEPS and time.monotonic() >= enough:
            return


def _pin(cpu: int) -> None:
    """Pin this process to one CPU: the speed of a host-bound program depends on the CPU that it runs on."""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(thread.name), {cpu})


def _facts(torch: Any, stage: Stage) -> dict[str, int]:
    if stage.device != "cuda":
        return {"sm_count": 0, "memory_mib": 0}
    free, total = torch.cuda.mem_get_info()
    del free
    return {
        "sm_count": torch.cuda.get_device_properties(0).multi_processor_count,
        "memory_mib": int(torch.cuda.max_memory_reserved() / 2**20),
        "total_mib": int(total / 2**20),
    }


def _window(torch: Any, step: Any, workload: Workload, stage: Stage, order: WindowOrder) -> tuple[float, int]:
    """Run for one window: (iterations/s, iterations seen)."""
    cpu, began, start, end = order
    _pin(cpu)
    cuda = stage.device == "cuda"
    pending: deque[Any] = deque()
    finished: list[float] = []
    time.sleep(max(0.0, began - time.monotonic()))
    while True:
        step()
        if cuda:
            event = torch.cuda.Event()
            event.record()
            pending.append(event)
            if len(pending) > workload.in_flight:
                pending.popleft().synchronize()
                finished.append(time.monotonic())
        else:
            finished.append(time.monotonic())
        if finished and finished[-1] >= end + _TAIL_SECONDS:
            break
    if cuda:
        torch.cuda.synchronize()
    count = completed(finished, began, end) - completed(finished, began, start)
    return count / (end - start), len(finished)
