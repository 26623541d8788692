"""The plugin over real sockets with a fake kubelet: registration, health, allocation, restarts, reconciliation."""

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.deviceplugin.fakes import GPU_A, GPU_B, FakeKubelet, Sleeper, make_pod

from gpushare.core.admission import DEFAULT_GPU_MEMORY_RESERVE_MIB
from gpushare.core.api import Decision
from gpushare.core.gpu import GpuHealth, Health
from gpushare.mps.layout import GpuDirectory
from gpushare_deviceplugin import api_pb2, registration, rpc
from gpushare_deviceplugin.allocation import device_ids, shares_by_gpu
from gpushare_deviceplugin.api_pb2_grpc import DevicePluginStub
from gpushare_deviceplugin.gates import Notice
from gpushare_deviceplugin.kubelet import (
    AllocationReconciler,
    PodResources,
    PodResourcesError,
)
from gpushare_deviceplugin.options import parse_options
from gpushare_deviceplugin.plugin import GATE_LOOK_SECONDS, GATE_SECONDS, DevicePlugin
from gpushare_deviceplugin.pods import ManagedPod
from gpushare_deviceplugin.registration import Registrar
from gpushare_deviceplugin.rpc import open_channel
from gpushare_deviceplugin.state import NodeState

SOON = 60.0


@pytest.fixture
def sleep() -> Sleeper:
    return Sleeper()


@asynccontextmanager
async def running(registrar: Registrar) -> AsyncIterator[None]:
    task = asyncio.create_task(registrar.run())
    try:
        async with asyncio.timeout(SOON):
            yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def serving(
    plugin: DevicePlugin, state: NodeState, kubelet: FakeKubelet, sleep: Sleeper | None = None
) -> AsyncIterator[Any]:
    async with running(Registrar(plugin, state, kubelet.plugins, sleep or Sleeper())):
        request = await kubelet.registered.get()
        async with grpc.aio.insecure_channel(f"unix://{kubelet.plugins}/{request.endpoint}") as channel:
            yield DevicePluginStub(channel)


def healthy(listing: Any) -> dict[str, int]:
    return shares_by_gpu(d.ID for d in listing.devices if d.health == "Healthy")


async def test_registers_lists_health_and_brings_a_gpu_back(state: NodeState, kubelet: FakeKubelet) -> None:
    async with serving(DevicePlugin(state, Path("/run/gpushare")), state, kubelet) as stub:
        stream = stub.ListAndWatch(api_pb2.Empty())
        assert healthy(await stream.read()) == {GPU_A: 100, GPU_B: 100}
        state.set_health(GPU_A, GpuHealth(Health.UNHEALTHY, "XID 79"))
        listing = await asyncio.wait_for(stream.read(), SOON)
        assert healthy(listing) == {GPU_B: 100}
        assert len(listing.devices) == 200
        state.set_health(GPU_A, GpuHealth(Health.HEALTHY))
        assert healthy(await asyncio.wait_for(stream.read(), SOON)) == {GPU_A: 100, GPU_B: 100}


async def test_registers_again_when_kubelet_restarts(
    state: NodeState, kubelet: FakeKubelet, sleep: Sleeper
) -> None:
    async with serving(DevicePlugin(state, Path("/run/gpushare")), state, kubelet, sleep):
        for _ in range(2):
            assert await sleep.asleep() == registration.WATCH_SECONDS
            await kubelet.stop()
            await kubelet.start()  # wipes every plugin's socket
            await sleep.turn()
            request = await kubelet.registered.get()
            assert (request.version, request.resource_name) == ("v1beta1", "gpushare.io/share")
            assert request.options.get_preferred_allocation_available
            async with grpc.aio.insecure_channel(f"unix://{kubelet.plugins}/{request.endpoint}") as channel:
                listing = await DevicePluginStub(channel).ListAndWatch(api_pb2.Empty()).read()
            assert len(listing.devices) == 200
        await sleep.asleep()
    assert state.counts.registrations == 3


async def test_a_loss_that_only_the_front_sees_is_known_and_the_plugin_goes_on_serving(
    state: NodeState, kubelet: FakeKubelet, sleep: Sleeper
) -> None:
    registrar = Registrar(DevicePlugin(state, Path("/run/gpushare")), state, kubelet.plugins, sleep)
    notice = kubelet.plugins / registration.NOTICE
    async with running(registrar):
        request = await kubelet.registered.get()
        async with grpc.aio.insecure_channel(f"unix://{kubelet.plugins}/{request.endpoint}") as channel:
            stream = DevicePluginStub(channel).ListAndWatch(api_pb2.Empty())
            await stream.read()
            for why_not in ("", "kubelet has no socket", "kubelet refuses", ""):
                if why_not:
                    notice.write_text(why_not)
                else:
                    notice.unlink(missing_ok=True)
                await sleep.turn()
                await sleep.asleep()
                assert (registrar.is_registered, registrar.why_not) == (not why_not, why_not)
            state.set_health(GPU_A, GpuHealth(Health.UNHEALTHY, "XID 79"))
            assert healthy(await asyncio.wait_for(stream.read(), SOON)) == {GPU_B: 100}
    assert (state.counts.registrations, state.counts.errors["registration"]) == (1, 1)


async def test_looks_often_for_a_kubelet_that_it_lost(
    state: NodeState, kubelet: FakeKubelet, sleep: Sleeper
) -> None:
    """Kubelet rejects for good what is bound to the node before the plugin has registered again."""
    plugin = DevicePlugin(state, Path("/run/gpushare"))
    async with serving(plugin, state, kubelet, sleep) as stub:
        stream = stub.ListAndWatch(api_pb2.Empty())
        await stream.read()
        assert await sleep.asleep() == registration.WATCH_SECONDS
        await sleep.turn()
        assert await sleep.asleep() == registration.WATCH_SECONDS
        stream.cancel()  # as kubelet's end does
        while not plugin.has_lost_kubelet:  # noqa: ASYNC110 - the server learns of it in its own time
            await asyncio.sleep(0.01)
        await sleep.turn()
        assert await sleep.asleep() == registration.QUICK_SECONDS
        await kubelet.stop()
        await kubelet.start()
        await sleep.turn()
        request = await kubelet.registered.get()
        async with grpc.aio.insecure_channel(f"unix://{kubelet.plugins}/{request.endpoint}") as channel:
            await DevicePluginStub(channel).ListAndWatch(api_pb2.Empty()).read()
            assert not plugin.has_lost_kubelet


async def test_a_stream_ends_with_ok_when_the_plugin_is_served_anew(
    state: NodeState, kubelet: FakeKubelet, sleep: Sleeper
) -> None:
    async with serving(DevicePlugin(state, Path("/run/gpushare")), state, kubelet, sleep) as stub:
        stream = stub.ListAndWatch(api_pb2.Empty())
        assert len((await stream.read()).devices) == 200
        await kubelet.stop()
        await kubelet.start()
        await sleep.turn()
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK
        await kubelet.registered.get()
        assert (kubelet.plugins / registration.SOCKET).exists()


async def test_a_stream_ends_with_ok_when_the_agent_stops(state: NodeState, kubelet: FakeKubelet) -> None:
    task = asyncio.create_task(Registrar(DevicePlugin(state, Path("/run")), state, kubelet.plugins).run())
    async with asyncio.timeout(SOON):
        await kubelet.registered.get()
        async with open_channel(kubelet.plugins / registration.SOCKET) as channel:
            stream = DevicePluginStub(channel).ListAndWatch(api_pb2.Empty())
            assert len((await stream.read()).devices) == 200
            task.cancel()
            assert await stream.read() is grpc.aio.EOF
            assert await stream.code() is grpc.StatusCode.OK
        await asyncio.gather(task, return_exceptions=True)
    assert not (kubelet.plugins / registration.SOCKET).exists()


async def test_a_stream_that_kubelet_drops_leaves_nothing_behind(state: NodeState, kubelet: FakeKubelet) -> None:
    async with serving(DevicePlugin(state, Path("/run")), state, kubelet) as stub:
        stream = stub.ListAndWatch(api_pb2.Empty())
        await stream.read()
        assert len(state._waiters) == 1
        stream.cancel()
        while state._waiters:  # noqa: ASYNC110 - the server learns of it in its own time
            await asyncio.sleep(0.01)


async def test_the_log_names_every_pod_that_an_allocation_can_be_for(
    state: NodeState, caplog: pytest.LogCaptureFixture
) -> None:
    """Kubelet does not say whose call it is; until its list does, a second call can be for either pod too."""
    caplog.set_level("INFO")
    plugin = DevicePlugin(state, Path("/run"))
    first, second, elsewhere = make_pod("first"), make_pod("second"), make_pod("elsewhere", gpu=GPU_B)
    for pod in (second, elsewhere, first, make_pod("runs", phase="Running")):
        state.put_pod(pod)
    asked = api_pb2.ContainerAllocateRequest(devices_ids=device_ids(GPU_A)[:25])
    for _ in range(2):
        await plugin.Allocate(api_pb2.AllocateRequest(container_requests=[asked]), None)  # type: ignore[arg-type]
        line = caplog.records.pop()
        assert line.getMessage().endswith(f"one of {first.key}, {second.key}")
        assert line.pod is None  # type: ignore[attr-defined]
    state.set_allocations({second.uid: {GPU_A: 25}})
    await plugin.Allocate(api_pb2.AllocateRequest(container_requests=[asked]), None)  # type: ignore[arg-type]
    line = caplog.records.pop()
    assert line.getMessage().endswith(f"to {first.key}")
    assert line.pod == first.uid  # type: ignore[attr-defined]


async def test_a_hundred_calls_at_once_are_all_answered(state: NodeState, kubelet: FakeKubelet) -> None:
    async with serving(DevicePlugin(state, Path("/run")), state, kubelet) as stub:
        requests = [
            api_pb2.AllocateRequest(container_requests=[api_pb2.ContainerAllocateRequest(devices_ids=[each])])
            for each in device_ids(GPU_A)
        ]
        answers = await asyncio.gather(*(stub.Allocate(request) for request in requests))
    assert [len(answer.container_responses) for answer in answers] == [1] * len(requests)


async def test_registers_again_when_kubelets_directory_is_made_anew(
    state: NodeState, kubelet: FakeKubelet, sleep: Sleeper
) -> None:
    async with serving(DevicePlugin(state, Path("/run/gpushare")), state, kubelet, sleep):
        await sleep.asleep()
        await kubelet.stop()
        shutil.rmtree(kubelet.plugins)
        await sleep.turn()  # the plugin sees that the sockets are gone, and cannot bind its own
        assert await sleep.asleep() == registration.BACKOFF.first_seconds
        kubelet.plugins.mkdir()
        await kubelet.start()
        await sleep.turn()
        await kubelet.registered.get()


async def test_a_path_that_no_unix_socket_can_have_is_named(
    state: NodeState, short_path: Path, sleep: Sleeper, caplog: pytest.LogCaptureFixture
) -> None:
    plugins = short_path / ("x" * rpc.MAX_PATH_BYTES)
    plugins.mkdir()
    async with running(Registrar(DevicePlugin(state, Path("/run")), state, plugins, sleep)):
        await sleep.asleep()
    assert "at most 107 bytes" in caplog.text
    with pytest.raises(PodResourcesError, match="at most 107 bytes"):
        await PodResources(plugins / "kubelet.sock").list()


async def test_registers_again_when_its_own_socket_is_removed(
    state: NodeState, kubelet: FakeKubelet, sleep: Sleeper
) -> None:
    async with serving(DevicePlugin(state, Path("/run/gpushare")), state, kubelet, sleep):
        (kubelet.plugins / registration.SOCKET).unlink()
        await sleep.turn()
        await kubelet.registered.get()
        assert (kubelet.plugins / registration.SOCKET).exists()


async def test_waits_with_back_off_for_a_kubelet_that_is_not_there_yet(
    state: NodeState, kubelet: FakeKubelet, sleep: Sleeper
) -> None:
    await kubelet.stop()
    (kubelet.plugins / "kubelet.sock").unlink(missing_ok=True)
    async with running(Registrar(DevicePlugin(state, Path("/run")), state, kubelet.plugins, sleep)):
        assert await sleep.asleep() == registration.BACKOFF.first_seconds
        await sleep.turn()
        assert await sleep.asleep() == 2 * registration.BACKOFF.first_seconds
        assert state.counts.errors == {"registration": 2}
        await kubelet.start()
        await sleep.turn()
        await kubelet.registered.get()


async def test_a_pod_gets_its_decided_gpu_and_its_gate(state: NodeState, kubelet: FakeKubelet) -> None:
    state.put_pod(make_pod(gpu=GPU_B))
    allocated: list[bool] = []
    plugin = DevicePlugin(state, Path("/run/gpushare"), on_allocated=lambda: allocated.append(True))
    async with serving(plugin, state, kubelet) as stub:
        asked = api_pb2.ContainerPreferredAllocationRequest(
            available_deviceIDs=[*device_ids(GPU_A), *device_ids(GPU_B)], allocation_size=25
        )
        preferred = await stub.GetPreferredAllocation(
            api_pb2.PreferredAllocationRequest(container_requests=[asked])
        )
        ids = list(preferred.container_responses[0].deviceIDs)
        assert shares_by_gpu(ids) == {GPU_B: 25}
        answer = await stub.Allocate(
            api_pb2.AllocateRequest(container_requests=[api_pb2.ContainerAllocateRequest(devices_ids=ids)])
        )
    [container] = answer.container_responses
    assert container.envs["NVIDIA_VISIBLE_DEVICES"] == GPU_B
    [mount] = container.mounts
    assert (mount.host_path, mount.read_only) == (f"/run/gpushare/{GPU_B}/tenant", True)
    assert allocated == [True]
    assert state.pending() == []


async def test_a_pod_that_kubelet_knew_first_is_asked_for(state: NodeState, kubelet: FakeKubelet) -> None:
    async def refresh() -> frozenset[str]:
        state.put_pod(make_pod(gpu=GPU_B))
        return frozenset(state.pods)

    async with serving(DevicePlugin(state, Path("/run"), refresh_pods=refresh), state, kubelet) as stub:
        asked = api_pb2.ContainerPreferredAllocationRequest(
            available_deviceIDs=[*device_ids(GPU_A), *device_ids(GPU_B)], allocation_size=25
        )
        preferred = await stub.GetPreferredAllocation(
            api_pb2.PreferredAllocationRequest(container_requests=[asked])
        )
    assert shares_by_gpu(preferred.container_responses[0].deviceIDs) == {GPU_B: 25}


async def test_ids_across_gpus_are_refused(state: NodeState, kubelet: FakeKubelet) -> None:
    ids = [f"{GPU_A}::00", f"{GPU_B}::00"]
    async with serving(DevicePlugin(state, Path("/run")), state, kubelet) as stub:
        with pytest.raises(grpc.aio.AioRpcError, match="kubelet chose") as caught:
            await stub.Allocate(
                api_pb2.AllocateRequest(container_requests=[api_pb2.ContainerAllocateRequest(devices_ids=ids)])
            )
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert state.counts.refused_allocations == 1


@contextmanager
def gate_of(directory: Path, uuid: str, backlog: int = 8) -> Iterator[Path]:
    """Listen as the gate of a GPU does."""
    control = GpuDirectory.of(directory, uuid).control
    control.parent.mkdir(parents=True, exist_ok=True)
    control.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(control))
        listener.listen(backlog)
        yield control


def starting(*gpus: str) -> Any:
    return api_pb2.PreStartContainerRequest(devices_ids=[device_ids(gpu)[0] for gpu in gpus])


async def test_a_container_starts_when_a_gate_listens(
    state: NodeState, kubelet: FakeKubelet, short_path: Path
) -> None:
    """A CUDA program that finds no gate runs without limits (docs/facts.md 6)."""
    sleep = Sleeper()
    async with serving(DevicePlugin(state, short_path, sleep=sleep), state, kubelet) as stub:
        with gate_of(short_path, GPU_A) as control:
            await stub.PreStartContainer(starting(GPU_A))
        assert control.is_socket()  # as a killed host leaves it: the file is there and nobody listens
        start = asyncio.ensure_future(stub.PreStartContainer(starting(GPU_A)))
        for _ in range(3):
            assert await sleep.asleep() == GATE_LOOK_SECONDS
            assert not start.done()
            await sleep.turn()
        with gate_of(short_path, GPU_B):  # another GPU's gate does not help
            await sleep.turn()
            await sleep.asleep()
        with gate_of(short_path, GPU_A):
            await sleep.turn()
            await start
    assert state.counts.refused_starts == 0


async def test_a_container_is_refused_in_words_while_no_gate_listens(
    state: NodeState, kubelet: FakeKubelet, short_path: Path
) -> None:
    sleep = Sleeper()
    async with serving(DevicePlugin(state, short_path, sleep=sleep), state, kubelet) as stub:
        start = asyncio.ensure_future(stub.PreStartContainer(starting(GPU_A)))
        waited = 0.0
        while waited < GATE_SECONDS:
            waited += await sleep.asleep()
            await sleep.turn()
        with pytest.raises(grpc.aio.AioRpcError, match=f"no MPS gate listens on GPU {GPU_A}") as caught:
            await start
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert state.counts.refused_starts == 1


async def test_several_whole_gpus_wait_for_no_gate(
    state: NodeState, kubelet: FakeKubelet, short_path: Path
) -> None:
    async with serving(DevicePlugin(state, short_path), state, kubelet) as stub:
        await stub.PreStartContainer(starting(GPU_A, GPU_B))
    assert state.counts.refused_starts == 0


async def test_a_gate_with_a_full_backlog_listens(
    state: NodeState, kubelet: FakeKubelet, short_path: Path
) -> None:
    async with serving(DevicePlugin(state, short_path), state, kubelet) as stub:
        with gate_of(short_path, GPU_A, backlog=0) as control, ExitStack() as waiting:
            with suppress(BlockingIOError):
                while True:
                    client = waiting.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                    client.setblocking(False)
                    client.connect(str(control))
            await stub.PreStartContainer(starting(GPU_A))
    assert state.counts.refused_starts == 0


class Cluster:
    """The node's pods as the API server has them, and the events that were written; `is_away` answers nothing."""

    def __init__(self, state: NodeState, *pods: ManagedPod) -> None:
        self.state, self.pods = state, list(pods)
        self.notices: list[Notice] = []
        self.is_away = False

    async def refresh(self) -> frozenset[str] | None:
        if self.is_away:
            return None
        for pod in self.pods:
            self.state.put_pod(pod)
        return frozenset(pod.uid for pod in self.pods)

    async def tell(self, notice: Notice) -> None:
        self.notices.append(notice)


FULL = 143_771 - 512  # of the fixture's H200


async def allocate(cluster: Cluster, kubelet: FakeKubelet, count: int = 25) -> str:
    """Allocate shares of GPU A; the sentence of the refusal, empty for none."""
    plugin = DevicePlugin(
        cluster.state,
        Path("/run"),
        refresh_pods=cluster.refresh,
        tell=cluster.tell,
        memory_reserve_mib=512,
    )
    ids = list(device_ids(GPU_A)[:count])
    async with serving(plugin, cluster.state, kubelet) as stub:
        try:
            await stub.Allocate(
                api_pb2.AllocateRequest(container_requests=[api_pb2.ContainerAllocateRequest(devices_ids=ids)])
            )
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
    return ""


async def test_memory_that_another_pod_holds_is_not_given_twice(state: NodeState, kubelet: FakeKubelet) -> None:
    """Kubelet's ids guard shares only: two extenders at one moment can decide more memory than there is."""
    old = make_pod("old", memory_mib=FULL - 1000, phase="Running")
    cluster = Cluster(state, old, make_pod("new", memory_mib=1001))
    await cluster.refresh()
    sentence = await allocate(cluster, kubelet)
    assert f"GPU {GPU_A} has {FULL} MiB for tenants, of which other pods hold {FULL - 1000} MiB" in sentence
    code, _, detail = sentence.partition(": ")
    assert code == "FAILED_PRECONDITION"
    assert cluster.notices == [Notice("uid-new", "NotEnoughGpuMemory", detail)]
    assert state.counts.refused_allocations == 1
    assert state.allocated(state.pods["uid-new"]) is None


async def test_memory_that_just_suffices_is_given(state: NodeState, kubelet: FakeKubelet) -> None:
    cluster = Cluster(
        state, make_pod("old", memory_mib=FULL - 1000, phase="Running"), make_pod("new", memory_mib=1000)
    )
    await cluster.refresh()
    assert await allocate(cluster, kubelet) == ""
    assert state.allocated(state.pods["uid-new"]) == {GPU_A: 25}
    assert cluster.notices == []


LEAVING = {"deletionTimestamp": "2026-11-21T10:00:30Z", "deletionGracePeriodSeconds": 30}


async def test_a_pod_that_is_being_deleted_holds_its_memory_as_the_extender_counts_it(
    state: NodeState, kubelet: FakeKubelet
) -> None:
    leaving = make_pod("old", memory_mib=FULL, phase="Running", metadata=LEAVING)
    assert leaving.ends_at is not None
    cluster = Cluster(state, leaving, make_pod("new", memory_mib=1000))
    await cluster.refresh()
    assert "hold" in await allocate(cluster, kubelet)


@pytest.mark.parametrize("how", ["gone", "over"])
async def test_a_pod_whose_end_our_watch_has_not_seen_yet_refuses_nobody(
    state: NodeState, kubelet: FakeKubelet, how: str
) -> None:
    state.put_pod(make_pod("old", memory_mib=FULL, phase="Running"))
    ended = [make_pod("old", memory_mib=FULL, phase="Succeeded")] if how == "over" else []
    cluster = Cluster(state, *ended, make_pod("new", memory_mib=1000))
    state.put_pod(cluster.pods[-1])
    assert await allocate(cluster, kubelet) == ""
    assert cluster.notices == []


async def test_without_the_api_servers_word_nobody_is_refused_for_memory(
    state: NodeState, kubelet: FakeKubelet
) -> None:
    cluster = Cluster(state, make_pod("old", memory_mib=FULL, phase="Running"), make_pod("new", memory_mib=1000))
    await cluster.refresh()
    cluster.is_away = True
    assert await allocate(cluster, kubelet) == ""


async def test_a_pod_that_is_not_known_yet_is_not_refused_for_memory(
    state: NodeState, kubelet: FakeKubelet
) -> None:
    cluster = Cluster(state, make_pod("old", memory_mib=FULL, phase="Running"))
    await cluster.refresh()
    assert await allocate(cluster, kubelet) == ""


async def test_a_pod_that_waits_for_its_own_allocation_holds_no_memory_yet(
    state: NodeState, kubelet: FakeKubelet
) -> None:
    cluster = Cluster(
        state, make_pod("old", memory_mib=FULL, share=30), make_pod("new", memory_mib=1000, share=25)
    )
    await cluster.refresh()
    assert await allocate(cluster, kubelet) == ""
    assert "other pods hold 1000 MiB" in await allocate(cluster, kubelet, 30)
    assert [notice.pod_uid for notice in cluster.notices] == ["uid-old"]


class Corrections:
    def __init__(self, answer: bool = True) -> None:
        self.made: list[tuple[str, Decision]] = []
        self.answer = answer

    async def __call__(self, pod: ManagedPod, decision: Decision) -> bool:
        self.made.append((pod.uid, decision))
        return self.answer


async def test_pod_resources_is_the_truth_and_annotations_follow_it(
    state: NodeState, kubelet: FakeKubelet
) -> None:
    state.put_pod(make_pod("right", gpu=GPU_A))
    state.put_pod(make_pod("wrong", gpu=GPU_A))
    kubelet.allocated = {
        "shop/right": list(device_ids(GPU_A)[:25]),
        "shop/wrong": list(device_ids(GPU_B)[:25]),
        "shop/stranger": list(device_ids(GPU_B)[50:60]),
    }
    corrections = Corrections()
    source = PodResources(kubelet.directory / "pod-resources" / "kubelet.sock")
    reconciler = AllocationReconciler(state, source, corrections)
    for _ in range(3):
        await reconciler.reconcile()
    assert state.allocations == {"uid-right": {GPU_A: 25}, "uid-wrong": {GPU_B: 25}}
    [(uid, decision)] = corrections.made
    assert (uid, decision.gpu_uuids, decision.thread_percentage) == ("uid-wrong", (GPU_B,), 50)
    assert state.counts.mismatches == 1


async def test_a_correction_that_fails_is_tried_again_and_counted_once(
    state: NodeState, kubelet: FakeKubelet
) -> None:
    state.put_pod(make_pod("wrong", gpu=GPU_A))
    kubelet.allocated = {"shop/wrong": list(device_ids(GPU_B)[:25])}
    corrections = Corrections(answer=False)
    source = PodResources(kubelet.directory / "pod-resources" / "kubelet.sock")
    reconciler = AllocationReconciler(state, source, corrections)
    await reconciler.reconcile()
    await reconciler.reconcile()
    assert len(corrections.made) == 2
    assert state.counts.mismatches == 1
    assert state.gpus_of(state.pods["uid-wrong"]) == (GPU_B,)


async def test_an_answer_larger_than_grpcs_default_is_read(
    kubelet: FakeKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpushare_deviceplugin.kubelet.LIST_SECONDS", SOON)  # it takes half a second of CPU time
    ids = [*device_ids(GPU_A)] * 1200
    assert sum(map(len, ids)) > 4 * 1024 * 1024
    kubelet.allocated = {"shop/a": ids}
    source = PodResources(kubelet.directory / "pod-resources" / "kubelet.sock")
    assert await source.list() == {"shop/a": {GPU_A: len(ids)}, "kube-system/coredns": {}}


async def test_without_kubelet_the_allocations_stay_as_last_known(state: NodeState, kubelet: FakeKubelet) -> None:
    state.put_pod(make_pod("a", gpu=GPU_A))
    kubelet.allocated = {"shop/a": list(device_ids(GPU_A)[:25])}
    source = PodResources(kubelet.directory / "pod-resources" / "kubelet.sock")
    reconciler = AllocationReconciler(state, source, Corrections())
    await reconciler.reconcile()
    await kubelet.stop()
    await reconciler.reconcile()
    assert state.allocations == {"uid-a": {GPU_A: 25}}
    assert state.counts.errors == {"podresources": 1}


def test_the_agent_keeps_back_as_much_memory_as_the_extender() -> None:
    assert parse_options(["--node-name", "n1"], {}).gpu_memory_reserve_mib == DEFAULT_GPU_MEMORY_RESERVE_MIB
    environment = {"GPUSHARE_GPU_MEMORY_RESERVE": "1024"}
    assert parse_options(["--node-name", "n1"], environment).gpu_memory_reserve_mib == 1024
    with pytest.raises(SystemExit):
        parse_options(["--node-name", "n1", "--gpu-memory-reserve", "-1"], {})
