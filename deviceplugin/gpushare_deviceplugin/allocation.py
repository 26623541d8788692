"""Which device ids a pod gets, and what its container is told: pure rules (docs/design.md 2.3)."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from gpushare.core.api import Reason, Rejection, names
from gpushare_deviceplugin.pods import ManagedPod

_SEPARATOR: Final = "::"
CDI_KIND: Final = "nvidia.com/gpu"  # what nvidia-ctk and the GPU operator generate


class DeviceListStrategy(StrEnum):
    """How a container is given its GPU."""

    ENVVAR = "envvar"
    CDI = "cdi"


@dataclass(frozen=True, slots=True)
class ContainerGrant:
    """What Allocate answers for one container.

    Attributes:
        mounts: container path -> host path, all read-only.
    """

    envs: Mapping[str, str]
    mounts: Mapping[str, str]
    cdi_devices: tuple[str, ...]


def device_ids(uuid: str) -> tuple[str, ...]:
    """The 100 ids of one GPU, one a percent."""
    return tuple(f"{uuid}{_SEPARATOR}{number:02d}" for number in range(names.SHARES_PER_GPU))


def gpu_of(device_id: str) -> str:
    """The GPU that an id belongs to."""
    return device_id.partition(_SEPARATOR)[0]


def shares_by_gpu(ids: Iterable[str]) -> dict[str, int]:
    """How many percents of which GPU a set of ids stands for, in the order of first sight."""
    return dict(Counter(gpu_of(device_id) for device_id in ids))


def check_grant(ids: Sequence[str], known_gpus: Iterable[str]) -> dict[str, int] | Rejection:
    """Shares by GPU if the ids make sense together: part of one GPU, or whole GPUs.

    kubelet treats the preferred allocation as a hint; ids across GPUs would run under no cap that was decided, so
    they are refused, and the pod's owner makes a new pod.
    """
    shares = shares_by_gpu(ids)
    unknown = sorted(set(shares) - set(known_gpus))
    if unknown:
        return Rejection(Reason.NO_GPUS, f"GPU {unknown[0]} is not on this node")
    if len(shares) > 1 and any(units != names.SHARES_PER_GPU for units in shares.values()):
        parts = ", ".join(f"{units}% of {uuid}" for uuid, units in shares.items())
        return Rejection(Reason.CONFLICT, f"a share is on one GPU or of whole GPUs, but kubelet chose {parts}")
    return shares


def prefer(
    available: Sequence[str], must_include: Sequence[str], size: int, pending: Iterable[ManagedPod]
) -> list[str]:
    """The ids that the pod meant for this request should get; empty when no GPU can serve it.

    Args:
        available: ids that kubelet offers, those of `must_include` among them.
        size: how many ids are wanted.
        pending: pods of this node that are bound and not yet allocated; the one decided first goes first.

    A request that no pending pod explains (its decision is unknown here) gets the fullest GPU that has room.
    """
    by_gpu: dict[str, list[str]] = {}
    for device_id in sorted(available):
        by_gpu.setdefault(gpu_of(device_id), []).append(device_id)
    forced = {gpu_of(device_id) for device_id in must_include}
    for pod in sorted(pending, key=lambda each: (each.decision.decided_at if each.decision else "", each.uid)):
        if pod.decision is None or pod.share_units != size:
            continue
        chosen = _take(by_gpu, pod.decision.gpu_uuids, must_include, size)
        if chosen and forced <= set(pod.decision.gpu_uuids):
            return chosen
    fullest = sorted(by_gpu, key=lambda uuid: (uuid not in forced, len(by_gpu[uuid]), uuid))
    if size <= names.SHARES_PER_GPU:
        for uuid in fullest:
            if chosen := _take(by_gpu, (uuid,), must_include, size):
                return chosen
        return []
    whole = [uuid for uuid in sorted(by_gpu) if len(by_gpu[uuid]) == names.SHARES_PER_GPU]
    return _take(by_gpu, tuple(whole[: size // names.SHARES_PER_GPU]), must_include, size)


def _take(
    by_gpu: Mapping[str, Sequence[str]], gpus: Sequence[str], must_include: Sequence[str], size: int
) -> list[str]:
    """`size` ids of one GPU, or all of several, the forced ones first; empty when they do not fit."""
    each, rest = divmod(size, len(gpus)) if gpus else (0, 1)
    if rest or each > names.SHARES_PER_GPU or (len(gpus) > 1 and each < names.SHARES_PER_GPU):
        return []
    chosen: list[str] = []
    for uuid in gpus:
        forced = [device_id for device_id in must_include if gpu_of(device_id) == uuid]
        free = [device_id for device_id in by_gpu.get(uuid, ()) if device_id not in set(forced)]
        picked = [*forced, *free][:each]
        if len(picked) < each:
            return []
        chosen += picked
    return chosen


def grant(gpu_uuids: Sequence[str], directory: Path, strategy: DeviceListStrategy) -> ContainerGrant:
    """What a container with these GPUs is given.

    A pod with several GPUs has each of them whole, and a CUDA process talks to one MPS pipe directory only, so it
    runs without MPS: nobody shares with it, and it needs no cap (ADR 0030).
    """
    uuids = ",".join(gpu_uuids)
    envs: dict[str, str] = {}
    cdi_devices: tuple[str, ...] = ()
    if strategy is DeviceListStrategy.CDI:
        cdi_devices = tuple(f"{CDI_KIND}={uuid}" for uuid in gpu_uuids)
    else:
        envs["NVIDIA_VISIBLE_DEVICES"] = uuids
    if len(gpu_uuids) != 1:
        return ContainerGrant(envs, {}, cdi_devices)
    envs["CUDA_MPS_PIPE_DIRECTORY"] = names.TENANT_MPS_DIRECTORY
    tenant_directory = str(directory / gpu_uuids[0] / "tenant")
    return ContainerGrant(envs, {names.TENANT_MPS_DIRECTORY: tenant_directory}, cdi_devices)
