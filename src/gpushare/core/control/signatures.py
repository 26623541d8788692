"""Profiles: measured by an agent, kept in the GpuShare.

An agent that measures a workload alone on a GPU, with all threads, publishes the signature in its GpuNode
(`TenantStatus.profile`); the operator copies it into `GpuShare.status.profile`. The interference model reads it by
`gpushare.core.interference.as_profile`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from gpushare.core.api import GpuShareSpec, WorkloadSignature, names


def taken(
    kept: WorkloadSignature | None,
    seen: Iterable[WorkloadSignature],
    spec: GpuShareSpec,
    *,
    is_one_kind: bool,
    now: str,
) -> WorkloadSignature | None:
    """Choose the signature that a GpuShare keeps.

    Args:
        seen: signatures that agents published for its pods; of those on the kept one's GPU model the one of the
            latest revision wins, then the one under the most threads, then the longest.
        is_one_kind: whether all its pods run one workload; otherwise nothing is taken.
        now: RFC 3339, for a newly taken signature.
    """
    asked = (spec.profile.window_seconds if spec.profile is not None else None) or 0
    fitting = [
        each
        for each in seen
        if each.is_usable()
        and (each.window_seconds or 0.0) >= asked
        and (kept is None or kept.gpu_model in {"", each.gpu_model})
    ]
    best = max(
        fitting,
        key=lambda each: (each.revision or 0, each.cap, each.window_seconds or 0.0, each.gpu_model),
        default=None,
    )
    if best is None or not is_one_kind or not (kept is None or kept.gives_way(best)):
        return kept
    return replace(best, taken_at=now)


def is_one_kind(spec: GpuShareSpec, annotations: Iterable[Mapping[str, str]]) -> bool:
    """Return whether all pods of a GpuShare run one workload: one owner, or the same `gpushare.io/workload`."""
    keys = {each.get(names.WORKLOAD) for each in annotations}
    return len(keys) <= 1 and (spec.selector is None or None not in keys)
