"""The operator's own metrics, in a registry of their own."""

from collections.abc import Callable, Iterable
from enum import StrEnum
from functools import partial
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gpushare.core.api import Phase, TroubleKind
from gpushare.runtime.http import lag_histogram


class WorkKind(StrEnum):
    """Kind of object to reconcile."""

    POD = "pod"
    SHARE = "share"


class WorkResult(StrEnum):
    """Result of one reconciliation."""

    DONE = "done"
    SKIPPED = "skipped"
    REFUSED = "refused"
    FAILED = "failed"


class EvictionRefusal(StrEnum):
    """Reason for which the API server did not evict a pod."""

    BUDGET = "DisruptionBudget"
    FAILED = "EvictionFailed"


class OperatorMetrics:
    """Counters of the work done, and gauges of the known objects."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconciliations = Counter(
            "gpushare_operator_reconciliations_total",
            "Reconciliations, by kind and result.",
            ["kind", "result"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "gpushare_operator_reconciliation_duration_seconds",
            "Time of one reconciliation, by kind.",
            ["kind"],
            registry=self.registry,
            buckets=(0.001, 0.005, 0.01, 0.05, 0.25, 1.0, 5.0, 30.0),
        )
        self.status_writes = Counter(
            "gpushare_operator_status_writes_total", "Statuses of GpuShares written.", registry=self.registry
        )
        self.retractions = Counter(
            "gpushare_retractions_total",
            "Pods that were moved away for a neighbour's promise.",
            registry=self.registry,
        )
        self.retractions_refused = Counter(
            "gpushare_retractions_refused_total",
            "Evictions that the API server refused, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self.retractions_waiting = Gauge(
            "gpushare_retractions_waiting",
            "Pods that an agent wants moved away and that are still there.",
            registry=self.registry,
        )
        self.replacements = Counter(
            "gpushare_replacements_total",
            "Pods in trouble that were evicted so that others are made in their place, by what was wrong.",
            ["kind"],
            registry=self.registry,
        )
        self.windows_learnt = Counter(
            "gpushare_operator_windows_learnt_total",
            "Windows of shared GPUs that taught something about their workloads.",
            registry=self.registry,
        )
        self.bad_objects = Gauge(
            "gpushare_operator_bad_objects",
            "Objects that cannot be understood now, by kind.",
            ["kind"],
            registry=self.registry,
        )
        self.missed_deletions = Gauge(
            "gpushare_operator_missed_deletions",
            "Deletions since the start that no watch brought, by kind.",
            ["kind"],
            registry=self.registry,
        )
        self.refused_namespaces = Gauge(
            "gpushare_operator_refused_namespaces",
            "Namespaces in which the operator may not list or watch now.",
            registry=self.registry,
        )
        self.queued = Gauge(
            "gpushare_operator_queue_length", "Keys that wait for work or are in work.", registry=self.registry
        )
        self.events = Gauge(
            "gpushare_operator_events_waiting", "Events that wait to be written.", registry=self.registry
        )
        self.pods = Gauge("gpushare_operator_pods", "Managed pods known.", registry=self.registry)
        self.shares = Gauge(
            "gpushare_operator_gpushares", "GpuShares known, by phase.", ["phase"], registry=self.registry
        )
        self.lag = lag_histogram(self.registry)
        # Create each series at 0, so that its first count is an increase to Prometheus.
        for kind, result in product(WorkKind, WorkResult):
            self.reconciliations.labels(kind.value, result.value)
        for reason in EvictionRefusal:
            self.retractions_refused.labels(reason.value)
        for trouble in TroubleKind:
            self.replacements.labels(trouble.value)

    def show(
        self,
        *,
        queued: Callable[[], int],
        events: Callable[[], int],
        pods: Callable[[], int],
        phases: Callable[[], Iterable[Phase]],
    ) -> None:
        """Read the gauges from these functions at each scrape, in the server's thread; empty phases read 0."""
        self.queued.set_function(queued)
        self.events.set_function(events)
        self.pods.set_function(pods)
        for phase in Phase:
            self.shares.labels(phase.value).set_function(partial(_count, phases, phase))


def _count(phases: Callable[[], Iterable[Phase]], phase: Phase) -> int:
    return sum(one is phase for one in phases())
