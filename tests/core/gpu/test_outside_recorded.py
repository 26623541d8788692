"""What a real GPU listed of processes that became MPS clients or left MPS, held to its page and to our rule."""

import json
import statistics
from pathlib import Path

from gpushare.core.gpu.outside import AGAIN_SECONDS, POD_LOOKS, OutsideProcess, OutsideWatch, look

ROOT = Path(__file__).resolve().parents[3]
ROWS = [json.loads(line) for line in (ROOT / "tests" / "data" / "outside" / "h200.jsonl").read_text().splitlines()]
PAGE = (ROOT / "docs" / "measurements" / "cluster-h200.md").read_text()


def listed(stays: float) -> list[float]:
    return [row["as_outside"] for row in ROWS if row["kind"] == "outside" and row["stays"] == stays]


def test_who_becomes_a_client_was_never_listed_as_outside() -> None:
    clients = [row for row in ROWS if row["kind"] == "clients"]
    assert len(clients) == 30
    assert all(row["as_outside"] is None and row["as_client"] > 0 for row in clients)
    assert "| 30 | **0** | |" in PAGE


def test_the_page_has_for_how_long_the_others_were_listed() -> None:
    for stays in (0.0, 0.1, 0.3):
        found = listed(stays)
        figures = ", ".join(f"{each:.2f}" for each in (min(found), statistics.median(found), max(found)))
        assert f"| {len(found)} | {len(found)} | {figures} |" in PAGE


def test_the_shortest_processes_in_a_row_are_found_at_the_third_look() -> None:
    """As long as the shortest of the record, each begun when the one before ended."""
    length = min(listed(0.0))
    assert length < AGAIN_SECONDS, "none is there for two looks"
    watch, now = OutsideWatch(), 0.1
    for number in range(POD_LOOKS):
        watch, found = look(watch, [OutsideProcess(int(now / length), 1, "uid")], (), now)
        assert bool(found) is (number == POD_LOOKS - 1)
        now += AGAIN_SECONDS
