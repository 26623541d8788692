"""The chart's certificates, and who may read metrics."""

import base64
import ssl
import time
import uuid
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from livecluster import wait_for
from podmonitors import scrape_jobs
from realprometheus import Prometheus
from tests.chart.chartobjects import CHART, Json, Render, containers, of_kind, webhooks, workloads

from gpushare.runtime.certificates import DIRECTORY_VARIABLE, Certificate
from gpushare.runtime.http import MetricsServer, metrics_route, metrics_token, registry_of

MADE_ON = "gpushare.io/made-on"


@pytest.mark.integration
def test_an_upgrade_keeps_a_young_certificate_and_renews_an_old_one_which_stays_trusted(
    api: Any, helm: Any
) -> None:
    """Before: one for ten years, for ever."""
    namespace = f"certificate-{uuid.uuid4().hex[:8]}"
    secrets = f"/api/v1/namespaces/{namespace}/secrets"
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
    assert api.call("POST", "/api/v1/namespaces", space).code == 201

    def upgrade() -> tuple[Json, set[str]]:
        """The Secret that an upgrade would write, and what the webhooks would trust."""
        where = (
            "-n",
            namespace,
            "--kubeconfig",
            str(api.kubeconfig),
            "--kube-version",
            "1.35.4",
            "--dry-run=server",
        )
        done = helm("template", "gpushare", str(CHART), *where)
        assert done.returncode == 0, done.stderr
        objects = [item for item in yaml.load_all(done.stdout, yaml.CSafeLoader) if item]
        (secret,) = of_kind(objects, "Secret")
        return secret, {hook["clientConfig"]["caBundle"] for hook in webhooks(objects)}

    def aged(secret: Json, days: int | None) -> Json:
        made_on = {} if days is None else {MADE_ON: (datetime.now(UTC) - timedelta(days)).strftime("%Y-%m-%d")}
        return {**secret, "metadata": {**secret["metadata"], "annotations": made_on}}

    try:
        first, _ = upgrade()
        for days, is_kept in ((0, True), (540, True), (560, False), (None, False)):
            assert api.call("POST", secrets, aged(first, days)).code == 201
            then, trusted = upgrade()
            assert (then["data"]["tls.crt"] == first["data"]["tls.crt"]) == is_kept, days
            assert trusted == {then["data"]["ca.crt"]}
            bundle = base64.b64decode(then["data"]["ca.crt"]).decode()
            assert base64.b64decode(first["data"]["ca.crt"]).decode().strip() in bundle
            assert bundle.count("BEGIN CERTIFICATE") == (1 if is_kept else 2)
            assert api.call("DELETE", f"{secrets}/{first['metadata']['name']}").code == 200
        assert api.call("POST", secrets, aged(then, None)).code == 201
        last, _ = upgrade()
        bundle = base64.b64decode(last["data"]["ca.crt"]).decode()
        assert bundle.count("BEGIN CERTIFICATE") == 2, "the one before the last is not trusted any more"
        ssl.create_default_context(cadata=bundle)
    finally:
        api.call("DELETE", f"/api/v1/namespaces/{namespace}")


def test_every_part_asks_for_the_token_and_the_pod_monitors_bring_it(render: Render) -> None:
    objects = render({"metrics": {"tokenSecret": "scrape", "tokenKey": "it"}, "podMonitor": {"enabled": True}})
    for part, workload in workloads(objects).items():
        container = containers(workload)[0]
        (path,) = [v["value"] for v in container["env"] if v["name"] == "GPUSHARE_METRICS_TOKEN_FILE"]
        (mount,) = [m for m in container["volumeMounts"] if m["name"] == "metrics-token"]
        (volume,) = [v for v in workload["spec"]["template"]["spec"]["volumes"] if v["name"] == "metrics-token"]
        assert f"{mount['mountPath']}/{volume['secret']['items'][0]['path']}" == path, part
        assert (volume["secret"]["secretName"], volume["secret"]["items"][0]["key"]) == ("scrape", "it")
    (monitor,) = of_kind(objects, "PodMonitor")
    credentials = [end["authorization"]["credentials"] for end in monitor["spec"]["podMetricsEndpoints"]]
    assert credentials == [{"name": "scrape", "key": "it"}] * 2


@pytest.mark.parametrize("secret", ["", "own"])
def test_every_part_serves_metrics_over_tls_and_kubelet_asks_so(render: Render, secret: str) -> None:
    objects = render({"metrics": {"tls": {"enabled": True, "secret": secret}}, "podMonitor": {"enabled": True}})
    used = secret or "gpushare-metrics-tls"
    parts = workloads(objects)
    probed = set()
    for part in ("operator", "scheduler", "agent", "mps"):
        container = containers(parts[part])[0]
        (directory,) = [v["value"] for v in container["env"] if v["name"] == DIRECTORY_VARIABLE]
        (mount,) = [m for m in container["volumeMounts"] if m["name"] == "metrics-tls"]
        (volume,) = [v for v in parts[part]["spec"]["template"]["spec"]["volumes"] if v["name"] == "metrics-tls"]
        assert (mount["mountPath"], volume["secret"]["secretName"]) == (directory, used)
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container.get(kind, {}).get("httpGet", {})
            if probe.get("port") in ("probes", 9401):
                assert probe["scheme"] == "HTTPS", part
                probed.add(part)
    assert probed == {"operator", "scheduler", "agent", "mps"}
    (monitor,) = of_kind(objects, "PodMonitor")
    ends = {end["port"]: end for end in monitor["spec"]["podMetricsEndpoints"]}
    assert {end["scheme"] for end in ends.values()} == {"https"}
    assert ends["metrics"]["tlsConfig"]["ca"] == {"secret": {"name": used, "key": "ca.crt"}}
    assert ends["webhook"]["tlsConfig"]["ca"]["secret"]["name"] == "gpushare-admission-tls"
    made = {item["metadata"]["name"] for item in of_kind(objects, "Secret")}
    assert made == {"gpushare-admission-tls"} | (set() if secret else {used})
    managed = render({"metrics": {"tls": {"enabled": True, "secret": secret}}, "certManager": {"enabled": True}})
    certificates = {c["spec"]["secretName"]: c["spec"] for c in of_kind(managed, "Certificate")}
    assert not of_kind(managed, "Secret")
    assert (used in certificates) is not bool(secret)
    for spec in certificates.values():
        assert of_kind(managed, spec["issuerRef"]["kind"], spec["issuerRef"]["name"])


def test_no_part_is_killed_while_it_still_starts(render: Render) -> None:
    """On a starved node a start takes minutes; liveness would end it again and again."""
    for part in ("operator", "admission", "scheduler", "agent"):
        container = containers(workloads(render())[part])[0]
        probe, liveness = container["startupProbe"], container["livenessProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] >= 300, part
        if part != "agent":  # whose start means more
            assert probe["httpGet"] == liveness["httpGet"], part


def test_an_agent_has_started_once_kubelet_has_taken_its_plugin(render: Render) -> None:
    for container in containers(workloads(render())["agent"]):
        probe = container["startupProbe"]
        assert (probe["httpGet"]["path"], probe["periodSeconds"]) == ("/readyz", 1), "what the extender waits for"
        assert container["readinessProbe"]["httpGet"]["path"] == "/healthz"


def test_without_tls_probes_are_plain(render: Render) -> None:
    objects = render({"podMonitor": {"enabled": True}})
    for part in ("scheduler", "agent", "mps"):
        assert containers(workloads(objects)[part])[0]["readinessProbe"]["httpGet"]["scheme"] == "HTTP"
    (monitor,) = of_kind(objects, "PodMonitor")
    assert "scheme" not in monitor["spec"]["podMetricsEndpoints"][0]


@pytest.mark.slow
def test_prometheus_scrapes_the_charts_certificate_by_the_pod_monitor(render: Render, tmp_path: Path) -> None:
    """The Secrets of one rendering, served by our servers; Prometheus trusts, asks and brings what it says."""
    token = tmp_path / "token"
    token.write_text("let me")
    values = {"metrics": {"tokenSecret": "scrape", "tls": {"enabled": True}}, "podMonitor": {"enabled": True}}
    objects = render(values)
    (monitor,) = of_kind(objects, "PodMonitor")
    secrets: dict[tuple[str, str], Path] = {("scrape", "token"): token}
    for item in of_kind(objects, "Secret"):
        for key, text in item["data"].items():
            file = tmp_path / item["metadata"]["name"] / key
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(base64.b64decode(text))
            secrets[item["metadata"]["name"], key] = file
    names_of = {"metrics": "gpushare-metrics-tls", "webhook": "gpushare-admission-tls"}
    routes = {"/metrics": metrics_route(registry_of())}
    bearer = metrics_token({"GPUSHARE_METRICS_TOKEN_FILE": str(token)})
    labels = monitor["spec"]["selector"]["matchLabels"]
    with ExitStack() as stack:
        pods = []
        for port, secret in names_of.items():
            tls = Certificate(tmp_path / secret)
            server = MetricsServer(routes, 0, "127.0.0.1", token=bearer, certificate=tls)
            server.start()
            stack.callback(server.close)
            container = {"name": port, "ports": [{"name": port, "containerPort": server.port}]}
            metadata = {"name": port, "namespace": "gpushare-system", "labels": labels}
            status = {"phase": "Running", "podIP": "127.0.0.1"}
            pods.append({"metadata": metadata, "status": status, "spec": {"containers": [container]}})
        jobs = scrape_jobs(monitor, pods, interval="1s", secrets=secrets)
        prometheus = Prometheus(tmp_path / "prometheus", {"scrape_configs": jobs})
        stack.callback(prometheus.stop)

        def ends() -> dict[str, float]:
            found = prometheus.query("gpushare_certificate_expiry_timestamp_seconds")
            return {one["metric"]["pod"]: float(one["value"][1]) for one in found}

        wait_for("both scraped", lambda: set(ends()) == set(names_of), seconds=60)
        assert {one["value"][1] for one in prometheus.query("up")} == {"1"}
        left = min(ends().values()) - time.time()
        assert 1090 * 86400 < left < 1096 * 86400, "three years"
        whole = prometheus.query(
            "gpushare_certificate_expiry_timestamp_seconds - gpushare_certificate_not_before_timestamp_seconds"
        )
        assert {one["metric"]["pod"]: float(one["value"][1]) / 86400 for one in whole} == dict.fromkeys(
            names_of, pytest.approx(1095, abs=1)
        ), "both have the same labels"


def test_metrics_are_for_those_who_are_named(render: Render) -> None:
    prometheus = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    for peers in ([], [prometheus]):
        found = of_kind(render({"networkPolicy": {"enabled": True, "metricsFrom": peers}}), "NetworkPolicy")
        rules = {one["metadata"]["name"].removeprefix("gpushare-"): one["spec"]["ingress"][0] for one in found}
        assert set(rules) == {"operator", "admission", "scheduler", "agent", "mps"}
        assert "from" not in rules.pop("admission"), "the API server calls it"
        assert all(rule.get("from", []) == peers for rule in rules.values())


def test_only_ports_of_metrics_and_of_admission_are_open(render: Render) -> None:
    """Ports of probes are for kubelet alone, whom no policy keeps out."""
    objects = render({"networkPolicy": {"enabled": True}})
    opened = {"admission": {"webhook"}, "scheduler": {"metrics", "https"}}  # https: kube-scheduler's own metrics
    closed = {"operator": {"probes"}, "scheduler": {"probes"}, "agent": {"probes"}, "mps": {"probes"}}
    for part, workload in workloads(objects).items():
        (policy,) = of_kind(objects, "NetworkPolicy", f"gpushare-{part}")
        found = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
        assert found == opened.get(part, {"metrics"}), part
        ports = {port["name"] for one in containers(workload) for port in one.get("ports", [])}
        assert ports - found == closed.get(part, set()), part


def test_webhooks_trust_the_certificate_that_the_server_gets(render: Render) -> None:
    objects = render()
    (secret,) = of_kind(objects, "Secret")
    assert {h["clientConfig"]["caBundle"] for h in webhooks(objects)} == {secret["data"]["ca.crt"]}
    with_cert_manager = render({"certManager": {"enabled": True}})
    assert not of_kind(with_cert_manager, "Secret")
    (certificate,) = of_kind(with_cert_manager, "Certificate", "gpushare-admission")
    assert certificate["spec"]["secretName"] == secret["metadata"]["name"]
    assert "gpushare-admission.gpushare-system.svc" in certificate["spec"]["dnsNames"]
