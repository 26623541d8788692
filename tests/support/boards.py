"""The chart's dashboards, alerts and PodMonitors as Prometheus has them."""

import json
import math
import re
from collections.abc import Sequence
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

# Series that a healthy release does not have, and since when it would have them. A query that asks for one of them
# and does not say what to show instead ("or") is silent: tests/chart/test_right_nothing.py shows both of each.
RIGHT_NOTHING = {
    "gpushare_mps_held_connections": "by reason, once a process waits",
    "gpushare_mps_mismatches": "by kind, once a process runs otherwise than decided",
    "gpushare_mps_refused_connections_total": "by reason, once a connection was refused",
    "gpushare_gate_throttle_refused_total": "by reason, once an ask was refused",
    "gpushare_retractions_refused_total": "by reason, once an eviction was refused",
    "gpushare_extender_bind_failures_total": "by reason, once a binding failed",
    "gpushare_admission_rejections_total": "by reason, once a review was refused",
    "gpushare_workload_recommended_share_ratio": "once a profile is known",
    "gpushare_pod_predicted_progress_ratio": "once the model predicts",
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

    @property
    def silent(self) -> str | None:
        """The series for want of which a healthy release has no answer to this query."""
        named = (name for name in RIGHT_NOTHING if re.search(rf"{name}\b", self.expression))
        return None if " or " in self.expression else next(named, None)


def is_answer(samples: Sequence[Json]) -> bool:
    """Whether Prometheus' answer to a query has a figure; NaN is none, and one infinite value spoils all."""
    values = [float(sample["value"][1]) for sample in samples]
    return any(map(math.isfinite, values)) and not any(map(math.isinf, values))


def asked() -> list[Asked]:
    """Every query of every panel."""
    return [
        Asked(name, panel["title"], target["expr"])
        for name, board in BOARDS.items()
        for panel in board["panels"]
        for target in panel.get("targets", [])
    ]


@dataclass(frozen=True)
class Listed:
    """One drop-down list: the values of a label of what a selector finds."""

    selector: str
    label: str


def lists() -> list[Listed]:
    """Every drop-down list, with every variable at "All"."""
    queries = [
        v["query"] for board in BOARDS.values() for v in board["templating"]["list"] if v["type"] == "query"
    ]
    words = [query.removeprefix("label_values(").removesuffix(")").rpartition(",") for query in queries]
    return [Listed(re.sub(r"\$[a-z]+", ".+", selector), label.strip()) for selector, _, label in words]


def rules() -> Json:
    """The chart's alerts as its template gives them to Prometheus."""
    found: Json = yaml.safe_load((CHART / "alerts.yaml").read_text())
    return found
