"""Metrics and probes over HTTPS on the real kubelet: scraped by the PodMonitor, certificates renewed."""

import base64
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from boards import CHART
from certificates import make_pair
from devcluster import progress, tools
from devcluster.settings import KUBERNETES_VERSION
from livecluster import RELEASE, RELEASE_NAMESPACE, ROOT, Cluster, wait_for
from podmonitors import scrape_jobs
from realprometheus import Prometheus
from tests.e2e.test_upgrade import replace_hosts, upgrade

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

PARTS = ("operator", "admission", "scheduler", "agent", "mps")
SECRET, TLS = "e2e-scrape", "gpushare-metrics-tls"
HOST = f"{RELEASE}-metrics.{RELEASE_NAMESPACE}.svc"
RENEWED_SECONDS = 300  # kubelet brings a changed Secret within its sync, a minute and a half at the most
VALUES = ("metrics.tls.enabled=true", f"metrics.tokenSecret={SECRET}")


@pytest.fixture
def protected(cluster: Cluster, image: str) -> Iterator[None]:
    """The release with TLS and a token on its metrics."""
    if cluster.backend != "local":
        pytest.skip("this machine reaches pods by their addresses on the local backend only")
    kubectl = ("-n", RELEASE_NAMESPACE)
    cluster.kubectl(*kubectl, "create", "secret", "generic", SECRET, "--from-literal=token=let-me")
    try:
        upgrade(cluster, *(word for value in VALUES for word in ("--set", value)))
        replace_hosts(cluster)
        yield
    finally:
        upgrade(cluster, "--set", "metrics.tls.enabled=false", "--set", "metrics.tokenSecret=")
        replace_hosts(cluster)
        cluster.kubectl(*kubectl, "delete", "secret", SECRET)


def test_every_part_is_scraped_over_https_and_takes_up_a_renewed_certificate(
    protected: None, cluster: Cluster, part: Callable[[str], list[dict]], tmp_path: Path
) -> None:
    prometheus = scraper(cluster, tmp_path / "first")
    try:
        wait_for("every part scraped", lambda: up(prometheus) == dict.fromkeys(PARTS, "1"), seconds=240)
        ends = prometheus.query("gpushare_certificate_expiry_timestamp_seconds")
        told = {one["metric"]["app_kubernetes_io_component"]: one["metric"]["certificate"] for one in ends}
        assert told == {name: "admission" if name == "admission" else "metrics" for name in PARTS}
    finally:
        prometheus.stop()
    (agent,) = part("agent")
    address = f"{agent['status']['podIP']}:9400"
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://{address}/metrics", timeout=30)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"https://{address}/metrics", timeout=30, context=ssl._create_unverified_context())

    pods = {name: [pod["metadata"]["uid"] for pod in part(name)] for name in PARTS}
    pem = make_pair(tmp_path / "pair", HOST, hosts=(HOST,))
    pair = {name: (tmp_path / "pair" / name).read_bytes() for name in ("tls.crt", "tls.key")}
    data = {name: base64.b64encode(text).decode() for name, text in {**pair, "ca.crt": pem}.items()}
    cluster.kubectl("-n", RELEASE_NAMESPACE, "patch", "secret", TLS, "-p", json.dumps({"data": data}))
    again = scraper(cluster, tmp_path / "second")
    try:
        wait_for("the new certificate", lambda: up(again) == dict.fromkeys(PARTS, "1"), seconds=RENEWED_SECONDS)
    finally:
        again.stop()
    assert {name: [pod["metadata"]["uid"] for pod in part(name)] for name in PARTS} == pods


def scraper(cluster: Cluster, folder: Path) -> Prometheus:
    """A Prometheus that trusts and brings what the PodMonitor says, by the Secrets that are there now."""
    shown = ["--set", "podMonitor.enabled=true", "--show-only", "templates/monitoring/podmonitor.yaml"]
    values = [word for value in VALUES for word in ("--set", value)]
    command = [
        tools.helm(),
        "template",
        RELEASE,
        CHART,
        "-n",
        RELEASE_NAMESPACE,
        "--kube-version",
        KUBERNETES_VERSION,
    ]
    text = progress.run([*command, *values, *shown], cwd=ROOT)
    folder.mkdir()
    secrets: dict[tuple[str, str], Path] = {}
    for name in (SECRET, TLS, "gpushare-admission-tls"):
        for key, value in cluster.get("-n", RELEASE_NAMESPACE, "secret", name)["data"].items():
            secrets[name, key] = folder / f"{name}-{key}"
            secrets[name, key].write_bytes(base64.b64decode(value))
    pods = cluster.get("-n", RELEASE_NAMESPACE, "pods")["items"]
    jobs = scrape_jobs(yaml.safe_load(text), pods, interval="3s", secrets=secrets)
    return Prometheus(folder / "own", {"scrape_configs": jobs})


def up(prometheus: Prometheus) -> dict[str, str]:
    """Whether all pods of a part answer, by part."""
    found = prometheus.query("min by (app_kubernetes_io_component) (up)")
    return {one["metric"]["app_kubernetes_io_component"]: one["value"][1] for one in found}
