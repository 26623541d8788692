"""Variables that tell a container its limits, part of Allocate's answer; pure (docs/adr/0250)."""

from collections.abc import Iterable, Sequence
from typing import Final

from gpushare.core.gpu import GpuInfo
from gpushare_deviceplugin.pods import ManagedPod

MEMORY_MIB: Final = "GPUSHARE_MEMORY_MIB"
MEMORY_FRACTION: Final = "GPUSHARE_MEMORY_FRACTION"
THREAD_PERCENTAGE: Final = "GPUSHARE_THREAD_PERCENTAGE"

# What is left of a limit for what frameworks do not count. PyTorch's context took 72 to 315 MiB
# (docs/measurements/cluster-h200.md), libraries and their kernels take hundreds more.
REST_MIB: Final = 1024
MOST_PERCENT: Final = 90  # of a large limit: vLLM and others plan with 90% of a GPU by default
LEAST_PERCENT: Final = 50  # of a small one
_STEPS: Final = 10_000  # rounded down to 0.0001: 14 MiB of an H200


def limits_of(pod: ManagedPod, gpus: Sequence[GpuInfo], jax_variable: str = "") -> dict[str, str]:
    """Return the variables for a pod on these GPUs; empty without a decision.

    Args:
        gpus: the pod's GPUs, one or several whole ones.
        jax_variable: JAX's name for the fraction; empty for none. JAX fails if its newer and its older name are
            both set, so a pod that sets either gets none. Several whole GPUs have no limit, so JAX's own default
            fits them.
    """
    if pod.decision is None:
        return {}
    limit_mib = pod.decision.memory_limit_mib
    variables = {MEMORY_MIB: str(limit_mib), THREAD_PERCENTAGE: str(pod.decision.thread_percentage)}
    largest_mib = max((gpu.memory_mib for gpu in gpus), default=0)
    if fraction := memory_fraction(limit_mib, largest_mib, -(-pod.processes // max(1, len(gpus)))):
        variables[MEMORY_FRACTION] = fraction
        if jax_variable and len(gpus) == 1 and not pod.sets_jax_memory:
            variables[jax_variable] = fraction
    return variables


def memory_fraction(limit_mib: int, gpu_mib: int, processes: int = 1) -> str:
    """Return the part of a GPU's memory that each of a pod's processes may plan with, such as "0.0498".

    It is the process's part of the limit less 1 GiB, but 50 to 90% of that part; rounded down. Empty if that is
    nothing, or if the GPU's memory is not known.
    """
    if gpu_mib <= 0:
        return ""
    own_mib = min(limit_mib, gpu_mib) // processes
    planned_mib = max(min(own_mib - REST_MIB, own_mib * MOST_PERCENT // 100), own_mib * LEAST_PERCENT // 100)
    steps = planned_mib * _STEPS // gpu_mib
    return f"{steps / _STEPS:.4f}" if steps else ""


def common_limits(pods: Iterable[ManagedPod], gpus: Sequence[GpuInfo], jax_variable: str = "") -> dict[str, str]:
    """Return the variables that are the same for each of these pods; empty without pods.

    Allocate does not name its pod. What holds for every pod that it can be for holds for the right one.
    """
    offers = [set(limits_of(pod, gpus, jax_variable).items()) for pod in pods]
    return dict(sorted(set.intersection(*offers))) if offers else {}
