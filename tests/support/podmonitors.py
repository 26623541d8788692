"""A PodMonitor as the scrape jobs that the Prometheus operator makes of it, with the pods that there are.

Debian builds Prometheus without Kubernetes' discovery, so the pods are looked up here, by the PodMonitor's own
selector and ports.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Json = dict[str, Any]


Secrets = Mapping[tuple[str, str], Path]


def scrape_jobs(
    monitor: Json, pods: Sequence[Json], *, interval: str, secrets: Secrets | None = None
) -> list[Json]:
    """One job for each endpoint; what our chart does not use is refused, so that nothing is passed over.

    Args:
        pods: of the PodMonitor's namespace.
        secrets: files with what the PodMonitor's Secrets hold, by name and key.
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
        _job(f"endpoint-{index}", endpoint, chosen, spec["podTargetLabels"], interval, secrets or {})
        for index, endpoint in enumerate(spec["podMetricsEndpoints"])
    ]


def _job(
    name: str, endpoint: Json, pods: Sequence[Json], copied: Sequence[str], interval: str, secrets: Secrets
) -> Json:
    used = {"port", "interval", "honorLabels", "scheme", "tlsConfig", "authorization"}
    assert set(endpoint) <= used, set(endpoint)
    return {
        "job_name": name,
        "honor_labels": endpoint.get("honorLabels", False),
        "scheme": endpoint.get("scheme", "http"),
        "scrape_interval": interval,
        "scrape_timeout": interval,
        **_protection(endpoint, secrets),
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


def _protection(endpoint: Json, secrets: Secrets) -> Json:
    """What a scrape trusts and brings."""
    job: Json = {}
    if tls := endpoint.get("tlsConfig"):
        assert set(tls) <= {"insecureSkipVerify", "ca", "serverName"}, set(tls)
        job["tls_config"] = {"insecure_skip_verify": tls.get("insecureSkipVerify", False)}
        if "ca" in tls:
            job["tls_config"] |= {"ca_file": _file(tls["ca"]["secret"], secrets), "server_name": tls["serverName"]}
    if "authorization" in endpoint:
        job["authorization"] = {"credentials_file": _file(endpoint["authorization"]["credentials"], secrets)}
    return job


def _file(reference: Json, secrets: Secrets) -> str:
    return str(secrets[reference["name"], reference["key"]])
