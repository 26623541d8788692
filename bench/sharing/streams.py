"""Two programs of one process in two streams: one answers requests at high priority, one works at low.

What CUDA offers within a process (`cudaStreamCreateWithPriority`): blocks of the stream of higher priority are
scheduled first, blocks that run are not preempted. Both programs' host sides share one Python, so a host-bound
program is slowed by its neighbour's Python too.
"""

import argparse
import threading
from typing import Any

from bench.sharing.work import JobLog, serve

_QUEUED = 2  # iterations of the second program that may wait on the GPU


def run(read: argparse.Namespace, log: JobLog) -> int:
    """Run both programs; the log's requests are the first one's, its `end` gives the second one's rate."""
    import torch

    from gpushare.research.calibration.table_suite import TABLE
    from gpushare.research.calibration.workload import Stage

    names = read.program.split("+")
    lowest, highest = torch.cuda.Stream.priority_range()
    streams = [torch.cuda.Stream(priority=priority) for priority in (highest, lowest)]
    steps = []
    for name, stream in zip(names, streams, strict=True):
        with torch.cuda.stream(stream):
            step = TABLE[name].build(Stage())
            for _ in range(4):
                step()
                stream.synchronize()
            steps.append(step)
    log.say("ready", sms=torch.cuda.get_device_properties(0).multi_processor_count, memory_mib=0)
    stop, done = threading.Event(), [0, 0.0]
    worker = threading.Thread(target=_work, args=(torch, steps[1], streams[1], stop, done, log), daemon=True)
    until = log.monotonic() + read.seconds
    worker.start()

    def answer() -> None:
        with torch.cuda.stream(streams[0]):
            steps[0]()
        streams[0].synchronize()

    count = serve(answer, read.count, read.rate, log, seed=read.seed, until=until)
    stop.set()
    worker.join(30)
    log.say("end", count=count, beside_rate=round(done[0] / max(done[1], 1e-9), 4))
    return 0


def _work(torch: Any, step: Any, stream: Any, stop: threading.Event, done: list[float], log: JobLog) -> None:
    began = log.monotonic()
    pending: list[Any] = []
    with torch.cuda.stream(stream):
        while not stop.is_set():
            step()
            event = torch.cuda.Event()
            event.record(stream)
            pending.append(event)
            if len(pending) > _QUEUED:
                pending.pop(0).synchronize()
                done[0] += 1
                done[1] = log.monotonic() - began
    stream.synchronize()
