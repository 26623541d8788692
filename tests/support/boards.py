"""The chart's dashboards, alerts and PodMonitors as Prometheus has them."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "gpushare"
Json = dict[str, Any]
BOARDS: dict[str, Json] = {
    path.stem: json.loads(path.read_text()) for path in sorted((CHART / "dashboards").glob("*.json"))
}


@dataclass(frozen=True)
class Asked:
    """One query of one panel."""

    board: str
    panel: str
    expression: str

    @property
    def plain(self) -> str:
        """The query with every variable at "All", as Grafana would send it."""
        return re.sub(r"\$[a-z]+", ".+", self.expression)


def asked() -> list[Asked]:
    """Every query of every panel."""
    return [
        Asked(name, panel["title"], target["expr"])
        for name, board in BOARDS.items()
        for panel in board["panels"]
        for target in panel.get("targets", [])
    ]


def lists() -> list[str]:
    """The selectors of the drop-down lists, as label_values takes them."""
    queries = [
        v["query"] for board in BOARDS.values() for v in board["templating"]["list"] if v["type"] == "query"
    ]
    return [re.sub(r"\$[a-z]+", ".+", query.removeprefix("label_values(").rpartition(",")[0]) for query in queries]


def rules() -> Json:
    """The chart's alerts as its template gives them to Prometheus."""
    found: Json = yaml.safe_load((CHART / "alerts.yaml").read_text())
    return found
