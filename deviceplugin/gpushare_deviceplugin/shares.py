"""GpuShares' data on this node's pods: profile of the workload, class, tolerated slowdown."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from gpushare.core.admission import Defaults, JoinedShares, JoinedWorkload, OwnedPod, PlacedShares
from gpushare.core.api import (
    GpuShare,
    GpuShareSpec,
    GpuShareStatus,
    JobClass,
    PodPlacement,
    ProfileMode,
    ProfileSpec,
    WorkloadSignature,
    from_json,
)
from gpushare.core.control import ReadPod, SoloSignature
from gpushare_deviceplugin.pods import ManagedPod


@dataclass(frozen=True, slots=True)
class SharedProfile:
    """Part of a GpuShare that this node needs.

    Attributes:
        pod_uids: its pods here, as far as its status lists them.
        signature: the workload's; None without a profile. `kept` is the profile as written there.
        job_class, max_slowdown: from its spec; None if absent.
        is_profiled: whether its workload may be profiled at all (`profile.mode` is not Off).
        partly_listed: the GpuShare, without its status, if that may not list all of its pods.
        window_seconds: how long it is to be measured alone, from its spec; None if absent.
        joined: the GpuShare itself if its workload is joined over namespaces; `NodeShares` takes it out.
    """

    pod_uids: frozenset[str]
    gpu_model: str = ""
    signature: SoloSignature | None = None
    kept: WorkloadSignature | None = None
    job_class: JobClass | None = None
    max_slowdown: float | None = None
    is_profiled: bool = True
    partly_listed: GpuShare | None = None
    window_seconds: float | None = None
    joined: GpuShare | None = None

    @property
    def profile_spec(self) -> ProfileSpec:
        """Return its settings of profiling."""
        mode = ProfileMode.AUTO if self.is_profiled else ProfileMode.OFF
        return ProfileSpec(mode, None if self.window_seconds is None else int(self.window_seconds))


class NodeShares(PlacedShares[SharedProfile]):
    """The GpuShares that have, or may have, a pod on this node, and those of joined workloads.

    Args:
        joined: workload keys that mean one workload in several namespaces.
    """

    def __init__(
        self,
        shares: Mapping[str, SharedProfile] = MappingProxyType({}),
        pods: Mapping[str, OwnedPod] = MappingProxyType({}),
        joined: Iterable[JoinedWorkload] = (),
    ) -> None:
        self._joined = JoinedShares(joined)
        super().__init__(shares, pods)

    def __setitem__(self, key: str, share: SharedProfile) -> None:
        super().__setitem__(key, replace(share, joined=None))
        if share.joined is not None:
            self._joined.put(share.joined)

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        namespace, _, name = key.partition("/")
        self._joined.drop(namespace, name)

    def joins(self, namespace: str, workload: str | None) -> bool:
        """Return whether this key of this namespace is joined with that of another one."""
        return self._joined.joins(namespace, workload)

    def joint(self, pod: ReadPod, gpu_model: str) -> SharedProfile | None:
        """Return the profile of a pod's joined workload on a GPU model, if the pod's own GpuShare takes it."""
        if not self._joined:
            return None
        namespace, _, workload = pod.workload.partition("/")  # the owner of a pod without a key has a slash more
        if namespace != pod.namespace or (known := self._joined.of(namespace, workload).get(gpu_model)) is None:
            return None
        if not all(known.suits(own.profile_spec) for own in self.of(pod.namespace, pod.uid)):
            return None
        return SharedProfile(frozenset(), gpu_model, _solo(known.profile), known.profile)


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms on which a pod runs.

    Attributes:
        max_slowdown: tolerated, 1 or more.
        is_certain: whether its class is known. Until its GpuShare is known, a pod without the annotation may be of
            class latency and must not be stopped.
    """

    job_class: JobClass
    max_slowdown: float
    is_certain: bool = True


TermsOf = Callable[[ManagedPod], Terms]


def _joins_none(_namespace: str, _workload: str | None) -> bool:
    return False


def reduce_gpushare(
    obj: Mapping[str, Any],
    node_name: str | None = None,
    joins: Callable[[str, str | None], bool] = _joins_none,
) -> SharedProfile | None:
    """Reduce the API's JSON object; None for a GpuShare that surely concerns no pod on this node.

    Args:
        node_name: None for any node.
        joins: whether a workload key of a namespace is joined with that of another one.
    """
    status = from_json(GpuShareStatus, obj.get("status"))
    uids = frozenset(each.pod_uid for each in status.placements if _is_here(each, node_name))
    is_joined = joins(str((obj.get("metadata") or {}).get("namespace", "")), status.workload)
    if not uids and status.lists_all_pods and not is_joined:
        return None
    spec = from_json(GpuShareSpec, obj.get("spec"))
    kept = status.profile if status.profile is not None and status.profile.counters else None
    profile = kept if kept is not None and not kept.contradiction() else None  # otherwise it is measured again
    return SharedProfile(
        pod_uids=uids,
        gpu_model=profile.gpu_model if profile else "",
        signature=_solo(profile) if profile else None,
        kept=kept,
        job_class=spec.job_class,
        max_slowdown=spec.max_slowdown,
        is_profiled=spec.profile is None or spec.profile.mode is not ProfileMode.OFF,
        partly_listed=None if status.lists_all_pods else GpuShare.from_object({**obj, "status": None}),
        window_seconds=spec.profile.window_seconds if spec.profile is not None else None,
        joined=_without_pods(GpuShare.from_object(obj)) if is_joined else None,
    )


def _without_pods(share: GpuShare) -> GpuShare:
    """Return a GpuShare with its settings of profiling, its workload and its profile alone."""
    return replace(
        share,
        owners=(),
        spec=GpuShareSpec(profile=share.spec.profile),
        status=GpuShareStatus(workload=share.status.workload, profile=share.status.profile),
    )


def terms_of(pod: ManagedPod, shares: NodeShares, defaults: Defaults) -> Terms:
    """Return a pod's terms: its annotation beats its GpuShare, which beats the chart's defaults.

    If several GpuShares have the pod, which lasts only moments, the first by name counts.
    """
    share = next(iter(shares.of(pod.namespace, pod.uid)), None)
    of_share = share.job_class if share is not None else None
    job_class = pod.job_class if pod.has_class else of_share or defaults.job_class
    tolerated = share.max_slowdown if share is not None else None
    return Terms(
        job_class,
        tolerated if tolerated is not None else defaults.max_slowdown_of(job_class),
        is_certain=pod.has_class or share is not None,
    )


def _solo(profile: WorkloadSignature) -> SoloSignature:
    return SoloSignature(
        profile.as_counters(),
        {point.thread_percentage: point.progress_ratio for point in profile.cap_curve},
        profile.iterations_per_second,
        profile.sm_clock_mhz,
    )


def _is_here(placement: PodPlacement, node_name: str | None) -> bool:
    return node_name is None or placement.node in {None, node_name}
