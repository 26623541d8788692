"""Find a GpuShare's pods that are on probation, and those that cannot be profiled where they are."""

from gpushare.core.admission import Needs, ShareKey, resolve
from gpushare.core.api import JobClass, names
from gpushare.core.control import OperatorSettings, ProfilingView
from gpushare.core.placement import clock_time, term_of, unprofiled_of, why_unread
from gpushare_operator.world import ClusterView


def profiling_of(
    world: ClusterView, key: ShareKey, settings: OperatorSettings, now: float
) -> tuple[ProfilingView, float | None]:
    """Return the state of a GpuShare's profiling, and when its first probation ends (None: no probation).

    Args:
        now: Unix time, as is the end.
    """
    share, pod_reports = world.shares[key], world.pod_reports_of(key)
    on_probation: dict[str, str] = {}
    unread: dict[str, str] = {}
    ends: list[float] = []
    for pod in world.pods_of(key):
        unprofiled = unprofiled_of(pod, share)
        if unprofiled is None and (share.spec.selector is None or names.WORKLOAD in pod.annotations):
            break  # the workload has its profile, or is not to be profiled
        if unprofiled is None or pod.finished or pod.decision is None:
            continue
        term = term_of(pod, unprofiled, world.starts.of(pod))
        if term is not None and term.until > now and settings.probation.seconds:
            on_probation[pod.name] = clock_time(term.until)
            ends.append(term.until)
        elif (report := pod_reports.get(pod.uid)) is not None:
            classes = [_class_of(world, uid, settings) for uid in report.neighbours]
            if why := why_unread(classes, can_read=settings.probation.freezes and report.can_read):
                unread[pod.name] = why
    return ProfilingView(on_probation, unread), min(ends, default=None)


def _class_of(world: ClusterView, uid: str, settings: OperatorSettings) -> JobClass | None:
    pod, key = world.pods.get(uid), world.share_of_pod(uid)
    if pod is None:
        return None
    share = world.shares.get(key) if key is not None else None
    needs = resolve(pod.annotations, share, settings.defaults, limit_percent=pod.limit_percent)
    return needs.job_class if isinstance(needs, Needs) else None
