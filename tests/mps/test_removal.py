"""An orderly end leaves nothing of a GPU without tenants, and everything of one that has some."""

import time

import pytest

from gpushare.mps.frozen import record_of
from gpushare.mps.layout import Decisions, GpuDirectory, PodDecision, write_decisions, write_status
from gpushare.mps.removal import has_tenants, remove_unused
from gpushare.mps.status import ClientStatus, GateState, GateStatus


def status(*clients: ClientStatus) -> GateStatus:
    return GateStatus("GPU-1", GateState.ACTIVE, time.time(), clients=clients)


@pytest.fixture
def gpu(tmp_path):
    made = GpuDirectory.of(tmp_path, "GPU-1")
    made.create()
    made.twin_state.write_text("{}")  # nothing of this test may reach a real daemon
    return made


def test_a_gpu_that_nobody_was_decided_for_leaves_nothing(gpu, tmp_path):
    write_status(gpu, status())
    write_decisions(gpu, Decisions())
    (gpu.log / "server.log").write_text("x")
    assert remove_unused([gpu]) == ()
    assert list(tmp_path.iterdir()) == []


def test_the_record_of_frozen_pods_goes_once_it_is_empty(gpu, tmp_path):
    record = record_of(tmp_path)
    record.mkdir()
    (record / "a").write_text("/sys/fs/cgroup/a")  # our successor has to thaw it
    remove_unused([gpu])
    assert [path.name for path in record.iterdir()] == ["a"]
    (record / "a").unlink()
    gpu.create()
    assert remove_unused([gpu]) == ()
    assert list(tmp_path.iterdir()) == []


def test_who_was_decided_or_connected_keeps_the_directory_that_it_mounts(gpu):
    write_decisions(gpu, Decisions({"a": PodDecision(20, 1024)}))
    assert remove_unused([gpu]) == (gpu,)
    write_decisions(gpu, Decisions())
    write_status(gpu, status(ClientStatus(7, "a")))
    assert remove_unused([gpu]) == (gpu,)
    write_status(gpu, status())
    gpu.decisions.write_text("{")
    assert has_tenants(gpu), "decisions that cannot be read are not taken for none"
    assert gpu.tenant.is_dir()


def test_a_gpu_that_is_still_exclusive_keeps_the_record_of_its_own_mode(gpu):
    gpu.compute_mode.write_text('{"own": "Default"}')
    write_decisions(gpu, Decisions())
    assert remove_unused([gpu]) == (gpu,)
    assert gpu.compute_mode.read_text() == '{"own": "Default"}'
    gpu.compute_mode.unlink()
    assert remove_unused([gpu]) == ()


def test_a_daemon_ends_with_its_directory(twin, twin_gpu):
    assert twin.program.daemon_pid() is not None
    assert remove_unused([twin_gpu]) == ()
    assert twin.program.daemon_pid() is None
    assert not twin_gpu.path.exists()
