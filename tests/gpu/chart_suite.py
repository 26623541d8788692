"""gpushare by its chart on a Kubernetes with real GPUs (or the twin's); one JSON of results, and a table.

    hack/gpu/cluster --bundle DIR up install test run -- python3 tests/gpu/chart_suite.py --out DIR
    hack/gpu/dry-run --bundle DIR up install test run -- python3 tests/gpu/chart_suite.py --out DIR

Standard library only. Every step has its own time limit; a failed one is recorded and the next one runs. A step
that needs what this cluster lacks (another GPU, the node's own processes) says so. `met` is a figure's bar,
which fails nothing: a loaded machine is no broken promise.
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import chart_checks as checks
import chart_trouble as trouble
from chart_bench import ChartBench, Details, NotHere
from limit import time_limit

STEP_SECONDS = 75.0
LIMITS = {"throttled": 170.0, "two_gpus": 150.0, "deleted_in_kernel": 100.0, "agent_cost": 90.0}
STEPS: tuple[Callable[[ChartBench], Details], ...] = (
    checks.found,
    checks.greedy,
    checks.first_kernel,
    checks.ten_at_once,
    checks.filled,
    checks.outside,
    trouble.deleted_in_kernel,
    trouble.job_deadline,
    checks.upgraded,
    trouble.agent_and_gate_killed,
    trouble.fault,
    trouble.host_restarted,
    checks.own_threads,
    trouble.throttled,
    trouble.agent_cost,
    checks.two_gpus,
    checks.uninstalled,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--only", default="", help="names of steps, by commas")
    parser.add_argument("--skip", default="", help="names of steps, by commas")
    parser.add_argument("--patience", type=float, default=1.0, help="times the limits, for a slow machine")
    parser.add_argument("--seconds", type=float, default=500.0, help="after which no further step begins")
    options = parser.parse_args()
    only, skip = ([name for name in given.split(",") if name] for given in (options.only, options.skip))
    options.out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    bench = ChartBench(options.out)
    results: list[Details] = []
    try:
        for step in STEPS:
            name = step.__name__
            if (only and name not in only) or name in skip:
                continue
            if time.monotonic() - begun > options.seconds:
                results.append({"step": name, "ok": None, "why": "no time was left"})
                continue
            results.append(_one(bench, step, LIMITS.get(name, STEP_SECONDS) * options.patience))
            (options.out / "chart_suite.json").write_text(json.dumps(results, indent=1, default=str))
    finally:
        bench.close()
    (options.out / "chart_suite.json").write_text(json.dumps(results, indent=1, default=str))
    (options.out / "chart_suite.md").write_text(table(results))
    failed = [row["step"] for row in results if row["ok"] is False]
    held = sum(row["ok"] is True for row in results)
    print(f"{held} of {len(results)} steps hold; failed: {failed or 'none'}", flush=True)
    return 1 if failed else 0


def _one(bench: ChartBench, step: Callable[[ChartBench], Details], seconds: float) -> Details:
    begun = time.monotonic()
    row: Details = {"step": step.__name__}
    try:
        with time_limit(seconds):
            row |= {"details": step(bench), "ok": True}
    except NotHere as missing:
        row |= {"ok": None, "why": str(missing)}
    except Exception as error:
        row |= {"ok": False, "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-1500:]}
        row["pods"] = bench.cluster.try_kubectl("-n", bench.space.name, "get", "pods,gpushares", "-o", "wide").out
        row["events"] = bench.cluster.try_kubectl("-n", bench.space.name, "events").out[-2500:]
    row["seconds"] = round(time.monotonic() - begun, 2)
    try:
        with time_limit(60):
            bench.clear()
    except Exception as error:
        row["clear"] = str(error)
    print(json.dumps(row, default=str)[:2500], flush=True)
    return row


def table(results: list[Details]) -> str:
    """The results as Markdown."""
    words = {True: "holds", False: "FAILS", None: "not here"}
    rows = ["| step | | seconds | seen |", "|---|---|---|---|"]
    for row in results:
        seen = row.get("details") or row.get("error") or row.get("why")
        text = json.dumps(seen, default=str) if isinstance(seen, dict) else str(seen)
        rows.append(
            f"| {row['step']} | {words[row['ok']]} | {row.get('seconds', '')} | {text[:600].replace('|', ' ')} |"
        )
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())
