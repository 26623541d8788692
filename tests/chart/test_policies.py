"""The chart's definitions and policies on a real API server: what is refused, in which words, and what is not."""

import contextlib
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from gpushare.core.api import (
    Ceilings,
    GpuNodeStatus,
    GpuStatus,
    MpsState,
    MpsStatus,
    TenantStatus,
    Utilization,
    names,
    to_json,
)
from gpushare.core.gpu import Health

ApiServer = Any  # conftest's, which importlib mode does not let a test module import
PodObject = Any
Accounts = dict[str, str]

pytestmark = pytest.mark.integration

SHARES = "/apis/gpushare.io/v1alpha1/namespaces/default/gpushares"
NODES = "/apis/gpushare.io/v1alpha1/gpunodes"
PODS = "/api/v1/namespaces/default/pods"
MERGE = "application/merge-patch+json"


def share(spec: dict[str, Any], name: str = "s") -> dict[str, Any]:
    return {"apiVersion": names.API_VERSION, "kind": "GpuShare", "metadata": {"name": name}, "spec": spec}


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"fraction": "0.25", "memory": "8Gi", "class": "latency", "maxSlowdown": 1, "faultDomain": "isolated"},
        {"fraction": "auto", "profile": {"mode": "Auto", "windowSeconds": 30}},
        {"fraction": "16", "selector": {"matchLabels": {"app": "a"}}},
        {"selector": {"matchExpressions": [{"key": "a", "operator": "Exists"}]}, "profile": {"mode": "Off"}},
    ],
)
def test_sensible_shares_are_accepted(installed: ApiServer, spec: dict[str, Any]) -> None:
    answer = installed.call("POST", SHARES, share(spec), dry_run=True)
    assert answer.code == 201, answer.message


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"fraction": "1.5"}, "whole percents"),
        ({"fraction": "0.255"}, "whole percents"),
        ({"fraction": "-1"}, "whole percents"),
        ({"fraction": "17"}, "up to 16"),
        ({"fraction": 0.5}, "must be of type string"),
        ({"memory": "lots"}, "8Gi"),
        ({"memory": "0Gi"}, "above zero"),
        ({"class": "fast"}, '"throughput", "latency"'),
        ({"maxSlowdown": 0.9}, "greater than or equal to 1"),
        ({"faultDomain": "none"}, '"shared", "isolated"'),
        ({"fraction": "auto", "profile": {"mode": "Off"}}, "profile.mode"),
        ({"profile": {"windowSeconds": 0}}, "greater than or equal to 1"),
        ({"selector": {"matchExpressions": [{"key": "a", "operator": "In"}]}}, "need values"),
        ({"fracton": "0.5"}, "unknown field"),
    ],
)
def test_senseless_shares_are_refused_with_a_reason(
    installed: ApiServer, spec: dict[str, Any], words: str
) -> None:
    answer = installed.call("POST", SHARES, share(spec), dry_run=True)
    assert answer.code in (400, 422)
    assert words in answer.message


def test_a_selector_cannot_be_changed_but_other_fields_can(installed: ApiServer) -> None:
    name = f"s-{uuid.uuid4().hex[:8]}"
    made = installed.call(
        "POST", SHARES, share({"selector": {"matchLabels": {"a": "1"}}, "fraction": "0.5"}, name)
    )
    assert made.code == 201, made.message
    try:
        for selector in ({"matchLabels": {"a": "2"}}, None):
            answer = installed.call(
                "PATCH", f"{SHARES}/{name}", {"spec": {"selector": selector}}, dry_run=True, content_type=MERGE
            )
            assert "selector cannot be changed" in answer.message
        answer = installed.call(
            "PATCH", f"{SHARES}/{name}", {"spec": {"fraction": "0.25"}}, dry_run=True, content_type=MERGE
        )
        assert answer.code == 200, answer.message
    finally:
        installed.call("DELETE", f"{SHARES}/{name}")


@pytest.fixture
def tenant(installed: ApiServer, pod_object: PodObject) -> Iterator[str]:
    """A managed pod that is never run; made as the scheduler, so that no webhook has to be up."""
    name = f"p-{uuid.uuid4().hex[:8]}"
    pod = pod_object(name, {"example.com/own": "1"}, {names.MANAGED_LABEL: "true"})
    made = installed.call("POST", PODS, pod)
    assert made.code == 201, made.message
    yield name
    installed.call("DELETE", f"{PODS}/{name}", {"gracePeriodSeconds": 0})


def annotate(api: ApiServer, pod: str, key: str, value: str | None, *, part: str = "", **who: str) -> Any:
    body = {"metadata": {"annotations": {key: value}}}
    return api.call("PATCH", f"{PODS}/{pod}{part}", body, dry_run=True, content_type=MERGE, **who)


@pytest.mark.parametrize("key", names.DECISION_ANNOTATIONS)
def test_no_user_makes_a_pod_with_a_decision(installed: ApiServer, pod_object: PodObject, key: str) -> None:
    answer = installed.call("POST", PODS, pod_object("p", {key: "x"}), dry_run=True)
    assert answer.code == 403
    assert "written by gpushare alone" in answer.message
    assert key in answer.message


@pytest.mark.parametrize("part", ["", "/status"])
@pytest.mark.parametrize("key", names.DECISION_ANNOTATIONS)
@pytest.mark.parametrize("user", ["", "operator", "system:serviceaccount:default:default"])
def test_no_user_sets_a_decision_on_a_pod(
    installed: ApiServer, accounts: Accounts, tenant: str, key: str, part: str, user: str
) -> None:
    answer = annotate(installed, tenant, key, "x", part=part, user=accounts.get(user, user))
    assert answer.code == 403
    assert "written by gpushare alone" in answer.message


def test_a_decision_cannot_be_smuggled_in_by_a_binding(installed: ApiServer, tenant: str) -> None:
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": tenant, "annotations": {names.GPU: "GPU-1"}},
        "target": {"kind": "Node", "name": "n1"},
    }
    for path in (f"{PODS}/{tenant}/binding", "/api/v1/namespaces/default/bindings"):
        answer = installed.call("POST", path, binding, dry_run=True)
        assert answer.code == 403
        assert "written by gpushare alone" in answer.message
    del binding["metadata"]["annotations"]
    assert installed.call("POST", f"{PODS}/{tenant}/binding", binding, dry_run=True).code == 201


def test_the_extender_writes_decisions_and_others_cannot_change_or_remove_them(
    installed: ApiServer, accounts: Accounts, tenant: str
) -> None:
    decision = {"metadata": {"annotations": {names.GPU: "GPU-1", names.THREAD_PERCENTAGE: "25"}}}
    wrote = installed.call("PATCH", f"{PODS}/{tenant}", decision, user=accounts["scheduler"], content_type=MERGE)
    assert wrote.code == 200, wrote.message
    assert annotate(installed, tenant, names.GPU, "GPU-2").code == 403
    assert annotate(installed, tenant, names.GPU, None).code == 403
    assert annotate(installed, tenant, names.GPU, None, part="/status").code == 403
    assert annotate(installed, tenant, names.GPU, "GPU-2", user=accounts["scheduler"]).code == 200
    assert annotate(installed, tenant, "example.com/own", "2").code == 200  # everything else is the user's
    assert annotate(installed, tenant, names.GPU, "GPU-1").code == 200  # nothing changed


def test_an_agent_corrects_decisions_on_its_own_node_only(
    installed: ApiServer, accounts: Accounts, tenant: str
) -> None:
    # The tenant is bound to no node, so no agent may touch it.
    answer = annotate(installed, tenant, names.GPU, "GPU-1", user=accounts["agent"], node="n1")
    assert answer.code == 403
    assert "own node only" in answer.message
    answer = annotate(installed, tenant, names.GPU, "GPU-1", user=accounts["agent"])
    assert answer.code == 403
    assert "has to name its node" in answer.message


@pytest.fixture
def bound(installed: ApiServer, pod_object: PodObject) -> Iterator[str]:
    """A pod of somebody's on the node `no-such-node`."""
    name = f"p-{uuid.uuid4().hex[:8]}"
    pod = pod_object(name, {"example.com/own": "1"}, {"app": "a"})
    pod["spec"]["nodeName"] = "no-such-node"
    assert installed.call("POST", PODS, pod).code == 201
    yield name
    installed.call("DELETE", f"{PODS}/{name}", {"gracePeriodSeconds": 0})


def test_an_agent_corrects_decisions_on_its_own_node(installed: ApiServer, accounts: Accounts, bound: str) -> None:
    agent = accounts["agent"]
    answer = annotate(installed, bound, names.GPU, "GPU-1", user=agent, node="no-such-node")
    assert answer.code == 200, answer.message
    assert annotate(installed, bound, names.GPU, "GPU-1", user=agent, node="other").code == 403


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


@pytest.mark.parametrize("key", names.USER_ANNOTATIONS)
def test_a_request_cannot_be_changed_later(installed: ApiServer, tenant: str, key: str) -> None:
    answer = annotate(installed, tenant, key, "1")
    assert answer.code == 403
    assert "make a new pod" in answer.message


def test_a_running_tenant_cannot_be_hidden_from_the_accounts(installed: ApiServer, tenant: str) -> None:
    body = {"metadata": {"labels": {names.MANAGED_LABEL: None}}}
    for part in ("", "/status"):
        answer = installed.call("PATCH", f"{PODS}/{tenant}{part}", body, dry_run=True, content_type=MERGE)
        assert answer.code == 403, part


def test_a_pod_without_our_annotation_is_not_touched(installed: ApiServer, pod_object: PodObject) -> None:
    answer = installed.call("POST", PODS, pod_object("plain", {"a": "b"}), dry_run=True)
    assert answer.code == 201
    bare = pod_object("bare")
    del bare["metadata"]["annotations"], bare["metadata"]["labels"]
    answer = installed.call("POST", PODS, bare, dry_run=True)
    assert answer.code == 201
    assert answer.body["spec"]["schedulerName"] == "nobody"


@pytest.mark.parametrize("part", ["limits", "requests"])
@pytest.mark.parametrize("where", ["containers", "initContainers"])
def test_shares_are_not_to_be_had_behind_the_extenders_back(
    installed: ApiServer, pod_object: PodObject, part: str, where: str
) -> None:
    pod = pod_object("p")
    resources = {"limits": {names.SHARE_RESOURCE: "50"}, "requests": {names.SHARE_RESOURCE: "50"}}
    if part == "limits":
        del resources["requests"]
    pod["spec"].setdefault(where, [{"name": "first", "image": "none"}])[0]["resources"] = resources
    answer = installed.call("POST", PODS, pod, dry_run=True)
    assert answer.code == 403
    assert 'annotate the pod instead, such as gpushare.io/fraction: "0.25"' in answer.message


@contextlib.contextmanager
def policies(api: ApiServer, objects: list[dict[str, Any]], *names_end: str) -> Iterator[None]:
    """The API server with more of the chart's policies, which a release has only with other values."""
    kinds = {"ValidatingAdmissionPolicy": "validatingadmissionpolicies"}
    kinds |= {"ValidatingAdmissionPolicyBinding": "validatingadmissionpolicybindings"}
    made = []
    try:
        for item in objects:
            if item["kind"] in kinds and item["metadata"]["name"].endswith(names_end):
                path = f"/apis/admissionregistration.k8s.io/v1/{kinds[item['kind']]}"
                answer = api.call("POST", path, item)
                assert answer.code == 201, answer.message
                made.append(f"{path}/{item['metadata']['name']}")
        assert made
        yield
    finally:
        for path in made:
            api.call("DELETE", path)


def until_refused(api: ApiServer, path: str, *objects: dict[str, Any]) -> None:
    """New policies take a moment; ask until they refuse these."""
    for _ in range(600):
        if all(api.call("POST", path, each, dry_run=True).code == 403 for each in objects):
            return
    raise AssertionError("the policies are not enforced")


@pytest.fixture
def restricted(installed: ApiServer, render: Any) -> Iterator[ApiServer]:
    """The API server with the policies of `policy.restricted` too."""
    objects = render({"policy": {"restricted": ["latency", "isolated"]}})
    with policies(installed, objects, "-latency", "-restricted"):
        until_refused(installed, SHARES, share({"class": "latency"}), share({"faultDomain": "isolated"}))
        yield installed


@pytest.fixture(scope="module")
def baseline(installed: ApiServer, render: Any, pod_object: PodObject) -> Iterator[ApiServer]:
    """The API server with the policy of `policy.refuseAboveBaseline` too."""
    with policies(installed, render({"policy": {"refuseAboveBaseline": True}}), "-baseline"):
        pod = pod_object("p", {names.FRACTION: "0.1"})
        pod["spec"] |= {"hostPID": True, "schedulerName": names.SCHEDULER_NAME}
        until_refused(installed, PODS, pod)
        yield installed


ABOVE_BASELINE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "hostPID": ({"hostPID": True}, {}),
    "hostIPC": ({"hostIPC": True}, {}),
    "hostNetwork": ({"hostNetwork": True}, {}),
    "hostPath": ({"volumes": [{"name": "run", "hostPath": {"path": "/run/gpushare"}}]}, {}),
    "privileged": ({}, {"privileged": True}),
    "ptrace": ({}, {"capabilities": {"add": ["SYS_PTRACE"]}}),
    "all capabilities": ({}, {"capabilities": {"add": ["ALL"]}}),
    "proc": ({"hostUsers": False}, {"procMount": "Unmasked"}),
}


@pytest.mark.parametrize("what", ABOVE_BASELINE)
@pytest.mark.parametrize("where", ["containers", "initContainers"])
def test_a_pod_above_baseline_gets_no_share(
    baseline: ApiServer, pod_object: PodObject, what: str, where: str
) -> None:
    spec, context = ABOVE_BASELINE[what]
    for annotations, code in (({names.FRACTION: "0.1"}, 403), ({}, 201)):
        pod = pod_object("p", annotations)
        pod["spec"] |= {"schedulerName": names.SCHEDULER_NAME} | spec
        pod["spec"].setdefault(where, [{"name": "first", "image": "none"}])[0]["securityContext"] = context
        answer = baseline.call("POST", PODS, pod, dry_run=True)
        assert answer.code == code, answer.message
        assert code == 201 or "policy.refuseAboveBaseline" in answer.message


@pytest.fixture
def annotated(installed: ApiServer, pod_object: PodObject) -> Iterator[str]:
    """A pod with a fraction that nobody schedules."""
    name = f"p-{uuid.uuid4().hex[:8]}"
    pod = pod_object(name, {names.FRACTION: "0.1"})
    pod["spec"] |= {"schedulerName": names.SCHEDULER_NAME, "schedulingGates": [{"name": "example.com/never"}]}
    made = installed.call("POST", PODS, pod)
    assert made.code == 201, made.message
    yield name
    installed.call("DELETE", f"{PODS}/{name}", {"gracePeriodSeconds": 0})


def attach(api: ApiServer, pod: str, container: dict[str, Any], *, dry_run: bool = True) -> Any:
    """Add an ephemeral container, as `kubectl debug` does."""
    body = {"spec": {"ephemeralContainers": [{"name": "debug", "image": "none"} | container]}}
    path, strategic = f"{PODS}/{pod}/ephemeralcontainers", "application/strategic-merge-patch+json"
    return api.call("PATCH", path, body, dry_run=dry_run, content_type=strategic)


@pytest.mark.parametrize(
    "variable",
    [
        {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
        {"name": "CUDA_VISIBLE_DEVICES", "value": "0,1"},
        {"name": "CUDA_MPS_PIPE_DIRECTORY"},
        {"name": "CUDA_MPS_PIPE_DIRECTORY", "value": "/tmp/other"},
        {
            "name": "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
            "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['example.com/own']"}},
        },
    ],
    ids=lambda variable: variable["name"],
)
def test_an_ephemeral_container_sets_no_variable_of_ours(
    installed: ApiServer, annotated: str, tenant: str, variable: dict[str, Any]
) -> None:
    env = [{"name": "HOME", "value": "/"}, variable]
    answer = attach(installed, annotated, {"env": env})
    assert answer.code == 403
    assert "admission.allowedEnv" in answer.message
    assert attach(installed, tenant, {"env": env}).code == 200, "the pod asks for no fraction"


def test_an_ephemeral_container_without_them_is_let_in(installed: ApiServer, annotated: str) -> None:
    for container in ({}, {"env": []}, {"env": [{"name": "CUDA_LAUNCH_BLOCKING", "value": "1"}]}):
        answer = attach(installed, annotated, container)
        assert answer.code == 200, answer.message


def test_an_ephemeral_container_may_set_what_the_chart_allows(render: Any) -> None:
    objects = render({"admission": {"allowedEnv": ["CUDA_VISIBLE_DEVICES"]}})
    [policy] = [
        each
        for each in objects
        if each["kind"] == "ValidatingAdmissionPolicy" and each["metadata"]["name"].endswith("-ephemeral")
    ]
    [validation] = policy["spec"]["validations"]
    assert 'variable.name in ["CUDA_VISIBLE_DEVICES"]' in validation["expression"]


@pytest.mark.parametrize("what", ["privileged", "ptrace", "all capabilities"])
def test_an_ephemeral_container_above_baseline_is_refused(baseline: ApiServer, annotated: str, what: str) -> None:
    _, context = ABOVE_BASELINE[what]
    answer = attach(baseline, annotated, {"securityContext": context})
    assert answer.code == 403
    assert "policy.refuseAboveBaseline" in answer.message


def test_an_ordinary_pod_passes_the_baseline(baseline: ApiServer, pod_object: PodObject) -> None:
    pod = pod_object("p", {names.FRACTION: "0.1"})
    pod["spec"] |= {
        "schedulerName": names.SCHEDULER_NAME,
        "volumes": [{"name": "scratch", "emptyDir": {}}],
    }
    pod["spec"]["containers"][0]["securityContext"] = {"capabilities": {"add": ["CHOWN"]}, "runAsUser": 0}
    answer = baseline.call("POST", PODS, pod, dry_run=True)
    assert answer.code == 201, answer.message


def test_latency_and_isolation_need_a_namespace_that_allows_them(
    restricted: ApiServer, pod_object: PodObject
) -> None:
    name = f"ns-{uuid.uuid4().hex[:8]}"
    labels = {"gpushare.io/allow-latency": "true"}
    allowed = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    assert restricted.call("POST", "/api/v1/namespaces", allowed).code == 201
    try:
        pod = pod_object("p", {names.CLASS: "latency"})
        refused = restricted.call("POST", PODS, pod, dry_run=True)
        assert refused.code == 403
        assert "gpushare.io/allow-latency=true" in refused.message
        there = PODS.replace("default", name)
        answer = restricted.call("POST", there, pod, dry_run=True)
        assert answer.code == 201 or "serviceaccount" in answer.message, answer.message
        plain = restricted.call("POST", PODS, pod_object("p", {names.CLASS: "throughput"}), dry_run=True)
        assert plain.code == 201, plain.message
        shares = SHARES.replace("default", name)
        assert restricted.call("POST", shares, share({"class": "latency"}), dry_run=True).code == 201
        isolated = restricted.call("POST", shares, share({"faultDomain": "isolated"}), dry_run=True)
        assert isolated.code == 403
        assert "gpushare.io/allow-isolated=true" in isolated.message
        assert restricted.call("POST", SHARES, share({"class": "throughput"}), dry_run=True).code == 201
    finally:
        restricted.call("DELETE", f"/api/v1/namespaces/{name}")


def test_a_gpunode_is_written_by_its_own_nodes_agent(installed: ApiServer, accounts: Accounts) -> None:
    name = f"n-{uuid.uuid4().hex[:8]}"
    node = {"apiVersion": names.API_VERSION, "kind": "GpuNode", "metadata": {"name": name}}
    refused = installed.call("POST", NODES, node, user=accounts["agent"], node="other", dry_run=True)
    assert refused.code == 403
    assert "another node" in refused.message
    nameless = installed.call("POST", NODES, node, user=accounts["agent"], dry_run=True)
    assert nameless.code == 403
    assert "has to name its node" in nameless.message
    assert installed.call("POST", NODES, node, user=accounts["agent"], node=name).code == 201
    try:
        status = {"status": {"gpus": [{"uuid": "GPU-1", "tenants": [{"podUid": "u", "share": 25}]}]}}
        path = f"{NODES}/{name}/status"
        assert (
            installed.call("PATCH", path, status, user=accounts["agent"], node="other", content_type=MERGE).code
            == 403
        )
        assert (
            installed.call("PATCH", path, status, user=accounts["agent"], node=name, content_type=MERGE).code
            == 200
        )
    finally:
        installed.call("DELETE", f"{NODES}/{name}")


def test_what_the_dataclasses_write_is_stored_unchanged(installed: ApiServer) -> None:
    name = f"n-{uuid.uuid4().hex[:8]}"
    mps = MpsStatus(MpsState.ACTIVE, 2, 0, Ceilings.ENFORCED)
    tenants = (TenantStatus("u", "ns", "p", 25, 40, 8192, 100, 1, 0.8, 0.1, 1.25),)
    gpu = GpuStatus("GPU-1", 0, "H200", 143_771, 132, Health.HEALTHY, None, mps, Utilization(sm=0.5), 100, tenants)
    status = to_json(GpuNodeStatus.of((gpu,), driver_version="580", observed_at="2026-11-21T11:00:00Z"))
    node = {"apiVersion": names.API_VERSION, "kind": "GpuNode", "metadata": {"name": name}}
    assert installed.call("POST", NODES, node).code == 201
    try:
        answer = installed.call("PATCH", f"{NODES}/{name}/status", {"status": status}, content_type=MERGE)
        assert answer.code == 200, answer.message
        assert answer.body["status"] == status
    finally:
        installed.call("DELETE", f"{NODES}/{name}")
