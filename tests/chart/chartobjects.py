"""What the tests of the chart share: sets of values, and how to find objects among those rendered."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpushare.core.api import names

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "gpushare"
Json = dict[str, Any]
Render = Any  # conftest's fixture
VALUE_SETS: dict[str, Json] = {
    "defaults": {},
    "simulated": {"simulated": {"gpus": "H200:2"}, "image": {"pullPolicy": "Never"}},
    "everything": {
        "certManager": {"enabled": True},
        "metrics": {"tokenSecret": "scrape", "tls": {"enabled": True}},
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True},
        "networkPolicy": {"enabled": True, "metricsFrom": [{"namespaceSelector": {}}]},
        "priorityClasses": {"quota": True},
        "watch": {"namespaces": ["a", "b"]},
        "runtimeClassName": "nvidia",
        "nodes": {"selector": {"pool": "gpu"}},
        "image": {"digest": "sha256:" + "0" * 64, "pullSecrets": ["one"]},
        "scheduler": {
            "command": ["/usr/local/bin/kube", "kube-scheduler"],
            "tolerations": [{"operator": "Exists"}],
        },
        "operator": {"podAnnotations": {"a": "b"}},
        "envCapsFallback": True,
        "policy": {"chargeMemory": False, "restricted": ["latency", "isolated"], "refuseAboveBaseline": True},
    },
    "bare": {
        "crds": {"install": False},
        "dashboards": {"enabled": False},
        "priorityClasses": {"node": "", "cluster": ""},
        "admission": {"replicas": 1},
        "scheduler": {"replicas": 1},
        "nodes": {"affinity": {}, "taints": []},
        "nameOverride": "share",
        "policy": {"restricted": []},
    },
}
VALUES = pytest.mark.parametrize("values", VALUE_SETS.values(), ids=VALUE_SETS.keys())


def of_kind(objects: list[Json], kind: str, name: str | None = None) -> list[Json]:
    return [o for o in objects if o["kind"] == kind and name in (None, o["metadata"]["name"])]


def workloads(objects: list[Json]) -> dict[str, Json]:
    """Part -> its Deployment or DaemonSet."""
    found = of_kind(objects, "Deployment") + of_kind(objects, "DaemonSet")
    return {o["metadata"]["labels"]["app.kubernetes.io/component"]: o for o in found}


def containers(workload: Json) -> list[Json]:
    return workload["spec"]["template"]["spec"]["containers"]


def webhooks(objects: list[Json]) -> Iterator[Json]:
    for kind in ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"):
        for configuration in of_kind(objects, kind):
            yield from configuration["webhooks"]


SHARES = "/apis/gpushare.io/v1alpha1/namespaces/default/gpushares"
NODES = "/apis/gpushare.io/v1alpha1/gpunodes"
PODS = "/api/v1/namespaces/default/pods"
MERGE = "application/merge-patch+json"


def share(spec: dict[str, Any], name: str = "s") -> dict[str, Any]:
    return {"apiVersion": names.API_VERSION, "kind": "GpuShare", "metadata": {"name": name}, "spec": spec}


def annotate(api: Any, pod: str, key: str, value: str | None, *, part: str = "", **who: str) -> Any:
    body = {"metadata": {"annotations": {key: value}}}
    return api.call("PATCH", f"{PODS}/{pod}{part}", body, dry_run=True, content_type=MERGE, **who)
