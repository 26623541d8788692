"""Names that Kubernetes and Helm allow, and YAML takes for a number, a truth value or nothing."""

import re
from typing import Any

import pytest
import yaml
from tests.chart.chartobjects import CHART, Json, Render, of_kind

ALL = (
    "podMonitor.enabled=true,prometheusRule.enabled=true,networkPolicy.enabled=true,metrics.tls.enabled=true,"
    "policy.refuseAboveBaseline=true,priorityClasses.quota=true"
)
MAPS = {"labels", "annotations", "matchLabels", "nodeSelector", "data"}
TEXTS = {"name", "namespace", "key", "path", "secretName", "priorityClassName", "runtimeClassName"}


def _rendered(helm: Any, release: str, namespace: str, *settings: str) -> list[Json]:
    where = ("-n", namespace, "--kube-version", "1.35.4", "--set", ALL)
    texts = [word for setting in settings for word in ("--set-string", setting)]
    done = helm("template", release, str(CHART), *where, *texts)
    assert done.returncode == 0, done.stderr
    return [item for item in yaml.safe_load_all(done.stdout) if item]


def _no_texts(tree: Any, path: str) -> list[str]:
    """Where something other than a text stands in the place of one."""
    if isinstance(tree, list):
        return [one for number, item in enumerate(tree) for one in _no_texts(item, f"{path}[{number}]")]
    if not isinstance(tree, dict):
        return []
    found = []
    for key, value in tree.items():
        if key in MAPS and isinstance(value, dict):
            found += [f"{path}.{key}.{one}: {text!r}" for one, text in value.items() if not isinstance(text, str)]
        elif key in TEXTS and not isinstance(value, str | dict | list):
            found.append(f"{path}.{key}: {value!r}")
        found += _no_texts(value, f"{path}.{key}")
    return found


def _wrong(objects: list[Json]) -> list[str]:
    kept = [item for item in objects if item["kind"] != "CustomResourceDefinition"]
    return [one for item in kept for one in _no_texts(item, item["kind"])]


@pytest.mark.parametrize("name", ["2024", "017", "0x1f", "true", "null", "on"])
def test_release_and_namespace_may_be_called_as_yaml_calls_something_else(helm: Any, name: str) -> None:
    """Before: `helm install` in a namespace 2024 was refused, since labels and namespaces were numbers."""
    objects = _rendered(helm, name, name, "fullnameOverride=gpushare")
    assert _wrong(objects) == []
    assert {o["metadata"].get("namespace", name) for o in objects} <= {name, "kube-system"}
    assert {o["metadata"]["labels"]["app.kubernetes.io/instance"] for o in objects} == {name}
    (config,) = of_kind(objects, "ConfigMap", "gpushare-scheduler")
    assert yaml.safe_load(config["data"]["scheduler.yaml"])["leaderElection"]["resourceNamespace"] == name


@pytest.mark.parametrize(
    "setting",
    [
        "nameOverride=123",
        "fullnameOverride=null",
        "image.pullSecrets={123,true}",
        "runtimeClassName=1e3",
        "priorityClasses.node=12",
        "priorityClasses.cluster=12",
        "metrics.tokenSecret=12,metrics.tokenKey=34",
        "metrics.tls.secret=56",
        "certManager.issuer.name=77",
        "kubeletDirectory=/data/{1}\\, more",
        "agent.toolkitDirectory=/opt/{1} #2",
        "agent.cdiDirectories={/opt/a #2}",
    ],
)
def test_a_value_may_be_called_as_yaml_calls_something_else(helm: Any, setting: str) -> None:
    """Before: pods, PodMonitors and Certificates named a number, and the API server refused them."""
    certificates = ("certManager.enabled=true",) if setting.startswith("certManager") else ()
    where = ("-n", "n", "--kube-version", "1.35.4", "--set", ",".join((ALL, *certificates)))
    done = helm("template", "gpushare", str(CHART), *where, "--set-string", setting)
    assert done.returncode == 0, done.stderr
    assert _wrong([item for item in yaml.safe_load_all(done.stdout) if item]) == []


SERVICE = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


@pytest.mark.parametrize("release", ["team.a", "a" * 38 + ".b.c.d.e.f", "a.gpushare"])
def test_a_release_with_a_dot_in_its_name_gets_a_service_that_the_api_server_takes(
    helm: Any, release: str
) -> None:
    """Before: Service team.a-gpushare-admission was refused, in the middle of the installation."""
    objects = _rendered(helm, release, "n")
    (service,) = of_kind(objects, "Service")
    assert SERVICE.fullmatch(service["metadata"]["name"])
    hooks = [o for o in objects if o["kind"].endswith("WebhookConfiguration")]
    names = {hook["clientConfig"]["service"]["name"] for o in hooks for hook in o["webhooks"]}
    assert names == {service["metadata"]["name"]}


def test_a_name_that_no_service_can_have_is_refused_before_anything_is_made(render: Render, helm: Any) -> None:
    done = helm("template", "2024", str(CHART), "--kube-version", "1.35.4")
    assert done.returncode != 0
    assert "set fullnameOverride" in done.stderr
    with pytest.raises(ValueError, match="begin with a letter"):
        render({"fullnameOverride": "7gpus"})
