"""The dashboards and the alerts ask only for metrics that some part serves, with labels that it has."""

import importlib
import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from boards import BOARDS
from exposed import series
from realprometheus import promtool

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "gpushare"
with tempfile.TemporaryDirectory() as _folder:
    SERVED = series(Path(_folder))


def _expressions() -> list[str]:
    queries = [
        target["expr"]
        for board in BOARDS.values()
        for panel in board["panels"]
        for target in panel.get("targets", [])
    ]
    lists = [v["query"] for board in BOARDS.values() for v in board["templating"]["list"] if v["type"] == "query"]
    alerts = yaml.safe_load((CHART / "alerts.yaml").read_text())
    return sorted({*queries, *lists, *(rule["expr"] for group in alerts["groups"] for rule in group["rules"])})


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


def test_the_checked_in_dashboards_are_the_generated_ones() -> None:
    pytest.importorskip("grafana_foundation_sdk")
    generate = importlib.import_module("dashboards.generate")
    stored = {path.name: path.read_text() for path in generate.FOLDER.glob("*.json")}
    assert stored == generate.render(), "run hack/dashboards/generate.py"


@pytest.mark.parametrize("name", BOARDS)
def test_panels_have_ids_titles_and_queries_of_their_own(name: str) -> None:
    panels = BOARDS[name]["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 15
    for panel in panels:
        assert panel["title"]
        if panel["type"] != "row":
            assert panel["description"]
            references = [target["refId"] for target in panel["targets"]]
            assert len(set(references)) == len(references)
            assert all(references)


@pytest.mark.parametrize("name", BOARDS)
def test_the_first_screen_answers_questions(name: str) -> None:
    row, *first = BOARDS[name]["panels"][:9]
    assert row["type"] == "row"
    for panel in first:
        assert panel["type"] == "stat"
        assert panel["title"].endswith("?")


def test_each_dashboard_links_to_the_next_round_in_a_circle() -> None:
    by_uid = {board["uid"]: board for board in BOARDS.values()}
    at, seen = "gpushare", []
    for _ in by_uid:
        seen.append(at)
        link = by_uid[at]["links"][0]
        assert link["title"].startswith("Next: ")
        assert link["keepTime"]
        at = link["url"].removeprefix("/d/")
    assert at == "gpushare"
    assert set(seen) == set(by_uid)


def test_links_lead_to_dashboards_with_the_variables_that_they_set() -> None:
    variables = {board["uid"]: {v["name"] for v in board["templating"]["list"]} for board in BOARDS.values()}
    found = re.findall(r'"/d/([a-z-]+)\?([^"]*)"', json.dumps(list(BOARDS.values())))
    assert len(found) > 5
    for uid, rest in found:
        assert set(re.findall(r"var-([a-z]+)=", rest)) <= variables[uid]


def test_the_dashboards_reach_grafanas_sidecar(render: Any) -> None:
    (config,) = [o for o in render() if o["metadata"]["name"] == "gpushare-dashboards"]
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert {json.loads(text)["uid"] for text in config["data"].values()} == {b["uid"] for b in BOARDS.values()}
    own = render({"dashboards": {"label": "mine", "annotations": {"folder": "gpu"}}})
    (config,) = [o for o in own if o["metadata"]["name"] == "gpushare-dashboards"]
    assert config["metadata"]["labels"]["mine"] == "1"
    assert config["metadata"]["annotations"] == {"folder": "gpu"}


def test_alerts_reach_prometheus(render: Any) -> None:
    values = {"prometheusRule": {"enabled": True, "labels": {"release": "p"}}}
    (rule,) = [o for o in render(values) if o["kind"] == "PrometheusRule"]
    assert rule["metadata"]["labels"]["release"] == "p"
    alerts = {a["alert"]: a for a in rule["spec"]["groups"][0]["rules"]}
    assert set(alerts) == _alerts()
    for alert in alerts.values():
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert set(alert["annotations"]) == {"summary", "description"}


# Alert -> the series that it is about: healthy values, values in trouble (promtool's notation, one each 30 s).
TROUBLE = {
    "GpushareGpuUnhealthy": ('gpushare_gpu_healthy{node="n",gpu_uuid="G",gpu_index="0"}', "1+0x40", "0+0x40"),
    "GpushareMpsDown": ('gpushare_mps_state{node="n",gpu_uuid="G",state="Fault"}', "0+0x40", "1+0x40"),
    "GpushareCeilingsNotEnforced": ('gpushare_mps_ceilings_enforced{node="n",gpu_uuid="G"}', "1+0x40", "0+0x40"),
    "GpusharePromiseBroken": (
        'gpushare_pod_promise_broken{node="n",gpu_uuid="G",namespace="ns",pod="p"}',
        "0+0x40",
        "1+0x40",
    ),
    "GpusharePodStalled": (
        'gpushare_pod_trouble{node="n",gpu_uuid="G",namespace="ns",pod="p",kind="Stalled"}',
        "0+0x40",
        "1+0x40",
    ),
    "GpushareSloMissed": (
        'gpushare_pod_slo_met{node="n",gpu_uuid="G",namespace="ns",pod="p"}',
        "1+0x40",
        "0+0x40",
    ),
    "GpushareSloUnknown": (
        'gpushare_pod_slo_target_seconds{node="n",gpu_uuid="G",namespace="ns",pod="q"}',
        "_x40",
        "1+0x40",
    ),
    "GpushareConnectionsHeld": (
        'gpushare_mps_held_connections{node="n",gpu_uuid="G",reason="x"}',
        "0+0x40",
        "1+0x40",
    ),
    "GpushareMismatch": ('gpushare_mps_mismatches{node="n",gpu_uuid="G",kind="x"}', "0+0x40", "1+0x40"),
    "GpushareOutsideMps": ('gpushare_mps_outside_processes{node="n",gpu_uuid="G"}', "0+0x40", "1+0x40"),
    "GpushareAllocationMismatch": (
        'gpushare_agent_allocation_mismatches_total{node="n"}',
        "3+0x40",
        "3+1x40",
    ),
    "GpushareAgentNotRegistered": ('gpushare_agent_registered{node="n"}', "1+0x40", "0+0x40"),
    "GpushareAgentSilent": ('gpushare_extender_silent_nodes{pod="e"}', "0+0x40", "2+0x40"),
    "GpushareExtenderAway": ('gpushare_extender_ready{pod="e"}', "1+0x40", "0+0x40"),
    "GpushareBindFailures": ('gpushare_extender_bind_failures_total{reason="x"}', "9+0x40", "9+1x40"),
    "GpushareCertificateExpires": (
        'gpushare_certificate_expiry_timestamp_seconds{pod="a",certificate="admission"}',
        "100000000+0x40",
        "1814600+0x40",  # a little more than three weeks after the beginning
    ),
    "GpushareExtenderSlow": (
        'gpushare_extender_request_duration_seconds_bucket{verb="filter",le="0.005"}',
        "0+100x40",
        "0+0x40",
    ),
}
# What else an alert covers, by the part of its rule: alert, rule without that part, and a series as above.
PARTS = {
    "Fault|Down": (
        "GpushareMpsDown",
        "Fault",
        'gpushare_mps_state{node="n",gpu_uuid="G",state="Down"}',
        "0+0x40",
        "1+0x40",
    ),
    "Stalled|GpuFault": (
        "GpusharePodStalled",
        "Stalled",
        'gpushare_pod_trouble{node="n",gpu_uuid="G",namespace="ns",pod="p",kind="GpuFault"}',
        "0+0x40",
        "1+0x40",
    ),
    "absent(gpushare_extender_ready) or max(": (
        "GpushareExtenderAway",
        "max(",
        'gpushare_extender_ready{pod="e"}',
        "1+0x40",
        "_x40",
    ),
    "filter|prioritize": (
        "GpushareExtenderSlow",
        "filter",
        'gpushare_extender_request_duration_seconds_bucket{verb="prioritize",le="0.005"}',
        "0+100x40",
        "0+0x40",
    ),
}
# The extender answers 100 times a step: within 5 ms when healthy, within half a second in trouble.
ALWAYS = {
    f'gpushare_extender_request_duration_seconds_bucket{{verb="{verb}",le="{bound}"}}': "0+100x40"
    for verb in ("filter", "prioritize")
    for bound in ("0.5", "+Inf")
}


def _alerts() -> set[str]:
    groups = yaml.safe_load((CHART / "alerts.yaml").read_text())["groups"]
    return {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}


def test_every_alert_is_put_to_the_test() -> None:
    assert _alerts() == set(TROUBLE), "give the new alert its trouble above"


def test_each_alert_fires_on_its_own_trouble_and_is_silent_else(tmp_path: Path) -> None:
    """promtool plays twenty minutes: all healthy, then each trouble alone."""
    rules = tmp_path / "rules.yaml"
    rules.write_text((CHART / "alerts.yaml").read_text())
    checked = promtool("check", "rules", str(rules))
    assert checked.returncode == 0, checked.stderr
    troubles = [_case(alert, name, bad) for alert, (name, _, bad) in TROUBLE.items()]
    parts = [_case(alert, name, bad) for alert, _, name, _, bad in PARTS.values()]
    done = _played(rules, [_case(), *troubles, *parts])
    assert done.returncode == 0, done.stdout + done.stderr


def _case(alert: str | None = None, series: str = "", bad: str = "") -> Json:
    """One series in trouble, all others healthy: this alert fires and no other."""
    healthy = {name: good for name, good, _ in TROUBLE.values()} | {p[2]: p[3] for p in PARTS.values()}
    inputs = {**ALWAYS, **healthy, **({series: bad} if alert else {})}
    firing = 'count by (alertname) (ALERTS{alertstate="firing"})'
    expected = [{"labels": f'{{alertname="{alert}"}}', "value": 1}] if alert else []
    return {
        "interval": "30s",
        "input_series": [{"series": name, "values": values} for name, values in inputs.items()],
        "promql_expr_test": [{"expr": firing, "eval_time": "20m", "exp_samples": expected}],
    }


def _played(rules: Path, cases: list[Json]) -> subprocess.CompletedProcess[str]:
    suite = rules.with_name("tests.yaml")
    suite.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "30s", "tests": cases}))
    return promtool("test", "rules", str(suite))


def test_promtool_would_see_a_silent_alert(tmp_path: Path) -> None:
    """Else the test above would prove nothing: the same suite fails on rules that never fire."""
    rules = tmp_path / "rules.yaml"
    text = (CHART / "alerts.yaml").read_text()
    rules.write_text(text.replace("gpushare_gpu_healthy == 0", "gpushare_gpu_healthy == 7"))
    name, _, bad = TROUBLE["GpushareGpuUnhealthy"]
    assert _played(rules, [_case("GpushareGpuUnhealthy", name, bad)]).returncode != 0


@pytest.mark.parametrize("part", PARTS)
def test_promtool_would_see_that_a_part_of_a_rule_is_gone(part: str, tmp_path: Path) -> None:
    alert, rest, name, _, bad = PARTS[part]
    text = (CHART / "alerts.yaml").read_text()
    assert text.count(part) == 1
    rules = tmp_path / "rules.yaml"
    rules.write_text(text.replace(part, rest))
    done = _played(rules, [_case(alert, name, bad)])
    assert done.returncode != 0
    assert "FAILED" in done.stdout + done.stderr, "the rules are read"
    assert "got: nil" in done.stdout + done.stderr
