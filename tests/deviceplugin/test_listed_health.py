"""Kubelet, which rejects pods for good, is told of an unhealthy GPU only if that lasts (docs/adr/0256)."""

import asyncio
from pathlib import Path

import pytest
from tests.deviceplugin.fakes import GPU_A, GPU_B, Clock, FakeKubelet, make_pod
from tests.deviceplugin.test_plugin import healthy, serving
from tests.deviceplugin.test_trouble import Bench

from gpushare.core.gpu import GpuHealth, Health
from gpushare.mps.status import GateState
from gpushare_deviceplugin import api_pb2, sampler
from gpushare_deviceplugin.allocation import device_ids, shares_by_gpu
from gpushare_deviceplugin.gates import GRACE_SECONDS
from gpushare_deviceplugin.plugin import DevicePlugin
from gpushare_deviceplugin.state import NodeState

WELL = GpuHealth(Health.HEALTHY)
STARTING = GpuHealth(Health.UNHEALTHY, "MPS is starting")
BROKEN = GpuHealth(Health.UNHEALTHY, "XID 79")


@pytest.fixture
def plugin(state: NodeState) -> DevicePlugin:
    for uuid in (GPU_A, GPU_B):
        state.set_health(uuid, WELL)
    return DevicePlugin(state, Path("/run/gpushare"))


def test_what_passes_is_known_at_once_and_listed_only_when_it_lasts(
    plugin: DevicePlugin, state: NodeState, clock: Clock
) -> None:
    changed = state.subscribe()
    state.set_health(GPU_A, STARTING, may_pass=True)
    assert (state.health[GPU_A], changed.is_set()) == (STARTING, True), "the GpuNode has it at once"
    assert healthy(plugin.listing()) == {GPU_A: 100, GPU_B: 100}
    clock.now += GRACE_SECONDS - 0.1
    state.set_health(GPU_A, GpuHealth(Health.UNHEALTHY, "MPS tests whether ceilings bind"), may_pass=True)
    assert healthy(plugin.listing()) == {GPU_A: 100, GPU_B: 100}
    changed.clear()
    clock.now += 0.1  # since the first of its reasons
    state.set_health(GPU_A, GpuHealth(Health.UNHEALTHY, "MPS tests whether ceilings bind"), may_pass=True)
    assert changed.is_set(), "who waits for a change looks again"
    assert healthy(plugin.listing()) == {GPU_B: 100}
    state.set_health(GPU_A, WELL)
    assert healthy(plugin.listing()) == {GPU_A: 100, GPU_B: 100}


def test_each_time_has_its_own_grace(plugin: DevicePlugin, state: NodeState, clock: Clock) -> None:
    for _ in range(3):
        state.set_health(GPU_A, STARTING, may_pass=True)
        clock.now += GRACE_SECONDS - 1
        state.set_health(GPU_A, STARTING, may_pass=True)
        assert healthy(plugin.listing()) == {GPU_A: 100, GPU_B: 100}
        state.set_health(GPU_A, WELL)


def test_a_fault_of_the_device_is_listed_at_once_and_until_the_gpu_is_well(
    plugin: DevicePlugin, state: NodeState
) -> None:
    state.set_health(GPU_A, STARTING, may_pass=True)
    state.set_health(GPU_A, BROKEN)
    assert healthy(plugin.listing()) == {GPU_B: 100}
    state.set_health(GPU_A, STARTING, may_pass=True)  # the device is well again, MPS not yet
    assert healthy(plugin.listing()) == {GPU_B: 100}
    state.set_health(GPU_A, WELL)
    assert healthy(plugin.listing()) == {GPU_A: 100, GPU_B: 100}


def test_a_gpu_that_was_not_seen_healthy_yet_has_the_same_grace(state: NodeState, clock: Clock) -> None:
    """The GpuNode, which an agent writes after its first list, may still say that it is healthy."""
    plugin = DevicePlugin(state, Path("/run/gpushare"))
    state.set_health(GPU_A, STARTING, may_pass=True)
    assert healthy(plugin.listing()) == {GPU_A: 100, GPU_B: 100}
    clock.now += GRACE_SECONDS
    state.set_health(GPU_A, STARTING, may_pass=True)
    assert healthy(plugin.listing()) == {GPU_B: 100}
    state.set_health(GPU_B, BROKEN)
    assert healthy(plugin.listing()) == {}


async def test_a_pod_gets_its_gpu_while_mps_starts_again(
    plugin: DevicePlugin, state: NodeState, kubelet: FakeKubelet
) -> None:
    """It was bound before the extender knew; before, kubelet had rejected it without a call to us."""
    state.put_pod(make_pod(gpu=GPU_A))
    async with serving(plugin, state, kubelet) as stub:
        listing = await stub.ListAndWatch(api_pb2.Empty()).read()
        state.set_health(GPU_A, STARTING, may_pass=True)
        asked = api_pb2.ContainerPreferredAllocationRequest(
            available_deviceIDs=[each.ID for each in listing.devices], allocation_size=25
        )
        preferred = await stub.GetPreferredAllocation(
            api_pb2.PreferredAllocationRequest(container_requests=[asked])
        )
        ids = list(preferred.container_responses[0].deviceIDs)
        answer = await stub.Allocate(
            api_pb2.AllocateRequest(container_requests=[api_pb2.ContainerAllocateRequest(devices_ids=ids)])
        )
    assert shares_by_gpu(ids) == {GPU_A: 25}
    assert answer.container_responses[0].envs["NVIDIA_VISIBLE_DEVICES"] == GPU_A


@pytest.mark.parametrize("gate", [GateState.STARTING, GateState.SELF_TEST, GateState.FAULT, GateState.DOWN, None])
async def test_the_extender_hears_of_mps_at_once_and_kubelet_when_it_lasts(
    tmp_path: Path, clock: Clock, gate: GateState | None
) -> None:
    """None: the MPS host does not report."""
    bench = Bench(tmp_path, clock)
    plugin = DevicePlugin(bench.agent.state, tmp_path)
    await bench.rounds()
    while bench.health[0] is Health.HEALTHY:
        if gate is not None:
            bench.gate(gate, at=50.0)
        clock.now += 1
        await bench.agent.sampler.step()
    assert bench.metrics()["gpushare_gpu_healthy"] == 0
    begun = clock.now
    while healthy(plugin.listing()):
        clock.now += 1
        if gate is not None:
            bench.gate_is_alive()
        await bench.agent.sampler.step()
    assert clock.now - begun == GRACE_SECONDS
    bench.gate(at=90.0)
    await bench.rounds()
    assert healthy(plugin.listing()) == {GPU_A: len(device_ids(GPU_A))}


async def test_kubelet_hears_at_once_of_a_gpu_that_is_gone(tmp_path: Path, clock: Clock) -> None:
    bench = Bench(tmp_path, clock)
    plugin = DevicePlugin(bench.agent.state, tmp_path)
    await bench.rounds()
    bench.driver.lists = False
    await bench.rounds(1)
    assert healthy(plugin.listing()) == {}


async def test_an_agent_that_starts_while_mps_does_tells_kubelet_only_if_that_lasts(
    tmp_path: Path, clock: Clock
) -> None:
    bench = Bench(tmp_path, clock)
    plugin = DevicePlugin(bench.agent.state, tmp_path)
    bench.gate(GateState.STARTING, at=50.0)
    await bench.rounds(2)
    assert bench.health[0] is Health.UNHEALTHY, "the GpuNode has it at once"
    assert healthy(plugin.listing()) == {GPU_A: 100}
    clock.now += GRACE_SECONDS
    bench.gate_is_alive()
    await bench.rounds(1)
    assert healthy(plugin.listing()) == {}


@pytest.mark.parametrize("lasts", [False, True])
async def test_kubelet_hears_of_a_driver_that_hangs_only_if_that_lasts(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, lasts: bool
) -> None:
    bench = Bench(tmp_path, clock)
    state, plugin = bench.agent.state, DevicePlugin(bench.agent.state, tmp_path)
    await bench.rounds()
    monkeypatch.setattr(sampler, "HUNG_SECONDS", 0.02)
    monkeypatch.setattr(sampler, "GRACE_SECONDS", 0.02 if lasts else 3600.0)
    bench.driver.answers.clear()
    changed = state.subscribe()
    stuck = asyncio.create_task(bench.agent.sampler.step())
    async with asyncio.timeout(60):
        while not state.problem or (lasts and healthy(plugin.listing())):
            changed.clear()
            await changed.wait()
    assert bench.health == (Health.UNHEALTHY, "the driver does not answer")
    assert healthy(plugin.listing()) == ({} if lasts else {GPU_A: 100})
    bench.driver.answers.set()
    await stuck
    monkeypatch.undo()
    bench.gate(at=88.0)
    await bench.rounds()
    assert bench.health[0] is Health.HEALTHY
    assert healthy(plugin.listing()) == {GPU_A: 100}
