"""A counter whose labels take a fixed set of values begins at 0: else `increase` would miss the first of each."""

import time
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tests.deviceplugin.fakes import GPU_A

from gpushare.core.api import Reason, TroubleKind
from gpushare.core.control import SLO_TROUBLES, SloReason
from gpushare.core.gpu import GpuInfo
from gpushare.exporter import NodeCollector
from gpushare.extender.metrics import ExtenderMetrics
from gpushare.mps.layout import GpuDirectory, write_status
from gpushare.mps.observe import GateCollector
from gpushare.mps.status import GateState, GateStatus, RefuseReason, ThrottleRefusal, ThrottleStatus
from gpushare.runtime.http import registry_of
from gpushare_deviceplugin.figures import node_figures
from gpushare_deviceplugin.state import AgentPart, NodeState
from gpushare_operator.admission.review import Webhook
from gpushare_operator.admission.server import AdmissionMetrics, ReviewResult
from gpushare_operator.metrics import EvictionRefusal, OperatorMetrics, WorkKind, WorkResult


def begun(registry: CollectorRegistry, family: str, *labels: str) -> dict[tuple[str, ...], float]:
    """The value of each series of a counter, by those of its labels."""
    return {
        tuple(sample.labels[label] for label in labels): sample.value
        for each in registry.collect()
        for sample in each.samples
        if sample.name == family
    }


def zeros(*values: Iterable[str]) -> dict[tuple[str, ...], float]:
    return {tuple(map(str, each)): 0.0 for each in product(*values)}


def test_the_control_planes_counters_begin_at_0() -> None:
    extender, operator, admission = (
        each().registry for each in (ExtenderMetrics, OperatorMetrics, AdmissionMetrics)
    )
    assert begun(extender, "gpushare_extender_rejections_total", "reason") == zeros(Reason)
    assert begun(admission, "gpushare_admission_rejections_total", "reason") == zeros(Reason)
    reviews = begun(admission, "gpushare_admission_reviews_total", "webhook", "result")
    assert reviews == zeros(Webhook, ReviewResult)
    work = begun(operator, "gpushare_operator_reconciliations_total", "kind", "result")
    assert work == zeros(WorkKind, WorkResult)
    assert begun(operator, "gpushare_retractions_refused_total", "reason") == zeros(EvictionRefusal)
    assert begun(operator, "gpushare_replacements_total", "kind") == zeros(TroubleKind)


def test_what_the_api_server_words_is_not_counted_before_it_happens() -> None:
    assert begun(ExtenderMetrics().registry, "gpushare_extender_bind_failures_total", "reason") == {}


@pytest.fixture
def gpu(tmp_path: Path) -> GpuDirectory:
    made = GpuDirectory.of(tmp_path, GPU_A)
    made.create()
    return made


def test_the_mps_hosts_counters_begin_at_0_once_their_process_runs(gpu: GpuDirectory) -> None:
    kept: Any = SimpleNamespace(gpu=gpu, restarts=0, is_running=True)
    registry = registry_of(GateCollector([kept]))
    refused, throttle = "gpushare_gate_refused_total", "gpushare_gate_throttle_refused_total"
    assert begun(registry, refused, "reason") == begun(registry, throttle, "reason") == {}
    write_status(gpu, GateStatus(GPU_A, GateState.ACTIVE, time.time(), throttle=ThrottleStatus(problem="silent")))
    assert begun(registry, refused, "reason") == zeros(RefuseReason)
    assert begun(registry, throttle, "reason") == {}, "a throttle that falls silent counts no less than before"
    counted = {RefuseReason.PROTOCOL.value: 2, "OfALaterVersion": 1}
    throttled = ThrottleStatus(5.0, refusals={ThrottleRefusal.STUCK.value: 3})
    write_status(gpu, GateStatus(GPU_A, GateState.ACTIVE, time.time(), refused=counted, throttle=throttled))
    assert begun(registry, refused, "reason") == zeros(RefuseReason) | {("Protocol",): 2, ("OfALaterVersion",): 1}
    of_throttle = zeros(set(ThrottleRefusal) - {ThrottleRefusal.OTHER})
    assert begun(registry, throttle, "reason") == of_throttle | {("StuckInFreezing",): 3}


def test_the_agents_counters_begin_at_0() -> None:
    state = NodeState(time.monotonic)
    state.set_gpus((GpuInfo(GPU_A, 0, "NVIDIA H200", 143771, 132),))
    gate: GateStatus | None = GateStatus(GPU_A, GateState.ACTIVE, 0.0, refused={RefuseReason.PROTOCOL.value: 2})
    failures: dict[str, int] = {}
    loop: Any = SimpleNamespace(counts={})

    def figures() -> Any:
        return node_figures(
            "n",
            state,
            {GPU_A: gate},
            {},
            {},
            ended={},
            loop=loop,
            keeping=lambda *_: None,
            readings={},
            slo_failures=failures,
            is_registered=True,
        )

    registry = registry_of(NodeCollector(figures))
    refused = "gpushare_mps_refused_connections_total"
    assert begun(registry, refused, "reason") == zeros(RefuseReason) | {("Protocol",): 2}
    slo = "gpushare_agent_slo_reading_failures_total"
    assert begun(registry, slo, "reason") == zeros(SLO_TROUBLES)
    failures[SloReason.NO_SERIES.value] = 4
    assert begun(registry, slo, "reason") == zeros(SLO_TROUBLES) | {("NoSeries",): 4}
    errors = "gpushare_agent_errors_total"
    assert begun(registry, errors, "part") == zeros(AgentPart)
    state.counts.error(AgentPart.LOOP)
    assert begun(registry, errors, "part") == zeros(AgentPart) | {("loop",): 1}
    gate = None
    assert begun(registry, refused, "reason") == {}, "nobody knows"


def test_the_parts_of_the_agent_are_those_of_the_documents() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text()
    [row] = [line for line in page.splitlines() if line.startswith("| gpushare_agent_errors_total |")]
    assert row.split("|")[3].strip() == f"part: {', '.join(AgentPart)}"
