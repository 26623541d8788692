"""Former releases of gpushare, unpacked from the history, with today's tools to build and install them."""

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from livecluster import ROOT

OLDEST = "fe3ce761d7c965329e5784bf574b4b1d259e3ba7"  # 22 November: before all views were of one decision
LAST = "dc64d45bff983730e5f7ccb7bd9c4da017aeacac"  # 28 November: before it was mended for nodes with a zone
BUILD_SECONDS = 600
_IDLE = ("chrt", "--idle", "0") if shutil.which("chrt") else ("nice", "-n", "19")


class FormerReleases:
    """Former releases, each in a folder of its own below `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._building: dict[str, subprocess.Popen[bytes]] = {}

    def build(self, commit: str) -> None:
        """Begin to build its image with idle priority: tests on a cluster leave the cores idle for long."""
        if not _is_here(commit):
            return
        command = [*_IDLE, str(self._unpacked(commit) / "hack" / "cluster"), "image"]
        with Path(self._folder, f"{commit}.log").open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        # A session's processes share its part of the CPUs, whatever their own priorities (autogroup in sched(7)).
        with contextlib.suppress(OSError):
            Path(f"/proc/{process.pid}/autogroup").write_text("19")
        self._building[commit] = process

    def sources(self, commit: str) -> Path:
        """Return its folder, once its image is built if that has begun; skips where history lacks it."""
        if not _is_here(commit):
            pytest.skip("a shallow clone: a former release is not in its history")
        if (building := self._building.pop(commit, None)) is not None:
            code = building.wait(timeout=BUILD_SECONDS)
            assert code == 0, Path(self._folder, f"{commit}.log").read_text()[-2000:]
        return self._unpacked(commit)

    def close(self) -> None:
        """End what is being built."""
        for process in self._building.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)  # what it has started too
            process.wait(timeout=60)

    def _unpacked(self, commit: str) -> Path:
        folder = self._folder / commit[:8]
        if not folder.exists():
            archive = subprocess.run(
                ["git", "-C", str(ROOT), "archive", commit], capture_output=True, check=True
            ).stdout
            folder.mkdir()
            subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
            own = shutil.ignore_patterns("demo-values.yaml")  # a chart refuses values of a later one
            shutil.copytree(ROOT / "hack", folder / "hack", dirs_exist_ok=True, ignore=own)
        return folder


def _is_here(commit: str) -> bool:
    asked = ["git", "-C", str(ROOT), "cat-file", "-e", f"{commit}^{{commit}}"]
    return subprocess.run(asked, capture_output=True, check=False).returncode == 0
