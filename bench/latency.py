"""filter + prioritize over HTTP: the real extender process at full size, asked as kube-scheduler asks."""

import argparse
import contextlib
import gc
import http.client
import json
import os
import platform
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from devcluster.loopback import unused_port

from bench import fleet
from bench.figures import percentile, resident_mib

ROOT = Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    path = os.pathsep.join(str(ROOT / part) for part in ("src", ""))
    running = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path})
    try:
        yield running
    finally:
        running.terminate()
        try:
            running.wait(5)
        except subprocess.TimeoutExpired:  # open watches
            running.kill()
            running.wait()


def kubeconfig(directory: str, url: str) -> str:
    path = Path(directory, "kubeconfig")
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "bench",
        "clusters": [{"name": "bench", "cluster": {"server": url}}],
        "users": [{"name": "bench", "user": {"token": "bench"}}],
        "contexts": [{"name": "bench", "context": {"cluster": "bench", "user": "bench"}}],
    }
    path.write_text(json.dumps(config))
    return str(path)


def wait_ready(port: int, seconds: float = 180) -> float:
    started = time.monotonic()
    while time.monotonic() - started < seconds:
        with contextlib.suppress(OSError):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/readyz")
            if connection.getresponse().status == 200:
                return time.monotonic() - started
        time.sleep(0.1)
    raise SystemExit("the extender did not become ready")


class Client:
    """Client that sends kube-scheduler's requests over one kept connection.

    Requests are encoded beforehand, and answers are read but not parsed, so that only the server is measured.
    """

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), 30)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = memoryview(bytearray(16 * 2**20))

    def ask(self, request: bytes) -> memoryview:
        """Return headers and body of the answer."""
        self._socket.sendall(request)
        got, wanted, buffer = 0, 0, self._buffer
        while not wanted or got < wanted:
            received = self._socket.recv_into(buffer[got:])
            if not received:
                raise SystemExit("the extender closed the connection")
            got += received
            if not wanted:
                head, found, _ = bytes(buffer[: min(got, 4096)]).partition(b"\r\n\r\n")
                length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
                if found and length:
                    wanted = len(head) + 4 + int(length[1])
        assert bytes(buffer[:12]) == b"HTTP/1.1 200", bytes(buffer[:200])
        return buffer[:got]


def request(verb: str, body: bytes) -> bytes:
    head = (
        f"POST /{verb} HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: Go-http-client/1.1\r\n"
        f"Content-Length: {len(body)}\r\nContent-Type: application/json\r\nAccept-Encoding: gzip\r\n\r\n"
    )
    return head.encode() + body


def arguments_of(pod: dict[str, Any], names: list[str]) -> bytes:
    """Encode ExtenderArgs as Go writes them."""
    fields = {"Pod": pod, "Nodes": None, "NodeNames": names}
    return json.dumps(fields, separators=(",", ":")).encode()


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process since it started, over all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def loop_cpu_ms(pid: int) -> float:
    """Return the CPU time of a process's first thread, its event loop, to the nanosecond."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e6


def measure(port: int, nodes: int, requests: int, vary: bool, prefer: bool, pid: int) -> dict[str, Any]:
    """Ask for a new pod each time; prioritize gets filter's answer, which is encoded outside the measured time."""
    names = [fleet.node_name(i) for i in range(nodes)]
    client = Client(port)
    rng = random.Random(1)
    filtering: list[float] = []
    both: list[float] = []
    on_cpu: list[float] = []
    gc.disable()  # of the client
    cpu_before = cpu_seconds(pid)
    first: list[float] = []
    for index in range(-fleet.KINDS, requests):  # each kind of pod once before
        kind = index % fleet.KINDS
        pod = fleet.pod(10**6 + index, fleet.FRACTIONS[kind % len(fleet.FRACTIONS)])
        if prefer:
            pod["spec"]["affinity"] = fleet.PREFERENCE
        asked = rng.sample(names, nodes * 9 // 10) if vary else names
        body = request("filter", arguments_of(pod, asked))
        spent_before = loop_cpu_ms(pid)
        started = time.perf_counter()
        answer = client.ask(body)
        taken = time.perf_counter() - started
        fitting = json.loads(bytes(answer).partition(b"\r\n\r\n")[2])["NodeNames"]
        assert fitting
        body = request("prioritize", arguments_of(pod, fitting))
        started = time.perf_counter()
        answer = client.ask(body)
        then = time.perf_counter() - started
        if index < 0:
            first.append((taken + then) * 1000)
            assert len(json.loads(bytes(answer).partition(b"\r\n\r\n")[2])) == len(fitting)
            continue
        filtering.append(taken * 1000)
        both.append((taken + then) * 1000)
        on_cpu.append(loop_cpu_ms(pid) - spent_before)
    return {
        "filter_ms": {"p50": statistics.median(filtering), "p99": percentile(filtering, 0.99)},
        "filter_and_prioritize_ms": {
            "p50": statistics.median(both),
            "p90": percentile(both, 0.9),
            "p99": percentile(both, 0.99),
            "max": max(both),
        },
        "loop_cpu_ms": {"p50": statistics.median(on_cpu), "p99": percentile(on_cpu, 0.99), "max": max(on_cpu)},
        "extender_cpu_ms": (cpu_seconds(pid) - cpu_before) / (requests + fleet.KINDS) * 1000,
        "first_ms": {"p50": statistics.median(first), "max": max(first)},
        "min_ms": min(both),
        "requests": requests,
        "fitting_nodes_of_last": len(fitting),
    }


def metrics(metrics_port: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", metrics_port, timeout=30)
    connection.request("GET", "/metrics")
    return connection.getresponse().read().decode()


def count(metrics_port: int, name: str) -> dict[str, float]:
    """Return one of the extender's counters by its labels."""
    found = re.findall(rf"^{name}{{(.*?)}} (\S+)$", metrics(metrics_port), re.MULTILINE)
    return {labels: float(value) for labels, value in found}


def inside(metrics_port: int) -> dict[str, float]:
    """Return the mean time inside the extender by verb, from its own histogram; the rest is HTTP and waiting."""
    text = metrics(metrics_port)
    found: dict[str, float] = {}
    for verb in ("filter", "prioritize", "bind"):
        sums = re.search(rf'duration_seconds_sum{{verb="{verb}"}} (\S+)', text)
        count = re.search(rf'duration_seconds_count{{verb="{verb}"}} (\S+)', text)
        if sums and count and float(count[1]):
            found[verb] = float(sums[1]) / float(count[1]) * 1000
    return found


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench latency", description=__doc__)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--tenants", type=int, default=20_000)
    parser.add_argument("--other-pods", type=int, default=0, help="running pods that are not ours, on those nodes")
    parser.add_argument("--waiting", type=int, default=0, help="pods that have waited long for a large part")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--events-per-second", type=float, default=0, help="GpuNode updates meanwhile")
    parser.add_argument(
        "--turnover-per-second", type=float, default=0, help="tenants that others follow meanwhile"
    )
    parser.add_argument("--policy", default="gpushare", help="as the extender's option")
    parser.add_argument("--vary", action="store_true", help="each pod asks for another nine tenths of the nodes")
    parser.add_argument("--profiled", action="store_true", help="every workload has a profile (ADR 0090)")
    parser.add_argument("--prefer", action="store_true", help="pods with a preferred affinity")
    parser.add_argument("--best-nodes", type=int, default=8, help="as the extender's option")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    api_port, port, metrics_port = unused_port(), unused_port(), unused_port()
    fake = {
        "port": api_port,
        "nodes": options.nodes,
        "gpus": options.gpus,
        "tenants": options.tenants,
        "other-pods": options.other_pods,
        "waiting": options.waiting,
        "events-per-second": options.events_per_second,
        "turnover-per-second": options.turnover_per_second,
    }
    arguments = [f"--{name}={value}" for name, value in fake.items()] + ["--profiled"] * options.profiled
    with (
        tempfile.TemporaryDirectory() as directory,
        process(sys.executable, "-m", "bench.fakeapi", *arguments),
    ):
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", api_port), 1):
                break
            time.sleep(0.2)
        config = kubeconfig(directory, f"http://127.0.0.1:{api_port}")
        with process(
            sys.executable,
            "-m",
            "gpushare.extender",
            "--kubeconfig",
            config,
            "--port",
            str(port),
            "--metrics-host",
            "127.0.0.1",
            "--metrics-port",
            str(metrics_port),
            "--policy",
            options.policy,
            "--best-nodes",
            str(options.best_nodes),
            "--log-level",
            "WARNING",
        ) as extender:
            ready = wait_ready(metrics_port)
            result = {
                "nodes": options.nodes,
                "gpus_per_node": options.gpus,
                "tenants": options.tenants,
                "other_pods": options.other_pods,
                "waiting": options.waiting,
                "events_per_second": options.events_per_second,
                "turnover_per_second": options.turnover_per_second,
                "policy": options.policy,
                "vary": options.vary,
                "prefer": options.prefer,
                "profiled": options.profiled,
                "best_nodes": options.best_nodes,
                "ready_seconds": ready,
                "ready_cpu_seconds": cpu_seconds(extender.pid),
                "resident_mib": resident_mib(extender.pid),
                "most_resident_mib": resident_mib(extender.pid, "VmHWM"),
                **measure(port, options.nodes, options.requests, options.vary, options.prefer, extender.pid),
                "cpus": os.cpu_count(),
                "python": platform.python_version(),
            }
            result["inside_ms"] = inside(metrics_port)
    if options.json:
        print(json.dumps(result))
        return
    both = result["filter_and_prioritize_ms"]
    print(
        f"{options.nodes} nodes x {options.gpus} GPUs, {options.tenants} tenants, "
        f"{options.other_pods} other pods, "
        f"{options.events_per_second:g} GpuNode updates/s, policy {options.policy}:\n"
        f"  ready after {ready:.1f} s ({result['ready_cpu_seconds']:.1f} s of processor time), "
        f"{result['resident_mib']:.0f} MiB resident, at most {result['most_resident_mib']:.0f} MiB\n"
        f"  filter + prioritize over HTTP, {options.requests} times: p50 {both['p50']:.2f} ms, "
        f"p90 {both['p90']:.2f} ms, p99 {both['p99']:.2f} ms, max {both['max']:.2f} ms\n"
        f"  the first of each of {fleet.KINDS} kinds of pod, before: p50 {result['first_ms']['p50']:.2f} ms, "
        f"max {result['first_ms']['max']:.2f} ms\n"
        f"  processor time of the extender's event loop for both: p50 {result['loop_cpu_ms']['p50']:.2f} ms, "
        f"p99 {result['loop_cpu_ms']['p99']:.2f} ms, max {result['loop_cpu_ms']['max']:.2f} ms\n"
        f"  quickest {result['min_ms']:.2f} ms; the extender's processor time {result['extender_cpu_ms']:.2f} ms\n"
        f"  of which inside the extender: "
        + ", ".join(f"{verb} {mean:.2f} ms" for verb, mean in result["inside_ms"].items())
        + " in the mean"
    )
