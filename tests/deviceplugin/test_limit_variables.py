"""What a container is told of its limits, and that nothing is told that may be another pod's."""

import re
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.deviceplugin.fakes import GPU_A, GPU_B, FakeKubelet, make_pod

from gpushare.core.gpu import GpuInfo
from gpushare_deviceplugin import api_pb2
from gpushare_deviceplugin.allocation import device_ids
from gpushare_deviceplugin.api_pb2_grpc import DevicePluginStub
from gpushare_deviceplugin.limit_variables import common_limits, limits_of, memory_fraction
from gpushare_deviceplugin.options import parse_options
from gpushare_deviceplugin.plugin import DevicePlugin
from gpushare_deviceplugin.pods import JAX_VARIABLES, ManagedPod
from gpushare_deviceplugin.registration import Registrar
from gpushare_deviceplugin.state import NodeState

H200_MIB = 143_771
A = (GpuInfo(GPU_A, 0, "NVIDIA H200", H200_MIB, 132),)
BOTH = (*A, GpuInfo(GPU_B, 1, "NVIDIA H200", H200_MIB, 132))
NEW, OLD = JAX_VARIABLES


@pytest.mark.parametrize(
    ("limit_mib", "gpu_mib", "processes", "fraction"),
    [
        (8192, H200_MIB, 1, "0.0498"),  # (8192 - 1024) / 143771
        (32_768, H200_MIB, 1, "0.2051"),  # nine tenths
        (H200_MIB - 512, H200_MIB, 1, "0.8967"),  # a whole GPU: about vLLM's own 0.9
        (1024, H200_MIB, 1, "0.0035"),  # half
        (8192, H200_MIB, 2, "0.0213"),  # (4096 - 1024) / 143771 for each of two
        (8192, 0, 1, ""),  # a GPU whose memory is not known
        (20, H200_MIB, 1, ""),  # less than a step
        (H200_MIB, 81_559, 1, "0.8999"),  # kubelet chose a smaller GPU than the decided one
    ],
)
def test_the_fraction_leaves_what_context_and_libraries_need(
    limit_mib: int, gpu_mib: int, processes: int, fraction: str
) -> None:
    assert memory_fraction(limit_mib, gpu_mib, processes) == fraction


@given(limit_mib=st.integers(0, 200_000), gpu_mib=st.integers(0, 200_000), processes=st.integers(1, 48))
def test_the_fractions_of_all_processes_are_never_more_than_the_limit(
    limit_mib: int, gpu_mib: int, processes: int
) -> None:
    text = memory_fraction(limit_mib, gpu_mib, processes)
    assert re.fullmatch(r"(0\.[0-9]{4})?", text), "a plain decimal"
    planned_mib = float(text or 0) * gpu_mib * processes
    assert planned_mib <= 0.9 * min(limit_mib, gpu_mib) + 1e-6


def test_a_pod_is_told_its_memory_and_its_cap() -> None:
    told = {
        "GPUSHARE_MEMORY_MIB": "8192",
        "GPUSHARE_MEMORY_FRACTION": "0.0498",
        "GPUSHARE_THREAD_PERCENTAGE": "50",
    }
    assert limits_of(make_pod(), A) == told
    assert limits_of(make_pod(), A, NEW) == {**told, NEW: "0.0498"}
    assert limits_of(make_pod(**{"gpushare.io/processes": "2"}), A)["GPUSHARE_MEMORY_FRACTION"] == "0.0213"
    assert limits_of(make_pod(gpu=None), A) == {}, "nothing is decided"


def test_several_whole_gpus_are_told_each_ones_memory_and_jax_keeps_its_default() -> None:
    pod = make_pod(gpu=f"{GPU_A},{GPU_B}", share=200, threads="100", memory_mib=H200_MIB - 512)
    told = {
        "GPUSHARE_MEMORY_MIB": "143259",
        "GPUSHARE_MEMORY_FRACTION": "0.8967",
        "GPUSHARE_THREAD_PERCENTAGE": "100",
    }
    assert limits_of(pod, BOTH, NEW) == told
    two = make_pod(gpu=f"{GPU_A},{GPU_B}", share=200, memory_mib=H200_MIB - 512, **{"gpushare.io/processes": "2"})
    assert limits_of(two, BOTH)["GPUSHARE_MEMORY_FRACTION"] == "0.8967", "one on each"


@pytest.mark.parametrize("own", JAX_VARIABLES)
@pytest.mark.parametrize("chosen", JAX_VARIABLES)
def test_who_sets_one_of_jaxs_names_gets_neither(own: str, chosen: str) -> None:
    """JAX fails where both are set: "XLA_CLIENT_MEM_FRACTION is specified together with ..."."""
    pod = make_pod(env={own: ".2"})
    assert not set(JAX_VARIABLES) & set(limits_of(pod, A, chosen))
    assert chosen in limits_of(make_pod(env={"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}), A, chosen)


def test_only_what_holds_for_every_candidate_is_told() -> None:
    pods = [make_pod("a", threads="50"), make_pod("b", threads="25"), make_pod("c", env={NEW: ".2"})]
    assert common_limits(pods, A, NEW) == {"GPUSHARE_MEMORY_MIB": "8192", "GPUSHARE_MEMORY_FRACTION": "0.0498"}
    assert common_limits([*pods, make_pod("d", memory_mib=4096)], A) == {}
    assert common_limits([*pods, make_pod("d", gpu=None)], A) == {}
    assert common_limits([], A) == {}


class AllocatingKubelet:
    """Allocate as kubelet calls it; `unseen`: pods that only the API server knows yet, None while it is away."""

    def __init__(self, state: NodeState) -> None:
        self.unseen: list[ManagedPod] | None = []
        self.asked = 0
        self._state = state
        self._plugin = DevicePlugin(state, Path("/run/gpushare"), refresh_pods=self._refresh)

    async def _refresh(self) -> frozenset[str] | None:
        self.asked += 1
        if self.unseen is None:
            return None
        for pod in self.unseen:
            self._state.put_pod(pod)
        return frozenset(self._state.pods)

    async def allocate(self, gpu: str = GPU_A, units: int = 25) -> dict[str, str]:
        ids = list(device_ids(gpu)[:units])
        request = api_pb2.AllocateRequest(container_requests=[api_pb2.ContainerAllocateRequest(devices_ids=ids)])
        answer = await self._plugin.Allocate(request, None)  # type: ignore[arg-type]  # it asks nothing of it
        [container] = answer.container_responses
        return {key: value for key, value in container.envs.items() if key.startswith("GPUSHARE_")}


@pytest.fixture
def node(state: NodeState) -> AllocatingKubelet:
    return AllocatingKubelet(state)


async def test_kubelet_gets_the_variables_over_its_socket(state: NodeState, kubelet: FakeKubelet) -> None:
    state.put_pod(make_pod())
    plugin = DevicePlugin(state, Path("/run/gpushare"), jax_variable=OLD)
    ids = api_pb2.ContainerAllocateRequest(devices_ids=device_ids(GPU_A)[:25])
    registrar = Registrar(plugin, state, kubelet.plugins)
    server = registrar._bind()
    await server.start()
    async with grpc.aio.insecure_channel(f"unix://{registrar._socket}") as channel:
        answer = await DevicePluginStub(channel).Allocate(api_pb2.AllocateRequest(container_requests=[ids]))
    await server.stop(0)
    [container] = answer.container_responses
    assert dict(container.envs) == {
        "CUDA_MPS_PIPE_DIRECTORY": "/run/gpushare/mps",
        "NVIDIA_VISIBLE_DEVICES": GPU_A,
        "GPUSHARE_MEMORY_MIB": "8192",
        "GPUSHARE_MEMORY_FRACTION": "0.0498",
        "GPUSHARE_THREAD_PERCENTAGE": "50",
        OLD: "0.0498",
    }


async def test_pods_that_differ_are_told_once_kubelet_shows_who_has_what(
    node: AllocatingKubelet, state: NodeState
) -> None:
    first, second = make_pod("first", memory_mib=8192), make_pod("second", memory_mib=4096)
    state.put_pod(first)
    assert (await node.allocate())["GPUSHARE_MEMORY_MIB"] == "8192"
    state.set_allocations({first.uid: {GPU_A: 25}})
    state.put_pod(second)
    assert (await node.allocate())["GPUSHARE_MEMORY_MIB"] == "4096"
    assert node.asked == 0, "the API server has enough to do"


async def test_of_two_pods_that_wait_together_neither_gets_the_others_limits(
    node: AllocatingKubelet, state: NodeState, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever kubelet allocates first: the second is presumed to be the other one, and that may be wrong."""
    state.put_pod(make_pod("first", memory_mib=8192, threads="40"))
    state.put_pod(make_pod("second", memory_mib=4096, threads="40"))
    for _ in range(2):
        assert await node.allocate() == {"GPUSHARE_THREAD_PERCENTAGE": "40"}
    assert "any of shop/first, shop/second" in caplog.text


async def test_a_pod_that_was_decided_for_another_gpu_is_a_candidate(
    node: AllocatingKubelet, state: NodeState
) -> None:
    """Kubelet takes a preferred allocation as a hint."""
    state.put_pod(make_pod("here", gpu=GPU_A, memory_mib=8192))
    state.put_pod(make_pod("elsewhere", gpu=GPU_B, memory_mib=4096))
    assert "GPUSHARE_MEMORY_MIB" not in await node.allocate(GPU_A)
    state.put_pod(make_pod("elsewhere", gpu=GPU_B, memory_mib=4096, phase="Succeeded"))
    state.put_pod(make_pod("of another size", share=50, memory_mib=4096))
    deleted = {"deletionTimestamp": "2026-11-21T10:00:00Z", "deletionGracePeriodSeconds": 30}
    state.put_pod(make_pod("deleted", memory_mib=2048, metadata=deleted))
    state.put_pod(make_pod("next", memory_mib=8192))
    assert (await node.allocate(GPU_A))["GPUSHARE_MEMORY_MIB"] == "8192"


async def test_a_pod_that_only_kubelet_has_seen_is_asked_for(node: AllocatingKubelet, state: NodeState) -> None:
    """The last free ids are allocated without a question about preferences, which would have asked."""
    state.put_pod(make_pod("first", memory_mib=8192))
    await node.allocate()
    node.unseen = [make_pod("second", memory_mib=4096)]
    assert "GPUSHARE_MEMORY_MIB" not in await node.allocate(), "the first is not in kubelet's list yet"
    assert node.asked == 1
    state.set_allocations({"uid-first": {GPU_A: 25}, "uid-second": {GPU_A: 25}})
    node.unseen = [make_pod("third", memory_mib=2048)]
    assert (await node.allocate())["GPUSHARE_MEMORY_MIB"] == "2048"


async def test_while_the_api_server_is_away_an_unknown_pod_is_told_nothing(
    node: AllocatingKubelet, state: NodeState
) -> None:
    state.put_pod(make_pod("first"))
    await node.allocate()
    node.unseen = None
    assert await node.allocate() == {}


async def test_a_kubelet_without_its_record_tells_a_running_pod_again(
    node: AllocatingKubelet, state: NodeState
) -> None:
    state.put_pod(make_pod("running", phase="Running"))
    state.set_allocations({})
    assert (await node.allocate())["GPUSHARE_MEMORY_MIB"] == "8192"
    assert node.asked == 1


def test_the_option_takes_jaxs_two_names_and_no_other() -> None:
    def chosen(value: str) -> str:
        return parse_options(["--node-name", "n1"], {"GPUSHARE_JAX_MEMORY_VARIABLE": value}).jax_variable

    assert [chosen(value) for value in ("", *JAX_VARIABLES)] == ["", *JAX_VARIABLES]
    with pytest.raises(SystemExit):
        chosen("LD_PRELOAD")
