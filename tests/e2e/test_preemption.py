"""A pod of higher priority gets the room that others are evicted for, from the real kube-scheduler and kubelet."""

from collections.abc import Iterator

import pytest
from livecluster import Cluster, Json, Namespace, decided, wait_for

pytestmark = pytest.mark.e2e

PRIORITY = "e2e-goes-first"
GRACE_SECONDS = 6  # victims take all of it, so that others ask while the preemptor waits for them
STAYS = ["sh", "-c", "trap '' TERM; while :; do sleep 1; done"]


@pytest.fixture
def priority(cluster: Cluster) -> Iterator[str]:
    body = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": PRIORITY}}
    assert cluster.apply({**body, "value": 1000}, namespace="default").code == 0
    yield PRIORITY
    cluster.try_kubectl("delete", "priorityclass", PRIORITY)


def pod(space: Namespace, name: str, fraction: str, priority: str | None = None) -> Json:
    made: Json = space.tenant(name, fraction, command=STAYS)
    made["spec"]["terminationGracePeriodSeconds"] = GRACE_SECONDS
    if priority:
        made["spec"]["priorityClassName"] = priority
    return made


def test_a_preemptor_gets_its_victims_room_though_others_ask_meanwhile(space: Namespace, priority: str) -> None:
    space.create(pod(space, "low-a", "0.9"), pod(space, "low-b", "0.9"))
    lows = {each["metadata"]["name"]: decided(each)[0] for each in space.running("low-a", "low-b")}
    assert len(set(lows.values())) == 2
    space.create(pod(space, "high", "0.9", priority))
    wait_for("the nomination", lambda: space.get("high")["status"].get("nominatedNodeName"), seconds=30, every=0.1)
    space.create(*(pod(space, f"small-{number}", "0.5") for number in range(3)))
    (high,) = space.running("high", seconds=40)
    left = {each["metadata"]["name"]: each for each in space.pods()}
    victims = [name for name in lows if name not in left or "deletionTimestamp" in left[name]["metadata"]]
    assert [lows[name] for name in victims] == [decided(high)[0]], (
        "one was evicted, and its GPU is the preemptor's"
    )
    assert [left[f"small-{number}"]["spec"].get("nodeName") for number in range(3)] == [None] * 3
