"""The node agent on a real GPU: profiles of programs, its own cost with 8 tenants, raw counters as fixtures.

    python hack/gpu/agent_suite.py --out DIR [--minutes 5] [--profile-seconds 8] [--programs NAME ...] [--skip ...]
    python hack/gpu/agent_suite.py --out DIR --simulated     # the agent's cost alone, without a GPU

On a machine without a network, carry the wheels (30 MB) and unpack them there; DEPENDENCIES is the line below:

    python -m pip download --python-version 3.12 --only-binary :all: -d .gpu-wheels DEPENDENCIES
    python3 -m pip install --no-index --find-links .gpu-wheels --target /tmp/site DEPENDENCIES
    PYTHONPATH=/tmp/site python3 hack/gpu/agent_suite.py --out "$OUT" --minutes 4

    nvidia-ml-py prometheus-client orjson grpcio protobuf aiohttp kubernetes typer rich cryptography

Needs an NVIDIA driver, PyTorch, and gpushare's dependencies; no Kubernetes: the agent runs as it is deployed,
against the scripted API server and kubelet of the tests (tests/deviceplugin/fakes.py), beside a real MPS daemon
with real tenants. Writes profiles.json, agent.json, counters.json and summary.md to DIR; sets nothing on the GPU.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("", "src", "operator", "deviceplugin")]

PROGRAMS = tuple(
    re.findall(r"^def ([a-z]\w*)\(\) -> Step:", Path(__file__).with_name("programs.py").read_text(), re.MULTILINE)
)

from summary import agent_lines, profile_lines

PROGRAM_FILE = Path(__file__).with_name("programs.py")
TENANTS = (
    "cnn_train_fp32", "transformer_train_bf16", "cnn_inference_b1", "memory_stream", "fft", "sort_integers",
    "fp64_product", "tiny",
)  # fmt: skip
NODE = "gpu-node"
TICKS = os.sysconf("SC_CLK_TCK")


def environment() -> dict[str, str]:
    folders = [str(ROOT / part) for part in ("src", "operator", "deviceplugin")]
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*folders, *inherited])}


def profile_programs(programs: Sequence[str], seconds: float) -> list[dict[str, Any]]:
    """`gpushare profile run` over programs."""
    found = []
    for name in programs:
        command = [sys.executable, "-c", "from gpushare.cli import main; main()", "profile", "run", "--json", "--",
                   sys.executable, str(PROGRAM_FILE), name, str(seconds)]  # fmt: skip
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
            **environment(), "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe), "CUDA_MPS_LOG_DIRECTORY": str(log),
        }  # fmt: skip
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


def cost_of(pid: int) -> tuple[float, float]:
    """CPU seconds so far and resident MiB of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = Path(f"/proc/{pid}/status").read_text()
    resident = re.search(r"VmRSS:\s+(\d+)", status)
    return (int(fields[11]) + int(fields[12])) / TICKS, int(resident[1]) / 1024 if resident else 0.0


# The agent, saying on SIGUSR1 which top-level modules it has loaded.
WRAPPER = """
import signal, sys
def said(*_):
    with open(target, "w") as f:
        print(*sorted({n.partition(".")[0] for n in sys.modules} - set(sys.stdlib_module_names)), file=f)
target = sys.argv.pop(1)
signal.signal(signal.SIGUSR1, said)
import runpy
runpy.run_module("gpushare_deviceplugin", run_name="__main__", alter_sys=False)
"""


def memory_of(pid: int) -> dict[str, float]:
    """What /proc/PID/smaps_rollup says, MiB, and the number of threads."""
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB$", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE))
    mib = {
        name: round(int(fields.get(name, 0)) / 1024, 1) for name in ("Rss", "Pss", "Anonymous", "AnonHugePages")
    }
    return {**mib, "threads": len(list(Path(f"/proc/{pid}/task").iterdir()))}


def mappings_of(pid: int, most: int = 25) -> list[list[Any]]:
    """The mappings that hold most: path or kind, number, resident MiB, anonymous MiB."""
    found: dict[str, list[float]] = {}
    name = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            parts = line.split(maxsplit=5)
            name = Path(parts[5]).name if len(parts) > 5 else "(anonymous)"
            found.setdefault(name, [0, 0, 0])[0] += 1
        elif line.startswith(("Rss:", "Anonymous:")):
            found[name][1 if line.startswith("Rss") else 2] += int(line.split()[1]) / 1024
    largest = sorted(found.items(), key=lambda item: -item[1][1])[:most]
    return [[name, count, round(rss, 1), round(anonymous, 1)] for name, (count, rss, anonymous) in largest]


def huge_pages() -> str:
    """Whether the kernel gives huge pages unasked: the choice in brackets."""
    try:
        return Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip()
    except OSError:
        return "unknown"


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


async def agent_cost(
    work: Path, uuid: str, minutes: float, profiles: list[dict[str, Any]], *, is_simulated: bool = False
) -> dict[str, Any]:
    """The agent's CPU and memory with 8 tenants under MPS, and what it says of them against their own rates."""
    alone = {each["name"]: each for each in profiles if "counters" in each}
    from aiohttp import web
    from aiohttp.test_utils import TestServer, unused_port
    from tests.deviceplugin.fakes import FakeApi, FakeKubelet, raw_pod

    from gpushare.core import names
    from gpushare.core.pipes import Counters
    from gpushare.core.schema import to_json
    from gpushare.mps.layout import GpuDirectory, write_atomically, write_status
    from gpushare.mps.status import ClientStatus, GateStatus, MpsState
    from gpushare.mps.twin.state import TwinState, state_path
    from gpushare_deviceplugin.allocation import device_ids

    mps = None if is_simulated else Mps(work / "mps", uuid)
    kubelet = FakeKubelet(work / "kubelet")
    await kubelet.start()
    api = FakeApi(NODE)
    ids = device_ids(uuid)
    tenants: list[tuple[str, subprocess.Popen[bytes]]] = []
    duration = minutes * 60 + 40
    for number, program in enumerate(TENANTS):
        pod = raw_pod(program.replace("_", "-"), uuid, threads="25", phase="Running", share=12, node=NODE)
        pod["metadata"]["annotations"][names.WORKLOAD] = program
        api.put(pod)
        kubelet.held[f"shop/{pod['metadata']['name']}"] = list(ids[number * 12 : number * 12 + 12])
        if program in alone:
            profile = {"counters": alone[program]["counters"], "gpuModel": ""}
            placement = {"podUid": pod["metadata"]["uid"], "pod": pod["metadata"]["name"]}
            metadata = {"name": pod["metadata"]["name"], "namespace": "shop", "uid": f"gs-{program}"}
            api.gpushares.append({"metadata": metadata, "status": {"profile": profile, "placements": [placement]}})
        command = [sys.executable, str(PROGRAM_FILE), program, str(duration), "--rate-file", str(work / program)]
        process = subprocess.Popen(
            command if mps else ["sleep", str(duration)], stdout=subprocess.DEVNULL,
            env={**(mps.environment if mps else environment()), "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"},
        )  # fmt: skip
        tenants.append((pod["metadata"]["uid"], process))

    place = GpuDirectory.of(work / "run", uuid)
    place.path.mkdir(parents=True)

    async def gate() -> None:
        """Stands in for the gate: each tenant's pid as its pod's client, written as often as the gate does."""
        while True:
            clients = tuple(ClientStatus(p.pid, uid, 25, None, 500) for uid, p in tenants if p.poll() is None)
            write_status(place, GateStatus(uuid, MpsState.ACTIVE, time.time(), clients=clients))
            if is_simulated:
                counters = Counters(sm_util=0.9, fp32_util=0.4, dram_bw_util=0.5, integer_util=0.2)
                twin = TwinState(uuid, "NVIDIA H200", 143771, 132, time.time(), 1, 2, "ACTIVE", counters, 4000)
                write_atomically(state_path(place), twin.to_json())
            await asyncio.sleep(1)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", api.handle)
    async with TestServer(app) as server:
        cluster = {"server": str(server.make_url("")).rstrip("/")}
        kubeconfig = {
            "apiVersion": "v1", "kind": "Config", "current-context": "c", "users": [{"name": "u", "user": {}}],
            "clusters": [{"name": "c", "cluster": cluster}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        }  # fmt: skip
        (work / "kubeconfig").write_text(json.dumps(kubeconfig))
        task = asyncio.create_task(gate())
        port = unused_port()
        agent = subprocess.Popen(
            [sys.executable, "-c", WRAPPER, str(work / "modules"), "--node-name", NODE,
             "--directory", str(work / "run"), "--kubelet-directory", str(kubelet.directory),
             "--metrics-port", str(port),
             *(["--simulated", "H200:1"] if is_simulated else [])],
            env={**environment(), "KUBECONFIG": str(work / "kubeconfig")},
        )  # fmt: skip
        born = time.monotonic()
        memory: list[dict[str, float]] = []

        def remember() -> None:
            memory.append({"seconds": round(time.monotonic() - born, 1), **memory_of(agent.pid)})

        for _ in range(4):
            await asyncio.sleep(5)  # CUDA contexts, first samples, kubelet's registration
            remember()
        started, (cpu, _) = time.monotonic(), cost_of(agent.pid)
        counted = {program: rate_file(work / program) for program in TENANTS}
        said: dict[str, list[float]] = {}
        resident: list[float] = []
        while time.monotonic() - started < minutes * 60:
            await asyncio.sleep(10)
            resident.append(cost_of(agent.pid)[1])
            remember()
            for gpu in api.statuses[-1].gpus if api.statuses else ():
                for tenant in gpu.tenants:
                    if tenant.progress_ratio is not None:
                        said.setdefault((tenant.pod or "").replace("-", "_"), []).append(tenant.progress_ratio)
        seconds = time.monotonic() - started
        used = cost_of(agent.pid)[0] - cpu
        progress = {
            program: {
                "inferred": sum(said[program]) / len(said[program]) if program in said else None,
                "measured": rate_between(counted[program], rate_file(work / program), alone.get(program)),
            }
            for program in TENANTS
        }
        fetch = "import sys, urllib.request; sys.stdout.write(urllib.request.urlopen(sys.argv[1]).read().decode())"
        url = f"http://127.0.0.1:{port}/metrics"
        scrape = subprocess.run(
            [sys.executable, "-c", fetch, url], capture_output=True, text=True, timeout=20, check=False
        )
        mappings = mappings_of(agent.pid)
        agent.send_signal(signal.SIGUSR1)
        await asyncio.sleep(2)
        modules = (work / "modules").read_text().split() if (work / "modules").exists() else []
        agent.terminate()
        agent.wait(20)
        task.cancel()
    for _, process in tenants:
        process.terminate()
    alive = sum(process.wait(30) is not None for _, process in tenants)
    await kubelet.stop()
    if mps is not None:
        mps.quit()
    own = [gpu for gpu in api.statuses[-1].gpus if gpu.uuid == uuid] if api.statuses else []
    return {
        "minutes": seconds / 60,
        "tenants": alive,
        "cpu_percent_of_one_core": 100 * used / seconds,
        "resident_mib_max": max(resident, default=0.0),
        "resident_mib_last": resident[-1] if resident else 0.0,
        "memory": memory,
        "mappings": mappings,
        "modules": modules,
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
        "huge_pages": huge_pages(),
        "progress": progress,
        "gpunode_writes": len(api.statuses),
        "gpunode": [to_json(gpu) for gpu in own],
        "metrics": scrape.stdout.splitlines(),
    }


def record_counters(uuid: str, program: str, windows: int) -> list[dict[str, Any]]:
    """Raw GPM values (code, percent) and NVML's processes while one program runs: fixtures for the parsers."""
    import pynvml

    from gpushare.devices.gpm import METRICS

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM_FILE), program, str(windows + 12)], stdout=subprocess.DEVNULL
    )
    time.sleep(8)
    records = []
    first, second = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
    pynvml.nvmlGpmSampleGet(handle, first)
    for _ in range(windows):
        time.sleep(1)
        pynvml.nvmlGpmSampleGet(handle, second)
        query = pynvml.c_nvmlGpmMetricsGet_t()
        query.version, query.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, len(METRICS)
        query.sample1, query.sample2 = first, second
        for slot, metric in enumerate(METRICS.values()):
            query.metrics[slot].metricId = metric
        pynvml.nvmlGpmMetricsGet(query)
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        records.append(
            {
                "program": program,
                "gpm": {
                    name: [query.metrics[s].nvmlReturn, query.metrics[s].value] for s, name in enumerate(METRICS)
                },
                "utilization_percent": pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
                "memory_used_bytes": pynvml.nvmlDeviceGetMemoryInfo(handle).used,
                "processes": [[p.pid, p.usedGpuMemory] for p in processes],
            }
        )
        first, second = second, first
    process.wait(60)
    pynvml.nvmlShutdown()
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
        from gpushare.core.simulated import parse_simulated

        return parse_simulated("H200:1", NODE)[0].uuid
    from gpushare.devices import nvml_library

    nvml_library.nvmlInit()
    uuid = nvml_library.nvmlDeviceGetUUID(nvml_library.nvmlDeviceGetHandleByIndex(0))
    nvml_library.nvmlShutdown()
    return uuid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--profile-seconds", type=float, default=8.0)
    parser.add_argument("--skip", nargs="*", default=[], choices=["contract", "profiles", "counters", "agent"])
    parser.add_argument("--programs", nargs="*", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--profiles", type=Path, help="an earlier profiles.json, for the tenants' signatures")
    parser.add_argument("--simulated", action="store_true", help="only the agent's cost, without a GPU")
    read = parser.parse_args()
    read.out.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Any] = {}
    uuid = first_gpu(is_simulated=read.simulated)
    work = Path("/tmp/gpushare-agent-suite")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    if read.profiles:
        parts["profiles"] = json.loads(read.profiles.read_text())
    steps = {
        "contract": contract,
        "profiles": lambda: profile_programs(read.programs, read.profile_seconds),
        "counters": lambda: [r for p in ("fp64_product", "fp16_product", "memory_stream")
                             for r in record_counters(uuid, p, 3)],
        "agent": lambda: asyncio.run(agent_cost(work, uuid, read.minutes, listed(parts.get("profiles")),
                                                is_simulated=read.simulated)),
    }  # fmt: skip
    for name, step in steps.items():
        if name in read.skip or (read.simulated and name != "agent"):
            continue
        try:
            parts[name] = step()
        except Exception as error:  # the other steps' results are worth having
            parts[name] = {"error": f"{type(error).__name__}: {error}"}
        (read.out / f"{name}.json").write_text(json.dumps(parts[name], indent=1))
        print(f"{name}: {str(parts[name])[:300]}", flush=True)
    profiles, agent = parts.get("profiles"), parts.get("agent", {})
    lines = [*profile_lines(listed(profiles)), "", *agent_lines(agent if isinstance(agent, dict) else {})]
    (read.out / "summary.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
