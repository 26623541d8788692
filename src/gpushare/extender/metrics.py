"""The extender's metrics; their names are documented with the exporter's."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gpushare.core.api import Reason
from gpushare.kube import Reflector
from gpushare.runtime.http import lag_histogram

_LATENCY_BUCKETS: Final = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0)
_FENCE_BUCKETS: Final = (0.001, 0.01, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class ExtenderMetrics:
    """The extender's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Histogram(
            "gpushare_extender_request_duration_seconds",
            "Time to answer kube-scheduler, by verb.",
            ["verb"],
            buckets=_LATENCY_BUCKETS,
            registry=self.registry,
        )
        self.rejections = Counter(
            "gpushare_extender_rejections",
            "Pods that fitted nowhere or not where they were sent, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self.bind_failures = Counter(
            "gpushare_extender_bind_failures",
            "Bindings that did not come about, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self.fence_wait = Histogram(
            "gpushare_extender_bind_fence_wait_seconds",
            "Time that bindings waited for another's allocation.",
            buckets=_FENCE_BUCKETS,
            registry=self.registry,
        )
        self.reservations = Gauge(
            "gpushare_extender_reservations", "Pods that hold room on a GPU.", registry=self.registry
        )
        self.woken = Counter(
            "gpushare_extender_pods_woken",
            "Waiting pods that were marked for another try when room appeared.",
            registry=self.registry,
        )
        self.schedulers_restarted = Counter(
            "gpushare_extender_schedulers_restarted",
            "Times that kube-scheduler was started anew since it did not see a pod.",
            registry=self.registry,
        )
        self.caps_changed = Counter(
            "gpushare_extender_caps_changed",
            "Pods without a process whose cap was chosen anew for the present tenants of their GPU.",
            registry=self.registry,
        )
        self.contested_gpus = Gauge(
            "gpushare_extender_contested_gpus",
            "GPUs that a node lists although they belong to another node.",
            registry=self.registry,
        )
        self.kept_gpus = Gauge(
            "gpushare_extender_kept_gpus",
            "GPUs that are kept for pods that have waited long.",
            registry=self.registry,
        )
        self.silent_nodes = Gauge(
            "gpushare_extender_silent_nodes",
            "Nodes whose agent has been silent for so long that they get no new pods.",
            registry=self.registry,
        )
        self.ready = Gauge("gpushare_extender_ready", "1 once all watches are synced.", registry=self.registry)
        self.lag = lag_histogram(self.registry)
        for reason in Reason:  # start at 0, otherwise the first one would not show as an increase
            self.rejections.labels(reason.value)

    def watch(self, reflectors: Iterable[Reflector[Any]]) -> None:
        """Report the watches' own counts."""
        self.registry.register(_Watches(tuple(reflectors)))


class _Watches(Collector):
    def __init__(self, reflectors: tuple[Reflector[Any], ...]) -> None:
        self._reflectors = reflectors

    def collect(self) -> Iterable[Metric]:
        """Yield restarts and readings that failed, by resource; and the objects that are bad now, by kind."""
        restarts = CounterMetricFamily(
            "gpushare_extender_watch_restarts", "Watches that broke and were started anew.", labels=["resource"]
        )
        bad = CounterMetricFamily(
            "gpushare_extender_bad_objects",
            "Readings of objects that could not be understood.",
            labels=["resource"],
        )
        present = GaugeMetricFamily(
            "gpushare_extender_present_bad_objects",
            "Objects that cannot be understood now, by kind.",
            labels=["kind"],
        )
        by_kind: dict[str, int] = defaultdict(int)
        for reflector in self._reflectors:
            restarts.add_metric([reflector.name], reflector.restarts)
            bad.add_metric([reflector.name], reflector.bad_objects)
            by_kind[reflector.resource.kind] += reflector.present_bad_objects
        for kind, count in by_kind.items():
            present.add_metric([kind], count)
        yield restarts
        yield bad
        yield present
