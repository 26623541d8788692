"""A workload's signature on its way: seen by an agent, kept by the GpuShare, asked by the interference model.

The agent that sees a workload alone on a GPU with all its threads says so in its GpuNode (`Tenant.profile`); the
operator copies it into `GpuShare.status.profile` and says what `auto` stands for; others read it there.
"""

from collections.abc import Iterable, Mapping

from gpushare.core.api import names
from gpushare.core.api.objects import GpuShare, GpuShareSpec, WorkloadSignature
from gpushare.core.api.request import JobClass
from gpushare.core.control.windows import replaces
from gpushare.core.interference import MIN_WINDOW_SECONDS, Profile, auto_share
from gpushare.core.placement.known import Known


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
        if as_known(each) is not None
        and (each.window_seconds or 0.0) >= asked
        and (kept is None or kept.gpu_model in {"", each.gpu_model})
    ]
    best = max(fitting, key=lambda each: (each.window_seconds or 0.0, each.gpu_model), default=None)
    if best is None or not is_one_kind or not replaces(best.window_seconds, kept):
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


def as_known(signature: WorkloadSignature) -> Profile | None:
    """A signature as the interference model takes it; None where it lacks what the model needs."""
    counters = signature.as_counters()
    window = signature.window_seconds
    if counters.sm_util is None or (window is not None and window < MIN_WINDOW_SECONDS):
        return None
    return Profile(
        counters,
        signature.iterations_per_second,
        signature.memory_peak_mib,
        {point.thread_percentage: point.progress_ratio for point in signature.cap_curve},
    )


def known_of(share: GpuShare, max_slowdown: float) -> Known | None:
    """What a GpuShare says of its workload; None without a profile that the model can use.

    Args:
        max_slowdown: tolerated where the GpuShare does not say.
    """
    signature = share.status.profile
    profile = as_known(signature) if signature is not None else None
    if signature is None or profile is None:
        return None
    tolerated = share.spec.max_slowdown if share.spec.max_slowdown is not None else max_slowdown
    key = f"{share.namespace}/{share.name}@{signature.taken_at}:{signature.window_seconds}"
    return Known(key, signature.gpu_model, tolerated, profile)


def recommended_fraction(
    signature: WorkloadSignature | None, *, max_slowdown: float, job_class: JobClass
) -> str | None:
    """What `gpushare.io/fraction: auto` stands for; None without a usable signature."""
    profile = as_known(signature) if signature is not None else None
    if profile is None:
        return None
    return f"{auto_share(profile, max_slowdown=max_slowdown, job_class=job_class) / 100:g}"
