"""Knowledge about a workload when one of its pods is placed."""

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from gpushare.core.admission import Defaults, ShareIndex, joint_name
from gpushare.core.api import GpuShare, GpuShareSpec, GpuShareStatus, JobClass, Rejection, names, parse_class
from gpushare.core.interference import NO_EFFECTS, Profile, as_profile, recommended_fraction


@dataclass(frozen=True, slots=True)
class KeptApart:
    """A retraction: the workload's pod was moved away from these neighbours, and none is put there for a while.

    Attributes:
        neighbours: names of workloads, as `KnownWorkload.name`.
        until: seconds of the caller's clock (Unix time on a live cluster).
    """

    neighbours: frozenset[str]
    until: float


@dataclass(frozen=True, slots=True)
class KnownWorkload:
    """Knowledge about one workload.

    Attributes:
        key: identifies the profile's version; equal keys mean equal profiles; "" without a profile.
        gpu_model: model that the profile was taken on; "" for any.
        max_slowdown: tolerated slowdown, 1 or more; None if the workload does not say and its pod's class decides.
        profile: None while the workload is not profiled.
        name: the workload's name, namespace/name of its GpuShare.
        apart: neighbours that it is kept apart from.
        wants_own: whether it was retracted so often that it gets a GPU of its own.
    """

    key: str
    gpu_model: str
    max_slowdown: float | None
    profile: Profile | None = field(compare=False, repr=False)
    name: str = ""
    apart: tuple[KeptApart, ...] = ()
    wants_own: bool = False

    @property
    def matters(self) -> bool:
        """Return whether anything known about this workload can change a decision."""
        return self.profile is not None or bool(self.apart) or self.wants_own

    def apart_from(self, now: float) -> frozenset[str]:
        """Return the names of the neighbours that it is kept apart from at `now`."""
        return frozenset(name for each in self.apart if each.until > now for name in each.neighbours)


def known_of(share: GpuShare, seconds: Callable[[str | None], float]) -> KnownWorkload:
    """Return what a GpuShare tells about its workload.

    Args:
        seconds: parses a time of the API; returns a time long ago if it is invalid.
    """
    signature, name = share.status.profile, f"{share.namespace}/{share.name}"
    profile = as_profile(signature, share.status.learned) if signature is not None else None
    key, gpu_model = "", ""
    if signature is not None and profile is not None:
        key = f"{name}@{signature.taken_at}:{signature.window_seconds}"
        if profile.effects != NO_EFFECTS:
            key += f":{profile.effects}"
        if signature.cap_curve:  # it grows without the signature being taken anew
            key += f":{zlib.crc32(repr(signature.cap_curve).encode()):08x}"
        if profile.phases:
            key += f":{zlib.crc32(repr(signature.phases).encode()):08x}"
        gpu_model = signature.gpu_model
    # An intended retraction has no end yet but counts: the pod's successor may arrive before the record is
    # complete.
    ends = [
        (frozenset(each.neighbours), math.inf if each.until is None else seconds(each.until))
        for each in share.status.retractions
    ]
    return KnownWorkload(
        key,
        gpu_model,
        share.spec.max_slowdown,
        profile,
        name,
        tuple(KeptApart(neighbours, until) for neighbours, until in ends),
        share.status.needs_own_gpu,
    )


def with_joint_profile(
    share: GpuShare | None,
    namespace: str,
    annotations: Mapping[str, str],
    shares: ShareIndex,
    defaults: Defaults,
) -> GpuShare | None:
    """Return a pod's GpuShare; with the profile of its joined workload if it has none of its own.

    The operator soon writes that profile to the pod's own GpuShare (docs/adr/0249). Until then, and before there
    is one, this one has the profile, what was learnt with it, and the fraction that `auto` means for this pod. A
    pod whose workload is not joined has its GpuShare as it is.

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
