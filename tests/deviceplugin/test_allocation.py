"""Which ids go to which pod, and what its container is told."""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.deviceplugin.fakes import GPU_A, GPU_B, make_pod

from gpushare.core.api import Reason, Rejection
from gpushare.core.gpu import GpuInfo
from gpushare_deviceplugin.allocation import (
    check_grant,
    check_memory,
    device_ids,
    gpu_of,
    grant,
    prefer,
    shares_by_gpu,
)
from gpushare_deviceplugin.state import NodeState

ALL = [*device_ids(GPU_A), *device_ids(GPU_B)]


def test_ids_are_a_hundred_a_gpu_and_fit_kubelets_limit() -> None:
    assert len(set(ALL)) == 200
    assert ALL[0] == f"{GPU_A}::00"
    assert all(len(device_id) <= 63 for device_id in ALL)


def test_the_decided_gpu_is_preferred_over_the_fuller_one() -> None:
    available = [*device_ids(GPU_A)[:30], *device_ids(GPU_B)]
    assert shares_by_gpu(prefer(available, [], 25, [make_pod(gpu=GPU_B)])) == {GPU_B: 25}


def test_of_two_pods_of_one_size_the_one_decided_first_is_served_first(state: NodeState) -> None:
    state.put_pod(make_pod("late", gpu=GPU_A, decided_at="2026-11-21T10:00:02Z"))
    state.put_pod(make_pod("early", gpu=GPU_B, decided_at="2026-11-21T10:00:01Z"))
    assert shares_by_gpu(prefer(ALL, [], 25, state.asking())) == {GPU_B: 25}


def test_a_decided_gpu_without_room_gives_way_to_the_next_pod_or_the_fullest_gpu() -> None:
    available = [*device_ids(GPU_A)[:10], *device_ids(GPU_B)[:40]]
    assert shares_by_gpu(prefer(available, [], 25, [make_pod(gpu=GPU_A)])) == {GPU_B: 25}
    assert prefer(available, [], 50, [make_pod(gpu=GPU_A, share=50)]) == []


def test_two_whole_gpus() -> None:
    pod = make_pod(gpu=f"{GPU_B},{GPU_A}", share=200)
    assert shares_by_gpu(prefer(ALL, [], 200, [pod])) == {GPU_B: 100, GPU_A: 100}
    assert prefer(ALL[1:], [], 200, [pod]) == []


def test_forced_ids_bind_the_choice() -> None:
    forced = [f"{GPU_B}::07"]
    chosen = prefer(ALL, forced, 25, [make_pod(gpu=GPU_A)])
    assert forced[0] in chosen
    assert shares_by_gpu(chosen) == {GPU_B: 25}


@given(
    free=st.sets(st.sampled_from(ALL)),
    size=st.integers(1, 200),
    decided=st.lists(st.sampled_from([GPU_A, GPU_B, f"{GPU_A},{GPU_B}"]), max_size=4),
)
@example(free={f"{GPU_A}::00", f"{GPU_B}::00"}, size=2, decided=[f"{GPU_A},{GPU_B}"])  # parts of two GPUs
def test_what_is_preferred_is_free_and_makes_sense_together(free: set[str], size: int, decided: list[str]) -> None:
    pods = [make_pod(str(i), gpu=gpu, share=size) for i, gpu in enumerate(decided)]
    chosen = prefer(sorted(free), [], size, pods)
    assert set(chosen) <= free
    assert len(chosen) == len(set(chosen))
    assert len(chosen) in (0, size)
    assert not isinstance(check_grant(chosen, [GPU_A, GPU_B]), Rejection)


@pytest.mark.parametrize(
    ("ids", "word"),
    [
        ([f"{GPU_A}::00", f"{GPU_B}::00"], "kubelet chose"),
        ([*device_ids(GPU_A), f"{GPU_B}::00"], "kubelet chose"),
        (["GPU-gone::00"], "not on this node"),
    ],
)
def test_ids_that_make_no_sense_together_are_refused(ids: list[str], word: str) -> None:
    refused = check_grant(ids, [GPU_A, GPU_B])
    assert isinstance(refused, Rejection)
    assert word in refused.detail


def test_a_shared_gpu_is_given_with_its_gate() -> None:
    granted = grant([GPU_A], Path("/run/gpushare"), by_cdi=False)
    assert granted.envs == {"NVIDIA_VISIBLE_DEVICES": GPU_A, "CUDA_MPS_PIPE_DIRECTORY": "/run/gpushare/mps"}
    assert granted.mounts == {"/run/gpushare/mps": f"/run/gpushare/{GPU_A}/tenant"}


def test_whole_gpus_are_given_without_mps_and_by_cdi_where_asked() -> None:
    granted = grant([GPU_A, GPU_B], Path("/run/gpushare"), by_cdi=True)
    assert (granted.envs, granted.mounts) == ({"NVIDIA_VISIBLE_DEVICES": "void"}, {}), "the image may say all"
    assert granted.cdi_devices == (f"nvidia.com/gpu={GPU_A}", f"nvidia.com/gpu={GPU_B}")
    assert gpu_of(device_ids(GPU_A)[3]) == GPU_A


SMALL = GpuInfo(GPU_A, 0, "NVIDIA L4", 10_512, 58)  # 10,000 MiB for tenants, with 512 kept back


@pytest.mark.parametrize(
    ("asking", "holding", "is_refused"),
    [
        ([4000], [6000], False),
        ([4001], [6000], True),
        ([4000], [3000, 3001], True),
        ([4001, 4000], [6000], False),  # which of the two it is cannot be known
        ([4002, 4001], [6000], True),
        ([], [12_000], False),  # nothing is known of who asks
        ([12_000], [], False),  # nobody's memory is taken
    ],
)
def test_memory_limits_of_one_gpu_are_never_more_than_it_has(
    asking: list[int], holding: list[int], is_refused: bool
) -> None:
    new = [make_pod(f"new-{number}", memory_mib=mib) for number, mib in enumerate(asking)]
    old = [make_pod(f"old-{number}", memory_mib=mib, phase="Running") for number, mib in enumerate(holding)]
    refusal = check_memory(SMALL, 512, new, old)
    assert (refusal is not None) is is_refused
    if refusal is not None:
        assert refusal.reason is Reason.GPU_MEMORY
        assert f"{min(asking)} MiB" in refusal.detail
        assert f"{sum(holding)} MiB" in refusal.detail


def test_a_pod_that_holds_memory_already_is_not_counted_against_itself() -> None:
    pod = make_pod("again", memory_mib=6000, phase="Running")
    assert check_memory(SMALL, 512, [pod], [pod]) is None


def test_a_gpu_whose_memory_is_not_known_refuses_nobody() -> None:
    unknown = GpuInfo(GPU_A, 0, "?", 0, 0)
    assert check_memory(unknown, 512, [make_pod("new")], [make_pod("old", phase="Running")]) is None
