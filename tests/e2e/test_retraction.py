"""A newcomer that breaks a promise is read in place; where no throttle keeps it, it leaves by the API, once."""

import time
from datetime import datetime
from typing import Any

import pytest
from busy import is_busy
from livecluster import IDLE, Cluster, Namespace, decided, wait_for
from stopped import StoppedTime
from troubles import says, words

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

Json = dict[str, Any]
# Under these shares the first makes 0.82 alone and 0.34 beside the second, which makes 0.52 (twin.drawn). Promised
# are 0.44 to 0.67 and 0.43 to 0.45, by the profiles: what a throttle may take from the second does not suffice.
STAYING, LEAVING = ("resnet50-train", "0.6"), ("stream", "0.4")
PROFILED_SECONDS = 30.0  # from an unknown workload's first kernel to its profile
STOPPED_SECONDS = 6.0  # of any minute, for that


def deployment(pod: Json) -> Json:
    """A Deployment of one such pod."""
    name = pod["metadata"]["name"]
    template = {
        "metadata": {"labels": {"app": name}, "annotations": pod["metadata"]["annotations"]},
        "spec": {**pod["spec"], "restartPolicy": "Always"},
    }
    spec = {"replicas": 1, "selector": {"matchLabels": {"app": name}}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}


def share_status(space: Namespace, name: str) -> Json:
    """Status of a GpuShare; empty while there is none."""
    answer = space.cluster.get("-n", space.name, "gpushares")
    found = [each.get("status", {}) for each in answer["items"] if each["metadata"]["name"] == name]
    return dict(found[0]) if found else {}


def only_pod(space: Namespace, app: str) -> Json | None:
    """The one pod of a Deployment that is not being deleted; None while there is none, or more than one."""
    pods = space.cluster.get("-n", space.name, "pods", "-l", f"app={app}")["items"]
    staying = [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]
    return dict(staying[0]) if len(staying) == 1 else None


def running_pod(space: Namespace, app: str) -> Json:
    def probe() -> Json | None:
        pod = only_pod(space, app)
        return pod if pod is not None and pod["status"].get("phase") == "Running" else None

    return wait_for(f"a running pod of {app}", probe, seconds=90)


def first_iteration_at(space: Namespace, pod: str) -> float:
    """Unix time of the first line of the pod's log that tells a rate."""
    lines = [line for line in space.log(pod, "--timestamps").splitlines() if "iterations/s=" in line]
    assert lines, f"{pod} has not begun"
    return datetime.fromisoformat(lines[0].partition(" ")[0][:26] + "+00:00").timestamp()


def restarts(pod: Json) -> int:
    return sum(each["restartCount"] for each in pod["status"]["containerStatuses"])


def test_a_newcomer_that_breaks_a_promise_is_held_by_a_budget_then_leaves_once_and_stays_away(
    space: Namespace, cluster: Cluster
) -> None:
    space.create(space.tenant("filler", "1", command=IDLE))
    space.running("filler")  # the other GPU is the only one left
    staying = space.tenant("staying", STAYING[1], "--memory-mib", "900", workload=STAYING[0])
    leaving = space.tenant("leaving", LEAVING[1], "--memory-mib", "900", workload=LEAVING[0])
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "leaving"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "leaving"}}},
    }

    # 1. An unknown workload that runs alone gives its profile away; the next one is read in place, and shares.
    assert cluster.apply(deployment(staying), budget, namespace=space.name).code == 0
    old = running_pod(space, "staying")
    alone = wait_for(
        "a profile seen alone", lambda: share_status(space, "deployment-staying").get("profile"), seconds=120
    )
    assert alone["threadPercentage"] == 60
    with StoppedTime(old["metadata"]["uid"]) as stopped:
        assert cluster.apply(deployment(leaving), namespace=space.name).code == 0
        new = running_pod(space, "leaving")
        assert decided(new)[0] == decided(old)[0]
        in_place = wait_for(
            "a profile read in place",
            lambda: share_status(space, "deployment-leaving").get("profile"),
            seconds=120,
        )
        after = time.time() - first_iteration_at(space, new["metadata"]["name"])
    assert after <= PROFILED_SECONDS or is_busy(), f"{after:.1f} s from its first iteration to its profile"
    if stopped.is_seen:
        most = stopped.most_within(60.0)
        assert 0.0 < most <= STOPPED_SECONDS or is_busy(), (
            f"its neighbour was stopped for {most:.1f} s of a minute"
        )
    assert in_place["threadPercentage"] == 40, "under its cap, beside the other one"
    assert in_place["reading"] == "InPlace"
    assert in_place["windowSeconds"] < 5, "a few readings of about a second, not a window alone"
    assert in_place["counters"]["dram_bw_util"] > alone["counters"]["dram_bw_util"]

    # 2. No throttle keeps the promise: the node asks, the operator intends it, and the budget holds the pod.
    def intent() -> Json | None:
        (first, *_) = share_status(space, "deployment-leaving").get("retractions") or [None]
        return first

    # Half a minute on an idle machine; on one with a load of 27 windows came late, and three minutes were too few.
    asked = wait_for("an intent in the GpuShare", intent, seconds=480)
    assert asked["podUid"] == new["metadata"]["uid"]
    assert asked["neighbours"] == [f"{space.name}/deployment-staying"]
    assert "until" not in asked

    def refused() -> Json | None:
        conditions = share_status(space, "deployment-leaving").get("conditions", [])
        return next((each for each in conditions if each["type"] == "RetractionRefused"), None)

    condition = wait_for("the refusal in the GpuShare", refused, seconds=240)
    assert condition["reason"] == "DisruptionBudget"
    assert {condition["type"], condition["reason"]} <= words("A promise is broken, and nobody is throttled")
    assert "disruption budget" in condition["message"]
    kept = only_pod(space, "leaving")
    assert kept is not None
    assert kept["metadata"]["uid"] == new["metadata"]["uid"]

    # 3. The budget goes: the pod leaves, and its successor waits rather than go there again.
    cluster.kubectl("-n", space.name, "delete", "poddisruptionbudget", "leaving")

    def record() -> Json | None:
        found = intent()
        return found if found is not None and found.get("until") else None

    done = wait_for("a record in the GpuShare", record, seconds=240)
    assert (done["count"], done["podUid"]) == (1, new["metadata"]["uid"])
    successor = wait_for("a successor", lambda: only_pod(space, "leaving"), seconds=60)
    assert successor["metadata"]["uid"] != new["metadata"]["uid"]
    (why, *_) = wait_for(
        "a successor that is told why it waits",
        lambda: [
            text
            for text in space.events(successor["metadata"]["name"])
            if "moved away from this pairing of workloads" in text
        ],
        seconds=90,
    )
    sentence = (
        "has room on 1 GPU, but a pod was moved away from this pairing of workloads, which is not tried again yet"
    )
    assert says("The pod waits", sentence, why)
    assert not space.get(successor["metadata"]["name"])["spec"].get("nodeName")
    assert share_status(space, "deployment-leaving")["phase"] == "Retracted"
    kept = only_pod(space, "staying")
    assert kept is not None
    assert (kept["metadata"]["uid"], restarts(kept)) == (old["metadata"]["uid"], 0)
