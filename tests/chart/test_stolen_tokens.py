"""What each account of the chart may do on a real API server, and what a stolen token does not bring."""

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from tests.chart.chartobjects import MERGE, PODS, SHARES, annotate, share

from gpushare.core.api import names

ApiServer = Any  # conftest's, which importlib mode does not let a test module import
Accounts = dict[str, str]

pytestmark = pytest.mark.integration


STOLEN = {
    "an image": {"spec": {"containers": [{"name": "main", "image": "evil"}]}},
    "a deadline": {"spec": {"activeDeadlineSeconds": 1}},
    "a label": {"metadata": {"labels": {"app": "b"}}},
    "a new label": {"metadata": {"labels": {"more": "b"}}},
    "an annotation": {"metadata": {"annotations": {"example.com/own": "2"}}},
    "a new annotation": {"metadata": {"annotations": {"example.com/new": "2"}}},
    "an annotation removed": {"metadata": {"annotations": {"example.com/own": None}}},
    "a finalizer": {"metadata": {"finalizers": ["example.com/stay"]}},
    "an owner": {"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "u"}]}},
}


@pytest.mark.parametrize("what", STOLEN)
def test_a_stolen_agent_token_changes_nothing_but_decisions(
    installed: ApiServer, accounts: Accounts, bound: str, what: str
) -> None:
    """Before: any pod's image, cluster-wide."""
    strategic = "application/strategic-merge-patch+json"
    who = {"user": accounts["agent"], "node": "no-such-node"}
    answer = installed.call("PATCH", f"{PODS}/{bound}", STOLEN[what], dry_run=True, content_type=strategic, **who)
    assert answer.code == 403, answer.message
    assert "decision annotations and nothing else" in answer.message


@pytest.mark.parametrize("what", STOLEN)
def test_a_stolen_scheduler_token_changes_nothing_but_decisions(
    installed: ApiServer, accounts: Accounts, bound: str, what: str
) -> None:
    strategic = "application/strategic-merge-patch+json"
    for part in ("", "/status"):
        if part and what in ("an image", "a deadline", "an owner"):
            continue  # the API server itself leaves these alone there
        answer = installed.call(
            "PATCH",
            f"{PODS}/{bound}{part}",
            STOLEN[what],
            dry_run=True,
            content_type=strategic,
            user=accounts["scheduler"],
        )
        assert answer.code == 403, (part, answer.message)
        assert "and nothing else" in answer.message


def test_the_scheduler_does_what_it_has_to(installed: ApiServer, accounts: Accounts, tenant: str) -> None:
    who = {"user": accounts["scheduler"], "dry_run": True}
    status = {"status": {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]}}
    answer = installed.call("PATCH", f"{PODS}/{tenant}/status", status, content_type=MERGE, **who)
    assert answer.code == 200, answer.message
    assert annotate(installed, tenant, names.ROOM_SINCE, "now", user=accounts["scheduler"]).code == 200
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": tenant, "annotations": {names.GPU: "GPU-1"}},
        "target": {"kind": "Node", "name": "n1"},
    }
    answer = installed.call("POST", f"{PODS}/{tenant}/binding", binding, **who)
    assert answer.code == 201, answer.message
    binding["metadata"]["annotations"]["example.com/own"] = "2"
    answer = installed.call("POST", f"{PODS}/{tenant}/binding", binding, **who)
    assert answer.code == 403
    assert "and nothing else" in answer.message


def evict(api: ApiServer, user: str, pod: str, *, namespace: str = "default", **options: Any) -> Any:
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace}}
    if options:
        body["deleteOptions"] = {"apiVersion": "v1", "kind": "DeleteOptions"} | options
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
    return api.call("POST", path, body, user=user, dry_run=True)


def test_a_stolen_operator_token_evicts_none_of_the_clusters_own_pods_and_forces_nobody(
    installed: ApiServer, accounts: Accounts, tenant: str
) -> None:
    operator, ours = accounts["operator"], accounts["operator"].split(":")[2]
    for namespace in ("kube-system", "kube-public"):
        answer = evict(installed, operator, "any", namespace=namespace)
        assert answer.code == 403, (namespace, answer.message)
        assert "kube-*" in answer.message
    path = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/gpushare-operators"
    [first, *_] = installed.call("GET", path).body["spec"]["validations"]
    assert f"request.namespace == '{ours}'" in first["expression"]
    for seconds in (0, 1):
        answer = evict(installed, operator, tenant, gracePeriodSeconds=seconds)
        assert answer.code == 403
        assert "own grace period" in answer.message
    uid = installed.call("GET", f"{PODS}/{tenant}").body["metadata"]["uid"]
    for options in ({}, {"preconditions": {"uid": uid}}):
        answer = evict(installed, operator, tenant, **options)
        assert answer.code == 201, answer.message
    assert evict(installed, "", tenant, gracePeriodSeconds=0).code == 201, "of others nothing is asked"


@pytest.fixture
def stored_share(installed: ApiServer) -> Iterator[str]:
    name = f"s-{uuid.uuid4().hex[:8]}"
    made = installed.call("POST", SHARES, share({"fraction": "0.5"}, name))
    assert made.code == 201, made.message
    yield name
    installed.call("DELETE", f"{SHARES}/{name}")


@pytest.mark.parametrize(
    "change",
    [
        {"spec": {"fraction": "1"}},
        {"spec": {"class": "latency"}},
        {"spec": None},
        {"metadata": {"labels": {"a": "b"}}},
        {"metadata": {"annotations": {"a": "b"}}},
        {"metadata": {"finalizers": ["example.com/stay"]}},
    ],
    ids=str,
)
def test_a_stolen_operator_token_changes_no_gpushare(
    installed: ApiServer, accounts: Accounts, stored_share: str, change: dict[str, Any]
) -> None:
    who = {"user": accounts["operator"], "dry_run": True, "content_type": MERGE}
    answer = installed.call("PATCH", f"{SHARES}/{stored_share}", change, **who)
    assert answer.code == 403, answer.message
    assert "owners and status" in answer.message


def test_the_operator_does_what_it_has_to(installed: ApiServer, accounts: Accounts, stored_share: str) -> None:
    who = {"user": accounts["operator"], "dry_run": True}
    owners = [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "u"}]
    body = {"metadata": {"ownerReferences": owners}}
    answer = installed.call("PATCH", f"{SHARES}/{stored_share}", body, content_type=MERGE, **who)
    assert answer.code == 200, answer.message
    status = {"status": {"phase": "Sharing"}}
    answer = installed.call("PATCH", f"{SHARES}/{stored_share}/status", status, content_type=MERGE, **who)
    assert answer.code == 200, answer.message
    made = share({"fraction": "auto"}, "made") | {"metadata": {"name": "made", "ownerReferences": owners}}
    assert installed.call("POST", SHARES, made, **who).code == 201
    made["spec"]["selector"] = {"matchLabels": {"app": "a"}}
    assert installed.call("POST", SHARES, made, **who).code == 403


NEVER = {
    "get secrets": ("get", "", "secrets"),
    "list secrets": ("list", "", "secrets"),
    "create pods": ("create", "", "pods"),
    "exec": ("create", "", "pods/exec"),
    "ephemeral containers": ("patch", "", "pods/ephemeralcontainers"),
    "tokens": ("create", "", "serviceaccounts/token"),
    "change nodes": ("patch", "", "nodes"),
    "proxy to nodes": ("get", "", "nodes/proxy"),
    "impersonate": ("impersonate", "", "users"),
    "grant": ("create", "rbac.authorization.k8s.io", "clusterrolebindings"),
    "escalate": ("escalate", "rbac.authorization.k8s.io", "clusterroles"),
    "policies": ("delete", "admissionregistration.k8s.io", "validatingadmissionpolicies"),
    "webhooks": ("patch", "admissionregistration.k8s.io", "mutatingwebhookconfigurations"),
    "change deployments": ("patch", "apps", "deployments"),
    "delete GpuShares": ("delete", "gpushare.io", "gpushares"),
    "delete GpuNodes": ("delete", "gpushare.io", "gpunodes"),
}


PARTS = ("agent", "scheduler", "operator", "admission", "mps")


@pytest.mark.parametrize("what", NEVER)
@pytest.mark.parametrize("part", PARTS)
def test_no_account_has_a_right_that_would_give_it_the_cluster(
    rights: ApiServer, accounts: Accounts, part: str, what: str
) -> None:
    verb, group, resource = NEVER[what]
    assert not may(rights, accounts, part, verb, group, resource)


def test_only_the_scheduler_deletes_pods_as_every_scheduler_does(rights: ApiServer, accounts: Accounts) -> None:
    """What the test of never-granted rights would say if it asked wrongly, too: here somebody may."""
    able = [part for part in PARTS if may(rights, accounts, part, "delete", "", "pods")]
    assert able == ["scheduler"]
    assert may(rights, accounts, "agent", "patch", "", "pods")
    assert not may(rights, accounts, "mps", "list", "", "pods")


def may(api: ApiServer, accounts: Accounts, part: str, verb: str, group: str, resource: str) -> bool:
    """Whether the API server would let the part's account do it, in any namespace."""
    user = accounts["agent"].removesuffix("agent") + part
    namespace = user.split(":")[2]
    name, _, subresource = resource.partition("/")
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": user,
            "groups": ["system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated"],
            "resourceAttributes": {
                "verb": verb,
                "group": group,
                "resource": name,
                "subresource": subresource,
                "namespace": "default",
            },
        },
    }
    answer = api.call("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
    assert answer.code == 201, answer.message
    return bool(answer.body["status"]["allowed"])


@pytest.fixture(scope="module")
def rights(installed: ApiServer, render: Any) -> Iterator[ApiServer]:
    """The API server with the chart's cluster roles; those that were not there leave with the tests."""
    base = "/apis/rbac.authorization.k8s.io/v1"
    kinds = {"ClusterRole": f"{base}/clusterroles", "ClusterRoleBinding": f"{base}/clusterrolebindings"}
    made = []
    for item in render():
        if path := kinds.get(item["kind"]):
            answer = installed.call("POST", path, item)
            assert answer.code in (201, 409), answer.message
            if answer.code == 201:
                made.append(f"{path}/{item['metadata']['name']}")
    yield installed
    for path in made:
        installed.call("DELETE", path)
