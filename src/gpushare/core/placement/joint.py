"""A pod's GpuShare with what a joined workload knows of it: for the first pods of a namespace (docs/adr/0249)."""

from collections.abc import Mapping
from dataclasses import replace

from gpushare.core.admission import Defaults, ShareIndex, joint_name
from gpushare.core.api import (
    GpuShare,
    GpuShareSpec,
    GpuShareStatus,
    JobClass,
    Rejection,
    names,
    parse_class,
)
from gpushare.core.interference import recommended_fraction


def with_joint_profile(
    share: GpuShare | None,
    namespace: str,
    annotations: Mapping[str, str],
    shares: ShareIndex,
    defaults: Defaults,
) -> GpuShare | None:
    """Return a pod's GpuShare; with the profile of its joined workload if it has none of its own.

    The operator soon writes that profile to the pod's own GpuShare. Until then, and before there is one, this one
    has the profile, what was learnt with it, and the fraction that `auto` means for this pod. For a pod whose
    workload is not joined it is the GpuShare as it is.

    Args:
        share: the one that applies to the pod, or None.
        annotations: the pod's.
    """
    if not shares.joined or (share is not None and share.status.profile is not None):
        return share
    workload = annotations.get(names.WORKLOAD)
    known = shares.joined.of(namespace, workload)
    spec = share.spec if share is not None else GpuShareSpec()
    suiting = [each for each in known.values() if each.suits(spec.profile)]
    if workload is None or not suiting:
        return share
    joint = max(
        suiting,
        key=lambda each: (
            each.profile.revision or 0,
            each.profile.cap,
            each.profile.window_seconds or 0.0,
            each.profile.gpu_model,
        ),
    )
    job_class = _class_of(annotations, spec, defaults)
    tolerated = spec.max_slowdown if spec.max_slowdown is not None else defaults.max_slowdown_of(job_class)
    fraction = recommended_fraction(joint.profile, max_slowdown=tolerated, job_class=job_class)
    if share is None:
        share = GpuShare(namespace, joint_name(workload), "", 0, (), spec, GpuShareStatus())
    status = replace(share.status, profile=joint.profile, learned=joint.learned, recommended_fraction=fraction)
    return replace(share, status=status)


def _class_of(annotations: Mapping[str, str], spec: GpuShareSpec, defaults: Defaults) -> JobClass:
    asked = parse_class(annotations[names.CLASS]) if names.CLASS in annotations else None
    if asked is not None and not isinstance(asked, Rejection):
        return asked
    return spec.job_class or defaults.job_class
