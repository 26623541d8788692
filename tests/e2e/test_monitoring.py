"""Prometheus scrapes the running release by the chart's PodMonitor and answers what dashboards and alerts ask."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml
from boards import CHART, Asked, asked, is_answer, lists, rules
from devcluster import progress, tools
from devcluster.settings import KUBERNETES_VERSION
from livecluster import IDLE, RELEASE, RELEASE_NAMESPACE, ROOT, Cluster, Namespace, NotYet, wait_for
from podmonitors import scrape_jobs
from realprometheus import Prometheus

from gpushare.cli.report.prometheus import PrometheusSpan, read_prometheus
from gpushare.cli.report.usage import showback
from gpushare.cli.report.usage_page import render_usage

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

Json = dict[str, Any]
PARTS = ("operator", "admission", "scheduler", "agent", "mps")


Scraping = Callable[[Json], Prometheus]


@pytest.fixture
def scraping(cluster: Cluster, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraping]:
    """Starts a Prometheus with rules, which scrapes the release as the Prometheus operator would have it do."""
    if cluster.backend != "local":
        pytest.skip("this machine reaches pods by their addresses on the local backend only")
    started: list[Prometheus] = []

    def start(with_rules: Json) -> Prometheus:
        values = [
            "--kube-version",
            KUBERNETES_VERSION,
            "--set",
            "podMonitor.enabled=true",
            "--show-only",
            "templates/monitoring/podmonitor.yaml",
        ]
        text = progress.run([tools.helm(), "template", RELEASE, CHART, "-n", RELEASE_NAMESPACE, *values], cwd=ROOT)
        wait_for("a pod of every part, none on its way out", lambda: _all_ready(cluster), seconds=180)
        pods = cluster.get("-n", RELEASE_NAMESPACE, "pods")["items"]
        folder = tmp_path_factory.mktemp("prometheus")
        (folder / "rules.yml").write_text(json.dumps(with_rules))
        config = {
            "global": {"evaluation_interval": "2s"},
            "rule_files": [str(folder / "rules.yml")],
            "scrape_configs": scrape_jobs(yaml.safe_load(text), pods, interval="3s"),
        }
        started.append(Prometheus(folder / "own", config))
        return started[-1]

    yield start
    for each in started:
        each.stop()


@pytest.fixture
def prometheus(scraping: Scraping) -> Prometheus:
    """One with the chart's own rules."""
    return scraping(rules())


def _all_ready(cluster: Cluster) -> bool:
    """Whether each part has pods and all of them are ready: an upgrade before this may still be under way."""
    pods = cluster.get("-n", RELEASE_NAMESPACE, "pods")["items"]
    ready = {
        pod["metadata"]["labels"].get("app.kubernetes.io/component")
        for pod in pods
        if any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))
    }
    return ready >= set(PARTS) and not any("deletionTimestamp" in pod["metadata"] for pod in pods)


class Audience:
    """Asks every query that must have an answer, again and again, until each has been answered once.

    What a healthy release is silent about is shown in tests/chart/test_right_nothing.py.
    """

    def __init__(self, prometheus: Prometheus) -> None:
        self._prometheus = prometheus
        self.open = [one for one in asked() if not one.silent]

    def ask(self) -> bool:
        self.open = [one for one in self.open if not is_answer(self._prometheus.query(one.plain))]
        return not self.open


def test_every_panel_and_alert_is_answered_by_the_running_release(
    space: Namespace, prometheus: Prometheus
) -> None:
    def targets() -> bool:
        """Each part's pods are found, by the ports that the PodMonitor names, and answer."""
        found = prometheus.query("min by (app_kubernetes_io_component) (up)")
        up = {one["metric"]["app_kubernetes_io_component"]: one["value"][1] for one in found}
        return up == dict.fromkeys(PARTS, "1")

    wait_for("every part scraped", targets, seconds=120)
    audience = Audience(prometheus)
    assert len(audience.open) == len(asked()) - 10
    space.create(space.tenant("whole", "1"))  # alone on a GPU with all threads: its progress can be told
    space.running("whole")
    space.connected("whole")
    progress_of = f'gpushare_pod_progress_ratio{{namespace="{space.name}", pod="whole"}}'
    wait_for("the progress of a pod that runs alone", lambda: prometheus.query(progress_of), seconds=120)
    audience.ask()
    space.cluster.kubectl("-n", space.name, "delete", "pod", "whole", "--wait=true")
    # At once: some ten seconds later something is known of the first two, and the third might have to wait.
    space.create(
        space.tenant("first", "0.6"),
        space.tenant("second", "0.6", workload="dlrm-infer"),
        space.tenant("third", "0.3"),
    )
    space.running("first", "second", "third")
    space.create(space.tenant("waits", "0.45"))  # 10% and 40% are left: room on the node, but on neither GPU
    try:
        wait_for("an answer for every panel", audience.ask, seconds=120, every=2)
    except NotYet:
        assert [f"{one.board}: {one.panel}: {one.plain}" for one in audience.open] == []
    waiting = f'gpushare_workload_pods{{state="Waiting", namespace="{space.name}"}}'
    wait_for("the pod that waits, of its workload", lambda: prometheus.query(waiting), seconds=60)
    for one in asked():
        prometheus.query(one.plain)  # refused by none, whether there is anything to say or not
    evaluated = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert {rule["health"] for rule in evaluated} == {"ok"}
    _the_report_knows_them(space, prometheus)
    firing = prometheus.query('ALERTS{severity="critical", alertstate="firing"}')
    assert [one["metric"]["alertname"] for one in firing] == []


def _the_report_knows_them(space: Namespace, prometheus: Prometheus) -> None:
    """`gpushare report` of these minutes: the pods by their workloads, what they asked for, held and got done."""
    now = time.time()
    history = read_prometheus(PrometheusSpan(prometheus.url, now - 300, now, 60))
    names = {share["metadata"]["name"] for share in space.cluster.get("-n", space.name, "gpushares")["items"]}
    rows = {row.workload: row for row in showback(history, by_workload=True) if row.namespace == space.name}
    assert set(rows) <= names | {"whole"} | {name for name in rows if "whole" in name}
    (first,) = (row for name, row in rows.items() if "first" in name)
    assert first.asked is not None
    assert first.given > 0
    assert first.kept_ratio is None or 0 <= first.kept_ratio <= 1
    assert space.name in render_usage(history)


# What a release says of workloads that have a profile.
OF_PROFILES = {"gpushare_workload_recommended_share_ratio", "gpushare_pod_predicted_progress_ratio"}
PROFILED = {"first": "resnet50-train", "second": "dlrm-infer"}


def test_two_profiled_workloads_on_one_gpu_answer_what_would_suit_them_and_what_was_predicted(
    space: Namespace, prometheus: Prometheus
) -> None:
    """And the drop-down lists of every dashboard list what there is."""
    space.create(space.tenant("filler", "1", command=IDLE))
    space.running("filler")  # the other GPU is the only one left
    for name, workload in PROFILED.items():
        share = {
            "apiVersion": "gpushare.io/v1alpha1",
            "kind": "GpuShare",
            "metadata": {"name": name},
            "spec": {"selector": {"matchLabels": {"part": name}}, "maxSlowdown": 10},
        }
        pod = space.tenant(name, "0.4", "--memory-mib", "900", workload=workload)
        pod["metadata"]["labels"] = {"part": name}
        space.create(share, pod)
        space.running(name)

        def recommended(name: str = name) -> str | None:
            status = space.cluster.get("-n", space.name, "gpushare", name).get("status", {})
            return status.get("recommendedFraction") if status.get("profile") else None

        wait_for(f"the profile of {name}", recommended, seconds=240)

    def figures(one: Asked, label: str) -> dict[str, float]:
        """The answer to a panel's query of this namespace and these two pods."""
        chosen = {"$namespace": space.name, "$workload": "first|second", "$pod": "first|second"}
        query = one.expression
        for variable, value in chosen.items():
            query = query.replace(variable, value)
        return {each["metric"].get(label, ""): float(each["value"][1]) for each in prometheus.query(query)}

    (beside,) = (one for one in asked() if one.panel == "Predicted against observed")
    (suits,) = (one for one in asked() if one.panel == "What would suit one pod?")
    assert {beside.silent, suits.silent} == OF_PROFILES
    found = wait_for(
        "what was predicted of both",
        lambda: by_pod if (by_pod := figures(beside, "pod")).keys() == PROFILED.keys() else None,
        seconds=120,
        every=1,
    )
    assert all(0.2 < each < 5 for each in found.values()), found

    def are_recommended() -> bool:
        """The panel shows the larger of what the GpuShares recommend; a profile may be replaced meanwhile."""
        shares = space.cluster.get("-n", space.name, "gpushares")["items"]
        largest = max(float(each["status"].get("recommendedFraction") or 0) for each in shares)
        return figures(suits, "") == pytest.approx({"": 100 * largest})

    wait_for("what would suit one pod", are_recommended, seconds=60, every=1)
    for one in asked():
        if one.silent in OF_PROFILES:
            assert is_answer(prometheus.query(one.plain)), one

    listed = {one: set(prometheus.label_values(one.selector, one.label)) for one in lists()}
    assert [one for one, values in listed.items() if not values] == []
    entries = {"namespace": space.name, "gpushare": "first", "pod": "second"}
    for one, values in listed.items():
        assert entries.get(one.label) in {None, *values}, (one, values)
    gpus = {gpu["uuid"] for gpu in space.cluster.gpus()}
    assert [values for one, values in listed.items() if one.label == "gpu_uuid"] == [gpus]
