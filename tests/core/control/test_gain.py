"""The gain from sharing beside tenants without a process and tenants whose progress nobody knows."""

from dataclasses import replace

import pytest

from gpushare.core.api import GpuNode, GpuNodeStatus, GpuStatus, TenantStatus, TenantTrouble, TroubleKind
from gpushare.core.control import Gain, gain_of


def _tenant(pod: str, progress: float | None, clients: int | None = 1) -> TenantStatus:
    return TenantStatus(pod, "ml", pod, 50, clients=clients, progress_ratio=progress)


def _gain(*gpus: tuple[TenantStatus, ...]) -> Gain:
    status = GpuNodeStatus(gpus=tuple(GpuStatus(f"GPU-{at}", at, tenants=each) for at, each in enumerate(gpus)))
    return gain_of([GpuNode("n", status)])


BUSY = (_tenant("a", 0.75), _tenant("b", 0.75))
MIXED = (_tenant("train", 0.9), _tenant("notebook", None, 0))
IDLE = (_tenant("c", None, 0), _tenant("d", None, 0))
NEW = (_tenant("e", 0.5), _tenant("new", None))
SILENT = (_tenant("f", None, None),)


def test_a_tenant_without_a_process_does_nothing_and_leaves_its_gpus_work_known() -> None:
    gain = _gain(BUSY, MIXED)
    assert (gain.known_gpus, gain.idle_gpus) == (2, 0)
    assert gain.progress_ratio == pytest.approx(2.4)
    assert [each.unknown for each in gain.by_gpu] == [0, 0]
    [space] = gain.by_namespace
    assert (space.progress_ratio, space.unknown) == (pytest.approx(2.4), 0)
    assert gain.unjudged == 4


def test_a_gpu_without_a_process_neither_gains_nor_costs() -> None:
    gain = _gain(BUSY, IDLE)
    assert (gain.used_gpus, gain.known_gpus, gain.idle_gpus) == (2, 1, 1)
    assert gain.gained_gpus == pytest.approx(0.5)


def test_the_progress_of_a_process_that_nobody_knows_leaves_its_gpus_work_unknown() -> None:
    gain = _gain(BUSY, NEW, SILENT)
    assert (gain.known_gpus, gain.idle_gpus) == (1, 0)
    assert [each.progress_ratio for each in gain.by_gpu] == [1.5, None, None]


OUTSIDE = replace(_tenant("whole", None, 0), trouble=TenantTrouble(TroubleKind.OUTSIDE_MPS, "outside"))


def test_a_pod_whose_processes_run_outside_mps_is_not_without_any() -> None:
    """One with a GPU to itself is not ended there. Before: it had done nothing, for as long as it ran so."""
    gain = _gain(BUSY, (OUTSIDE,))
    assert (gain.used_gpus, gain.known_gpus, gain.idle_gpus) == (2, 1, 0)
    assert [each.progress_ratio for each in gain.by_gpu] == [1.5, None]
    stalled = replace(_tenant("fault", None, 0), trouble=TenantTrouble(TroubleKind.GPU_FAULT, "lost"))
    assert _gain((stalled,)).idle_gpus == 1
