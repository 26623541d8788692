"""Metrics of each workload: its pods by name, their requests, and the share that its profile recommends."""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gpushare.core.admission import ShareKey
from gpushare.core.api import GpuShare, JobClass, PodView, Rejection, names, parse_fraction
from gpushare.core.interference import as_profile, cap_progress
from gpushare_operator.world import ClusterView

_WORKLOAD: Final = ("namespace", "gpushare")


class WorkloadCollector(Collector):
    """Collector that reads the operator's view of the cluster at each scrape, in the metrics server's thread."""

    def __init__(self, world: ClusterView) -> None:
        self._world = world

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families."""
        listed = list(self._world.shares.values())  # one atomic step, since the event loop's thread keeps writing
        shares = {ShareKey(share.namespace, share.name): share for share in listed}
        live = [pod for pod in list(self._world.pods.values()) if not pod.finished]
        info = GaugeMetricFamily(
            "gpushare_workload_pod_info",
            "1 for each pod that has not ended, with the GpuShare that it belongs to.",
            labels=(*_WORKLOAD, "pod", "pod_uid", "class"),
        )
        asked: Counter[tuple[str, str]] = Counter()
        states: Counter[tuple[str, str, str]] = Counter()
        for pod in live:
            key = self._world.share_of_pod(pod.uid)
            share = shares.get(key) if key is not None else None
            if share is None:
                continue
            of = (share.namespace, share.name)
            info.add_metric((*of, pod.name, pod.uid, _class_of(pod, share)), 1.0)
            asked[of] += pod.limit_percent
            states[*of, "Waiting" if pod.decision is None else "Placed"] += 1
        yield info
        yield _family(
            "requested_gpus",
            "GPUs that the workload's pods ask for, waiting ones included.",
            {of: percent / 100 for of, percent in asked.items()},
        )
        pods = GaugeMetricFamily(
            "gpushare_workload_pods", "Pods of the workload, by state.", labels=(*_WORKLOAD, "state")
        )
        for at, count in states.items():
            pods.add_metric(at, count)
        yield pods
        expected = GaugeMetricFamily(
            "gpushare_workload_expected_progress_ratio",
            "Progress that the workload's profile expects alone under a cap of the share held, or recommended.",
            labels=(*_WORKLOAD, "share"),
        )
        sizes = Counter({of: states[*of, "Waiting"] + states[*of, "Placed"] for of in asked})
        for share in listed:
            of = (share.namespace, share.name)
            held_ratio = asked[of] / sizes[of] / 100 if sizes[of] else None
            for name, ratio in (("held", held_ratio), ("recommended", _recommended(share))):
                if ratio and (progress := _expected(share, ratio)) is not None:
                    expected.add_metric((*of, name), progress)
        yield expected
        recommended = {
            (share.namespace, share.name): each
            for share in shares.values()
            if (each := _recommended(share)) is not None
        }
        yield _family(
            "recommended_share_ratio",
            "Share of a GPU that the workload's profile recommends for each pod; above 1: whole GPUs.",
            recommended,
        )


def _family(name: str, text: str, values: dict[tuple[str, str], float]) -> Metric:
    family = GaugeMetricFamily(f"gpushare_workload_{name}", text, labels=_WORKLOAD)
    for of, value in values.items():
        family.add_metric(of, value)
    return family


def _class_of(pod: PodView, share: GpuShare) -> str:
    asked = pod.annotations.get(names.CLASS)
    return asked or (share.status.job_class or share.spec.job_class or JobClass.THROUGHPUT).value


def _expected(share: GpuShare, share_ratio: float) -> float | None:
    """Return the progress alone under a cap of this share; None without a usable profile."""
    profile = as_profile(share.status.profile) if share.status.profile is not None else None
    return None if profile is None else min(1.0, cap_progress(profile, min(1.0, share_ratio)))


def _recommended(share: GpuShare) -> float | None:
    if share.status.recommended_fraction is None:
        return None
    parsed = parse_fraction(share.status.recommended_fraction)
    if isinstance(parsed, Rejection):
        return None
    percent, gpus = parsed
    return None if percent is None else percent * gpus / 100
