"""A PodMonitor as the scrape jobs that the Prometheus operator makes of it."""

import re
from typing import Any

Json = dict[str, Any]
_POD = "__meta_kubernetes_pod"


def scrape_jobs(monitor: Json, kubeconfig: str, *, interval: str) -> list[Json]:
    """One job for each endpoint; pods are found through the API server as the kubeconfig's user.

    As pkg/prometheus/promcfg.go of the operator does it, for the fields that our chart uses. Fields that it would
    have to know are refused, so that none is passed over.
    """
    spec = monitor["spec"]
    assert set(spec) == {"selector", "podTargetLabels", "podMetricsEndpoints"}, set(spec)
    assert set(spec["selector"]) == {"matchLabels"}
    namespace = monitor["metadata"]["namespace"]
    return [
        _job(f"{namespace}/{monitor['metadata']['name']}/{index}", endpoint, spec, namespace, kubeconfig, interval)
        for index, endpoint in enumerate(spec["podMetricsEndpoints"])
    ]


def _job(name: str, endpoint: Json, spec: Json, namespace: str, kubeconfig: str, interval: str) -> Json:
    assert set(endpoint) <= {"port", "interval", "honorLabels", "scheme", "tlsConfig"}, set(endpoint)
    keep = [
        {"source_labels": [f"{_POD}_phase"], "regex": "(Failed|Succeeded)", "action": "drop"},
        *(
            {"source_labels": [f"{_POD}_label_{_label(key)}"], "regex": re.escape(value), "action": "keep"}
            for key, value in spec["selector"]["matchLabels"].items()
        ),
        {"source_labels": [f"{_POD}_container_port_name"], "regex": endpoint["port"], "action": "keep"},
    ]
    named = [
        {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
        {"source_labels": [f"{_POD}_container_name"], "target_label": "container"},
        {"source_labels": [f"{_POD}_name"], "target_label": "pod"},
        *(
            {"source_labels": [f"{_POD}_label_{_label(key)}"], "target_label": _label(key)}
            for key in spec["podTargetLabels"]
        ),
        {"target_label": "endpoint", "replacement": endpoint["port"]},
    ]
    tls = endpoint.get("tlsConfig", {})
    return {
        "job_name": name,
        "honor_labels": endpoint.get("honorLabels", False),
        "scheme": endpoint.get("scheme", "http"),
        "scrape_interval": interval,
        "scrape_timeout": interval,
        **({"tls_config": {"insecure_skip_verify": tls["insecureSkipVerify"]}} if tls else {}),
        "kubernetes_sd_configs": [
            {"role": "pod", "kubeconfig_file": kubeconfig, "namespaces": {"names": [namespace]}}
        ],
        "relabel_configs": [*keep, *named],
    }


def _label(key: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", key)
