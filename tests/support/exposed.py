"""What each part serves at /metrics, with every figure present, from the parts' own collectors."""

import time
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from gpushare.core.api import GpuShare, PodView, names
from gpushare.exporter import DeviceFigures, NodeCollector, NodeFigures, TenantFigures
from gpushare.extender.metrics import ExtenderMetrics
from gpushare.kube import PODS
from gpushare.mps.layout import GpuDirectory, write_status
from gpushare.mps.observe import GateCollector
from gpushare.mps.status import (
    GateState,
    GateStatus,
    HeldStatus,
    HoldReason,
    Mismatch,
    MismatchKind,
    ThrottleStatus,
)
from gpushare.runtime.certificates import CertificateCollector, Validity
from gpushare.runtime.http import registry_of
from gpushare_operator.admission.server import AdmissionMetrics
from gpushare_operator.metrics import OperatorMetrics
from gpushare_operator.workloads import WorkloadCollector
from gpushare_operator.world import ClusterView

T = TypeVar("T")
_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}


def full(kind: type[T], **chosen: Any) -> T:
    """A dataclass with every field filled, so that no figure is absent; `chosen` gives those that matter."""
    hints = typing.get_type_hints(kind)
    return kind(**{one.name: chosen.get(one.name, _filled(hints[one.name], one.name)) for one in fields(kind)})  # type: ignore[arg-type]


def _filled(hint: Any, name: str) -> Any:
    options = [one for one in typing.get_args(hint) if one is not type(None)]
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return _filled(options[0], name)
    origin = typing.get_origin(hint) or hint
    if isinstance(origin, type) and issubclass(origin, Enum):
        return next(iter(origin))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"x": _filled(options[1], name)}
    if origin is tuple:
        return ()
    return {str: name, bool: True, int: 1, float: 0.5}[origin]


@dataclass
class _Keeper:
    gpu: GpuDirectory
    restarts: int = 1
    is_running: bool = True


def registries(folder: Path) -> dict[str, CollectorRegistry]:
    """The registry of each part by its name; `folder` is for the gate's status file."""
    tenant = full(TenantFigures, gpu_uuid="GPU-1", namespace="shop", pod="web-0", pod_uid="p", pipes={"fp32": 0.5})
    scrapes = count(1)

    def node() -> NodeFigures:
        grown = next(scrapes)
        device = full(
            DeviceFigures,
            uuid="GPU-1",
            mps_state="Active",
            pipes={"fp32": 0.5},
            turns=grown,
            refused={"x": grown},
        )
        return replace(full(NodeFigures), devices=(device,), tenants=(tenant,))

    gpu = GpuDirectory.of(folder, "GPU-1")
    gpu.create()
    own = {"extender": ExtenderMetrics(), "admission": AdmissionMetrics(), "operator": OperatorMetrics()}
    certificate: Any = SimpleNamespace(validity=Validity(1e9, 2e9))
    own["admission"].registry.register(CertificateCollector({"admission": certificate}))
    pods: Any = SimpleNamespace(name="pods", resource=PODS, restarts=0, bad_objects=0, present_bad_objects=0)
    own["extender"].watch([pods])
    own["operator"].registry.register(WorkloadCollector(one_workload()))
    for metrics in own.values():
        metrics.registry.register(_Busy(metrics))
    return {
        "agent": registry_of(NodeCollector(node)),
        "gate": registry_of(_BusyGate([_Keeper(gpu)])),
        **{name: metrics.registry for name, metrics in own.items()},
    }


def one_workload() -> ClusterView:
    """One profiled workload with one pod."""
    world = ClusterView(lambda _: None)
    owners = [{"uid": "u"}]
    profile = {"counters": {"sm_util": 0.5, "fp32_util": 0.4, "dram_bw_util": 0.2, "sm_occupancy": 0.3}}
    share = {"namespace": "shop", "name": "web", "ownerReferences": owners}
    world.put_share(
        GpuShare.from_object({"metadata": share, "status": {"recommendedFraction": "0.25", "profile": profile}})
    )
    annotations = {names.FRACTION: "0.5"}
    pod = {"namespace": "shop", "name": "web-0", "uid": "p", "ownerReferences": owners, "annotations": annotations}
    spec = {"containers": [{"resources": {"limits": {names.SHARE_RESOURCE: "50"}}}]}
    world.put_pod(PodView.from_object({"metadata": pod, "spec": spec}))
    return world


class _BusyGate(GateCollector):
    """A gate that holds somebody, and refuses once more with each scrape."""

    def __init__(self, kept: Sequence[_Keeper]) -> None:
        super().__init__(kept)
        self._gpu, self._scrapes = kept[0].gpu, count(1)

    def collect(self) -> Iterable[Metric]:
        """Write the next status and yield its metrics."""
        refused = {"x": next(self._scrapes)}
        status = GateStatus(
            "GPU-1",
            GateState.ACTIVE,
            time.time(),
            waiting_connections=(HeldStatus(1, "uid", HoldReason.CLIENTS, 1.0),),
            refused=refused,
            mismatches=(Mismatch(MismatchKind.STALE_CEILING, "uid", 1, "outside its turn"),),
            throttle=ThrottleStatus(refusals=refused),
        )
        write_status(self._gpu, status)
        return super().collect()


class _Busy(Collector):
    """Gives every family a child, and lets every counter and histogram grow with each scrape."""

    def __init__(self, metrics: Any) -> None:
        self._families = [one for one in vars(metrics).values() if isinstance(one, MetricWrapperBase)]
        self.collect()  # so that the first scrape has every child

    def collect(self) -> Iterable[Metric]:
        """Return nothing of its own."""
        for family in self._families:
            names = family._labelnames
            child: Any = family.labels(*("x" for _ in names)) if names else family
            if isinstance(child, Histogram):
                child.observe(0.01)
            elif isinstance(child, Counter):
                child.inc()
        return ()

    def describe(self) -> Iterable[Metric]:
        """Describe nothing beforehand."""
        return ()


def expositions(folder: Path) -> dict[str, str]:
    """The text that each part serves."""
    return {name: generate_latest(registry).decode() for name, registry in registries(folder).items()}


def series(folder: Path) -> dict[str, set[str]]:
    """Series name -> its labels, over all parts."""
    found: dict[str, set[str]] = {}
    for registry in registries(folder).values():
        families: Iterable[Metric] = registry.collect()
        for family in families:
            labels = {label for sample in family.samples for label in sample.labels}
            for suffix in _SUFFIXES.get(family.type, ("",)):
                found[family.name + suffix] = labels
    return found
