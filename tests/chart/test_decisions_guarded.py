"""Admission policies on a real API server: who may write decisions and requests on pods, and who may not."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.chart.chartobjects import MERGE, PODS, annotate

from gpushare.core.api import PodView, names
from gpushare.extender.recapping import cap_patch

ApiServer = Any  # conftest's, which importlib mode does not let a test module import
PodObject = Any
MakePod = Callable[..., str]
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


JSON_PATCH = "application/json-patch+json"


@pytest.mark.parametrize("cap", ["25", "26", "75", "100"])
def test_the_extender_changes_the_cap_of_a_bound_pod(
    installed: ApiServer, accounts: Accounts, decided: MakePod, cap: str
) -> None:
    """By the very patch that the extender sends; what it expects is tested by the API server."""
    pod = decided("0.25", cap="50")
    path = f"{PODS}/{pod}"
    view = PodView.from_object(installed.call("GET", path).body)
    assert view.decision is not None
    who = {"user": accounts["scheduler"], "dry_run": True, "content_type": JSON_PATCH}
    answer = installed.call("PATCH", path, cap_patch(view, int(cap)), **who)
    assert answer.code == 200, answer.message
    before = installed.call("GET", path).body["metadata"]["annotations"]
    assert answer.body["metadata"]["annotations"] == before | {names.THREAD_PERCENTAGE: cap}
    outdated = replace(view, decision=replace(view.decision, thread_percentage=33))
    assert installed.call("PATCH", path, cap_patch(outdated, int(cap)), **who).code == 422
    elsewhere = replace(view, decision=replace(view.decision, gpu_uuids=("GPU-2",)))
    assert installed.call("PATCH", path, cap_patch(elsewhere, int(cap)), **who).code == 422
    assert installed.call("PATCH", path, cap_patch(replace(view, uid="another"), int(cap)), **who).code == 422


@pytest.mark.parametrize("cap", ["24", "1", "0", "101", "-50", "050", "many", "", None])
def test_no_cap_is_below_the_share_or_senseless(
    installed: ApiServer, accounts: Accounts, decided: MakePod, cap: str | None
) -> None:
    pod = decided("0.25", cap="50")
    answer = annotate(installed, pod, names.THREAD_PERCENTAGE, cap, user=accounts["scheduler"])
    assert answer.code == 403
    assert "never below its share" in answer.message


def test_a_cap_that_is_no_choice_is_not_changed(
    installed: ApiServer, accounts: Accounts, decided: MakePod, bound: str
) -> None:
    for pod in (decided("0.25", cap="100", **{"class": "latency"}), decided("1", cap="100")):
        answer = annotate(installed, pod, names.THREAD_PERCENTAGE, "50", user=accounts["scheduler"])
        assert answer.code == 403
        assert "not for class latency, whole GPUs" in answer.message
    answer = annotate(installed, bound, names.THREAD_PERCENTAGE, "50", user=accounts["scheduler"])
    assert answer.code == 403, "a pod that was bound without a decision gets none"


def test_a_pod_that_is_ending_keeps_its_cap(installed: ApiServer, accounts: Accounts, decided: MakePod) -> None:
    pod = decided("0.25", cap="50")
    path = f"{PODS}/{pod}"
    stays = {"metadata": {"finalizers": ["example.com/stay"]}}
    assert installed.call("PATCH", path, stays, content_type=MERGE).code == 200
    try:
        installed.call("DELETE", path, {"gracePeriodSeconds": 0})
        answer = annotate(installed, pod, names.THREAD_PERCENTAGE, "75", user=accounts["scheduler"])
        assert answer.code == 403
        assert "a pod that is ending" in answer.message
    finally:
        installed.call("PATCH", path, {"metadata": {"finalizers": None}}, content_type=MERGE)


@pytest.mark.parametrize("key", sorted({*names.DECISION_ANNOTATIONS} - {names.THREAD_PERCENTAGE}))
@pytest.mark.parametrize("part", ["", "/status"])
def test_of_a_bound_pods_decision_the_extender_changes_the_cap_alone(
    installed: ApiServer, accounts: Accounts, decided: MakePod, key: str, part: str
) -> None:
    pod = decided("0.25")
    for value in ("1", None) if key != names.PROBATION_SECONDS else ("1",):
        answer = annotate(installed, pod, key, value, part=part, user=accounts["scheduler"])
        assert answer.code == 403
        assert "changes gpushare.io/thread-percentage and nothing else" in answer.message
    assert annotate(installed, pod, names.ROOM_SINCE, "now", user=accounts["scheduler"]).code == 200
