"""The tests' own reads of the cluster answer what kubectl does."""

import json

import pytest
from livecluster import RELEASE_NAMESPACE, Cluster, Json, Namespace, wait_for

pytestmark = pytest.mark.e2e


def steady(answer: Json) -> Json:
    """Without what changes from one look to the next."""
    for item in answer.get("items", [answer]):
        for changing in ("managedFields", "resourceVersion"):
            item["metadata"].pop(changing, None)
        item.pop("status", None)
    return {key: value for key, value in answer.items() if key != "metadata" or "items" not in answer}


@pytest.mark.parametrize(
    "asked",
    [
        ("nodes",),
        ("gpunodes",),
        ("crd",),
        ("-n", RELEASE_NAMESPACE, "pods", "-l", "app.kubernetes.io/component in (agent,mps)"),
        ("-n", RELEASE_NAMESPACE, "deployment", "gpushare-operator"),
        ("-n", RELEASE_NAMESPACE, "deploy/gpushare-operator"),
        ("networkpolicies.networking.k8s.io", "--all-namespaces"),
    ],
)
def test_objects_and_lists_are_those_of_kubectl(cluster: Cluster, image: str, asked: tuple[str, ...]) -> None:
    read = cluster.reads.get(asked)
    assert read is not None
    assert steady(read) == steady(json.loads(cluster.kubectl("get", *asked, "-o", "json")))


def test_what_is_not_there_is_left_to_kubectl_which_says_so(cluster: Cluster, image: str) -> None:
    assert cluster.reads.get(("pods", "nobody")) is None
    with pytest.raises(AssertionError, match='pods "nobody" not found'):
        cluster.get("pods", "nobody")


def test_a_log_is_that_of_kubectl(cluster: Cluster, space: Namespace) -> None:
    space.create(space.pod("tells", ["sh", "-c", "echo one; echo two; exec sleep infinity"]))
    wait_for("both lines", lambda: space.log("tells").count("\n") == 2)
    assert space.log("tells") == "one\ntwo\n" == cluster.kubectl("-n", space.name, "logs", "tells")
    assert space.log("tells", tail=1) == "two\n"
    assert space.log("nobody") == ""
