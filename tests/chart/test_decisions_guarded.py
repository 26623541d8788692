"""Admission policies on a real API server: who may write decisions and requests on pods, and who may not."""

from typing import Any

import pytest
from tests.chart.chartobjects import MERGE, PODS, annotate

from gpushare.core.api import names

ApiServer = Any  # conftest's, which importlib mode does not let a test module import
PodObject = Any
Accounts = dict[str, str]

pytestmark = pytest.mark.integration


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


def test_an_agent_corrects_decisions_on_its_own_node(installed: ApiServer, accounts: Accounts, bound: str) -> None:
    agent = accounts["agent"]
    answer = annotate(installed, bound, names.GPU, "GPU-1", user=agent, node="no-such-node")
    assert answer.code == 200, answer.message
    assert annotate(installed, bound, names.GPU, "GPU-1", user=agent, node="other").code == 403


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
