"""Why a job of the benchmark waited: kube-scheduler's events are kept with its run."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from bench.sharing import pods
from bench.sharing.launching import Order
from bench.sharing.manifests import Json
from tests.bench.test_sharing_pods import TRAINING, OneNode, begun


def test_what_kube_scheduler_said_of_jobs_that_waited_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    node = OneNode()
    began = datetime(2026, 11, 25, 20, 0, tzinfo=UTC)
    monkeypatch.setattr(pods.time, "time", began.timestamp)
    launcher = begun(node, monkeypatch, Order(TRAINING, 70))

    def event(seconds: float, message: str, name: str = TRAINING.name, **more: Any) -> Json:
        at = (began + timedelta(seconds=seconds)).isoformat()
        return {
            "metadata": {"creationTimestamp": at},
            "involvedObject": {"name": name},
            "reason": "FailedScheduling",
            "eventTime": at,
            "message": message,
            **more,
        }

    later = (began + timedelta(seconds=31)).isoformat()
    node.events = [
        event(12, "0/1 nodes: a promise", series={"count": 3, "lastObservedTime": later}),
        event(4, "0/1 nodes: no GPU fits " + "x" * 9_000),
        event(-40, "of the run before"),
        event(5, "of a fault's pod", name="fault-0"),
        event(6, "pulled", reason="Pulled"),
    ]
    first, second = launcher.refusals()
    assert (first["number"], first["at"], first["until"], first["times"]) == (TRAINING.number, 4.0, 4.0, 1)
    assert len(first["message"]) == 600
    assert second == {
        "number": TRAINING.number,
        "at": 12.0,
        "until": 31.0,
        "times": 3,
        "message": "0/1 nodes: a promise",
    }
    node.lost.add("get")
    assert launcher.refusals() == ()
