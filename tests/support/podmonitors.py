"""A PodMonitor as the scrape jobs that the Prometheus operator makes of it, with the pods that there are.

Debian builds Prometheus without Kubernetes' discovery, so the pods are looked up here, by the PodMonitor's own
selector and ports.
"""

import re
from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]


def scrape_jobs(monitor: Json, pods: Sequence[Json], *, interval: str) -> list[Json]:
    """One job for each endpoint; what our chart does not use is refused, so that nothing is passed over.

    Args:
        pods: of the PodMonitor's namespace.
    """
    spec = monitor["spec"]
    assert set(spec) == {"selector", "podTargetLabels", "podMetricsEndpoints"}, set(spec)
    assert set(spec["selector"]) == {"matchLabels"}
    wanted = spec["selector"]["matchLabels"].items()
    chosen = [
        pod
        for pod in pods
        if wanted <= pod["metadata"]["labels"].items()
        and pod["status"]["phase"] == "Running"
        and "deletionTimestamp" not in pod["metadata"]
    ]
    return [
        _job(f"endpoint-{index}", endpoint, chosen, spec["podTargetLabels"], interval)
        for index, endpoint in enumerate(spec["podMetricsEndpoints"])
    ]


def _job(name: str, endpoint: Json, pods: Sequence[Json], copied: Sequence[str], interval: str) -> Json:
    assert set(endpoint) <= {"port", "interval", "honorLabels", "scheme", "tlsConfig"}, set(endpoint)
    tls = endpoint.get("tlsConfig", {})
    return {
        "job_name": name,
        "honor_labels": endpoint.get("honorLabels", False),
        "scheme": endpoint.get("scheme", "http"),
        "scrape_interval": interval,
        "scrape_timeout": interval,
        **({"tls_config": {"insecure_skip_verify": tls["insecureSkipVerify"]}} if tls else {}),
        "static_configs": [
            {
                "targets": [f"{pod['status']['podIP']}:{port['containerPort']}"],
                "labels": {
                    "namespace": pod["metadata"]["namespace"],
                    "pod": pod["metadata"]["name"],
                    "container": container["name"],
                    "endpoint": endpoint["port"],
                    **{
                        re.sub(r"[^a-zA-Z0-9_]", "_", key): pod["metadata"]["labels"][key]
                        for key in copied
                        if key in pod["metadata"]["labels"]
                    },
                },
            }
            for pod in pods
            for container in pod["spec"]["containers"]
            for port in container.get("ports", ())
            if port.get("name") == endpoint["port"]
        ],
    }
