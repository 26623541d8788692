"""A real Prometheus scrapes what every part serves, and answers every query of every panel with data."""

import json
from collections.abc import Iterator

import pytest
from boards import Asked, Listed, asked, is_answer, lists, rules
from exposed import registries
from livecluster import wait_for
from realprometheus import Prometheus

from gpushare.runtime.http import MetricsServer, metrics_route

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Scrapes all parts each second, with every figure present and every counter growing."""
    folder = tmp_path_factory.mktemp("prometheus")
    routes = {f"/{part}": metrics_route(registry) for part, registry in registries(folder).items()}
    server = MetricsServer(routes, 0, "127.0.0.1")
    server.start()
    (folder / "rules.yml").write_text(json.dumps(rules()))
    jobs = [
        {
            "job_name": path.strip("/"),
            "metrics_path": path,
            "honor_labels": True,
            "scrape_interval": "1s",
            "scrape_timeout": "1s",
            "static_configs": [{"targets": [f"127.0.0.1:{server.port}"]}],
        }
        for path in routes
    ]
    config = {
        "global": {"evaluation_interval": "500ms"},
        "rule_files": [str(folder / "rules.yml")],
        "scrape_configs": jobs,
    }
    running = Prometheus(folder / "own", config)
    grown = "min(count_over_time(up[1m]))"
    wait_for(
        "three scrapes of each part",
        lambda: any(float(one["value"][1]) >= 3 for one in running.query(grown)),
        seconds=60,
    )
    yield running
    running.stop()
    server.close()


@pytest.mark.parametrize("one", asked(), ids=lambda one: f"{one.board}: {one.panel}")
def test_every_query_of_every_panel_returns_data(prometheus: Prometheus, one: Asked) -> None:
    """A machine under load can be late for a scrape, and its series are gone until the next."""

    def answered() -> bool:
        found = prometheus.query(one.plain)
        return is_answer(found) and all(is_answer([sample]) for sample in found)

    wait_for(one.plain, answered, seconds=60)


@pytest.mark.parametrize("one", lists(), ids=lambda one: f"{one.label} of {one.selector}")
def test_every_drop_down_list_has_entries(prometheus: Prometheus, one: Listed) -> None:
    assert all(wait_for(one.selector, lambda: prometheus.label_values(one.selector, one.label), seconds=60))


def test_prometheus_evaluates_every_alert(prometheus: Prometheus) -> None:
    expected = {rule["alert"] for group in rules()["groups"] for rule in group["rules"]}

    def evaluated() -> dict[str, str]:
        found = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
        health = {rule["name"]: rule["health"] for rule in found}
        return health if "unknown" not in health.values() and health.keys() == expected else {}

    health = wait_for("every alert evaluated", evaluated, seconds=60)
    assert set(health.values()) == {"ok"}
