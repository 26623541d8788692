"""A node's agent that has not reported for long: what it last reported is not shown as the present."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from fakecluster import HttpApiServer

from gpushare.cli.last_reports import heard
from gpushare.core.api import GpuNode, GpuNodeStatus
from gpushare.core.control import SILENT_SECONDS
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
