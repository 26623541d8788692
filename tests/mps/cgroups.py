"""Throw-away cgroups for tests of the real freezer, and processes in them that count."""

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from gpushare.mps.freezer import CGROUP_ROOT, CgroupFreezer

COUNTER = "import time\nwhile True:\n print('x', end='', flush=True)\n time.sleep(0.01)"


def root_of(version: str) -> Path:
    """The mount point to give to the freezer; skips where this machine has no such cgroups to write."""
    if version == "v1":
        root = CGROUP_ROOT
        if not (root / "freezer" / "tasks").exists():
            pytest.skip("no cgroup v1 freezer is mounted here")
        where = root / "freezer"
    else:
        found = [path for path in (CGROUP_ROOT, CGROUP_ROOT / "unified") if (path / "cgroup.controllers").exists()]
        if not found:
            pytest.skip("no cgroup v2 is mounted here")
        root = where = found[0]
    if os.geteuid() != 0 or not os.access(where, os.W_OK) or os.statvfs(where).f_flag & os.ST_RDONLY:
        pytest.skip(f"{where} is not writable here: run as root")
    return root


class RealPods:
    """Pods' cgroups as kubelet makes them, below a directory of the test's own."""

    def __init__(self, version: str) -> None:
        self.root = root_of(version)
        self.freezer = CgroupFreezer(self.root)
        self.top = self.freezer.hierarchy / f"gpushare-test-{uuid.uuid4().hex[:8]}"
        self._made: list[Path] = []
        self._processes: list[subprocess.Popen] = []
        try:
            self.make(self.top)
        except OSError as error:
            pytest.skip(f"no cgroup can be made here: {error}")

    def make(self, path: Path) -> Path:
        for one in [*reversed(path.parents), path]:
            if not one.exists():
                one.mkdir()
                self._made.append(one)
        return path

    def add(self, uid: str, name: str | None = None) -> Path:
        return self.make(self.top / "kubepods" / "besteffort" / (name or f"pod{uid}"))

    def run(self, cgroup: Path, output: Path) -> subprocess.Popen:
        """A process in a container of that pod that writes a letter every 10 ms."""
        container = self.make(cgroup / "container")
        with output.open("wb") as file:
            process = subprocess.Popen([sys.executable, "-c", COUNTER], stdout=file, stdin=subprocess.DEVNULL)
        self._processes.append(process)
        (container / "cgroup.procs").write_text(str(process.pid))
        return process

    def close(self) -> None:
        for path in self._made:
            with contextlib.suppress(OSError):
                self.freezer.thaw(path)
        for process in self._processes:
            process.send_signal(signal.SIGKILL)
            process.wait(30)
        for path in reversed(self._made):
            with contextlib.suppress(OSError):
                path.rmdir()
