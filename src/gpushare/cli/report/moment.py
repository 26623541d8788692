"""One moment of a cluster, from the files written by `gpushare snapshot`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from gpushare.cli.errors import AbsentError
from gpushare.cli.last_reports import heard, silence_notes
from gpushare.cli.live import Objects
from gpushare.cli.report.usage import Figures, Tenancy, UsageHistory, WorkloadName
from gpushare.core.admission import ShareIndex
from gpushare.core.api import GpuNode, GpuShare, PodView, Rejection, TenantStatus, parse_fraction
from gpushare.core.control import processes_of
from gpushare.core.gpu import Health
from gpushare.core.interference import as_profile, cap_progress


def usage_of(objects: Objects, folder: Path, at: float) -> UsageHistory:
    """Return a snapshot as a history of one moment.

    Args:
        folder: where the snapshot came from.
        at: when it was taken, in seconds since the epoch.

    Raises:
        AbsentError: no GpuNode lists a GPU.
    """
    nodes = [GpuNode.from_object(each) for each in objects.gpunodes]
    if objects.read_at is not None:
        nodes = [heard(node, objects.read_at) for node in nodes]
    gpus = [gpu for node in nodes for gpu in node.status.gpus]
    if not gpus:
        raise AbsentError(f"{folder} holds no GPU that gpushare manages, so there is nothing to report")
    shares = [GpuShare.from_object(one) for one in objects.gpushares]
    index = ShareIndex(shares)
    pods = {pod.uid: pod for pod in map(PodView.from_object, objects.pods)}
    workloads = {uid: _workload(pod, index) for uid, pod in pods.items()}
    requested: dict[WorkloadName, Figures] = {}
    for uid, pod in pods.items():
        if pod.fraction is not None and not pod.finished:
            before = requested.get(workloads[uid], np.zeros(1))
            requested[workloads[uid]] = before + pod.limit_percent / 100
    recommended = {(one.namespace, one.name): each for one in shares if (each := _recommended(one)) is not None}
    return UsageHistory(
        source=f"the snapshot in {folder}",
        times=np.array([at]),
        step_seconds=0.0,
        gpus=np.array([float(len(gpus))]),
        healthy=np.array([float(sum(gpu.health is Health.HEALTHY for gpu in gpus))]),
        tenancies=tuple(
            _tenancy(tenant, gpu.uuid, workloads.get(tenant.pod_uid)) for gpu in gpus for tenant in gpu.tenants
        ),
        requested_gpus=requested,
        recommended=recommended,
        expected=_expected(shares, recommended, requested, pods, workloads),
        notes=(
            "A snapshot is one moment: figures are GPUs, not GPU-hours, and nothing can be said over time.",
            *(f"{note[0].upper()}{note[1:]}." for note in silence_notes(nodes)),
        ),
    )


def _expected(
    shares: Sequence[GpuShare],
    recommended: Mapping[WorkloadName, float],
    requested: Mapping[WorkloadName, Figures],
    pods: Mapping[str, PodView],
    workloads: Mapping[str, WorkloadName],
) -> dict[WorkloadName, tuple[float, float]]:
    """Return the progress alone that profiles predict at the share that pods request, and at the recommended."""
    found = {}
    for share in shares:
        name = (share.namespace, share.name)
        profile = as_profile(share.status.profile) if share.status.profile is not None else None
        members = sum(
            workloads[uid] == name and not pod.finished and pod.fraction is not None for uid, pod in pods.items()
        )
        if profile is not None and name in recommended and members:
            ratios = (float(requested[name][0]) / members, recommended[name])
            now, then = (min(1.0, cap_progress(profile, min(1.0, ratio))) for ratio in ratios)
            found[name] = (now, then)
    return found


def _tenancy(tenant: TenantStatus, gpu_uuid: str, workload: WorkloadName | None) -> Tenancy:
    pod = tenant.pod or tenant.pod_uid
    return Tenancy(
        namespace=tenant.namespace or "",
        pod=pod,
        workload=workload[1] if workload is not None else pod,
        gpu_uuid=gpu_uuid,
        share_ratio=np.array([tenant.share_percent / 100]),
        progress_ratio=_one(tenant.work_ratio),
        progress_error_ratio=_one(tenant.progress_error_ratio),
        promise_ratio=_one(tenant.promise_ratio),
        broken_ratio=_one(None),
        throttle_ratio=_one(tenant.throttle_ratio),
        busiest_ratio=_one(None),
        clients=_one(processes_of(tenant)),
    )


def _one(value: float | None) -> Figures:
    return np.array([np.nan if value is None else value])


def _workload(pod: PodView, index: ShareIndex) -> WorkloadName:
    share = index.of(pod.namespace, pod.labels, (*pod.owner_uids, pod.uid))
    name = share.name if share is not None else (pod.controller[1] if pod.controller else pod.name)
    return pod.namespace, name


def _recommended(share: GpuShare) -> float | None:
    parsed = parse_fraction(share.status.recommended_fraction or "auto")
    if isinstance(parsed, Rejection):
        return None
    percent, gpus = parsed
    return None if percent is None else percent * gpus / 100
