"""The gate and its daemon under load, attack and faults, on a real GPU or (--twin) on the twin; one JSON of
results.

    PYTHONPATH=src python3 tests/gpu/gate_suite.py [--twin] [--agent] [--only NAME,...] [--out DIR] [--faults 50]

Needs root, unshare, setpriv, writable cgroups; on a GPU also nvcc, nvidia-ml-py and prometheus-client. It changes
neither compute mode nor MIG. Every step has its own time limit; a failed one is recorded and the next one runs.

With --agent a node agent runs beside the host, between the tests' API server and kubelet: decisions come from
pods' annotations by it, and every fault is also looked at through its GpuNode and events.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from gate_bench import SRC, Bench, compile_tenant
from gate_faults import (
    agent_killed,
    daemon_killed,
    illegal_access,
    keeper_killed,
    killed_mid_kernel,
    many_faults,
    newcomers,
    server_killed,
    terminated_mid_kernel,
)
from gate_hostile import flooded, mute, one_pods_clients, wasted
from gate_promises import (
    burst,
    cap_of_the_pod,
    clients_49,
    exhausted,
    latency_order,
    new_decision,
    no_decision,
    overrun,
    raw,
    self_test,
    several_contexts,
    silent,
    start_cost,
    two_processes,
)
from limit import time_limit

STEP_SECONDS = 120.0
LIMITS = {"clients_49": 180.0, "burst": 150.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--twin", action="store_true", help="on a machine without a GPU")
    parser.add_argument("--agent", action="store_true", help="with a node agent beside the host")
    parser.add_argument("--only", default="")
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--base", default="/run/gpushare-suite")
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument(
        "--fault-seconds", type=float, default=240.0, help="the faults end then (default: %(default)g)"
    )
    options = parser.parse_args()
    LIMITS["many_faults"] = 40 + options.fault_seconds
    base, out = Path(options.base), Path(options.out)
    if options.twin:
        program = ["env", f"PYTHONPATH={SRC}", sys.executable, str(Path(__file__).parent / "gate_twin_tenant.py")]
        gpu_uuid = None
    else:
        program = compile_tenant(base)
        gpu_uuid = subprocess.run(
            ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout.split()[0]
    steps: list[tuple[str, Callable[[Bench], dict[str, Any]]]] = [
        (step.__name__, step)
        for step in (
            self_test,
            raw,
            start_cost,
            burst,
            cap_of_the_pod,
            two_processes,
            overrun,
            several_contexts,
            exhausted,
            new_decision,
            no_decision,
            silent,
            latency_order,
            clients_49,
            one_pods_clients,
            flooded,
            wasted,
            mute,
            illegal_access,
            newcomers,
            daemon_killed,
            server_killed,
            keeper_killed,
            terminated_mid_kernel,
            killed_mid_kernel,
        )
    ]
    steps.append(("many_faults", lambda b: many_faults(b, options.faults, options.fault_seconds)))
    wanted = [name for name in options.only.split(",") if name]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # out of time: the logs are wanted all the more
    bench = Bench(base, twin=options.twin, program=program, gpu_uuid=gpu_uuid)
    results: list[dict[str, Any]] = []
    try:
        bench.start_host()
        up = bench.until_active(120)
        results.append({"step": "host up", "ok": True, "seconds": up})
        if options.agent:
            bench.start_agent(Path(f"{base}-agent"))
            steps.insert(-1, ("agent_killed", agent_killed))
        for name, step in steps:
            if wanted and name not in wanted:
                continue
            begun = time.time()
            row: dict[str, Any] = {"step": name}
            try:
                with time_limit(LIMITS.get(name, STEP_SECONDS)):
                    row["details"] = step(bench)
                row["ok"] = True
            except Exception as error:
                row.update(
                    ok=False, error=f"{type(error).__name__}: {error}", trace=traceback.format_exc()[-1500:]
                )
                row["tenants"] = [(t.pod and t.pod[-4:], t.events[-2:], t.noise[-2:]) for t in bench.tenants[:6]]
            row["seconds"] = round(time.time() - begun, 2)
            try:
                with time_limit(STEP_SECONDS):
                    bench.clear()
            except Exception as error:
                row["clear"] = str(error)
            results.append(row)
            print(json.dumps(row, default=str)[:1500], flush=True)
            (out / "gate_suite.json").write_text(json.dumps(results, indent=1, default=str))
    finally:
        bench.save_logs(out)
        bench.close()
    failed = [row["step"] for row in results if not row["ok"]]
    print(f"{len(results) - len(failed)} of {len(results)} steps hold; failed: {failed or 'none'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
