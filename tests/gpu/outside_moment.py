"""How long NVML lists a process as one outside MPS: one that becomes a client, and short ones that stay outside.

`outside_moment.py OUT`: an MPS daemon of its own and an idle GPU, as root. A process that is about to become a
client must not be taken for one outside (docs/adr/0171); one that leaves MPS may live for a moment only. A row per
process: its own times, and from when until when NVML listed it, in either list. It changes no setting and ends its
daemon.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Self

import pynvml

CLIENTS, OUTSIDERS = 30, 15
AT_A_TIME = 3
STAYS_SECONDS = (0.0, 0.1, 0.3)  # of processes outside MPS, after their context is made
LOOKS_EVERY_SECONDS = 0.002
TENANT = """
import ctypes, sys, time
at = lambda: time.clock_gettime(time.CLOCK_MONOTONIC)
began, cuda, found = at(), ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
assert cuda.cuInit(0) == 0
inited = at()
assert cuda.cuCtxCreate_v2(ctypes.byref(found), 0, 0) == 0
made, memory = at(), ctypes.c_uint64()
assert cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(64 << 20)) == 0
assert cuda.cuMemsetD8_v2(memory, 1, ctypes.c_size_t(64 << 20)) == 0 and cuda.cuCtxSynchronize() == 0
worked = at()
time.sleep(float(sys.argv[1]))
print(began, inited, made, worked, at(), flush=True)
"""


class Lists:
    """What NVML lists, looked at again and again: first and last moment of each pid in each of the two lists."""

    def __init__(self) -> None:
        self.clients: dict[int, tuple[float, float]] = {}
        self.outside: dict[int, tuple[float, float]] = {}
        self.looks = 0
        self._stops = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stops.set()
        self._thread.join()

    def _look(self) -> None:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        while not self._stops.is_set():
            # In the agent's order: who becomes a client between the two lists is in the second list alone.
            clients = {one.pid for one in pynvml.nvmlDeviceGetMPSComputeRunningProcesses_v3(handle)}
            everyone = {one.pid for one in pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)}
            now = time.clock_gettime(time.CLOCK_MONOTONIC)
            for pids, seen in ((clients, self.clients), (everyone - clients, self.outside)):
                for pid in pids:
                    seen[pid] = (seen.get(pid, (now, now))[0], now)
            self.looks += 1
            time.sleep(LOOKS_EVERY_SECONDS)


def run(count: int, environment: dict[str, str], stays: tuple[float, ...], lists: Lists) -> list[dict[str, Any]]:
    """Run so many processes, a few at a time; their own times and those of the lists."""
    rows, running, made = [], [], 0
    while made < count or running:
        while made < count and len(running) < AT_A_TIME:
            seconds = stays[made % len(stays)]
            command = [sys.executable, "-c", TENANT, str(seconds)]
            process = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            running.append((process, seconds))
            made += 1
            time.sleep(0.05)
        process, seconds = running.pop(0)
        try:
            out, error = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            rows.append({"stays": seconds, "error": "no end in 20 s"})
            continue
        if process.returncode:
            rows.append({"stays": seconds, "error": error[-300:]})
            continue
        began, inited, context, worked, ended = map(float, out.split())
        row: dict[str, Any] = {"stays": seconds, "init": inited - began, "context": context - inited}
        row |= {"work": worked - context, "life": ended - began}
        for name, seen in (("as_client", lists.clients), ("as_outside", lists.outside)):
            found = seen.get(process.pid)
            row[name] = round(found[1] - found[0], 4) if found is not None else None
        rows.append({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})
    return rows


def main(out: Path) -> None:
    """Run both kinds, write rows.json and print what they say."""
    pynvml.nvmlInit()
    with tempfile.TemporaryDirectory() as place:
        inside = {
            **os.environ,
            "CUDA_MPS_PIPE_DIRECTORY": f"{place}/pipe",
            "CUDA_MPS_LOG_DIRECTORY": f"{place}/log",
        }
        outside = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": f"{place}/nowhere"}
        for name in ("pipe", "log"):
            (Path(place) / name).mkdir()
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=inside, check=True, timeout=20)
        try:
            with Lists() as lists:
                run(1, inside, (0.5,), lists)  # it starts the server
                began, looks = time.monotonic(), lists.looks
                rows = {"clients": run(CLIENTS, inside, (0.3,), lists)}
                rows["outside"] = run(OUTSIDERS, outside, STAYS_SECONDS, lists)
                every = (time.monotonic() - began) / (lists.looks - looks)
        finally:
            with contextlib.suppress(subprocess.SubprocessError):
                subprocess.run(
                    ["nvidia-cuda-mps-control"], input="quit\n", text=True, env=inside, timeout=20, check=False
                )
    out.mkdir(parents=True, exist_ok=True)
    (out / "rows.json").write_text(json.dumps({"look_every_seconds": every, **rows}, indent=1))
    for kind, found in rows.items():
        good = [row for row in found if "error" not in row]
        seen = [row["as_outside"] for row in good if row["as_outside"] is not None]
        print(f"{kind}: {len(good)} of {len(found)} ran; listed as outside: {len(seen)}", end="")
        print(f", for {statistics.median(seen):.3f} s in the median, {max(seen):.3f} at most" if seen else "")
        for name in ("init", "context", "work", "life"):
            print(f"   {name}: median {statistics.median(row[name] for row in good):.3f} s" if good else "")
    print(f"a look every {every * 1000:.1f} ms")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
