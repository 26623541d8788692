"""The dashboard and the alerts ask only for metrics that some part serves, with labels that it has."""

import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.core import Metric

from gpushare.exporter import DeviceFigures, NodeCollector, NodeFigures, TenantFigures
from gpushare.extender.metrics import ExtenderMetrics
from gpushare_operator.admission.server import AdmissionMetrics

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "gpushare"
PROMTOOL = shutil.which("promtool")
_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}


def _served() -> dict[str, set[str]]:
    """Series name -> its labels, from the parts' own collectors with every figure present."""
    pipes = {"fp32": 0.5}
    device = DeviceFigures(
        "GPU-1",
        0,
        "H200",
        1,
        True,
        pipes,
        0.1,
        0.1,
        0.1,
        1,
        0.5,
        "Active",
        True,
        1,
        {"clients": 1},
        {"x": 1},
        {"x": 1},
        0,
        0,
        1,
        1.0,
    )
    tenant = TenantFigures("GPU-1", "ns", "p", "uid", 0.5, 50, 1, 1, 1, 0.9, 0.1, 1.1, pipes)
    node = NodeCollector(lambda: NodeFigures("n", (device,), (tenant,), {"x": 1}, is_registered=True))
    extender, admission = ExtenderMetrics(), AdmissionMetrics()
    extender.requests.labels("filter")
    extender.rejections.labels("x")
    extender.bind_failures.labels("x")
    admission.rejections.labels("x")
    admission.seconds.labels("x")
    families: Iterable[Metric] = [*node.collect(), *extender.registry.collect(), *admission.registry.collect()]
    series: dict[str, set[str]] = {}
    for family in families:
        labels = {label for sample in family.samples for label in sample.labels}
        for suffix in _SUFFIXES.get(family.type, ("",)):
            series[family.name + suffix] = labels
    return series


SERVED = _served()


def _expressions() -> list[str]:
    board = json.loads((CHART / "dashboards" / "gpushare.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    variables = [v["query"] for v in board["templating"]["list"] if v["type"] == "query"]
    alerts = yaml.safe_load((CHART / "alerts.yaml").read_text())
    return queries + variables + [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("expression", _expressions())
def test_what_is_asked_for_is_served(expression: str) -> None:
    names = re.findall(r"\bgpushare_[a-z_0-9]+", expression)
    assert names, "asks for nothing of ours"
    assert [name for name in names if name not in SERVED] == []
    for name, matchers in re.findall(r"(gpushare_[a-z_0-9]+)\{([^}]*)\}", expression):
        asked = set(re.findall(r"([a-z_]+)\s*(?:=~|!~|!=|=)", matchers))
        assert asked <= SERVED[name], name
    grouped = {g.strip() for groups in re.findall(r"by \(([^)]*)\)", expression) for g in groups.split(",")}
    assert grouped - {"le"} <= set().union(*(SERVED[name] for name in names))


def _generator() -> Any:
    spec = importlib.util.spec_from_file_location(
        "generate_dashboard", ROOT / "hack" / "dashboards" / "generate.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_checked_in_dashboard_is_the_generated_one() -> None:
    pytest.importorskip("grafana_foundation_sdk")
    generator = _generator()
    assert generator.TARGET.read_text() == generator.render(), "run hack/dashboards/generate.py"


def test_panels_have_ids_titles_and_queries_of_their_own() -> None:
    board = json.loads((CHART / "dashboards" / "gpushare.json").read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 20
    for panel in panels:
        assert panel["title"]
        if panel["type"] != "row":
            assert panel["description"]
            references = [target["refId"] for target in panel["targets"]]
            assert len(set(references)) == len(references)
            assert all(references)


def test_the_dashboard_reaches_grafanas_sidecar(render: Any) -> None:
    (config,) = [o for o in render() if o["metadata"]["name"] == "gpushare-dashboards"]
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(config["data"]["gpushare.json"])["uid"] == "gpushare"
    own = render({"dashboards": {"label": "mine", "annotations": {"folder": "gpu"}}})
    (config,) = [o for o in own if o["metadata"]["name"] == "gpushare-dashboards"]
    assert config["metadata"]["labels"]["mine"] == "1"
    assert config["metadata"]["annotations"] == {"folder": "gpu"}


def test_alerts_reach_prometheus_with_the_clusters_tolerance(render: Any) -> None:
    values = {"prometheusRule": {"enabled": True, "labels": {"release": "p"}}, "policy": {"maxSlowdown": 2.5}}
    (rule,) = [o for o in render(values) if o["kind"] == "PrometheusRule"]
    assert rule["metadata"]["labels"]["release"] == "p"
    alerts = {a["alert"]: a for a in rule["spec"]["groups"][0]["rules"]}
    assert alerts["GpushareSlowdownBeyondTolerance"]["expr"].endswith("> 2.5")
    assert "MAX_SLOWDOWN" not in json.dumps(rule)
    for alert in alerts.values():
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert set(alert["annotations"]) == {"summary", "description"}


TROUBLE = {
    "GpushareGpuUnhealthy": ('gpushare_gpu_healthy{node="n",gpu_uuid="G",gpu_index="0"}', 0),
    "GpushareMpsDown": ('gpushare_mps_state{node="n",gpu_uuid="G",state="Fault"}', 1),
    "GpushareCeilingsNotEnforced": ('gpushare_mps_ceilings_enforced{node="n",gpu_uuid="G"}', 0),
    "GpushareSlowdownBeyondTolerance": (
        'gpushare_pod_slowdown_ratio{node="n",gpu_uuid="G",namespace="ns",pod="p"}',
        2,
    ),
    "GpushareConnectionsHeld": ('gpushare_mps_held_connections{node="n",gpu_uuid="G",reason="x"}', 1),
    "GpushareMismatch": ('gpushare_mps_mismatches{node="n",gpu_uuid="G",kind="x"}', 1),
    "GpushareOutsideMps": ('gpushare_mps_outside_processes{node="n",gpu_uuid="G"}', 1),
    "GpushareAgentNotRegistered": ('gpushare_agent_registered{node="n"}', 0),
    "GpushareExtenderAway": ('gpushare_extender_ready{pod="e"}', 0),
}


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool (Debian's prometheus package)")
def test_promtool_accepts_the_rules_and_they_fire(tmp_path: Path) -> None:
    """Each alert is silent on a healthy series and fires, of all, alone on its own trouble."""
    assert PROMTOOL is not None
    rules = tmp_path / "rules.yaml"
    rules.write_text((CHART / "alerts.yaml").read_text().replace("MAX_SLOWDOWN", "1.5"))
    checked = subprocess.run([PROMTOOL, "check", "rules", str(rules)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    healthy = {series: 1 - bad if bad < 2 else 1 for series, bad in TROUBLE.values()}
    tests = []
    for alert, (series, bad) in TROUBLE.items():
        values = {**healthy, series: bad}
        firing = [{"alertname": name, "eval_time": "15m", "exp_alerts": []} for name in TROUBLE if name != alert]
        inputs = [{"series": one, "values": f"{value}+0x30"} for one, value in values.items()]
        expression = f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})'
        fired = [{"expr": expression, "eval_time": "15m", "exp_samples": [{"labels": "{}", "value": 1}]}]
        tests.append(
            {"interval": "30s", "input_series": inputs, "alert_rule_test": firing, "promql_expr_test": fired}
        )
    suite = tmp_path / "tests.yaml"
    suite.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "30s", "tests": tests}))
    done = subprocess.run([PROMTOOL, "test", "rules", str(suite)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
