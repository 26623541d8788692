"""What a healthy release is silent about: each such query says nothing then, else exactly what there is."""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from boards import BOARDS, RIGHT_NOTHING, Asked, asked, is_answer
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from realprometheus import promtool

from gpushare.exporter import DeviceFigures, NodeCollector, NodeFigures, TenantFigures
from gpushare.extender.metrics import ExtenderMetrics
from gpushare.mps.layout import GpuDirectory, write_status
from gpushare.mps.observe import GateCollector
from gpushare.mps.status import GateState, GateStatus
from gpushare.runtime.http import registry_of
from gpushare_operator.admission.server import AdmissionMetrics
from gpushare_operator.metrics import OperatorMetrics

Json = dict[str, Any]
SILENT = {(one.panel, one.silent or ""): one for one in asked() if one.silent}
SAMPLES = 150  # one each 30 s, so that the queries over an hour have a whole one behind them at 70 minutes
AT = "70m"


@dataclass(frozen=True)
class _Figures:
    """Series in trouble (labels -> start and growth each 30 s), and what the panel is to show of them."""

    series: Mapping[str, str]
    shown: Mapping[str, float]


GPU = 'node="n",gpu_uuid="G"'
PEER = 'node="m",gpu_uuid="H"'
WEB = 'namespace="shop",gpushare="web"'
FIGURES: dict[tuple[str, str], _Figures] = {
    ("Held at the gate", "gpushare_mps_held_connections"): _Figures(
        {f'{GPU},reason="Fault"': "1+0", f'{PEER},reason="Fault"': "3+0", f'{GPU},reason="Clients"': "2+0"},
        {'{reason="Fault"}': 4, '{reason="Clients"}': 2},
    ),
    ("Trouble", "gpushare_mps_mismatches"): _Figures(
        {f'{GPU},kind="StaleCeiling"': "1+0", f'{PEER},kind="StaleCeiling"': "1+0"}, {'{kind="StaleCeiling"}': 2}
    ),
    ("Trouble", "gpushare_mps_refused_connections_total"): _Figures(
        {f'{GPU},reason="ControlCommand"': "7+1", f'{PEER},reason="ControlCommand"': "0+2"},
        {'{reason="ControlCommand"}': 30},
    ),
    ("Throttling by the host", "gpushare_gate_throttle_refused_total"): _Figures(
        {'gpu_uuid="G",reason="NoFreezer"': "0+1"}, {'{reason="NoFreezer"}': 10}
    ),
    ("Bindings that failed, pods woken", "gpushare_extender_bind_failures_total"): _Figures(
        {'pod="a",reason="Conflict"': "0+15", 'pod="b",reason="Conflict"': "0+30"}, {'{reason="Conflict"}': 1.5}
    ),
    ("Refusals", "gpushare_admission_rejections_total"): _Figures(
        {'pod="a",reason="fraction"': "0+15", 'pod="b",reason="memory"': "0+30"},
        {'{reason="fraction"}': 0.5, '{reason="memory"}': 1.0},
    ),
    ("Retractions", "gpushare_retractions_refused_total"): _Figures(
        {'reason="budget"': "0+1"}, {'{reason="budget"}': 120}
    ),
    ("What would suit one pod?", "gpushare_workload_recommended_share_ratio"): _Figures(
        {WEB: "0.25+0", 'namespace="shop",gpushare="api"': "0.4+0"}, {"{}": 40}
    ),
    ("Share, cap and what would suit", "gpushare_workload_recommended_share_ratio"): _Figures(
        {WEB: "0.25+0"}, {f"gpushare_workload_recommended_share_ratio{{{WEB}}}": 0.25}
    ),
    ("Predicted against observed", "gpushare_pod_predicted_progress_ratio"): _Figures(
        {f'{GPU},namespace="shop",pod="web-0",pod_uid="p"': "0.5+0"},
        {f'{{{GPU},namespace="shop",pod="web-0",pod_uid="p"}}': 0.75},
    ),
}
OBSERVED = {
    f'gpushare_pod_progress_ratio{{{GPU},namespace="shop",pod="web-0",pod_uid="p"}}': "0.375+0",
    f"gpushare_gpu_healthy{{{GPU}}}": "1+0",
}


def _healthy(folder: Path) -> dict[str, str]:
    """Every series of parts that have just begun, with one healthy GPU and one pod on it."""
    gpu = GpuDirectory.of(folder, "G")
    gpu.create()
    write_status(gpu, GateStatus("G", GateState.ACTIVE, 0.0))
    device = DeviceFigures("G", 0, "NVIDIA H200", 143771, is_healthy=True, mps_state="Active")
    tenant = TenantFigures("G", "shop", "web-0", "p", 0.25, promise_ratio=0.6)
    figures = NodeFigures("n", (device,), (tenant,), is_registered=True, is_driver_ready=True)
    parts: list[CollectorRegistry] = [
        registry_of(NodeCollector(lambda: figures)),
        registry_of(GateCollector([_Keeper(gpu)])),
        *(metrics.registry for metrics in (ExtenderMetrics(), AdmissionMetrics(), OperatorMetrics())),
    ]
    return {
        f"{sample.name}{{{_labels(sample.labels)}}}": f"{sample.value}+0"
        for part in parts
        for family in text_string_to_metric_families(generate_latest(part).decode())
        for sample in family.samples
    }


def _labels(of: Mapping[str, str]) -> str:
    return ",".join(f'{key}="{value}"' for key, value in of.items())


@dataclass
class _Keeper:
    gpu: GpuDirectory
    restarts: int = 0
    is_running: bool = True


def _case(series: Mapping[str, str], expected: Mapping[str, Mapping[str, float]]) -> Json:
    """What promtool plays: the series, and each query's whole answer at the end."""
    return {
        "interval": "30s",
        "input_series": [{"series": name, "values": f"{run}x{SAMPLES}"} for name, run in series.items()],
        "promql_expr_test": [
            {
                "expr": query,
                "eval_time": AT,
                "exp_samples": [{"labels": labels, "value": value} for labels, value in shown.items()],
            }
            for query, shown in expected.items()
        ],
    }


def _played(folder: Path, *cases: Json) -> subprocess.CompletedProcess[str]:
    suite = folder / "tests.yaml"
    suite.write_text(yaml.safe_dump({"rule_files": [], "evaluation_interval": "30s", "tests": list(cases)}))
    return promtool("test", "rules", str(suite))


def _in_trouble(key: tuple[str, str]) -> Json:
    named = {f"{key[1]}{{{labels}}}": run for labels, run in FIGURES[key].series.items()}
    return _case({**OBSERVED, **named}, {SILENT[key].plain: FIGURES[key].shown})


def test_every_silent_query_has_its_figures() -> None:
    assert set(FIGURES) == set(SILENT)
    assert {name for _, name in SILENT} == set(RIGHT_NOTHING)


def test_parts_that_have_just_begun_are_silent_in_each(tmp_path: Path) -> None:
    healthy = _healthy(tmp_path)
    assert {
        "gpushare_gpu_healthy",
        "gpushare_gate_throttled_pods",
        "gpushare_extender_ready",
        "gpushare_operator_pods",
    } <= {name.partition("{")[0] for name in healthy}
    done = _played(tmp_path, _case(healthy, {one.plain: {} for one in SILENT.values()}))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("key", FIGURES, ids=": ".join)
def test_each_shows_exactly_its_figures_once_there_are_some(tmp_path: Path, key: tuple[str, str]) -> None:
    done = _played(tmp_path, _in_trouble(key))
    assert done.returncode == 0, done.stdout + done.stderr


def test_another_figure_would_be_seen(tmp_path: Path) -> None:
    """Else the tests above would prove nothing: neither silence nor a figure passes for the other."""
    key = ("Held at the gate", "gpushare_mps_held_connections")
    wrong = _in_trouble(key)
    wrong["promql_expr_test"][0]["exp_samples"][0]["value"] = 5
    silent = _in_trouble(key)
    silent["promql_expr_test"][0]["exp_samples"] = []
    assert [_played(tmp_path, case).returncode for case in (wrong, silent, _in_trouble(key))] == [1, 1, 0]


def test_the_first_screen_says_so_in_words(tmp_path: Path) -> None:
    """A silent single figure shows its word; the gate's question, which has an "or", is 0 on healthy GPUs."""
    panels = {panel["title"]: panel for board in BOARDS.values() for panel in board["panels"]}
    single = [one for one in SILENT.values() if panels[one.panel]["type"] == "stat"]
    assert [one.panel for one in single] == ["What would suit one pod?"]
    assert panels[single[0].panel]["fieldConfig"]["defaults"]["noValue"] == "nothing is known: no data"
    (gate,) = (one.plain for one in asked() if one.panel == "Does anyone wait at the gate?")
    waiting = {
        f'gpushare_mps_held_connections{{{GPU},reason="{reason}"}}': "2+0" for reason in ("Fault", "Clients")
    }
    healthy = _healthy(tmp_path)
    cases = [_case({}, {gate: {}}), _case(healthy, {gate: {"{}": 0}}), _case(healthy | waiting, {gate: {"{}": 4}})]
    done = _played(tmp_path, *cases)
    assert done.returncode == 0, done.stdout + done.stderr


def test_neither_infinite_values_nor_none_pass_as_an_answer() -> None:
    answers = {value: is_answer([{"value": [0, value]}]) for value in ("NaN", "+Inf", "-Inf", "0", "0.5")}
    assert answers == {"NaN": False, "+Inf": False, "-Inf": False, "0": True, "0.5": True}
    assert not is_answer([])
    assert is_answer([{"value": [0, "NaN"]}, {"value": [0, "1"]}])
    assert not is_answer([{"value": [0, "+Inf"]}, {"value": [0, "1"]}])
    assert Asked("b", "p", "sum(gpushare_mps_mismatches)").silent == "gpushare_mps_mismatches"
    assert Asked("b", "p", "sum(gpushare_mps_mismatches) or vector(0)").silent is None
