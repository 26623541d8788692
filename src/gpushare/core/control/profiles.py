"""A workload's signature on its way: seen by an agent, kept by the GpuShare.

The agent that sees a workload alone on a GPU with all its threads says so in its GpuNode (`TenantStatus.profile`),
and the operator copies it into `GpuShare.status.profile`. Others read it there, the interference model by
`gpushare.core.interference.as_profile`.
"""

from collections.abc import Iterable, Mapping

from gpushare.core.api import GpuShareSpec, WorkloadSignature, names


def taken(
    kept: WorkloadSignature | None,
    seen: Iterable[WorkloadSignature],
    spec: GpuShareSpec,
    *,
    is_one_kind: bool,
    now: str,
) -> WorkloadSignature | None:
    """The signature that a GpuShare keeps.

    Args:
        seen: what agents say of its pods; the longest on the kept one's GPU model counts.
        is_one_kind: whether its pods are of one workload; nothing is taken where they are not.
        now: RFC 3339, for one newly taken.
    """
    asked = (spec.profile.window_seconds if spec.profile is not None else None) or 0
    fitting = [
        each
        for each in seen
        if each.is_usable()
        and (each.window_seconds or 0.0) >= asked
        and (kept is None or kept.gpu_model in {"", each.gpu_model})
    ]
    best = max(fitting, key=lambda each: (each.window_seconds or 0.0, each.gpu_model), default=None)
    if best is None or not is_one_kind or not (kept is None or kept.gives_way(best.window_seconds)):
        return kept
    return WorkloadSignature(
        best.gpu_model,
        best.counters,
        best.iterations_per_second,
        best.memory_peak_mib,
        best.cap_curve,
        best.window_seconds,
        now,
    )


def is_one_kind(spec: GpuShareSpec, annotations: Iterable[Mapping[str, str]]) -> bool:
    """Whether the pods of a GpuShare are of one workload: of one owner, or all of one `gpushare.io/workload`."""
    keys = {each.get(names.WORKLOAD) for each in annotations}
    return len(keys) <= 1 and (spec.selector is None or None not in keys)
