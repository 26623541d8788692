"""`helm upgrade` with a changed value rolls our parts and leaves tenants alone."""

import json
import os
import subprocess
from collections.abc import Callable

import pytest
from livecluster import RELEASE, RELEASE_NAMESPACE, ROOT, Cluster, Namespace, processes_of, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(500)]


def helm(cluster: Cluster, *arguments: str) -> str:
    base = os.environ.get("GPUSHARE_CACHE") or str(
        # the driver's default
        (os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) + "/gpushare"  # noqa: PTH111
    )
    done = subprocess.run(
        [f"{base}/bin/helm", *arguments, "--namespace", RELEASE_NAMESPACE, "--kubeconfig", cluster.kubeconfig],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def upgrade(cluster: Cluster, *arguments: str) -> None:
    chart = str(ROOT / "helm" / "gpushare")
    helm(cluster, "upgrade", RELEASE, chart, "--reuse-values", *arguments, "--wait", "--timeout", "240s")


def test_an_upgrade_with_a_changed_value_leaves_tenants_untouched(
    space: Namespace, cluster: Cluster, part: Callable[[str], list[dict]]
):
    space.create(space.tenant("runs", "0.3"))
    space.running("runs")
    space.connected("runs")
    uid = space.get("runs")["metadata"]["uid"]
    pids = processes_of(uid, saying="twin.tenant")
    status = space.get("runs")["status"]["containerStatuses"]
    agents, hosts = [[pod["metadata"]["uid"] for pod in part(name)] for name in ("agent", "mps")]
    certificate = secret(cluster)
    try:
        upgrade(cluster, "--set", "logging.level=DEBUG", "--set-json", "policy.maxSlowdown=2")

        def rolled() -> bool:
            return bool(part("agent")) and [pod["metadata"]["uid"] for pod in part("agent")] != agents

        wait_for("a new agent", rolled, seconds=90)
        assert [pod["metadata"]["uid"] for pod in part("mps")] == hosts  # OnDelete: its end would end the tenants
        assert secret(cluster) == certificate  # kept, so that no call in flight fails
        assert processes_of(uid, saying="twin.tenant") == pids
        now = space.get("runs")["status"]["containerStatuses"]
        assert [(one["containerID"], one["restartCount"]) for one in now] == [
            (one["containerID"], one["restartCount"]) for one in status
        ]
        assert "error" not in space.log("runs")
        space.create(space.tenant("new", "0.3"))
        space.running("new")
        space.connected("new")
    finally:
        upgrade(cluster, "--set", "logging.level=INFO", "--set-json", "policy.maxSlowdown=1.5")


def secret(cluster: Cluster) -> str:
    found = cluster.get("-n", RELEASE_NAMESPACE, "secrets", "-l", "app.kubernetes.io/component=admission")
    assert found["items"], "no certificate of the chart's"
    return json.dumps([item["data"] for item in found["items"]], sort_keys=True)
