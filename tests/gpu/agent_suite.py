"""The node agent on a real GPU: profiles of programs, its own cost with 8 tenants, progress inferred and measured.

    python tests/gpu/agent_suite.py --out DIR [--only STEP ...] [--minutes 5] [--profile-seconds 4]
    python tests/gpu/agent_suite.py --out DIR --simulated [--only STEP ...]     # agent and progress without a GPU

tests/gpu/README.md says how to run it on a machine without a network. Needs an NVIDIA driver, PyTorch, and
gpushare's dependencies; no root and no Kubernetes: the agent runs as it is deployed, between the tests' API server
and kubelet (agent_bench.py), beside a real MPS daemon with real tenants. Each step has a time limit and writes
STEP.json to DIR as it goes; summary.md at the end has the tables. It sets nothing on the GPU.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from agent_bench import (
    NODE,
    NodeAgent,
    StandInGate,
    cpu_seconds,
    environment,
    huge_pages,
    ids_of,
    mappings_of,
    memory_of,
    pod_of,
    threads_of,
    wait_until,
)
from limit import time_limit
from progress import Law, Processes, Side, dataset_lines, run_progress
from summary import agent_lines, profile_lines, progress_lines
from threadtimes import each_second, thread_times

from gpushare.core.api import to_json
from gpushare.core.gpu import Counters
from gpushare.kube import GPUSHARES
from gpushare.twin.contention import WORKLOADS

PROGRAM_FILE = Path(__file__).with_name("programs.py")
PROGRAMS = tuple(re.findall(r"^def ([a-z]\w*)\(\) -> Step:", PROGRAM_FILE.read_text(), re.MULTILINE))
TENANTS = (
    "cnn_train_fp32",
    "transformer_train_bf16",
    "cnn_inference_b1",
    "memory_stream",
    "fft",
    "sort_integers",
    "fp64_product",
    "tiny",
)
WARM_SECONDS = 20.0  # CUDA contexts, first samples, kubelet's registration
SETS = {2: 9, 3: 8, 4: 7}
SET_SECONDS = 12.0
LIMITS = {"contract": 60.0, "profiles": 240.0, "counters": 90.0, "agent": 420.0, "progress": 500.0}
MARGIN_SECONDS = 60.0  # beyond the minutes that were asked for


def profile_programs(programs: Sequence[str], seconds: float, keep: Callable[[Any], None]) -> list[dict[str, Any]]:
    """`gpushare profile run` over programs."""
    found: list[dict[str, Any]] = []
    for name in programs:
        keep(found)
        command = [
            sys.executable,
            "-c",
            "from gpushare.cli import main; main()",
            "profile",
            "run",
            "--json",
            "--",
            sys.executable,
            str(PROGRAM_FILE),
            name,
            str(seconds),
        ]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=seconds + 120)
        text = done.stdout[done.stdout.find("{") :]
        if done.returncode or not text:
            found.append({"name": name, "error": (done.stderr or done.stdout)[-400:]})
            continue
        rate = re.search(r"([\d.]+)/s", done.stdout)
        found.append({"name": name, "iterations_per_s": float(rate[1]) if rate else None, **json.loads(text)})
        print(f"profiled {name}", flush=True)
    return found


class Mps:
    """A plain MPS daemon of its own directories."""

    def __init__(self, root: Path, uuid: str) -> None:
        self.pipe, log = root / "pipe", root / "log"
        for directory in (self.pipe, log):
            directory.mkdir(parents=True)
        self.environment = {
            **environment(),
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(log),
        }
        daemon = {**self.environment, "CUDA_VISIBLE_DEVICES": uuid}
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=daemon, check=True, timeout=20)

    def quit(self) -> None:
        subprocess.run(
            ["nvidia-cuda-mps-control"],
            input="quit -t 5\n",
            text=True,
            env=self.environment,
            timeout=30,
            check=False,
        )


def rate_file(path: Path) -> tuple[float, int] | None:
    """Time and count that a program wrote last."""
    try:
        at, count = path.read_text().split()
    except (OSError, ValueError):
        return None
    return float(at), int(count)


def rate_between(
    first: tuple[float, int] | None, last: tuple[float, int] | None, alone: dict[str, Any] | None
) -> float | None:
    """Rate between two counts relative to the rate alone; None where one of them is missing."""
    if not first or not last or not alone or not alone.get("iterations_per_s") or last[0] <= first[0]:
        return None
    return (last[1] - first[1]) / (last[0] - first[0]) / float(alone["iterations_per_s"])


def signature(program: str, alone: dict[str, dict[str, Any]]) -> dict[str, float]:
    """A program's counters alone: as profiled, else of a typical workload, so that attribution has its work."""
    if program in alone:
        return dict(alone[program]["counters"])
    names = sorted(WORKLOADS)
    return WORKLOADS[names[TENANTS.index(program) % len(names)]].solo.as_dict()


def agent_cost(
    work: Path,
    uuid: str,
    minutes: float,
    profiles: Sequence[dict[str, Any]],
    *,
    is_simulated: bool,
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """The agent's CPU and memory with 8 tenants under MPS, and what it says of them against their own rates."""
    alone = {each["name"]: each for each in profiles if "counters" in each}
    mps = None if is_simulated else Mps(work / "mps", uuid)
    node = NodeAgent(work / "n", work / "run", simulated="H200:1" if is_simulated else "")
    counters = Counters(sm_util=0.9, fp32_util=0.4, dram_bw_util=0.5, integer_util=0.2) if is_simulated else None
    gate = StandInGate(work / "run", uuid, counters)
    tenants: list[tuple[int, str, int]] = []
    running: list[subprocess.Popen[bytes]] = []
    try:
        for number, program in enumerate(TENANTS):
            name = program.replace("_", "-")
            pod = pod_of(name, uuid, uid=f"uid-{program}", threads=25, WORKLOAD=program)
            node.put(pod, ids_of(uuid, number))
            placement = {"podUid": f"uid-{program}", "pod": name}
            profile = {"counters": signature(program, alone), "gpuModel": ""}
            metadata = {"name": name, "namespace": "shop", "uid": f"gs-{program}"}
            share = {"metadata": metadata, "status": {"profile": profile, "placements": [placement]}}
            node.api.store.put(GPUSHARES, share)
            seconds = minutes * 60 + 2 * WARM_SECONDS
            command = [
                sys.executable,
                str(PROGRAM_FILE),
                program,
                str(seconds),
                "--rate-file",
                str(work / program),
            ]
            process = subprocess.Popen(
                command if mps else ["sleep", str(seconds)],
                stdout=subprocess.DEVNULL,
                env={**(mps.environment if mps else environment()), "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"},
            )
            running.append(process)
            tenants.append((process.pid, f"uid-{program}", 25))
        gate.show(tenants, counters)
        node.start()
        result = _watch(node, uuid, work, minutes, alone, keep)
        result["tenants"] = sum(process.poll() is None for process in running)
        return result
    finally:
        for process in running:
            process.terminate()
        node.close()
        gate.close()
        for process in running:
            process.wait(20)
        if mps is not None:
            mps.quit()


def _watch(
    node: NodeAgent,
    uuid: str,
    work: Path,
    minutes: float,
    alone: dict[str, dict[str, Any]],
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    memory: list[dict[str, float]] = []

    def remember() -> None:
        memory.append({"seconds": round(time.time() - node.starts[0], 1), **memory_of(node.pid)})

    for _ in range(4):
        time.sleep(WARM_SECONDS / 4)
        remember()
    started, cpu, looked = time.monotonic(), cpu_seconds(node.pid), thread_times([node.pid])
    counted = {program: rate_file(work / program) for program in TENANTS}
    inferred: dict[str, list[float]] = {}
    result: dict[str, Any] = {
        "python": sys.version.split()[0],
        "cores": len(os.sched_getaffinity(0)),
        "huge_pages": huge_pages(),
    }
    while (seconds := time.monotonic() - started) < minutes * 60:
        time.sleep(min(10.0, minutes * 60 - seconds))
        remember()
        for pod, value in node.figures("gpushare_pod_progress_ratio").items():
            inferred.setdefault(pod.replace("-", "_"), []).append(value)
        seconds = time.monotonic() - started
        result |= {
            "minutes": seconds / 60,
            "cpu_percent_of_one_core": 100 * (cpu_seconds(node.pid) - cpu) / seconds,
            "thread_times": each_second(looked, thread_times([node.pid]), seconds),
            "resident_mib_max": max(row["Rss"] for row in memory),
            "memory": memory,
        }
        keep(result)
    result["progress"] = {
        program: {
            "inferred": sum(inferred[program]) / len(inferred[program]) if program in inferred else None,
            "measured": rate_between(counted[program], rate_file(work / program), alone.get(program)),
        }
        for program in TENANTS
    }
    gpu = node.gpu(uuid)
    return result | {
        "mappings": mappings_of(node.pid),
        "threads": threads_of(node.pid),
        "modules": node.modules(),
        "gpunode_writes": len(node.api.statuses),
        "gpunode": [to_json(gpu)] if gpu else [],
        "metrics": node.metrics().splitlines(),
        "log": node.log(),
    }


def infer_progress(
    work: Path, uuid: str, read: argparse.Namespace, keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Random pairs, triples and fours through the agent."""
    from gpushare.devices.nvml import NvmlDevices

    mps = None if read.simulated else Mps(work / "mps", uuid)
    node = NodeAgent(work / "n", work / "run", simulated="H200:1" if read.simulated else "")
    gate = StandInGate(work / "run", uuid, Counters() if read.simulated else None)
    side: Side = Law()
    devices = None
    try:
        node.start()
        if mps is not None:
            side = Processes([name for name in read.programs if name != "tiny"], mps.environment, work / "said")
            devices = NvmlDevices.open(time.monotonic)
        wait_until(lambda: node.health(uuid) == "Healthy", 60, "a healthy GPU on the GpuNode")
        result = run_progress(
            side,
            node,
            gate,
            sets={int(k): int(v) for k, v in (each.split("=") for each in read.sets)},
            set_seconds=SET_SECONDS,
            seed=read.seed,
            devices=devices,
            keep=keep,
        )
        driver = devices.driver_version() if devices is not None else None
        lines = dataset_lines(result, driver or "simulated")
        (read.out / "progress-dataset.jsonl").write_text("\n".join(lines) + "\n")
        return result | {"broken": list(side.broken), "log": node.log()}
    finally:
        side.close()
        node.close()
        gate.close()
        if mps is not None:
            mps.quit()


def record_counters(uuid: str, program: str, windows: int) -> list[dict[str, Any]]:
    """Raw GPM values (code, percent) and NVML's processes while one program runs: fixtures for the parsers."""
    from gpushare.devices.nvml import NvmlDevices

    devices = NvmlDevices.open(time.monotonic)
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM_FILE), program, str(windows + 12)], stdout=subprocess.DEVNULL
    )
    time.sleep(8)
    records = []
    window = devices.gpm_window(uuid)
    window.mark()
    devices.sample(uuid)
    for _ in range(windows):
        time.sleep(1)
        window.mark()
        sample = devices.sample(uuid)
        assert sample is not None
        utilization = sample.gpu_utilization_ratio
        records.append(
            {
                "program": program,
                "gpm": window.values(),
                "utilization_percent": None if utilization is None else round(100 * utilization),
                "memory_used_mib": sample.memory_used_mib,
                "processes": [
                    [p.pid, p.memory_used_mib] for p in devices.processes(uuid) if not p.is_named_server
                ],
            }
        )
    process.wait(60)
    window.close()
    devices.close()
    return records


def contract() -> dict[str, Any]:
    """The contract of `Devices` on the real side."""
    from tests.devices.contract import check_contract

    from gpushare.devices.nvml import NvmlDevices

    devices = NvmlDevices.open(time.monotonic)
    check_contract(devices, time.sleep)
    gpus = [str(gpu) for gpu in devices.list()]
    driver = devices.driver_version()
    devices.close()
    return {"passed": True, "gpus": gpus, "driver": driver}


def listed(value: object) -> list[dict[str, Any]]:
    return value if isinstance(value, list) else []


def first_gpu(*, is_simulated: bool) -> str:
    if is_simulated:
        from gpushare.twin.gpus import parse_simulated

        return parse_simulated("H200:1", NODE)[0].uuid
    from gpushare.devices.nvml import NvmlDevices

    devices = NvmlDevices.open(time.monotonic)
    uuid = devices.list()[0].uuid
    devices.close()
    return uuid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--only", nargs="*", default=["contract", "profiles", "counters", "agent"], choices=[*LIMITS]
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--profile-seconds", type=float, default=4.0)
    parser.add_argument("--programs", nargs="*", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--profiles", type=Path, help="an earlier profiles.json, for the tenants' signatures")
    parser.add_argument("--sets", nargs="*", default=[f"{k}={v}" for k, v in SETS.items()], help="such as 2=9 3=8")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--simulated", action="store_true", help="agent and progress without a GPU")
    read = parser.parse_args()
    read.out.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Any] = {}
    uuid = first_gpu(is_simulated=read.simulated)
    work = Path("/tmp/gpushare-agent-suite")
    if read.profiles:
        parts["profiles"] = json.loads(read.profiles.read_text())

    def keep(name: str) -> Callable[[Any], None]:
        return lambda value: write(read.out / f"{name}.json", value)

    steps: dict[str, Callable[[], Any]] = {
        "contract": contract,
        "profiles": lambda: profile_programs(read.programs, read.profile_seconds, keep("profiles")),
        "counters": lambda: [
            r for p in ("fp64_product", "fp16_product", "memory_stream") for r in record_counters(uuid, p, 3)
        ],
        "agent": lambda: agent_cost(
            work,
            uuid,
            read.minutes,
            listed(parts.get("profiles")),
            is_simulated=read.simulated,
            keep=keep("agent"),
        ),
        "progress": lambda: infer_progress(work, uuid, read, keep("progress")),
    }
    failed = []
    for name, step in steps.items():
        if name not in read.only or (read.simulated and name not in ("agent", "progress")):
            continue
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        limit = max(LIMITS[name], read.minutes * 60 + MARGIN_SECONDS if name == "agent" else 0.0)
        try:
            with time_limit(limit):
                parts[name] = step()
            write(read.out / f"{name}.json", parts[name])
        except Exception as error:  # the other steps' results are worth having
            failed.append(name)
            write(
                read.out / f"{name}-error.json",
                {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-2000:]},
            )
            print(f"{name} FAILED: {type(error).__name__}: {error}", flush=True)
        else:
            print(f"{name}: {str(parts[name])[:300]}", flush=True)
    lines = lines_of(read.out)
    (read.out / "summary.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines), flush=True)
    sys.exit(1 if failed else 0)


def write(path: Path, value: Any) -> None:
    """A result so far."""
    path.write_text(json.dumps(value, indent=1, default=str))


def lines_of(out: Path) -> list[str]:
    """The tables of what is there, whole or cut short."""
    lines: list[str] = []
    for name, render in (("profiles", profile_lines), ("agent", agent_lines), ("progress", progress_lines)):
        path = out / f"{name}.json"
        if path.exists():
            lines += [*render(json.loads(path.read_text())), ""]
    return lines


if __name__ == "__main__":
    main()
