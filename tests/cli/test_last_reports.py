"""A node's agent that has not reported for long: what it last reported is not shown as the present."""

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fakecluster import HttpApiServer

from gpushare.cli.last_reports import heard
from gpushare.cli.live import Objects
from gpushare.cli.report.moment import usage_of
from gpushare.cli.report.usage import UsageHistory, course
from gpushare.core.api import GpuNode, GpuNodeStatus, GpuStatus, TenantStatus
from gpushare.core.control import SILENT_SECONDS, gain_of
from gpushare.kube import GPUNODES
from gpushare.runtime.moments import unix_seconds

Call = Callable[..., tuple[int, str, str]]
AT = "2026-11-25T00:00:00Z"


def reported(cluster: HttpApiServer, seconds_ago: float) -> str:
    at = (datetime.now(UTC) - timedelta(seconds=seconds_ago)).isoformat()
    (node,) = cluster.store.objects(GPUNODES).values()
    cluster.put(GPUNODES, {**node, "status": {**node["status"], "observedAt": at}})
    return at


@pytest.mark.parametrize(
    ("observed_at", "seconds", "is_silent"),
    [(AT, SILENT_SECONDS, False), (AT, SILENT_SECONDS + 1, True), (None, 1e6, False), ("yesterday", 0, True)],
)
def test_an_agent_is_silent_after_as_long_as_the_extender_waits(
    observed_at: str | None, seconds: float, is_silent: bool
) -> None:
    node = heard(GpuNode("n", GpuNodeStatus(observed_at=observed_at)), unix_seconds(AT) + seconds)
    assert node.silent_since == (observed_at if is_silent else None)


def test_a_silent_agents_gpus_are_unknown_and_take_nothing(busy: HttpApiServer, call: Call) -> None:
    before = json.loads(call("gpus", "-o", "json")[1])
    at = reported(busy, 3 * 86400)
    rows = json.loads(call("gpus", "-o", "json")[1])
    assert {(row["health"], row["mps"], row["free_percent"], row["clients"]) for row in rows} == {
        ("Unknown", "Unknown", 0, 0)
    }
    assert {row["sm_ratio"] for row in rows} | {row["progress_ratio"] for row in rows} == {None}
    assert all(f"its agent has not reported since {at}" in row["trouble"] for row in rows)
    assert [row["used_percent"] for row in rows] == [row["used_percent"] for row in before], (
        "pods keep their shares"
    )
    assert f"node-a/0: its agent has not reported since {at}" in call("gpus")[2]


@pytest.mark.parametrize("command", ["top", "pods", "gain"])
def test_how_its_pods_fare_is_not_known(busy: HttpApiServer, call: Call, command: str) -> None:
    at = reported(busy, 200)
    _, out, err = call(command, "-o", "json")
    assert f"the agent of node node-a has not reported since {at}" in err
    found = json.loads(out)
    if command == "gain":
        assert (found["kept"], found["broken"], found["throttled"], found["per_gpu"]) == (0, 0, 0, None)
        assert found["unjudged"]
    else:
        assert {row["progress_ratio"] for row in found} == {None}
        assert {row["pod"]: row["share_percent"] for row in found}["train-5d4c-p9"] == 50


def test_an_agent_that_reports_is_shown_as_before(busy: HttpApiServer, call: Call) -> None:
    before = call("gpus")[1:], call("gain")[1:], call("top")[1:]
    reported(busy, 30)
    assert (call("gpus")[1:], call("gain")[1:], call("top")[1:]) == before


def asleep(seconds_ago: float) -> GpuNode:
    """A node with a pod that slept at its agent's last report, which was made so long before AT."""
    at = datetime.fromtimestamp(unix_seconds(AT) - seconds_ago, UTC).isoformat()
    pods = (
        TenantStatus("u", "ml", "service", 50, clients=1, is_asleep=True, phase=0, thread_percentage_in_force=50),
    )
    gpus = (GpuStatus("G", tenants=(*pods, TenantStatus("v", "ml", "train", 50, clients=1, progress_ratio=0.9))),)
    return GpuNode("n", replace(GpuNodeStatus.of(gpus), observed_at=at))


def test_a_pod_that_slept_at_the_last_report_is_not_known_to_sleep_now() -> None:
    """Before: its progress was 0 for as long as the node was switched off, in `gain` and `gpus`."""
    node = heard(asleep(seconds_ago=3 * 86400), unix_seconds(AT))
    (gpu,) = node.status.gpus
    assert {tenant.work_ratio for tenant in gpu.tenants} == {None}
    assert {(tenant.phase, tenant.thread_percentage_in_force) for tenant in gpu.tenants} == {(None, None)}
    [namespace] = gain_of([node]).by_namespace
    assert (namespace.progress_ratio, namespace.unknown) == (None, 2)


def snapshot(node: GpuNode) -> UsageHistory:
    pods = [
        {"metadata": {"namespace": "ml", "name": tenant.pod, "uid": tenant.pod_uid}}
        for gpu in node.status.gpus
        for tenant in gpu.tenants
    ]
    objects = Objects(None, gpunodes=[node.to_object()], pods=pods, read_at=unix_seconds(AT))
    return usage_of(objects, Path("snap"), unix_seconds(AT))


def test_a_snapshots_report_does_not_take_a_last_report_for_the_present() -> None:
    """Before: a node that was switched off days ago was healthy, and its pods made progress."""
    present, silent = snapshot(asleep(seconds_ago=5)), snapshot(asleep(seconds_ago=3 * 86400))
    assert [list(each.healthy) for each in (present, silent)] == [[1], [0]]
    assert [list(course(each).progress) for each in (present, silent)] == [[0.9], [0]]
    assert [list(course(each).known) for each in (present, silent)] == [[1], [0]]
    assert list(course(silent).given) == [1], "its pods keep their shares"
    told = "The agent of node n has not reported since"
    assert [any(told in note for note in each.notes) for each in (present, silent)] == [False, True]
