"""A pod's own target (gpushare.io/slo) in `explain` and `top`: what was measured, and whether it is met."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from blocks import ROOT, blocks
from fakecluster import HttpApiServer, busy_node, check_screen, pod_object

from gpushare.cli.access import Seen
from gpushare.cli.columns import Column, lay_out
from gpushare.cli.pod_rows import COLUMNS, rows, style_of
from gpushare.cli.targets import PodTarget, figures_of
from gpushare.cli.top_screen import View, screen
from gpushare.core.api import ConditionStatus, Decision, GpuNode, TenantSlo, names
from gpushare.core.control import SloReason, why_unknown
from gpushare.kube import GPUNODES, NODES, PODS

Call = Callable[..., tuple[int, str, str]]
SERVE, TRAIN = "serve-7c9f8d6b5-xk2lp", "train-5d4c-p9"
LATENCY = {names.CLASS: "latency", names.SLO: "p99<50ms", names.SLO_FROM: "port=8080,series=request_seconds"}
RATE = {names.SLO: "rate>20", names.SLO_FROM: "port=9100,series=steps_total"}
MET, MISSED, UNKNOWN = ConditionStatus.TRUE, ConditionStatus.FALSE, ConditionStatus.UNKNOWN


def latency(met: ConditionStatus, reason: str, measured_seconds: float | None = None) -> dict[str, Any]:
    """What an agent reports of SERVE."""
    found = {"met": met.value, "reason": reason, "message": "", "target": "p99<50ms", "targetSeconds": 0.05}
    return found if measured_seconds is None else {**found, "measuredSeconds": measured_seconds}


def rate(met: ConditionStatus, reason: str, measured_per_second: float | None = None) -> dict[str, Any]:
    """What an agent reports of TRAIN."""
    found = {"met": met.value, "reason": reason, "message": "", "target": "rate>20", "targetPerSecond": 20.0}
    return found if measured_per_second is None else {**found, "measuredPerSecond": measured_per_second}


@pytest.fixture
def named(busy: HttpApiServer) -> HttpApiServer:
    """The busy cluster; two of its pods name targets of their own, of which no agent reports yet."""
    allocatable = {"cpu": "64", "memory": "256Gi", names.SHARE_RESOURCE: "100"}
    busy.put(NODES, {"metadata": {"name": "node-a"}, "status": {"allocatable": allocatable}})
    annotate(busy, SERVE, LATENCY)
    annotate(busy, TRAIN, RATE)
    return busy


def annotate(cluster: HttpApiServer, pod: str, annotations: dict[str, str]) -> None:
    found = cluster.store.objects(PODS)[f"shop/{pod}"]
    metadata = found["metadata"]
    cluster.put(
        PODS, {**found, "metadata": {**metadata, "annotations": {**metadata["annotations"], **annotations}}}
    )


def report(
    cluster: HttpApiServer, of_serve: dict[str, Any] | None, of_train: dict[str, Any] | None = None
) -> None:
    """Have the agent report on the two pods' targets."""
    node = busy_node()
    for tenant in node["status"]["gpus"][0]["tenants"]:
        if (slo := {SERVE: of_serve, TRAIN: of_train}[tenant["pod"]]) is not None:
            tenant["slo"] = slo
    cluster.put(GPUNODES, node)


def nodes_of(cluster: HttpApiServer) -> tuple[GpuNode, ...]:
    return tuple(GpuNode.from_object(each) for each in cluster.store.objects(GPUNODES).values())


def line_of(call: Call, pod: str) -> str:
    """The line of `explain` about the target of the pod itself."""
    code, out, err = call("explain", pod)
    assert code == 0, err
    (line,) = [each for each in out.splitlines() if each.startswith(f"shop/{pod}: ")]
    return line.removeprefix(f"shop/{pod}: ")


def target_of(call: Call, pod: str) -> dict[str, Any]:
    """The same as data."""
    return json.loads(call("explain", pod, "-o", "json")[1])["target"]


@pytest.mark.parametrize(
    ("reported", "line"),
    [
        (latency(MET, "Met", 0.031), "target p99<50ms, measured 31ms: met."),
        (latency(MISSED, "Missed", 0.0612), "target p99<50ms, measured 61.2ms: missed."),
        (
            latency(UNKNOWN, "Borderline", 0.0499),
            "target p99<50ms, measured 49.9ms: unknown, it is about at its target, so that chance decides.",
        ),
        (latency(UNKNOWN, "TooFewRequests"), "target p99<50ms: unknown, too few requests to judge."),
        (latency(UNKNOWN, "Strange"), "target p99<50ms: unknown, its node's agent says why, in the GpuNode."),
        (None, "target p99<50ms: unknown, its node's agent does not report on it."),
    ],
    ids=["met", "missed", "borderline", "too-few", "another-version", "not-reported"],
)
def test_explain_says_what_was_measured_of_a_latency(
    named: HttpApiServer, call: Call, reported: dict[str, Any] | None, line: str
) -> None:
    report(named, reported)
    assert line_of(call, SERVE) == line


@pytest.mark.parametrize(
    ("reported", "line"),
    [
        (rate(MET, "Met", 23.4), "target rate>20, measured 23.4 a second: met."),
        (rate(MISSED, "Missed", 18.3), "target rate>20, measured 18.3 a second: missed."),
        (rate(UNKNOWN, "Idle"), "target rate>20: unknown, its counter stands still."),
    ],
    ids=["met", "missed", "idle"],
)
def test_explain_says_what_was_measured_of_a_rate(
    named: HttpApiServer, call: Call, reported: dict[str, Any], line: str
) -> None:
    report(named, None, reported)
    assert line_of(call, TRAIN) == line


@pytest.mark.parametrize("reason", [each for each in SloReason if each not in {SloReason.MET, SloReason.MISSED}])
def test_why_a_target_is_unknown_is_told_as_the_condition_tells_it(
    named: HttpApiServer, call: Call, reason: SloReason
) -> None:
    _, sentence = why_unknown(TenantSlo(UNKNOWN, reason.value, target="p99<50ms"))
    report(named, latency(UNKNOWN, reason.value))
    assert line_of(call, SERVE) == f"target p99<50ms: unknown, {sentence}."
    found = target_of(call, SERVE)
    assert (found["met"], found["reason"], found["why"]) == ("Unknown", reason.value, sentence)


def test_a_pod_without_a_target_has_no_such_line(named: HttpApiServer, call: Call) -> None:
    found = named.store.objects(PODS)[f"shop/{TRAIN}"]
    annotations = {key: value for key, value in found["metadata"]["annotations"].items() if key not in RATE}
    named.put(PODS, {**found, "metadata": {**found["metadata"], "annotations": annotations}})
    code, out, err = call("explain", TRAIN)
    assert (code, "target" in out, "TARGET" in out) == (0, False, False), err
    assert target_of(call, TRAIN) is None


@pytest.mark.parametrize(
    ("annotations", "says"),
    [
        ({names.SLO: "p99<fast\x1b[2J"}, f'annotation {names.SLO}: "p99<fast?[2J" is not a target; allowed is'),
        ({names.SLO_FROM: "port=0"}, f'annotation {names.SLO_FROM}: "port=0" names no port of 1 to 65535'),
    ],
    ids=["target", "source"],
)
def test_a_target_that_cannot_be_read_is_told_with_what_is_allowed(
    named: HttpApiServer, call: Call, annotations: dict[str, str], says: str
) -> None:
    annotate(named, SERVE, annotations)
    report(named, latency(MET, "Met", 0.031))  # of what it named before
    assert line_of(call, SERVE).startswith(f"its target cannot be read: {says}")
    found = target_of(call, SERVE)
    assert (found["target"], found["met"], found["reason"]) == (None, "Unknown", "InvalidAnnotation")
    assert found["why"].startswith(says)


def test_a_target_of_a_pod_that_waits_is_told_as_not_measured(named: HttpApiServer, call: Call) -> None:
    annotate(named, "late", RATE)
    assert line_of(call, "late") == "target rate>20: unknown, it is not placed yet."
    assert target_of(call, "late")["reason"] is None


def test_a_silent_agents_last_report_is_not_told(named: HttpApiServer, call: Call) -> None:
    report(named, latency(MISSED, "Missed", 0.061))
    (node,) = named.store.objects(GPUNODES).values()
    named.put(GPUNODES, {**node, "status": {**node["status"], "observedAt": "2026-01-01T00:00:00Z"}})
    assert line_of(call, SERVE) == "target p99<50ms: unknown, its node's agent does not report on it."


def test_who_may_not_read_gpunodes_is_not_told_that_no_agent_reports(named: HttpApiServer, call: Call) -> None:
    report(named, latency(MISSED, "Missed", 0.061))
    named.forbidden = {"v1/nodes", "v1/pods", "v1/configmaps"}
    assert line_of(call, SERVE) == "target p99<50ms, measured 61ms: missed."
    named.forbidden |= {"gpunodes", "gpunodes/node-a", "/gpunodes"}
    assert line_of(call, SERVE) == "target p99<50ms: unknown, its GpuNode was not read."
    row = json.loads(call("top", "-n", "shop", "--json")[1])[0]
    assert (row["pod"], row["target"]["target"], row["target"]["why"]) == (
        SERVE,
        "p99<50ms",
        "its GpuNode was not read",
    )


def test_a_throttled_pod_is_told_which_neighbour_misses_its_target(named: HttpApiServer, call: Call) -> None:
    report(named, latency(MET, "Met", 0.031), rate(MET, "Met", 23.4))
    _, out, _ = call("explain", TRAIN)
    assert f"shop/{SERVE}: " not in out  # of neighbours that meet theirs the table is enough
    assert f"shop/{TRAIN} is kept stopped 30% of the time, for a neighbour's promise." in out
    report(named, latency(MISSED, "Missed", 0.0612), rate(MET, "Met", 23.4))
    code, out, err = call("explain", TRAIN)
    assert code == 0
    assert f"shop/{SERVE}: target p99<50ms, measured 61.2ms: missed." in out
    assert f"shop/{TRAIN} is kept stopped 30% of the time, for a neighbour's promise or target." in out
    check_screen("explain-target", out + "".join(f"stderr: {line}\n" for line in err.splitlines()))


def test_forty_columns_are_enough_for_targets(named: HttpApiServer, narrow: Call) -> None:
    report(named, latency(MISSED, "Missed", 0.0612), rate(UNKNOWN, "Idle"))
    code, out, _ = narrow("explain", SERVE)
    assert code == 0
    check_screen("explain-target-40", out)
    code, out, _ = narrow("top", "--once")
    assert code == 0
    check_screen("top-target--once-40", out)


@pytest.mark.parametrize("width", [80, 200])
def test_top_shows_targets_where_a_pod_of_the_list_has_one(named: HttpApiServer, width: int) -> None:
    report(named, latency(MET, "Met", 0.031), rate(MISSED, "Missed", 18.3))
    annotate(named, "late", {names.SLO: "rate>quick"})
    nodes = nodes_of(named)
    found = rows(named.store.objects(PODS).values(), nodes)
    lines = lay_out(COLUMNS, found, width)
    assert max(map(len, lines)) <= width
    check_screen(f"top-target-{width}", "".join(f"{line}\n" for line in lines))
    assert [style_of(row) for row in found if row.pod in {SERVE, TRAIN}] == ["red", "red"]


def test_top_has_no_such_column_where_no_pod_has_a_target(busy: HttpApiServer, call: Call) -> None:
    assert "TARGET" not in call("top")[1]
    assert [row["target"] for row in json.loads(call("top", "--json")[1])] == [None] * 4
    annotate(busy, SERVE, LATENCY)
    assert "TARGET" in call("top")[1]
    assert "TARGET" not in call("top", "-n", "research")[1]


def test_the_live_table_has_the_column_too(named: HttpApiServer) -> None:
    report(named, latency(MET, "Met", 0.031), rate(MISSED, "Missed", 18.3))
    seen = Seen(tuple(named.store.objects(PODS).values()), nodes_of(named), ())
    text = "\n".join(line.text for line in screen(seen, View(), 200, 12))
    assert "p99 31ms<50ms" in text
    assert "rate 18.3>20 missed" in text


def test_top_as_data_has_the_figures(named: HttpApiServer, call: Call) -> None:
    report(named, latency(MET, "Met", 0.031), rate(UNKNOWN, "Implausible", 18.3))
    by_pod = {row["pod"]: row["target"] for row in json.loads(call("top", "--json")[1])}
    assert by_pod[SERVE] == {
        "target": "p99<50ms",
        "met": "True",
        "reason": "Met",
        "why": "",
        "target_seconds": 0.05,
        "measured_seconds": 0.031,
        "target_per_second": None,
        "measured_per_second": None,
    }
    assert (by_pod[TRAIN]["met"], by_pod[TRAIN]["measured_per_second"]) == ("Unknown", 18.3)
    assert by_pod[TRAIN]["why"].startswith("the GPU's counters leave what it reports impossible")
    assert by_pod["lab"] is None


def test_a_missed_target_makes_its_row_red(named: HttpApiServer) -> None:
    """Although the promise is kept: a target is the pod's own word on how it fares."""
    nodes = nodes_of(named)
    (before,) = [row for row in rows(named.store.objects(PODS).values(), nodes) if row.pod == TRAIN]
    report(named, None, rate(MISSED, "Missed", 18.3))
    nodes = nodes_of(named)
    (after,) = [row for row in rows(named.store.objects(PODS).values(), nodes) if row.pod == TRAIN]
    assert (style_of(before), style_of(after)) == ("yellow", "red")


@pytest.mark.parametrize(
    ("measured", "shown"),
    [
        (0.5, "rate 0.5>20"),
        (19.97, "rate 19.97>20"),
        (1234.5678, "rate 1235>20"),
        (123456789.0, "rate 123456789>20"),
        (1e300, "rate 1e+300>20"),
    ],
    ids=["slow", "near", "thousands", "tokens", "nonsense"],
)
def test_rates_are_shown_without_exponents_while_they_can_be_rates(measured: float, shown: str) -> None:
    target = PodTarget("rate>20", MET, "Met", target_per_second=20.0, measured_per_second=measured)
    assert figures_of(target) == shown


def test_a_target_in_another_agents_words_is_shown_as_it_is() -> None:
    target = PodTarget("fast enough", MISSED, "Missed", measured_seconds=0.1)
    assert figures_of(target) == "fast enough missed"


def test_the_pages_show_the_lines_that_explain_prints(named: HttpApiServer, call: Call) -> None:
    report(named, latency(MISSED, "Missed", 0.0612), rate(MET, "Met", 23.4))
    printed = [*call("explain", SERVE)[1].splitlines(), *call("explain", TRAIN)[1].splitlines()]
    report(named, latency(UNKNOWN, "TooFewRequests"))
    printed += call("explain", SERVE)[1].splitlines()
    written = [
        (block.page, line)
        for block in blocks("text")
        for line in block.text.splitlines()
        if line.startswith("shop/") and ": target " in line
    ]
    assert {page for page, _ in written} == {"docs/cli.md", "docs/guide/slow.md"}
    assert [line for _, line in written if line not in printed] == []


def test_the_page_of_the_commands_lists_what_the_column_shows() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    _, section = page.split("## Targets of pods\n")
    rows_of_page = re.findall(r"^\| (`.+`) \|", section.partition("\n## ")[0], re.MULTILINE)
    shown = [
        PodTarget("p99<50ms", MET, "Met", measured_seconds=0.031),
        PodTarget("rate>20", MISSED, "Missed", measured_per_second=18.3),
        PodTarget("p99<50ms", UNKNOWN, "Borderline", measured_seconds=0.0499),
        PodTarget("p99<50ms", UNKNOWN, "TooFewRequests"),
        PodTarget(None, UNKNOWN, "InvalidAnnotation"),
    ]
    assert re.findall(r"`([^`]+)`", " ".join(rows_of_page)) == [figures_of(each) for each in shown]


def test_two_gpus_tell_the_target_once(named: HttpApiServer, call: Call) -> None:
    pod = pod_object("big", "u9", gpu="GPU-0", share=200, annotations=RATE)
    decision = Decision(("GPU-0", "GPU-1"), 100, 143_155, "2026-11-22T12:00:00Z")
    pod["metadata"]["annotations"] |= decision.to_annotations()
    named.put(PODS, pod)
    code, out, err = call("explain", "big")
    assert code == 0, err
    assert (out.count("\nOn node-a/"), out.count("shop/big: target rate>20")) == (2, 1)


def test_a_column_for_some_rows_only_is_left_out_where_none_has_a_value() -> None:
    columns = (Column("A", str.upper), Column("B", str.lower, where_known=True))
    assert lay_out(columns, ["x", ""], None) == ["A  B", "X  x", "-  -"]
    assert lay_out(columns, [""], None) == ["A", "-"]
