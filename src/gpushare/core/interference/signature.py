"""Conversion of a GpuShare's signature into a profile, and the fraction that `auto` means."""

from collections.abc import Sequence

from gpushare.core.api import JobClass, LearnedEffect, WorkloadSignature
from gpushare.core.interference.advice import auto_share
from gpushare.core.interference.learned_effects import effects_of
from gpushare.core.interference.profile import Profile


def as_profile(signature: WorkloadSignature, learned: Sequence[LearnedEffect] = ()) -> Profile | None:
    """Return a signature as the model's profile; None if it lacks what the model needs.

    Args:
        learned: learned effects of the workload; only those on the signature's GPU model are used.
    """
    if not signature.is_usable():
        return None
    others = (as_profile(phase.as_signature(signature.gpu_model), learned) for phase in signature.phases)
    return Profile(
        signature.as_counters(),
        signature.iterations_per_second,
        signature.memory_peak_mib,
        {point.thread_percentage: point.progress_ratio for point in signature.cap_curve},
        effects=effects_of(learned, signature.gpu_model),
        phases=tuple(each for each in others if each is not None),
    )


def recommended_fraction(
    signature: WorkloadSignature | None, *, max_slowdown: float, job_class: JobClass
) -> str | None:
    """Return the fraction that `gpushare.io/fraction: auto` means; None without a usable signature."""
    profile = as_profile(signature) if signature is not None else None
    if profile is None:
        return None
    return f"{auto_share(profile, max_slowdown=max_slowdown, job_class=job_class) / 100:g}"
