"""docs/measurements/ending-h200.md says what the recorded rounds say."""

import json
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = {
    "fp16_product": "fp16 products of 8,192 square",
    "transformer_train_bf16": "transformer, bf16 training",
    "long": "a kernel that spins for 6 s",
    "big_product": "an fp32 product of 40,960 square",
}


def _end(row: dict[str, object]) -> str:
    way = str(row["way"])
    if way == "terminate_client while nothing of it is queued":
        return "terminate_client between products, the GPU idle"
    if way == "kill -9":
        return "kill -9 while it works"
    if way in {"stopped for 0.6 s, kill -9", "stopped for 0.6 s, terminate_client, kill -9"}:
        return "stopped, then killed"
    if way == "stopped for 0.6 s, terminate_client, continued":
        return "stopped, terminate_client without answer for 15 s, continued"
    if way == "launching threads held for 0.6 s, terminate_client, kill -9":
        answer = "" if row["answer"] == "ok" else " without answer for 15 s"
        return f"launching threads held, terminate_client{answer}, kill -9"
    if way.startswith("stopped for 0.6 s, launching threads held"):
        answer = "" if row["answered_in_time"] else " without answer for 1 s"
        return f"stopped, launching threads held, terminate_client{answer}, kill -9"
    if way.startswith("as the gate does"):
        assert row["answered_in_time"]
        return "as the gate does" + (", caught in libc" if way.endswith("libc") else "")
    assert "terminate_client" in way
    return "terminate_client while it works"


def test_the_page_says_what_the_rounds_say():
    rounds: Counter[tuple[str, str]] = Counter()
    faults: Counter[tuple[str, str]] = Counter()
    for line in (ROOT / "tests/data/ending/rounds.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["way"] == "by itself":
            continue
        key = PROGRAMS[row["program"]], _end(row)
        rounds[key] += 1
        faults[key] += bool(row["faults"])
    page = (ROOT / "docs/measurements/ending-h200.md").read_text()
    told = {line for line in page.splitlines() if line.startswith("|")}
    assert {f"| {' | '.join(key)} | {rounds[key]} | {faults[key]} |" for key in rounds} == {
        line for line in told if line.split(" | ")[0].removeprefix("| ") in PROGRAMS.values()
    }


def test_a_fault_within_products_costs_the_neighbour_or_the_newcomer():
    rows = [json.loads(line) for line in (ROOT / "tests/data/ending/rounds.jsonl").read_text().splitlines()]
    faults = [row for row in rows if row["faults"] and row["program"] == "fp16_product"]
    beside = [row["neighbour_lives"] for row in faults if row["neighbour"]]
    alone = [row.get("newcomer") or row.get("second_began", "") for row in faults if not row["neighbour"]]
    assert (beside, alone) == ([False] * 8, [""] * 6), "docs/measurements/ending-h200.md"
