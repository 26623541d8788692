"""What `gpushare gain` says where pods have no process or their progress is not known."""

import pytest

from gpushare.cli.gain import sentences
from gpushare.core.api import GpuNode, GpuNodeStatus, GpuStatus, TenantStatus
from gpushare.core.control import gain_of

BUSY = (TenantStatus("a", "ml", "a", 50, clients=1, progress_ratio=0.75),) * 2
IDLE = (TenantStatus("b", "ml", "b", 50, clients=0),)
NEW = (TenantStatus("c", "ml", "c", 50, clients=1),)
NO_PROCESS = "On 1 GPU no pod has a process now. "
WHY = "a workload has no profile, several GPUs or processes outside MPS, or the node's agent is silent."
GAIN = "they make the progress of 1.50 GPUs: 1.50 a GPU, 0.50 GPUs more than without sharing."


@pytest.mark.parametrize(
    ("gpus", "told"),
    [
        ([BUSY], f"On them {GAIN}"),
        ([IDLE], NO_PROCESS.strip()),
        ([NEW], f"How fast they are is not known yet: on every GPU {WHY}"),
        ([IDLE, NEW], f"{NO_PROCESS}How fast they are is not known yet: on every other GPU {WHY}"),
        ([IDLE, BUSY], f"{NO_PROCESS}On 1 GPU whose pods are all known {GAIN}"),
    ],
)
def test_gpus_without_a_process_and_those_of_unknown_progress_are_told_apart(
    gpus: list[tuple[TenantStatus, ...]], told: str
) -> None:
    status = GpuNodeStatus(gpus=tuple(GpuStatus(f"GPU-{at}", at, tenants=each) for at, each in enumerate(gpus)))
    assert " ".join(sentences(gain_of([GpuNode("n", status)]))[1:]) == told
