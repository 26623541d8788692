"""gpushare by its chart on a Kubernetes with real GPUs (or the twin's); one JSON of results, and a table.

    hack/gpu/cluster --bundle DIR up install test run -- python3 tests/gpu/chart_suite.py --out DIR
    hack/gpu/dry-run --bundle DIR up install test run -- python3 tests/gpu/chart_suite.py --out DIR

Standard library only. Every step has its own time limit; a failed one is recorded and the next one runs. A step
that needs what this cluster lacks (another GPU, the node's own processes) says so. `met` is a figure's bar: a step
that misses it holds, since a loaded machine is no broken promise, but is named; with --strict it fails the suite.

It harms who else uses these GPUs: it faults MPS servers, kills the agent and the MPS host where it runs on their
node, and upgrades the release. So it refuses a cluster with tenants (--yes: go on), and puts the release's values
back at its end.
"""

import argparse
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

import chart_checks as checks
import chart_newcomer
import chart_trouble as trouble
from chart_bench import ChartBench, Cluster, Details, NotHere, tenants_of
from limit import time_limit

STEP_SECONDS = 75.0
LIMITS = {
    "throttled": 220.0,
    "newcomer": 240.0,
    "two_gpus": 150.0,
    "deleted_in_kernel": 120.0,
    "agent_cost": 100.0,
    "job_deadline": 100.0,
    "own_threads": 120.0,
}
STEPS: tuple[Callable[[ChartBench], Details], ...] = (
    checks.found,
    checks.given,
    checks.greedy,
    checks.first_kernel,
    checks.ten_at_once,
    checks.filled,
    checks.outside,
    trouble.deleted_in_kernel,
    trouble.job_deadline,
    trouble.oom_killed,
    checks.upgraded,
    trouble.agent_and_gate_killed,
    trouble.fault,
    trouble.host_restarted,
    checks.own_threads,
    trouble.throttled,
    chart_newcomer.newcomer,
    trouble.agent_cost,
    checks.two_gpus,
    checks.uninstalled,
)


class Outcome(StrEnum):
    """What became of a step."""

    HOLDS = "holds"
    BAR_MISSED = "holds, bar missed"
    FAILS = "FAILS"
    NOT_HERE = "not here"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--only", default="", help="names of steps, by commas")
    parser.add_argument("--skip", default="", help="names of steps, by commas")
    parser.add_argument("--patience", type=float, default=1.0, help="times the limits, for a slow machine")
    parser.add_argument("--seconds", type=float, default=500.0, help="after which no further step begins")
    parser.add_argument("--oom-kills", type=int, default=3, help="of the step oom_killed")
    parser.add_argument("--strict", action="store_true", help="a missed bar fails the suite")
    parser.add_argument("--yes", action="store_true", help="also where others use the GPUs: it harms them")
    options = parser.parse_args()
    if not options.yes and (used := tenants_of(Cluster(os.environ["KUBECONFIG"], "kubectl", "existing"))):
        print(f"these pods share the cluster's GPUs: {', '.join(used)}. The suite would harm them (--yes: do so)")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what it changed is put back
    only, skip = ([name for name in given.split(",") if name] for given in (options.only, options.skip))
    options.out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    bench = ChartBench(options.out)
    bench.oom_kills = options.oom_kills
    limits = LIMITS | {"oom_killed": 40.0 + trouble.OOM_ROUND_SECONDS * options.oom_kills}
    results: list[Details] = []
    try:
        for step in STEPS:
            name = step.__name__
            if (only and name not in only) or name in skip:
                continue
            if time.monotonic() - begun > options.seconds:
                results.append({"step": name, "ok": None, "why": "no time was left"})
                continue
            results.append(_one(bench, step, limits.get(name, STEP_SECONDS) * options.patience))
            (options.out / "chart_suite.json").write_text(json.dumps(results, indent=1, default=str))
    finally:
        results += _put_back(bench)
        bench.close()
    (options.out / "chart_suite.json").write_text(json.dumps(results, indent=1, default=str))
    (options.out / "chart_suite.md").write_text(table(results))
    print(summary(results), flush=True)
    return exit_code(results, strict=options.strict)


def outcome(row: Details) -> Outcome:
    """What became of a step, by its record."""
    if row["ok"] is None:
        return Outcome.NOT_HERE
    if not row["ok"]:
        return Outcome.FAILS
    return Outcome.BAR_MISSED if missed(row.get("details")) else Outcome.HOLDS


def missed(details: object) -> bool:
    """Whether a bar was missed somewhere in what a step found."""
    if not isinstance(details, dict):
        return False
    return details.get("met") is False or any(missed(part) for part in details.values())


def summary(results: list[Details]) -> str:
    """The results in a sentence."""
    by_outcome = {kind: [row["step"] for row in results if outcome(row) is kind] for kind in Outcome}
    kept = len(by_outcome[Outcome.HOLDS]) + len(by_outcome[Outcome.BAR_MISSED])
    return (
        f"{kept} of {len(results)} steps hold; bar missed: {by_outcome[Outcome.BAR_MISSED] or 'none'}; "
        f"failed: {by_outcome[Outcome.FAILS] or 'none'}"
    )


def exit_code(results: list[Details], *, strict: bool) -> int:
    """1 after a failed step, or with `strict` after a missed bar."""
    bad = {Outcome.FAILS, Outcome.BAR_MISSED} if strict else {Outcome.FAILS}
    return int(any(outcome(row) in bad for row in results))


def _put_back(bench: ChartBench) -> list[Details]:
    """Put the release's values back; return a row where that failed."""
    try:
        with time_limit(60):
            bench.restore()
    except Exception as error:
        return [{"step": "put_back", "ok": False, "error": f"the release keeps the suite's values: {error}"}]
    return []


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
    except Exception as error:  # pods that do not go are in the next step's way
        row["ok"] = False
        row["clear"] = str(error)
        row.setdefault("error", f"its pods did not go: {error}")
    print(json.dumps(row, default=str)[:2500], flush=True)
    return row


def table(results: list[Details]) -> str:
    """The results as Markdown."""
    rows = ["| step | | seconds | seen |", "|---|---|---|---|"]
    for row in results:
        seen = row.get("error") or row.get("details") or row.get("why")
        text = json.dumps(seen, default=str) if isinstance(seen, dict) else str(seen)
        rows.append(
            f"| {row['step']} | {outcome(row)} | {row.get('seconds', '')} | {text[:600].replace('|', ' ')} |"
        )
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())
