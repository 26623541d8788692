import os
import subprocess

import pytest

from gpushare.mps.identity import (
    container_of,
    ends_with,
    is_alive,
    pod_uid_of,
    pod_uid_of_cgroup,
    start_ticks_of,
)

from .cgroups import RealPods
from .conftest import until

UID = "0b8a5f4e-2c1d-4e3f-9a8b-7c6d5e4f3a2b"
SYSTEMD = UID.replace("-", "_")


@pytest.mark.parametrize(
    "line",
    [
        f"0::/kubepods/besteffort/pod{UID}/3f4c5d",
        f"0::/kubepods/pod{UID}/3f4c5d",
        f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SYSTEMD}.slice/cri-containerd-3f.scope",
        f"0::/kubepods.slice/kubepods-pod{SYSTEMD}.slice/crio-3f4c5d.scope",
        f"0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{SYSTEMD}.slice/crio-3f.scope/container",
        f"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{SYSTEMD}.slice/cri-containerd-3f.scope",
        f"0::/system.slice/containerd.service/kubepods-burstable-pod{SYSTEMD}.slice:cri-containerd:3f4c5d",
        f"0::/../../pod{UID}/3f4c5d",
        f"0::/../../kubepods-besteffort-pod{SYSTEMD}.slice/cri-containerd-3f.scope",
        f"12:devices:/kubepods/burstable/pod{UID}/3f4c5d\n11:memory:/kubepods/burstable/pod{UID}/3f4c5d\n0::/",
        f"3:cpuset:/\n2:pids:/kubepods/besteffort/pod{UID}/3f4c5d\n0::/",
    ],
)
def test_the_pod_is_found_in_every_layout(line):
    assert pod_uid_of_cgroup(line) == UID


@pytest.mark.parametrize(
    "line",
    [
        "0::/",
        "",
        "0::/user.slice/session-1.scope",
        "0::/system.slice/podman.service",
        "0::/kubepods/besteffort",
        "0::/kubepods/podlike/x",
        f"0::/kubepods/nopod{UID}/x",
        "0::/init.scope",
    ],
)
def test_what_is_no_pod_has_no_uid(line):
    assert pod_uid_of_cgroup(line) is None


def test_a_container_cannot_rename_itself_by_a_cgroup_below_its_own():
    other = "ffffffff-2c1d-4e3f-9a8b-7c6d5e4f3a2b"
    assert pod_uid_of_cgroup(f"0::/kubepods/besteffort/pod{UID}/3f4c5d/pod{other}/x") == UID


def test_a_static_pod_has_a_hash_for_a_uid():
    assert pod_uid_of_cgroup(f"0::/kubepods/burstable/pod{'a1' * 16}/x") == "a1" * 16


def test_a_process_that_is_gone_or_out_of_sight_is_in_no_pod(tmp_path):
    assert pod_uid_of(0) is None
    assert pod_uid_of(2**22 + 1) is None
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cgroup").write_text(f"0::/kubepods/pod{UID}/x\n")
    assert pod_uid_of(7, tmp_path) == UID


def test_alive_means_the_same_process():
    ticks = start_ticks_of(os.getpid())
    assert ticks is not None
    assert is_alive(os.getpid(), ticks)
    assert not is_alive(os.getpid(), ticks - 1)
    assert not is_alive(2**22 + 1)


def test_a_process_without_its_first_thread_runs_on(headless):
    """Before: taken for dead, so the pod's next process had the whole cap for itself."""
    assert is_alive(headless.pid, start_ticks_of(headless.pid))
    headless.kill()
    until(lambda: not is_alive(headless.pid), "a zombie until it is waited for")
    assert headless.poll() is not None


def test_a_process_without_its_first_thread_is_still_in_its_pod(headless, tmp_path):
    """In cgroup v1 its own file then says "/"."""
    pods = RealPods("v1")
    try:
        container = pods.make(pods.add(UID) / "container")
        (container / "cgroup.procs").write_text(str(headless.pid))
        assert pod_uid_of(headless.pid) == UID
    finally:
        headless.kill()
        headless.wait(60)
        pods.close()


def test_a_process_without_its_first_thread_is_still_in_its_container(headless, tmp_path):
    """Before: in cgroup v1 it counted as in the container of every process of the node that is in no cgroup."""
    pods = RealPods("v1")
    beside = subprocess.Popen(["sleep", "60"])
    try:
        container = pods.make(pods.add(UID) / "container")
        for pid in (headless.pid, beside.pid):
            (container / "cgroup.procs").write_text(str(pid))
        freezer = [line for line in container_of(beside.pid).splitlines() if ":freezer:" in line]
        assert f"pod{UID}/container" in freezer[0]
        assert freezer[0] in container_of(headless.pid).splitlines()
        assert ends_with(beside.pid, headless.pid)
    finally:
        for process in (headless, beside):
            process.kill()
            process.wait(60)
        pods.close()
