"""Policies of the chart's values on a real API server: pods above baseline, ephemeral containers, classes."""

import contextlib
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from livecluster import wait_for
from tests.chart.chartobjects import PODS, SHARES, share

from gpushare.core.api import names

ApiServer = Any  # conftest's, which importlib mode does not let a test module import
PodObject = Any

pytestmark = pytest.mark.integration


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


def until_accepted(api: ApiServer, path: str, *objects: dict[str, Any]) -> None:
    """Deleted policies bind for a moment more; ask until they let these pass, which other tests create."""
    for _ in range(600):
        if all(api.call("POST", path, each, dry_run=True).code == 201 for each in objects):
            return
    raise AssertionError("the policies are enforced still")


@pytest.fixture
def spaces(installed: ApiServer) -> Iterator[Callable[..., str]]:
    """Makes namespaces with labels; returns each one's name."""
    made: list[str] = []

    def make(**labels: str) -> str:
        name = f"ns-{uuid.uuid4().hex[:8]}"
        metadata = {"name": name, "labels": {f"gpushare.io/{key}": value for key, value in labels.items()}}
        space = {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
        assert installed.call("POST", "/api/v1/namespaces", space).code == 201
        made.append(name)
        return name

    yield make
    for name in made:
        installed.call("DELETE", f"/api/v1/namespaces/{name}")


@pytest.fixture(scope="module")
def baseline(installed: ApiServer, render: Any, pod_object: PodObject) -> Iterator[ApiServer]:
    """The API server with the policy of `policy.refuseAboveBaseline` too."""
    with policies(installed, render({"policy": {"refuseAboveBaseline": True}}), "-baseline"):
        pod = pod_object("p", {names.FRACTION: "0.1"})
        pod["spec"] |= {"hostPID": True, "schedulerName": names.SCHEDULER_NAME}
        until_refused(installed, PODS, pod)
        yield installed
    until_accepted(installed, PODS, pod)


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
    installed: ApiServer, pod_object: PodObject, spaces: Callable[..., str]
) -> None:
    allowing = spaces(**{"allow-latency": "true"})
    pod, isolated = pod_object("p", {names.CLASS: "latency"}), share({"faultDomain": "isolated"})
    for name in (spaces(), spaces(**{"allow-latency": "false", "allow-isolated": ""})):
        pods, shares = (path.replace("default", name) for path in (PODS, SHARES))
        until_given_an_account(installed, pods, pod_object("p", {names.CLASS: "throughput"}))
        for path, each in ((pods, pod), (shares, share({"class": "latency"}))):
            refused = installed.call("POST", path, each, dry_run=True)
            assert refused.code == 403
            assert "gpushare.io/allow-latency=true" in refused.message
        assert installed.call("POST", shares, share({"class": "throughput"}), dry_run=True).code == 201
    pods, shares = (path.replace("default", allowing) for path in (PODS, SHARES))
    until_given_an_account(installed, pods, pod)
    assert installed.call("POST", shares, share({"class": "latency"}), dry_run=True).code == 201
    refused = installed.call("POST", shares, isolated, dry_run=True)
    assert refused.code == 403
    assert "gpushare.io/allow-isolated=true" in refused.message
    shares = SHARES.replace("default", spaces(**{"allow-isolated": "true"}))
    assert installed.call("POST", shares, isolated, dry_run=True).code == 201


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet", "DaemonSet", "Job"])
def test_who_applies_a_template_of_class_latency_is_warned_where_its_pods_will_be_refused(
    installed: ApiServer, spaces: Callable[..., str], kind: str
) -> None:
    group = "batch" if kind == "Job" else "apps"

    def warnings(space: str, job_class: str) -> tuple[str, ...]:
        metadata = {"labels": {"app": "a"}, "annotations": {names.CLASS: job_class}}
        spec: dict[str, Any] = {"containers": [{"name": "main", "image": "none"}]}
        spec = {"template": {"metadata": metadata, "spec": spec}}
        if kind == "Job":
            spec["template"]["spec"]["restartPolicy"] = "Never"
        else:
            spec["selector"] = {"matchLabels": {"app": "a"}}
        body = {"apiVersion": f"{group}/v1", "kind": kind, "metadata": {"name": "a"}, "spec": spec}
        path = f"/apis/{group}/v1/namespaces/{space}/{kind.lower()}s"
        answer = installed.call("POST", path, body, dry_run=True)
        assert answer.code == 201, answer.message
        return tuple(each for each in answer.warnings if "its pods will be refused" in each)

    plain = spaces()
    wait_for("the warning", lambda: warnings(plain, "latency"), seconds=30)
    (warning,) = warnings(plain, "latency")
    assert "gpushare.io/allow-latency=true" in warning
    assert warnings(plain, "throughput") == ()
    assert warnings(spaces(**{"allow-latency": "true"}), "latency") == ()


def test_who_changes_a_deployment_of_class_latency_is_warned_too(
    installed: ApiServer, spaces: Callable[..., str]
) -> None:
    metadata = {"labels": {"app": "a"}, "annotations": {names.CLASS: "latency"}}
    template = {"metadata": metadata, "spec": {"containers": [{"name": "main", "image": "none"}]}}
    spec = {"replicas": 0, "selector": {"matchLabels": {"app": "a"}}, "template": template}
    body = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "a"}, "spec": spec}
    path = f"/apis/apps/v1/namespaces/{spaces()}/deployments"
    assert installed.call("POST", path, body).code == 201
    change, merge = {"spec": {"minReadySeconds": 1}}, "application/merge-patch+json"
    answer = installed.call("PATCH", f"{path}/a", change, content_type=merge)
    assert answer.code == 200, answer.message
    assert any("its pods will be refused" in each for each in answer.warnings)


def test_a_gpushare_that_has_the_class_keeps_it_where_the_label_is_gone(
    installed: ApiServer, spaces: Callable[..., str]
) -> None:
    space, merge = spaces(**{"allow-latency": "true"}), "application/merge-patch+json"
    shares = SHARES.replace("default", space)
    for name, spec in (("has", {"class": "latency"}), ("wants", {})):
        assert installed.call("POST", shares, share(spec, name)).code == 201
    label = {"metadata": {"labels": {"gpushare.io/allow-latency": None}}}
    assert installed.call("PATCH", f"/api/v1/namespaces/{space}", label, content_type=merge).code == 200

    def change(name: str, **spec: Any) -> int:
        return int(
            installed.call("PATCH", f"{shares}/{name}", {"spec": spec}, content_type=merge, dry_run=True).code
        )

    wants = {"class": "latency"}
    wait_for("the label gone", lambda: change("wants", **wants) == 403, seconds=30)
    assert change("has", maxSlowdown=2) == 200


def until_given_an_account(api: ApiServer, path: str, pod: dict[str, Any]) -> None:
    """A new namespace takes a pod once it has its service account; ask until it does."""
    for _ in range(600):
        answer = api.call("POST", path, pod, dry_run=True)
        if answer.code == 201:
            return
        assert "serviceaccount" in answer.message, answer.message
    raise AssertionError("no account")
