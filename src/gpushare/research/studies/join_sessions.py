"""Join several collections into one dataset: `python -m gpushare.research.studies.join_sessions OUT NAME=FILE...`.

Each run is marked with its session. Solo windows at 100% below 0.9 of the same program's fastest solo window at
any cap in that session are left out: only a slow host explains them. A program without any other solo window at
100% is dropped from the session. Prints what was left out.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

LEAST = 0.9


def kept(runs: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Drop a session's disturbed solo windows, and programs that have no others."""
    fastest: dict[str, float] = defaultdict(float)
    for run in runs:
        if len(run["tenants"]) == 1:
            program = run["tenants"][0]["workload"]
            fastest[program] = max(fastest[program], run["iterations_per_s"][0])
    chosen, alone, slow = [], set(), 0
    for run in runs:
        tenant = run["tenants"][0]
        if len(run["tenants"]) == 1 and tenant["thread_percentage"] == 100:
            if run["iterations_per_s"][0] < LEAST * fastest[tenant["workload"]]:
                slow += 1
                continue
            alone.add(tenant["workload"])
        chosen.append(run)
    usable = [run for run in chosen if all(tenant["workload"] in alone for tenant in run["tenants"])]
    lost = sorted(set(fastest) - alone)
    print(
        f"{name}: left out {slow} slow solo windows and {len(chosen) - len(usable)} runs with "
        f"{', '.join(lost) or 'no one'}"
    )
    return [{**run, "session": name} for run in usable]


def main(output: Path, sources: list[str]) -> None:
    """Write the joined dataset; all sources must agree in their headers."""
    headers, lines = [], []
    for source in sources:
        name, _, path = source.partition("=")
        header, *runs = (json.loads(line) for line in Path(path).read_text().splitlines() if line.strip())
        headers.append(header)
        lines += kept(runs, name)
    if any(header != headers[0] for header in headers):
        raise SystemExit(f"the headers differ: {headers}")
    output.write_text("".join(json.dumps(each, separators=(",", ":")) + "\n" for each in [headers[0], *lines]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
