"""Each part may do in the API what its code does, and nothing else: the rights are compared with the calls."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.chart.chartobjects import of_kind

from gpushare import kube
from gpushare.cli import release as release_data
from gpushare.kube import Resource

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {
    "operator": "operator/gpushare_operator/*.py",
    "admission": "operator/gpushare_operator/admission/*.py",
    "scheduler": "src/gpushare/extender/*.py",
    "agent": "deviceplugin/gpushare_deviceplugin/**/*.py",
    "mps": "src/gpushare/mps/**/*.py",
}
OF_EXPLAIN = ("src/gpushare/cli/explain.py", "src/gpushare/cli/live.py", "src/gpushare/cli/release.py")
VERBS = {
    "get": "get",
    "list": "list",
    "create": "create",
    "patch": "patch",
    "delete": "delete",
    "replace": "update",
}
SELECTED = dict(label.split("=") for label in release_data.SCHEDULER_SELECTOR.split(","))
MODELS_SELECTED = dict(label.split("=") for label in release_data.MODELS_SELECTOR.split(","))
MODELS = {"l4": '{"artefact":"gpushare.io/interference-model","version":4,"gpu_model":"NVIDIA L4"}'}
Right = tuple[str, str, str]  # group, resource with its subresource, verb

# Rights that no call of ours shows, each with its reason.
BESIDES: dict[str, set[Right]] = {
    "operator": {
        # Kopf lists and watches these for the handlers.
        *(("gpushare.io", "gpushares", verb) for verb in ("list", "watch")),
        *(("", "pods", verb) for verb in ("list", "watch")),
        # Owners are asked for by a table of kinds.
        ("apps", "replicasets", "get"),
        ("batch", "jobs", "get"),
    },
    "scheduler": {("coordination.k8s.io", "leases", verb) for verb in ("create", "get", "update", "patch")},
}


def _resource(node: ast.expr) -> Resource | None:
    found = getattr(kube, node.id, None) if isinstance(node, ast.Name) else None
    return found if isinstance(found, Resource) else None


def _calls(*sources: str) -> Iterator[Right]:
    """What code asks of the API, by the names of gpushare.kube."""
    for path in (path for source in sources for path in ROOT.glob(source)):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            resources = [resource for argument in node.args if (resource := _resource(argument)) is not None]
            if name == "record_event":
                yield "events.k8s.io", "events", "create"
            elif name == "bind" and "api" in ast.dump(node.func):
                yield "", "pods/binding", "create"
            elif name == "evict" and "api" in ast.dump(node.func):
                yield "", "pods/eviction", "create"
            elif resources and name in ("Reflector", "list_ours", *VERBS):
                (resource,) = resources
                subresource = next((k.value for k in node.keywords if k.arg == "subresource"), None)
                plural = resource.plural
                if isinstance(subresource, ast.Constant):
                    plural += f"/{subresource.value}"
                verbs = ("list", "watch") if name == "Reflector" else (VERBS.get(name, "list"),)
                yield from ((resource.group, plural, verb) for verb in verbs)


def _granted(objects: list[dict[str, Any]], part: str) -> set[Right]:
    """What the chart's own roles, bound to the part's account, allow."""
    account = f"gpushare-{part}"
    bound = {
        o["roleRef"]["name"]
        for o in objects
        if o["kind"].endswith("RoleBinding") and any(s["name"] == account for s in o["subjects"])
    }
    return _allowed(
        [o for o in objects if o["kind"] in ("Role", "ClusterRole") and o["metadata"]["name"] in bound]
    )


def _allowed(roles: list[dict[str, Any]]) -> set[Right]:
    return {
        (group, resource, verb)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


@pytest.mark.parametrize("part", SOURCES)
def test_rights_are_those_that_the_code_uses(render: Any, part: str) -> None:
    assert _granted(render(), part) == set(_calls(SOURCES[part])) | BESIDES.get(part, set())


def test_calls_are_found_at_all() -> None:
    assert ("", "pods", "patch") in set(_calls(SOURCES["scheduler"]))
    assert ("gpushare.io", "gpunodes/status", "patch") in set(_calls(SOURCES["agent"]))
    assert set(_calls(SOURCES["mps"])) == set()


@pytest.mark.parametrize("part", SOURCES)
def test_nobody_may_read_secrets_or_run_commands_in_pods(render: Any, part: str) -> None:
    granted = {resource for _, resource, _ in _granted(render(), part)}
    assert not [r for r in granted if re.match(r"secrets|pods/(exec|attach|portforward)|nodes/|.*\*|.*roles", r)]


def test_the_scheduler_acts_as_kube_scheduler_and_volume_scheduler_and_no_more(render: Any) -> None:
    roles = {
        o["roleRef"]["name"]
        for o in render()
        if o["kind"] == "ClusterRoleBinding" and o["subjects"][0]["name"] == "gpushare-scheduler"
    }
    assert roles == {"gpushare-scheduler", "system:kube-scheduler", "system:volume-scheduler"}


def test_who_may_view_or_edit_pods_may_view_or_edit_gpushares(render: Any) -> None:
    """The cluster's own roles contain ours; nobody but the agents writes GpuNodes, and no status is for people."""
    prefix = "rbac.authorization.k8s.io/aggregate-to-"
    found = {
        label.removeprefix(prefix): {
            (resource, verb) for rule in o["rules"] for resource in rule["resources"] for verb in rule["verbs"]
        }
        for o in render()
        if o["kind"] == "ClusterRole"
        for label in o["metadata"]["labels"]
        if label.startswith(prefix)
    }
    assert set(found) == {"view", "edit", "admin"}
    assert ("gpunodes", "list") in found["view"]
    assert {verb for _, verb in found["view"]} == {"get", "list", "watch"}
    assert {resource for resource, _ in found["edit"] | found["admin"]} == {"gpushares"}


def _of_models(objects: list[dict[str, Any]]) -> list[str]:
    """Names of the ConfigMaps that hold models, as explain looks for them."""
    found = of_kind(objects, "ConfigMap")
    return [o["metadata"]["name"] for o in found if MODELS_SELECTED.items() <= o["metadata"]["labels"].items()]


@pytest.mark.parametrize("release", ["gpushare", "team"])
def test_the_role_for_explain_allows_what_explain_plan_and_snapshot_read_and_no_more(
    render: Any, release: str
) -> None:
    """ConfigMaps cannot be restricted by label, so that settings and models are read by their names."""
    objects = render({"fullnameOverride": release, "models": MODELS})
    (role,) = [o for o in objects if o["kind"] == "ClusterRole" and o["metadata"]["name"] == f"{release}-explain"]
    (settings,) = [o for o in objects if (o["metadata"].get("labels") or {}).get("gpushare.io/settings") == "true"]
    (by_name,) = [rule for rule in role["rules"] if "resourceNames" in rule]
    named = [settings["metadata"]["name"], *_of_models(objects)]
    assert (by_name["resources"], by_name["resourceNames"]) == (["configmaps"], named)
    read = set(_calls(*OF_EXPLAIN))
    assert ("", "configmaps", "get") in read
    assert _allowed([role]) == read - {("", "configmaps", "list")}
    assert not [label for label in role["metadata"]["labels"] if "aggregate" in label]
    assert not [o for o in objects if (o.get("roleRef") or {}).get("name") == role["metadata"]["name"]]


@pytest.mark.parametrize("models", [{}, MODELS])
def test_the_schedulers_pods_name_settings_and_models_where_explain_looks(
    render: Any, models: dict[str, str]
) -> None:
    """Who may not list ConfigMaps finds the settings by the pods' environment, and the models by their volume."""
    objects = render({"models": models})
    pods = [
        {**o["spec"]["template"], "metadata": {**o["spec"]["template"]["metadata"], "namespace": "system"}}
        for o in objects
        if o["kind"] in ("Deployment", "DaemonSet")
    ]
    chosen = [pod for pod in pods if SELECTED.items() <= pod["metadata"]["labels"].items()]
    (settings,) = [o for o in objects if (o["metadata"].get("labels") or {}).get("gpushare.io/settings") == "true"]
    named = _of_models(objects)
    assert len(named) == len(models)
    found = release_data.ConfigMapNames("system", settings["metadata"]["name"], named[0] if named else None)
    assert [release_data.configmaps_named(pod) for pod in chosen] == [found]


def test_no_role_for_people_grants_the_status_of_gpushares(render: Any) -> None:
    """It carries profiles and who left whom; the operator alone writes it."""
    writers = {
        role["metadata"]["name"]
        for kind in ("Role", "ClusterRole")
        for role in of_kind(render(), kind)
        for rule in role["rules"] or ()
        if {"gpushares/status", "gpushares/*", "*/status", "*"} & set(rule.get("resources") or ())
        and {"gpushare.io", "*"} & set(rule["apiGroups"])
        and not set(rule["verbs"]) <= {"get", "list", "watch"}
    }
    assert writers == {"gpushare-operator"}
