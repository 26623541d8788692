"""The freezer's port: the kernel's cgroups (v1, v2) and the simulated side keep the same contract."""

import errno
import gc
import os
import shutil
import subprocess
import sys
import tracemalloc
import uuid

import pytest

from gpushare.mps.freezer import CgroupFreezer, FreezerError, FreezeState, SimulatedFreezer
from gpushare.mps.frozen import STUCK_SECONDS, FrozenPods, record_of, recorded, thaw_recorded
from gpushare.mps.status import ThrottleRefusal

from .cgroups import RealPods
from .conftest import until

SIDES = ["simulated", "v1", "v2"]


class SimulatedPods:
    def __init__(self) -> None:
        self.freezer = SimulatedFreezer()

    def add(self, uid):
        self.freezer.add(uid)
        return self.freezer.find(uid)

    def remove(self, uid, _path):
        self.freezer.remove(uid)

    def close(self) -> None:
        pass


class KernelPods(RealPods):
    def remove(self, _uid, path):
        path.rmdir()
        self._made.remove(path)


@pytest.fixture(params=SIDES)
def pods(request):
    pods = SimulatedPods() if request.param == "simulated" else KernelPods(request.param)
    yield pods
    pods.close()


@pytest.fixture(params=["v1", "v2"])
def kernel(request):
    pods = KernelPods(request.param)
    yield pods
    pods.close()


@pytest.fixture
def uid():
    return str(uuid.uuid4())


# The contract


def test_a_pod_is_frozen_and_thawed_and_can_be_so_again(pods, uid):
    path = pods.add(uid)
    freezer = pods.freezer
    assert freezer.problem() == ""
    for _ in range(3):
        assert freezer.state(path) is FreezeState.THAWED
        freezer.freeze(path)
        until(lambda: freezer.state(path) is FreezeState.FROZEN, "frozen")
        freezer.freeze(path)
        until(lambda: freezer.state(path) is FreezeState.FROZEN, "still frozen")
        freezer.nudge(path)
        until(lambda: freezer.state(path) is FreezeState.FROZEN, "frozen after a nudge")
        freezer.thaw(path)
        until(lambda: freezer.state(path) is FreezeState.THAWED, "thawed")
        freezer.thaw(path)


def test_a_pod_is_found_while_it_is_there(pods, uid):
    assert pods.freezer.find(uid) is None
    path = pods.add(uid)
    assert pods.freezer.find(uid) == path
    pods.remove(uid, path)
    assert pods.freezer.find(uid) is None


def test_pods_that_are_gone_take_no_memory(kernel):
    def come_and_go(count):
        for _ in range(count):
            uid = str(uuid.uuid4())
            path = kernel.add(uid)
            kernel.freezer.find(uid)
            kernel.remove(uid, path)

    come_and_go(10)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        come_and_go(200)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 20_000  # a path alone is some 250 bytes
    finally:
        tracemalloc.stop()


def test_operations_on_a_removed_cgroup_raise_file_not_found(pods, uid):
    path = pods.add(uid)
    pods.remove(uid, path)
    for operation in (pods.freezer.state, pods.freezer.freeze, pods.freezer.thaw):
        with pytest.raises(FileNotFoundError):
            operation(path)


# What the kernel's side adds


def test_processes_stand_still_and_go_on(kernel, uid, tmp_path):
    path, output = kernel.add(uid), tmp_path / "out"
    process = kernel.run(path, output)
    until(lambda: output.stat().st_size > 5, "it runs")
    kernel.freezer.freeze(path)
    until(lambda: kernel.freezer.state(path) is FreezeState.FROZEN, "frozen")
    before = output.stat().st_size
    os.kill(process.pid, 18)  # SIGCONT, which a tenant could send, does not help it
    assert kernel.freezer.state(path) is FreezeState.FROZEN
    assert output.stat().st_size == before
    kernel.freezer.thaw(path)
    until(lambda: output.stat().st_size > before + 5, "it goes on")


def test_a_container_that_somebody_paused_stays_paused(kernel, uid):
    path = kernel.add(uid)
    container = kernel.make(path / "container")
    kernel.freezer.freeze(container)
    kernel.freezer.freeze(path)
    until(lambda: kernel.freezer.state(path) is FreezeState.FROZEN, "frozen")
    kernel.freezer.thaw(path)
    until(lambda: kernel.freezer.state(path) is FreezeState.THAWED, "thawed")
    assert kernel.freezer.state(container) is FreezeState.FROZEN


UID = "0b8a5f4e-2c1d-4e3f-9a8b-7c6d5e4f3a2b"
SYSTEMD = UID.replace("-", "_")


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize(
    "path",
    [
        f"kubepods/burstable/pod{UID}",
        f"kubepods/besteffort/pod{UID}",
        f"kubepods/pod{UID}",
        f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SYSTEMD}.slice",
        f"kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{SYSTEMD}.slice",
        f"kubepods.slice/kubepods-pod{SYSTEMD}.slice",
        f"kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{SYSTEMD}.slice",
        f"docker/{'3f' * 32}/kubelet/kubepods/burstable/pod{UID}",
    ],
)
def test_every_layout_is_found(tmp_path, version, path):
    root = cgroup_tree(tmp_path, version)
    pod = root / path
    (pod / "container").mkdir(parents=True)
    freezer = CgroupFreezer(tmp_path)
    assert freezer.find(UID) == pod
    assert freezer.find(str(uuid.uuid4())) is None


def cgroup_tree(base, version):
    """A directory that looks like a mount point of cgroups."""
    root = base / "freezer" if version == "v1" else base
    root.mkdir(exist_ok=True)
    (root / ("tasks" if version == "v1" else "cgroup.controllers")).touch()
    for other in ("system.slice/ssh.service", f"kubepods/burstable/pod{uuid.uuid4()}/x"):
        (root / other).mkdir(parents=True)
    return root


def test_a_cgroup_that_a_tenant_made_is_no_other_pods(tmp_path):
    root = cgroup_tree(tmp_path, "v2")
    (root / "kubepods" / f"pod{uuid.uuid4()}" / "container" / f"pod{UID}").mkdir(parents=True)
    assert CgroupFreezer(tmp_path).find(UID) is None


def test_containers_outside_their_pods_cgroup_are_told(tmp_path):
    root = cgroup_tree(tmp_path, "v2")
    (root / "system.slice" / f"kubepods-burstable-pod{SYSTEMD}.slice:cri-containerd:3f4c5d").mkdir()
    with pytest.raises(FreezerError, match="cgroupfs driver"):
        CgroupFreezer(tmp_path).find(UID)


def test_a_machine_without_cgroups_has_a_problem(tmp_path):
    assert "no cgroup file system" in CgroupFreezer(tmp_path).problem()
    assert CgroupFreezer(tmp_path).find(UID) is None


def test_a_pod_without_a_freezer_file_gets_none(tmp_path):
    pod = cgroup_tree(tmp_path, "v2") / "kubepods" / f"pod{UID}"
    pod.mkdir()
    with pytest.raises(FileNotFoundError):
        CgroupFreezer(tmp_path).freeze(pod)
    assert list(pod.iterdir()) == []


# Who is frozen by us


def test_the_record_names_whom_we_froze_and_nobody_else(pods, uid, tmp_path):
    path = pods.add(uid)
    frozen = FrozenPods(tmp_path, pods.freezer)
    assert frozen.freeze(uid, 0.0) is None
    assert [mark.name for mark in recorded(tmp_path)] == [uid]
    assert recorded(tmp_path)[0].read_text() == str(path)
    until(lambda: not frozen.settle(0.0) and frozen.still == {uid}, "settled")
    assert frozen.thaw(uid)
    until(lambda: pods.freezer.state(path) is FreezeState.THAWED, "thawed")
    assert recorded(tmp_path) == ()
    assert frozen.uids == frozenset()


def test_whoever_comes_after_a_crash_thaws_exactly_those(pods, tmp_path):
    ours, theirs = str(uuid.uuid4()), str(uuid.uuid4())
    ours_path, theirs_path = pods.add(ours), pods.add(theirs)
    FrozenPods(tmp_path, pods.freezer).freeze(ours, 0.0)
    pods.freezer.freeze(theirs_path)
    until(lambda: pods.freezer.state(theirs_path) is FreezeState.FROZEN, "frozen by somebody else")
    assert thaw_recorded(tmp_path, pods.freezer) == (ours,)
    until(lambda: pods.freezer.state(ours_path) is FreezeState.THAWED, "thawed")
    assert pods.freezer.state(theirs_path) is FreezeState.FROZEN
    assert thaw_recorded(tmp_path, pods.freezer) == ()
    assert recorded(tmp_path) == ()


def test_a_pod_that_somebody_else_froze_is_left_alone(pods, uid, tmp_path):
    path = pods.add(uid)
    pods.freezer.freeze(path)
    until(lambda: pods.freezer.state(path) is FreezeState.FROZEN, "frozen by somebody else")
    frozen = FrozenPods(tmp_path, pods.freezer)
    refused = frozen.freeze(uid, 0.0)
    assert refused is not None
    assert refused.reason is ThrottleRefusal.FROZEN_BY_OTHERS
    assert frozen.thaw_all()
    assert pods.freezer.state(path) is FreezeState.FROZEN
    assert recorded(tmp_path) == ()


def test_a_pod_that_leaves_while_frozen_is_forgotten(pods, uid, tmp_path):
    path = pods.add(uid)
    frozen = FrozenPods(tmp_path, pods.freezer)
    frozen.freeze(uid, 0.0)
    pods.remove(uid, path)
    assert frozen.thaw_all()
    assert frozen.uids == frozenset()
    assert recorded(tmp_path) == ()
    refused = frozen.freeze(uid, 1.0)
    assert refused is not None
    assert refused.reason is ThrottleRefusal.NO_CGROUP


def test_a_mark_of_a_pod_that_is_gone_and_one_cut_short_are_cleared(pods, tmp_path):
    record_of(tmp_path).mkdir()
    (record_of(tmp_path) / "gone").write_text(str(tmp_path / "nowhere" / "gone"))
    (record_of(tmp_path) / "empty").write_text("")
    assert thaw_recorded(tmp_path, pods.freezer) == ()
    assert recorded(tmp_path) == ()


def test_what_sticks_in_freezing_is_nudged_and_then_let_go(tmp_path):
    freezer = SimulatedFreezer()
    for uid, nudges in (("soon", 3), ("never", 10**6)):
        freezer.add(uid)
        freezer.sticks[uid] = nudges
    frozen = FrozenPods(tmp_path, freezer)
    now = 0.0
    assert frozen.freeze("soon", now) is None
    assert frozen.freeze("never", now) is None
    refused = {}
    while now < STUCK_SECONDS + 0.1 and not refused:
        now += 0.02
        refused = frozen.settle(now)
    assert frozen.still == {"soon"}
    assert {uid: one.reason for uid, one in refused.items()} == {"never": ThrottleRefusal.STUCK}
    assert freezer.cgroups["never"] is FreezeState.THAWED
    assert [mark.name for mark in recorded(tmp_path)] == ["soon"]


def test_a_freezer_that_cannot_be_written_refuses_and_leaves_nothing(tmp_path):
    freezer = SimulatedFreezer()
    freezer.add("a")
    freezer.error = OSError(errno.EROFS, "Read-only file system")
    frozen = FrozenPods(tmp_path, freezer)
    refused = frozen.freeze("a", 0.0)
    assert refused is not None
    assert refused.reason is ThrottleRefusal.NOT_WRITABLE
    assert "Read-only" in refused.detail
    assert frozen.uids == frozenset()
    assert recorded(tmp_path) == ()


def test_a_thaw_that_fails_is_tried_again_and_stays_on_record(tmp_path):
    freezer = SimulatedFreezer()
    freezer.add("a")
    frozen = FrozenPods(tmp_path, freezer)
    assert frozen.freeze("a", 0.0) is None
    freezer.error = OSError(errno.EIO, "broken")
    assert not frozen.thaw_all()
    assert thaw_recorded(tmp_path, freezer) == ()
    assert [mark.name for mark in recorded(tmp_path)] == ["a"]
    freezer.error = None
    assert frozen.thaw_all()
    assert freezer.cgroups["a"] is FreezeState.THAWED
    assert recorded(tmp_path) == ()


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
def test_root_without_capabilities_may_freeze(kernel, uid):
    """As the MPS host runs: v1's root directory has no w, which only a capability would pass."""
    path = kernel.add(uid)
    freezes = (
        "import sys; from pathlib import Path; from gpushare.mps.freezer import CgroupFreezer\n"
        "freezer = CgroupFreezer(Path(sys.argv[1]))\n"
        "print(freezer.problem() or 'none')\n"
        "freezer.freeze(Path(sys.argv[2]))"
    )
    dropped = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all"]
    done = subprocess.run(
        [*dropped, sys.executable, "-c", freezes, str(kernel.root), str(path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.stdout, done.stderr) == ("none\n", "")
    until(lambda: kernel.freezer.state(path) is FreezeState.FROZEN, "frozen")
    kernel.freezer.thaw(path)
