"""Very many GpuShares with selectors, each of which selects all pods of a namespace, beside a real API server."""

import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from livecluster import RELEASE_NAMESPACE, Cluster, Json, Namespace, is_ready, wait_for
from prometheus_client.parser import text_string_to_metric_families
from tests.e2e.test_views import metrics

from gpushare.runtime.tasks import LOOK_SECONDS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
SHARES, PODS = 600, 300
METRICS_PORT = 9090
LAG = "gpushare_event_loop_lag_seconds"
Samples = dict[tuple[str, str], float]  # by name and bound
# The product's bar is 0.5 s. Looks are late, too, while others have both cores: seen were
# 0.25 s (load 10) and 0.5 s (load 4), at a start between 1.0 and 2.5 s (load 11). With each selector matched
# with each pod (load 9) it was between 2.5 and 10 s, and the loop late for 69% of the time instead of 8%.
LONGEST_STALL_SECONDS = 2.5
LONGEST_STALL_AT_START_SECONDS = 10.0
MOST_LATE_RATIO = 1 / 3


def selecting(number: int) -> Json:
    """A GpuShare that selects every pod of the flood, in words of its own."""
    selector = {
        "matchLabels": {"app": "web"},
        "matchExpressions": [{"key": "tier", "operator": "NotIn", "values": [f"t{number}", "all"]}],
    }
    return {
        "apiVersion": "gpushare.io/v1alpha1",
        "kind": "GpuShare",
        "metadata": {"name": f"s-{number:04}"},
        "spec": {"selector": selector, "maxSlowdown": 2},
    }


def waiting(space: Namespace, number: int) -> Json:
    """A pod with a share that the scheduler leaves alone."""
    pod = space.tenant(f"p-{number}", "0.1", command=["true"])
    pod["metadata"]["labels"] = {"app": "web", "tier": "x"}
    pod["spec"]["schedulingGates"] = [{"name": "example.com/later"}]
    return pod


def create_at_once(space: Namespace, objects: list[Json]) -> None:
    """Create objects by four clients, each of which sends as fast as kubectl does."""
    with ThreadPoolExecutor(4) as clients:
        list(clients.map(lambda each: space.create(*each), [objects[i::4] for i in range(4)]))


def samples(cluster: Cluster, operator: Json) -> Samples:
    """Return the operator's own samples."""
    return {
        (sample.name, sample.labels.get("le", "")): sample.value
        for family in text_string_to_metric_families(metrics(cluster, operator, METRICS_PORT))
        for sample in family.samples
        if sample.name.startswith((LAG, "gpushare_operator_"))
    }


def longest_stall_seconds(now: Samples, before: Samples) -> float:
    """Return the bound of the smallest bucket that holds all looks since then."""
    bucket = f"{LAG}_bucket"
    looks = {float(le): value - before.get((name, le), 0) for (name, le), value in now.items() if name == bucket}
    assert looks[math.inf] > 0
    return min(bound for bound, count in looks.items() if count == looks[math.inf])


def late_ratio(now: Samples, before: Samples) -> float:
    """Return for which part of the time since then the event loop did not come round."""
    late_seconds, looks = (now[f"{LAG}_{each}", ""] - before[f"{LAG}_{each}", ""] for each in ("sum", "count"))
    return late_seconds / (late_seconds + looks * LOOK_SECONDS)


def is_done(now: Samples) -> bool:
    """Whether the operator knows the pods and has no work left."""
    return now["gpushare_operator_pods", ""] >= PODS and not now["gpushare_operator_queue_length", ""]


def conditions(cluster: Cluster, space: Namespace, number: int) -> str:
    share = cluster.get("-n", space.name, "gpushare", f"s-{number:04}")
    return json.dumps(share.get("status", {}).get("conditions", []))


def test_600_gpushares_that_select_300_pods_do_not_stall_the_operator(
    space: Namespace, cluster: Cluster, part: Callable[[str], list[Json]]
) -> None:
    (operator,) = part("operator")
    try:
        before = samples(cluster, operator)
        create_at_once(space, [waiting(space, number) for number in range(PODS)])
        create_at_once(space, [selecting(number) for number in range(SHARES)])
        wait_for("all pods", lambda: f" of {PODS} pods" in conditions(cluster, space, 0), seconds=120)
        wait_for("the last", lambda: "Overlapping" in conditions(cluster, space, SHARES - 1), seconds=120)
        now = samples(cluster, operator)
        assert longest_stall_seconds(now, before) <= LONGEST_STALL_SECONDS
        assert late_ratio(now, before) <= MOST_LATE_RATIO

        # A new operator reads all of them at once.
        cluster.kubectl("-n", RELEASE_NAMESPACE, "delete", "pod", operator["metadata"]["name"])
        wait_for("a new operator", lambda: [is_ready(pod) for pod in part("operator")] == [True])
        (operator,) = part("operator")
        wait_for("all read", lambda: is_done(samples(cluster, operator)))
        assert longest_stall_seconds(samples(cluster, operator), {}) <= LONGEST_STALL_AT_START_SECONDS
    finally:  # one call for all, where kubectl would make one for each
        cluster.kubectl("delete", "--raw", f"/api/v1/namespaces/{space.name}/pods")
