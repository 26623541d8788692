"""The local cluster goes away whole, a pod that a throttle has just stopped included."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from devcluster.local import KUBELET_DIRECTORY, outside_places, thaw

V1 = Path("/sys/fs/cgroup/freezer")
SECONDS = 60.0


@pytest.fixture
def frozen() -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """A cgroup of its own with a process that is stopped by the freezer."""
    parent = V1 if V1.is_dir() else Path("/sys/fs/cgroup")
    group = parent / f"gpushare-down-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    try:
        (group / "cgroup.procs").write_text(str(process.pid))
        name, stop = ("freezer.state", "FROZEN") if V1.is_dir() else ("cgroup.freeze", "1")
        if not (group / name).exists():
            pytest.skip("this machine has no freezer")
        (group / name).write_text(stop)
        yield group, process
    finally:
        thaw(group)
        process.kill()
        process.wait(SECONDS)
        deadline = time.monotonic() + SECONDS
        while group.exists() and time.monotonic() < deadline:
            try:
                group.rmdir()
            except OSError:
                time.sleep(0.1)


def test_what_is_frozen_dies_once_it_is_thawed(frozen: tuple[Path, subprocess.Popen[bytes]]) -> None:
    group, process = frozen
    process.send_signal(signal.SIGKILL)
    thaw(group)
    assert process.wait(SECONDS) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("name", "stopped", "running"), [("freezer.state", "FROZEN", "THAWED"), ("cgroup.freeze", "1", "0")]
)
def test_a_group_of_either_version_is_thawed_and_one_without_a_freezer_left_alone(
    tmp_path: Path, name: str, stopped: str, running: str
) -> None:
    (tmp_path / name).write_text(stopped)
    thaw(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == running


def test_a_dry_run_uncovers_no_directory_of_a_cluster_that_runs() -> None:
    """Unmounted, its file system would give way to the machine's kubelet directory, which `down` then removes."""
    assert KUBELET_DIRECTORY in outside_places(is_ours=True, is_dry_run=False)
    assert outside_places(is_ours=True, is_dry_run=True) == []
    assert outside_places(is_ours=False, is_dry_run=False) == []
