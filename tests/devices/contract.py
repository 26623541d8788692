"""What every side of `Devices` must keep: the simulated side always, the real one where there is a GPU."""

from collections.abc import Callable

from gpushare.core.gpu import ComputeMode, Devices, DevicesError, Health

LOOKED_FOR_SECONDS = 60.0  # as often a real side looks for a GPU that is missing
WELL_AGAIN_SECONDS = 120.0  # a real side waits for a minute without a further XID


def check_contract(devices: Devices, sleep: Callable[[float], None]) -> None:
    """Hold a side to the Protocol's words.

    Args:
        sleep: lets the side's clock move by so many seconds.
    """
    gpus = devices.list()
    assert gpus, "no GPU to check"
    assert [gpu.index for gpu in gpus] == sorted(gpu.index for gpu in gpus)
    assert len({gpu.uuid for gpu in gpus}) == len(gpus)
    for gpu in gpus:
        assert gpu.uuid.startswith("GPU-")
        assert gpu.model
        assert gpu.memory_mib > 1000
        assert 10 <= gpu.sm_count <= 500
        assert devices.health(gpu.uuid).health is Health.HEALTHY
        assert devices.driver_version()

        assert devices.sample(gpu.uuid) is None  # one reading is no window
        assert devices.sample(gpu.uuid) is None  # nor are two within 100 ms
        sleep(0.3)
        sample = devices.sample(gpu.uuid)
        assert sample is not None
        assert 0.2 < sample.window_seconds < 5
        assert 0 <= sample.memory_used_mib <= gpu.memory_mib
        assert sample.gpu_utilization_ratio is None or 0 <= sample.gpu_utilization_ratio <= 1
        assert all(0 <= value <= 1 for value in sample.counters.as_dict().values())
        assert all(0 <= value <= 1 for value in sample.counters.pipes().values())

        assert sample.sm_clock_mhz is None or 100 <= sample.sm_clock_mhz <= 5000

        assert devices.compute_mode(gpu.uuid) in set(ComputeMode)
        for process in devices.processes(gpu.uuid):
            assert process.pid > 0
            assert process.memory_used_mib is None or 0 <= process.memory_used_mib <= gpu.memory_mib
    unknown = "GPU-00000000-0000-0000-0000-000000000000"
    assert devices.health(unknown).health is Health.UNHEALTHY  # never an exception
    for call in (devices.sample, devices.processes, devices.compute_mode):
        try:
            call(unknown)
        except DevicesError as error:
            assert not error.retryable  # noqa: PT017 - also run by tests/gpu without pytest
        else:
            raise AssertionError(f"{call} knows a GPU that is not there")


def check_driver(open_devices: Callable[[], Devices], be: Callable[[str], None]) -> None:
    """Hold a side to this: with a driver older than the least nothing is opened, and one sentence says why.

    Args:
        be: makes the driver that is opened next one of this version.
    """
    for version in ("470.82.01", "520.61.05", "524"):
        be(version)
        try:
            open_devices()
        except DevicesError as error:
            assert str(error) == f"the driver is {version}, and gpushare needs 525 or later"  # noqa: PT017 - as above
            assert not error.retryable  # noqa: PT017
        else:
            raise AssertionError(f"driver {version} is used")
    for version in ("525.60.13", "610.1", "of no number"):
        be(version)
        devices = open_devices()
        assert devices.driver_version() == version
        assert [devices.health(gpu.uuid).health for gpu in devices.list()] == [Health.HEALTHY] * len(
            devices.list()
        )
        devices.close()


def check_lost(
    devices: Devices, lose: Callable[[str], None], find: Callable[[str], None], sleep: Callable[[float], None]
) -> None:
    """Hold a side to this: a GPU that falls off the bus is unhealthy alone, and healthy when it is found again.

    Args:
        lose: lets a GPU fall off the bus, with the XID that the driver then reports, if the side has any.
        find: brings it back.
        sleep: lets the side's clock move by so many seconds.
    """
    uuids = [gpu.uuid for gpu in devices.list()]
    assert len(uuids) > 1, "one GPU alone tells nothing"
    for lost in uuids:
        for uuid in uuids:
            devices.sample(uuid)
        lose(lost)
        for _ in range(3):
            sleep(1.0)
            for uuid in uuids:
                if uuid == lost:
                    _check_is_lost(devices, uuid)
                    continue
                assert devices.health(uuid).health is Health.HEALTHY, devices.health(uuid)
                assert devices.sample(uuid) is not None
                devices.processes(uuid)
        assert [gpu.uuid for gpu in devices.list()] == uuids, "it stays listed, with its reason"
        find(lost)
        sleep(WELL_AGAIN_SECONDS)
        assert devices.health(lost).health is Health.HEALTHY
        assert devices.sample(lost) is None  # no window spans the gap
        sleep(1.0)
        assert devices.sample(lost) is not None


def check_left_out(
    open_devices: Callable[[], Devices],
    hide: Callable[[], None],
    find: Callable[[], None],
    sleep: Callable[[float], None],
) -> None:
    """Hold a side to this: a GPU that the driver counts and cannot read is not listed, and the reason is told.

    Args:
        open_devices: opens the side, of two GPUs.
        hide: makes the second one a GPU that cannot be read, before the side is opened.
        find: makes it readable.
        sleep: lets the side's clock move by so many seconds.
    """
    hide()
    devices = open_devices()
    [gpu] = devices.list()
    assert gpu.index == 0
    [(index, why)] = devices.left_out().items()
    assert (index, bool(why)) == (1, True)
    assert devices.health(gpu.uuid).health is Health.HEALTHY
    find()
    for _ in range(3):
        sleep(LOOKED_FOR_SECONDS)
        devices.list()
    assert [each.index for each in devices.list()] == [0, 1]
    assert devices.left_out() == {}
    assert [devices.health(each.uuid).health for each in devices.list()] == [Health.HEALTHY] * 2


def _check_is_lost(devices: Devices, uuid: str) -> None:
    health = devices.health(uuid)
    assert health.health is Health.UNHEALTHY
    assert health.reason.startswith("the driver lost the GPU: ")
    for call in (devices.sample, devices.processes, devices.compute_mode):
        try:
            call(uuid)
        except DevicesError as error:
            assert error.retryable  # noqa: PT017 - as above
        else:
            raise AssertionError(f"{call} answers for a GPU that is lost")


def check_compute_mode(devices: Devices) -> None:
    """Hold a side to what it says of compute modes. It sets them: never run it on a GPU that others use."""
    for gpu in devices.list():
        before = devices.compute_mode(gpu.uuid)
        for mode in (ComputeMode.EXCLUSIVE_PROCESS, ComputeMode.DEFAULT, before):
            devices.set_compute_mode(gpu.uuid, mode)
            assert devices.compute_mode(gpu.uuid) is mode
    try:
        devices.set_compute_mode("GPU-00000000-0000-0000-0000-000000000000", ComputeMode.DEFAULT)
    except DevicesError as error:
        assert not error.retryable  # noqa: PT017 - as above
    else:
        raise AssertionError("a GPU that is not there was set")
