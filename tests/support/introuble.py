"""Every part's series, in health and in each trouble that an alert is about, from the parts' own collectors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tests.deviceplugin.fakes import GPU_A, WELL, Clock, make_pod

from gpushare.core.api import ConditionStatus, TenantSlo, TenantTrouble, TroubleKind
from gpushare.core.gpu import GpuHealth, GpuInfo, Health, OutsideProcess, OutsideWatch
from gpushare.exporter import NodeCollector, NodeFigures
from gpushare.extender import Extender, parse_options
from gpushare.kube.fake import FakeApi
from gpushare.mps.status import (
    GateState,
    GateStatus,
    HeldStatus,
    HoldReason,
    Mismatch,
    MismatchKind,
    SelfTest,
    SelfTestResult,
)
from gpushare.runtime.certificates import CertificateCollector, Validity
from gpushare.runtime.http import registry_of
from gpushare_deviceplugin.figures import node_figures
from gpushare_deviceplugin.gates import conclude_health
from gpushare_deviceplugin.state import NodeState
from gpushare_deviceplugin.status import Keeping
from gpushare_operator.admission.server import AdmissionMetrics
from gpushare_operator.metrics import OperatorMetrics

STEP_SECONDS = 30
ANSWERS = 100  # of the extender to each verb, in a step
QUICK_SECONDS, SLOW_SECONDS = 0.003, 0.3
WELL_GATE = GateStatus(GPU_A, GateState.ACTIVE, 0.0, self_test=SelfTest(SelfTestResult.PASSED))
DAY = 86400.0
START_OF_VALIDITY = "gpushare_certificate_not_before_timestamp_seconds"
_GROWING = frozenset({"counter", "histogram"})


def _valid(days: float, *, left: float) -> Validity:
    """A certificate of so many days, of which so many are left soon after promtool's clock begins at 0."""
    end = left * DAY + 200.0
    return Validity(end - days * DAY, end)


# In their health: made by the chart for three years, and renewed by cert-manager with a quarter of its life left.
LONG, SHORT = _valid(1095, left=15), _valid(60, left=15)


def _slo(met: ConditionStatus) -> Keeping:
    return Keeping(slo=TenantSlo(met, "Measured", target="p99<50ms", target_seconds=0.05))


class Scene:
    """Every part with one GPU and one pod; a trouble changes an attribute.

    Attributes:
        gate: the MPS host's report; None where it does not report.
        validity: of the certificates, by use; admission serves both here.
        is_older: the parts do not say when their certificates became valid.
        slow: verbs that the extender answers slowly.
        unbound: why bindings fail, one in each step.
    """

    def __init__(self) -> None:
        self.device = WELL
        self.gate: GateStatus | None = WELL_GATE
        self.outside = OutsideWatch()
        self.keeping = _slo(ConditionStatus.TRUE)
        self.is_broken = False
        self.is_registered = True
        self.is_reallocated = False
        self.is_away = False
        self.validity: Mapping[str, Validity] = {"admission": LONG, "metrics": SHORT}
        self.is_older = False
        self.slow: frozenset[str] = frozenset()
        self.unbound: str | None = None
        self.extender = Extender(FakeApi(), parse_options([], {}))
        self.extender.verbs.app()  # gives the verbs their series
        self.extender.metrics.ready.set(1)
        self._state = NodeState(Clock())
        self._state.set_gpus((GpuInfo(GPU_A, 0, "NVIDIA H200", 143771, 132),))
        self._state.put_pod(make_pod("web", phase="Running"))
        self._state.set_allocations({"uid-web": {GPU_A: 25}})

    def _figures(self) -> NodeFigures:
        self._state.set_health(GPU_A, conclude_health(self.device, self.gate))
        loop: Any = SimpleNamespace(counts={}, is_broken=lambda *_: self.is_broken)
        return node_figures(
            "n",
            self._state,
            {GPU_A: self.gate},
            {},
            {GPU_A: self.outside},
            ended={},
            loop=loop,
            keeping=lambda *_: self.keeping,
            readings={},
            slo_failures={},
            is_registered=self.is_registered,
        )

    def verbs(self) -> set[str]:
        """The verbs that the extender serves."""
        found = [each for family in self.extender.metrics.requests.collect() for each in family.samples]
        return {sample.labels["verb"] for sample in found}

    def _step(self) -> None:
        for verb in self.verbs():
            answer = self.extender.metrics.requests.labels(verb=verb)
            for _ in range(ANSWERS):
                answer.observe(SLOW_SECONDS if verb in self.slow else QUICK_SECONDS)
        if self.unbound is not None:
            self.extender.metrics.bind_failures.labels(reason=self.unbound).inc()
        self._state.counts.mismatches += self.is_reallocated

    def _parts(self) -> dict[str, CollectorRegistry]:
        admission = AdmissionMetrics().registry
        certificates: Any = {use: SimpleNamespace(validity=each) for use, each in self.validity.items()}
        admission.register(CertificateCollector(certificates))
        parts = {
            "agent-0": registry_of(NodeCollector(self._figures)),
            "scheduler-0": self.extender.metrics.registry,
            "admission-0": admission,
            "operator-0": OperatorMetrics().registry,
        }
        return {pod: part for pod, part in parts.items() if not (self.is_away and pod == "scheduler-0")}

    def _scraped(
        self, parts: Mapping[str, CollectorRegistry]
    ) -> dict[tuple[str, tuple[tuple[str, str], ...]], Any]:
        """Value and kind by name and labels; labels of the scraped pod fill what is missing (honorLabels)."""
        return {
            (sample.name, tuple(sorted(({"namespace": "system", "pod": pod} | sample.labels).items()))): (
                sample.value,
                family.type,
            )
            for pod, part in parts.items()
            for family in text_string_to_metric_families(generate_latest(part).decode())
            for sample in family.samples
            if not (self.is_older and sample.name == START_OF_VALIDITY)
        }

    def series(self) -> list["Played"]:
        """Every series as it goes on: counters grow by what a step adds to them, gauges stay."""
        parts = self._parts()
        self._step()
        before = self._scraped(parts)
        self._step()
        return [
            Played(name, dict(labels), value, value - before[name, labels][0] if kind in _GROWING else 0.0)
            for (name, labels), (value, kind) in self._scraped(parts).items()
        ]


@dataclass(frozen=True)
class Played:
    """One series: its value at the beginning, and what each step adds."""

    name: str
    labels: Mapping[str, str]
    value: float
    growth: float

    def as_input(self, steps: int) -> dict[str, str]:
        """What promtool plays."""
        labels = ",".join(f'{key}="{value}"' for key, value in self.labels.items())
        return {"series": f"{self.name}{{{labels}}}", "values": f"{self.value}+{self.growth}x{steps}"}


def _with_gate(**changes: Any) -> Callable[[Scene], None]:
    return _with(gate=replace(WELL_GATE, **changes))


def _with(**changes: Any) -> Callable[[Scene], None]:
    def change(scene: Scene) -> None:
        for name, value in changes.items():
            assert hasattr(scene, name), name
            setattr(scene, name, value)

    return change


def _slow(verb: str) -> Callable[[Scene], None]:
    def change(scene: Scene) -> None:
        assert verb in scene.verbs(), f"the extender serves {scene.verbs()}"
        scene.slow = frozenset({verb})

    return change


def _silent(scene: Scene) -> None:
    scene.extender.metrics.silent_nodes.set(2)


def _not_ready(scene: Scene) -> None:
    scene.extender.metrics.ready.set(0)


def _in(kind: TroubleKind) -> Callable[[Scene], None]:
    return _with(keeping=replace(_slo(ConditionStatus.TRUE), trouble=TenantTrouble(kind, "seen")))


TROUBLES: dict[str, Callable[[Scene], None]] = {
    "the device fails": _with(device=GpuHealth(Health.UNHEALTHY, "Xid 79")),
    "the MPS server is in FAULT": _with_gate(state=GateState.FAULT),
    "the MPS daemon is down": _with_gate(state=GateState.DOWN),
    "the MPS host does not report": _with(gate=None),
    "ceilings do not bind": _with_gate(self_test=SelfTest(SelfTestResult.FAILED, "as fast as before")),
    "a promise is broken": _with(is_broken=True),
    "a pod stalls": _in(TroubleKind.STALLED),
    "a fault ended a pod's processes": _in(TroubleKind.GPU_FAULT),
    "a latency target is missed": _with(keeping=_slo(ConditionStatus.FALSE)),
    "a latency target is unknown": _with(keeping=_slo(ConditionStatus.UNKNOWN)),
    "a process waits at the gate": _with_gate(
        waiting_connections=(HeldStatus(7, "uid-web", HoldReason.CLIENTS, 0.0),)
    ),
    "a process runs under an old cap": _with_gate(
        mismatches=(Mismatch(MismatchKind.STALE_CEILING, "uid-web", 7, "outside its turn"),)
    ),
    "a process uses the GPU outside MPS": _with(
        outside=OutsideWatch({OutsideProcess(7, 1, "uid-web"): 2}, found=1)
    ),
    "kubelet gives other GPUs": _with(is_reallocated=True),
    "kubelet does not know the plugin": _with(is_registered=False),
    "agents are silent": _silent,
    "the extender is not ready": _not_ready,
    "the extender is away": _with(is_away=True),
    "bindings fail": _with(unbound="Conflict"),
    "a certificate is not renewed": _with(validity={"admission": _valid(1095, left=14)}),
    "a short certificate is not renewed": _with(validity={"admission": LONG, "metrics": _valid(60, left=7.5)}),
    "a certificate of an older part is not renewed": _with(
        validity={"admission": _valid(1095, left=14)}, is_older=True
    ),
    "filter is slow": _slow("filter"),
    "prioritize is slow": _slow("prioritize"),
}


def played(trouble: str | None = None) -> list[Played]:
    """The series of one scene."""
    scene = Scene()
    if trouble is not None:
        TROUBLES[trouble](scene)
    return scene.series()
