"""The node agent as it is deployed, between the tests' API server and kubelet, for suites on a machine with a GPU.

Nothing of it needs Kubernetes or root. `NodeAgent` is the node; `StandInGate` takes the gate's place where a suite
runs its tenants under a plain MPS daemon; the rest reads what a process costs.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("", "src", "operator", "deviceplugin", "tests/support")]

import grpc
from aiohttp import web
from tests.deviceplugin.fakes import FakeKubelet, NodeApi, raw_pod

from gpushare.core.api import GpuStatus, names
from gpushare.core.gpu import Counters
from gpushare.kube import GPUSHARES
from gpushare.mps.layout import GpuDirectory, write_atomically, write_status
from gpushare.mps.status import ClientStatus, GateState, GateStatus
from gpushare.twin.mps.state import TwinState, state_path
from gpushare_deviceplugin import api_pb2
from gpushare_deviceplugin.allocation import device_ids
from gpushare_deviceplugin.api_pb2_grpc import DevicePluginStub

NODE = "gpu-node"
TICKS = os.sysconf("SC_CLK_TCK")

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


def environment() -> dict[str, str]:
    """Ours, with the sources to be found by a child."""
    folders = [str(ROOT / part) for part in ("src", "operator", "deviceplugin")]
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*folders, *inherited])}


def wait_until(condition: Callable[[], Any], seconds: float, what: str) -> float:
    """Poll; seconds waited, or TimeoutError."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > seconds:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.02)
    return round(time.monotonic() - begun, 3)


class NodeAgent:
    """A node: API server and kubelet in a thread of ours, the agent in a process of its own.

    Args:
        work: sockets (keep it short: a unix address has 108 characters), logs, kubeconfig.
        directory: the node's gpushare directory, shared with the MPS host.
        simulated: as the agent's option, such as "H200:1"; empty on a GPU.
    """

    def __init__(
        self, work: Path, directory: Path, *, simulated: str = "", node: str = NODE, sample_seconds: float = 1.0
    ) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self.work, self.directory, self.node = work, directory, node
        self.api = NodeApi(node)
        self.kubelet = FakeKubelet(work / "kubelet")
        self.process: subprocess.Popen[bytes] | None = None
        self.starts: list[float] = []
        self._options = [
            "--node-name",
            node,
            "--directory",
            str(directory),
            "--kubelet-directory",
            str(self.kubelet.directory),
            "--sample-seconds",
            str(sample_seconds),
        ]
        if simulated:
            self._options += ["--simulated", simulated]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._runner: Any = None
        port = self._in_loop(self._open())
        (work / "kubeconfig").write_text(json.dumps(_kubeconfig(f"http://127.0.0.1:{port}")))
        self.port = free_port()

    def start(self) -> None:
        """Start the agent's process."""
        log = (self.work / "agent.log").open("ab")
        command = [
            sys.executable,
            "-c",
            WRAPPER,
            str(self.work / "modules"),
            *self._options,
            "--metrics-port",
            str(self.port),
        ]
        env = {**environment(), "KUBECONFIG": str(self.work / "kubeconfig")}
        env.pop("KUBERNETES_SERVICE_HOST", None)
        self.starts.append(time.time())
        self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log)

    @property
    def pid(self) -> int:
        """Of the running agent."""
        assert self.process is not None
        return self.process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process lives."""
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """kill -9, as the kernel would when memory is short."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def put(self, pod: dict[str, Any], ids: Sequence[str] = ()) -> None:
        """A pod appears or changes, and kubelet gave it these device ids."""
        self._call(self.api.put, pod)
        if ids:
            self.kubelet.allocated[f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"] = list(ids)

    def admit(self, pod: dict[str, Any], ids: Sequence[str]) -> None:
        """A pod is bound, its container is given its ids by the plugin as kubelet would ask for them, and runs."""
        self.put({**pod, "status": {"phase": "Pending"}}, ids)
        with contextlib.suppress(grpc.aio.AioRpcError):  # the agent is down; PodResources tells it later
            self._in_loop(self._allocate(list(ids)))
        self.put({**pod, "status": {"phase": "Running"}})

    def share(self, *gpushares: dict[str, Any]) -> None:
        """GpuShares appear or change."""
        for gpushare in gpushares:
            self._call(self.api.store.put, GPUSHARES, gpushare)

    def remove(self, name: str) -> None:
        """A pod is gone."""
        self.kubelet.allocated.pop(f"shop/{name}", None)
        self._call(self.api.remove, name)

    def gpu(self, uuid: str) -> GpuStatus | None:
        """A GPU as the GpuNode says it last."""
        statuses = self.api.statuses
        return next((gpu for gpu in statuses[-1].gpus if gpu.uuid == uuid), None) if statuses else None

    def health(self, uuid: str) -> str:
        """Its health; empty before the first word."""
        gpu = self.gpu(uuid)
        return gpu.health.value if gpu is not None else ""

    def events(self) -> list[tuple[str, str]]:
        """Reason and whom it is about, of every event so far."""
        return [(event["reason"], event["regarding"]["name"]) for event in self.api.events]

    def metrics(self) -> str:
        """What a scrape gives; empty while nobody answers."""
        with contextlib.suppress(OSError), urllib.request.urlopen(self._url("metrics"), timeout=5) as answer:
            return str(answer.read().decode())
        return ""

    def figures(self, family: str) -> dict[str, float]:
        """One family of a pod's figures, by pod."""
        pattern = rf'^{family}{{.*\bpod="([^"]*)".*}} (\S+)$'
        return {pod: float(value) for pod, value in re.findall(pattern, self.metrics(), re.MULTILINE)}

    def is_well(self) -> bool:
        """Whether /healthz says ok."""
        with contextlib.suppress(OSError), urllib.request.urlopen(self._url("healthz"), timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    def modules(self) -> list[str]:
        """Top-level modules loaded beside the standard library."""
        path = self.work / "modules"
        path.unlink(missing_ok=True)
        assert self.process is not None
        self.process.send_signal(signal.SIGUSR1)
        wait_until(lambda: path.exists() and path.read_text().endswith("\n"), 10, "the modules")
        return path.read_text().split()

    def log(self, characters: int = 4000) -> str:
        """The end of the agent's log."""
        with contextlib.suppress(OSError):
            return (self.work / "agent.log").read_text(errors="replace")[-characters:]
        return ""

    def close(self) -> None:
        """End the agent and the node."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
            if self.process.poll() is None:
                self.process.kill()
        self.api.away = True
        with contextlib.suppress(Exception):
            self._in_loop(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    async def _open(self) -> int:
        app = self.api.app
        self._runner = web.AppRunner(app, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        await self.kubelet.start()
        return int(self._runner.addresses[0][1])

    async def _allocate(self, ids: list[str]) -> None:
        asked = api_pb2.AllocateRequest(container_requests=[api_pb2.ContainerAllocateRequest(devices_ids=ids)])
        async with grpc.aio.insecure_channel(f"unix://{self.kubelet.plugins}/gpushare.sock") as channel:
            await DevicePluginStub(channel).Allocate(asked, timeout=5)

    async def _close(self) -> None:
        await self.kubelet.stop()
        await self._runner.cleanup()

    def _in_loop(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        async def once() -> None:
            function(*arguments)

        self._in_loop(once())

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}/{path}"


def pod_of(
    name: str,
    uuid: str,
    *,
    uid: str,
    threads: int,
    memory_mib: int = 8192,
    share: int = 12,
    node: str = NODE,
    **annotations: str,
) -> dict[str, Any]:
    """A running pod with its decision; annotations by constant of `gpushare.core.api.names`."""
    pod = raw_pod(name, uuid, threads=str(threads), phase="Running", share=share, node=node)
    pod["metadata"]["uid"] = uid
    pod["metadata"]["annotations"][names.MEMORY_LIMIT] = f"0={memory_mib}M"
    pod["metadata"]["annotations"] |= {getattr(names, key): value for key, value in annotations.items()}
    return pod


def ids_of(uuid: str, number: int, share: int = 12) -> list[str]:
    """Device ids of the number-th tenant of a GPU; beyond the hundredth percent they are given twice."""
    first = number * share % (names.SHARES_PER_GPU - share + 1)
    return list(device_ids(uuid)[first : first + share])


class StandInGate:
    """Writes what the gate would (and, without a GPU, what the twin would), once a second.

    Attributes:
        clients: pods' processes with their caps, as (pid, pod uid, thread percentage).
        counters: of the simulated GPU; None on a real one.
    """

    def __init__(self, directory: Path, uuid: str, counters: Counters | None = None) -> None:
        self.clients: list[tuple[int, str, int]] = []
        self.counters = counters
        self._place = GpuDirectory.of(directory, uuid)
        self._place.path.mkdir(parents=True, exist_ok=True)
        self.uuid = uuid
        self._over = threading.Event()
        self._lock = threading.Lock()
        self.write()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def show(self, clients: Sequence[tuple[int, str, int]], counters: Counters | None = None) -> None:
        """From now on these run, and the simulated GPU shows this."""
        with self._lock:
            self.clients, self.counters = list(clients), counters
        self.write()

    def write(self) -> None:
        """Write the files now."""
        with self._lock:
            shown = tuple(ClientStatus(pid, uid, cap, None, 500) for pid, uid, cap in self.clients)
            write_status(self._place, GateStatus(self.uuid, GateState.ACTIVE, time.time(), clients=shown))
            if self.counters is not None:
                twin = TwinState(
                    self.uuid, "NVIDIA H200", 143771, 132, time.time(), 1, 2, "ACTIVE", self.counters, 4000
                )
                write_atomically(state_path(self._place), twin.to_json())

    def close(self) -> None:
        """Fall silent."""
        self._over.set()
        self._thread.join(5)

    def _run(self) -> None:
        while not self._over.wait(0.5):
            self.write()


def cpu_seconds(pid: int) -> float:
    """CPU so far of a process and of its children that have ended (the forecaster's)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15]) / TICKS


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


def threads_of(pid: int) -> dict[str, int]:
    """Threads by name."""
    found: dict[str, int] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        name = (task / "comm").read_text().strip()
        found[name] = found.get(name, 0) + 1
    return found


def huge_pages() -> str:
    """Whether the kernel gives huge pages unasked: the choice in brackets."""
    try:
        return Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip()
    except OSError:
        return "unknown"


def free_port() -> int:
    """A TCP port that nobody has."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _kubeconfig(url: str) -> Mapping[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "users": [{"name": "u", "user": {}}],
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    }
