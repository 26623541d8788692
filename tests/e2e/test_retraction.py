"""A pod whose promise cannot be kept where it is leaves through the API, when a budget lets it, and stays away."""

from typing import Any

import pytest
from livecluster import Cluster, Namespace, decided, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

Json = dict[str, Any]
SERVING, TRAINING = "bert-infer", "resnet50-train"


def deployment(pod: Json) -> Json:
    """Return a Deployment of one such pod."""
    name = pod["metadata"]["name"]
    template = {
        "metadata": {"labels": {"app": name}, "annotations": pod["metadata"]["annotations"]},
        "spec": {**pod["spec"], "restartPolicy": "Always"},
    }
    spec = {"replicas": 1, "selector": {"matchLabels": {"app": name}}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}


def share(space: Namespace, name: str) -> Json:
    found = space.cluster.try_kubectl(
        "-n", space.name, "get", "gpushare", name, "--ignore-not-found", "-o", "name"
    )
    if not found.out.strip():
        return {}
    status: Json = space.cluster.get("-n", space.name, "gpushare", name).get("status", {})
    return status


def pods_of(space: Namespace, app: str) -> list[Json]:
    pods: list[Json] = space.cluster.get("-n", space.name, "pods", "-l", f"app={app}")["items"]
    return [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]


def placed(space: Namespace, app: str) -> Json | None:
    (pod, *more) = pods_of(space, app) or [None]
    return pod if pod is not None and not more and pod["status"].get("phase") == "Running" else None


def learn_profiles(space: Namespace) -> None:
    """Let each program run alone on a GPU until its profile is taken."""
    for program in (SERVING, TRAINING):
        space.create(space.tenant(f"alone-{program}", "1", workload=program))
    space.running(*(f"alone-{program}" for program in (SERVING, TRAINING)), seconds=120)
    for program in (SERVING, TRAINING):
        wait_for(
            f"the profile of {program}",
            lambda p=program: share(space, f"pod-alone-{p}").get("profile"),
            seconds=120,
        )
    space.cluster.kubectl("-n", space.name, "delete", "pods", "--all", "--wait=true")


def test_a_pod_that_has_to_leave_is_held_by_a_budget_leaves_once_and_is_not_put_there_again(
    space: Namespace, cluster: Cluster
) -> None:
    learn_profiles(space)
    space.create(space.tenant("filler", "0.9", workload="filler", command=["sleep", "3600"]))
    (filler,) = space.running("filler")
    served = deployment(space.tenant("serve", "0.2", workload=SERVING, job_class="latency", memory="4Gi"))
    trained = deployment(space.tenant("train", "0.4", workload=TRAINING))
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "train"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "train"}}},
    }
    assert cluster.apply(budget, served, namespace=space.name).code == 0
    serve = wait_for("the service", lambda: placed(space, "serve"), seconds=60)
    assert cluster.apply(trained, namespace=space.name).code == 0
    train = wait_for("the training", lambda: placed(space, "train"), seconds=60)
    assert decided(train)[0] == decided(serve)[0] != decided(filler)[0]

    # 1. The node asks, the operator intends it, and the budget holds the pod.
    def intended() -> Json | None:
        (first, *_) = share(space, "deployment-train").get("retractions") or [None]
        return first

    intent = wait_for("the intent in the GpuShare", intended, seconds=240)
    assert intent["podUid"] == train["metadata"]["uid"]
    assert intent["neighbours"] == [f"{space.name}/deployment-serve"]

    def refused() -> str | None:
        conditions = share(space, "deployment-train").get("conditions", [])
        said = [one for one in conditions if one["type"] == "RetractionRefused"]
        return said[0]["reason"] if said else None

    assert wait_for("the refusal in the GpuShare", refused, seconds=180) == "DisruptionBudget"
    held = placed(space, "train")
    assert held is not None
    assert held["metadata"]["uid"] == train["metadata"]["uid"]

    # 2. The budget goes: the pod leaves, once, and its successor waits rather than go there again.
    cluster.kubectl("-n", space.name, "delete", "poddisruptionbudget", "train")

    def recorded() -> Json | None:
        found = intended()
        return found if found is not None and found.get("until") else None

    record = wait_for("the record in the GpuShare", recorded, seconds=150)
    assert (record["count"], record["podUid"]) == (1, train["metadata"]["uid"])

    def kept_away() -> bool:
        events = cluster.get("-n", space.name, "events")["items"]
        return any(
            one["involvedObject"]["name"] == pod["metadata"]["name"]
            and "moved away from this pairing" in one["message"]
            for one in events
            for pod in pods_of(space, "train")
        )

    wait_for("a successor that is kept away", kept_away, seconds=90)
    (successor,) = pods_of(space, "train")
    assert successor["metadata"]["uid"] != train["metadata"]["uid"]
    assert not successor["spec"].get("nodeName")
    assert share(space, "deployment-train")["phase"] == "Retracted"
    kept = placed(space, "serve")
    assert kept is not None
    assert kept["metadata"]["uid"] == serve["metadata"]["uid"]
