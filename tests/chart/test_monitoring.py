"""The dashboards and the alerts ask only for metrics that some part serves, with labels that it has."""

import importlib
import json
import re
import subprocess
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from boards import BOARDS
from exposed import series
from introuble import STEP_SECONDS, TROUBLES, Played, played
from realprometheus import promtool

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "gpushare"
STEPS = 41
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
    assert set(alerts) == set(_rules())
    for alert in alerts.values():
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert set(alert["annotations"]) == {"summary", "description"}


# Trouble -> the alerts that it raises, and no other.
RAISED = {
    "the device fails": {"GpushareGpuUnhealthy"},
    "the MPS server is in FAULT": {"GpushareMpsDown", "GpushareGpuUnhealthy"},
    "the MPS daemon is down": {"GpushareMpsDown", "GpushareGpuUnhealthy"},
    "the MPS host does not report": {"GpushareMpsDown", "GpushareGpuUnhealthy"},
    "ceilings do not bind": {"GpushareCeilingsNotEnforced"},
    "a promise is broken": {"GpusharePromiseBroken"},
    "a pod stalls": {"GpusharePodStalled"},
    "a fault ended a pod's processes": {"GpusharePodStalled"},
    "a latency target is missed": {"GpushareSloMissed"},
    "a latency target is unknown": {"GpushareSloUnknown"},
    "a process waits at the gate": {"GpushareConnectionsHeld"},
    "a process runs under an old cap": {"GpushareMismatch"},
    "a process uses the GPU outside MPS": {"GpushareOutsideMps"},
    "kubelet gives other GPUs": {"GpushareAllocationMismatch"},
    "kubelet does not know the plugin": {"GpushareAgentNotRegistered"},
    "agents are silent": {"GpushareAgentSilent"},
    "the extender is not ready": {"GpushareExtenderAway"},
    "the extender is away": {"GpushareExtenderAway"},
    "bindings fail": {"GpushareBindFailures"},
    "a certificate is not renewed": {"GpushareCertificateExpires"},
    "a short certificate is not renewed": {"GpushareCertificateExpires"},
    "a certificate of an older part is not renewed": {"GpushareCertificateExpires"},
    "filter is slow": {"GpushareExtenderSlow"},
    "prioritize is slow": {"GpushareExtenderSlow"},
}
DAY = 86400.0
# Days that a certificate is valid, and those that are left when it is renewed: by default of cert-manager, by the
# `renewBefore` of its examples (15 days of 90) and of others, and by Let's Encrypt's clients.
RENEWALS = [(1, 1 / 3), (7, 7 / 3), (30, 10), (60, 15), (60, 20), (90, 15), (90, 30), (365, 15), (1095, 365)]
# A part of a rule: the alert, the rule without that part, and the trouble that it is for.
PARTS = {
    "Fault|Down": ("GpushareMpsDown", "Fault", "the MPS daemon is down"),
    'state=~"Fault|Down"': ("GpushareMpsDown", 'state="Down"', "the MPS server is in FAULT"),
    "Stalled|GpuFault": ("GpusharePodStalled", "Stalled", "a fault ended a pod's processes"),
    'kind=~"Stalled|GpuFault"': ("GpusharePodStalled", 'kind="GpuFault"', "a pod stalls"),
    "absent(gpushare_extender_ready) or max(": ("GpushareExtenderAway", "max(", "the extender is away"),
    "absent(gpushare_extender_ready) or max(gpushare_extender_ready) == 0": (
        "GpushareExtenderAway",
        "absent(gpushare_extender_ready)",
        "the extender is not ready",
    ),
    "gpushare_certificate_expiry_timestamp_seconds - time() < clamp_max(": (
        "GpushareCertificateExpires",
        "gpushare_certificate_expiry_timestamp_seconds - time() < 0 * clamp_max(",
        "a short certificate is not renewed",
    ),
    "or (gpushare_certificate_expiry_timestamp_seconds - time() < 14 * 86400": (
        "GpushareCertificateExpires",
        "or (gpushare_certificate_expiry_timestamp_seconds - time() < 0",
        "a certificate of an older part is not renewed",
    ),
    "filter|prioritize": ("GpushareExtenderSlow", "filter", "prioritize is slow"),
    'verb=~"filter|prioritize"': ("GpushareExtenderSlow", 'verb="prioritize"', "filter is slow"),
}
ALERTS = (CHART / "alerts.yaml").read_text()


def _rules(text: str = ALERTS) -> dict[str, str]:
    """The expression of each alert."""
    groups = yaml.safe_load(text)["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


@cache
def _series(trouble: str | None) -> tuple[Played, ...]:
    return tuple(played(trouble))


def test_every_alert_and_every_trouble_is_put_to_the_test() -> None:
    assert set(RAISED) == set(TROUBLES)
    assert set(_rules()) == set().union(*RAISED.values()), (
        "give the new alert its trouble in tests/support/introuble.py"
    )


def _unwritten(text: str) -> list[tuple[str, str, str]]:
    """The alert, label and value of each matcher that no series has, in no trouble."""
    written = {
        (one.name, label, value)
        for trouble in (None, *TROUBLES)
        for one in _series(trouble)
        if one.value
        for label, value in one.labels.items()
    }
    return [
        (alert, label, value)
        for alert, expression in _rules(text).items()
        for name, matchers in re.findall(r"(gpushare_[a-z_0-9]+)\{([^}]*)\}", expression)
        for label, values in re.findall(r'([a-z_]+)\s*=~?\s*"([^"]*)"', matchers)
        for value in values.split("|")
        if (name, label, value) not in written
    ]


def test_alerts_ask_only_for_values_that_the_code_writes() -> None:
    assert _unwritten(ALERTS) == []


@pytest.mark.parametrize(
    ("written", "asked"),
    [("Fault|Down", "Fault|Away"), ("Stalled|GpuFault", "Stuck|GpuFault"), ("filter|prioritize", "filter|bound")],
)
def test_a_value_that_no_code_writes_would_be_seen(written: str, asked: str) -> None:
    ((_, _, value),) = _unwritten(ALERTS.replace(written, asked))
    assert value in set(asked.split("|")) - set(written.split("|"))


def test_each_trouble_raises_its_alerts_and_no_other(tmp_path: Path) -> None:
    """promtool plays twenty minutes of what the parts serve: all healthy, then each trouble."""
    rules = tmp_path / "rules.yaml"
    rules.write_text(ALERTS)
    checked = promtool("check", "rules", str(rules))
    assert checked.returncode == 0, checked.stderr
    done = _played(rules, [_case(None, set()), *(_case(trouble, alerts) for trouble, alerts in RAISED.items())])
    assert done.returncode == 0, done.stdout + done.stderr


def _case(trouble: str | None, alerts: Iterable[str], *, only: str = ".+") -> Json:
    """The parts' series in a trouble, and the alerts that fire after twenty minutes."""
    firing = f'count by (alertname) (ALERTS{{alertstate="firing",alertname=~"{only}"}})'
    return {
        "interval": f"{STEP_SECONDS}s",
        "input_series": [one.as_input(STEPS) for one in _series(trouble)],
        "promql_expr_test": [
            {
                "expr": firing,
                "eval_time": "20m",
                "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in sorted(alerts)],
            }
        ],
    }


def _played(rules: Path, cases: list[Json]) -> subprocess.CompletedProcess[str]:
    suite = rules.with_name("tests.yaml")
    suite.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "30s", "tests": cases}))
    return promtool("test", "rules", str(suite))


def _tells_of_a_certificate(days: float, left_days: float) -> bool:
    """Whether GpushareCertificateExpires holds of a certificate of so many days, of which so many are left."""
    expression = _rules()["GpushareCertificateExpires"]
    younger, _, _ = expression.partition(" or (")  # the rest is for parts that do not tell when it began
    at = {
        "gpushare_certificate_expiry_timestamp_seconds": left_days * DAY,
        "gpushare_certificate_not_before_timestamp_seconds": (left_days - days) * DAY,
        "clamp_max": min,
        "time": lambda: 0.0,
    }
    return bool(eval(younger, {"__builtins__": {}}, at))


@pytest.mark.parametrize(("days", "left_days"), RENEWALS)
def test_no_certificate_that_is_renewed_in_time_raises_the_alert(days: float, left_days: float) -> None:
    """Before, one of 90 days that is renewed 15 days before its end raised it for six days of each 75."""
    while_it_is_renewed = 20 / (24 * 60)  # cert-manager asks, kubelet brings the Secret, the part reads it
    assert not _tells_of_a_certificate(days, left_days - while_it_is_renewed)


@pytest.mark.parametrize(("days", "left_days"), RENEWALS)
def test_a_certificate_whose_renewal_is_overdue_raises_the_alert_in_time(days: float, left_days: float) -> None:
    left_to_act = min(days / 8, 14.0) - 0.01
    assert _tells_of_a_certificate(days, left_to_act)
    assert _tells_of_a_certificate(days, -1)
    assert not _tells_of_a_certificate(days, left_days)


@pytest.mark.parametrize("part", PARTS)
def test_promtool_would_see_that_a_part_of_a_rule_is_gone(part: str, tmp_path: Path) -> None:
    alert, rest, trouble = PARTS[part]
    assert ALERTS.count(part) == 1
    rules = tmp_path / "rules.yaml"
    rules.write_text(ALERTS.replace(part, rest))
    done = _played(rules, [_case(trouble, {alert}, only=alert)])
    assert done.returncode != 0
    assert "FAILED" in done.stdout + done.stderr, "the rules are read"
    assert "got: nil" in done.stdout + done.stderr
