"""Measure how long honest reviews wait beside hostile ones, at the real admission server over HTTPS.

The server is a process of its own, as the chart starts it, and so are the senders. Reviews are sent at a steady
rate whether or not answers come, so a server that falls behind shows in the figures.

On a machine that is busy with other things `--processor-time` measures by the server's own processor time: what
it would take on a core of its own. Reviews then come at a rate of its seconds, too, and it has no time-outs.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import platform
import random
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from devcluster.loopback import unused_port

from bench.figures import percentile, resident_mib
from bench.latency import cpu_seconds
from gpushare.core.api import names

ROOT: Final = Path(__file__).resolve().parents[1]
BAR_MS: Final = 100.0
CONNECTIONS: Final = 64  # of one sender; the API server opens as many as it has reviews under way
BUSY_PATIENCE_SECONDS: Final = 120.0  # of sender and server where processor time is the clock
HOSTILE_ADDRESS: Final = "127.0.0.2"  # a pod has another address than the API server
HANDSHAKES_OPEN: Final = 800  # of one sender, more than the server has connections
IDLE_LOOKS: Final = 10
SENDERS: Final = 2  # of hostile reviews, each a process
PATIENCE_SECONDS: Final = 5.0  # the chart's admission.timeoutSeconds
SMALL_BYTES: Final = 60_000  # below what the server reads without a slot


def pod(annotations: dict[str, str], **container: Any) -> dict[str, Any]:
    """Return a pod such as a Deployment's, with what the API server adds."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": "web-7c9d8b6f5-",
            "namespace": "shop",
            "labels": {"app": "web", "pod-template-hash": "7c9d8b6f5"},
            "annotations": annotations,
            "ownerReferences": [
                {
                    "apiVersion": "apps/v1",
                    "kind": "ReplicaSet",
                    "name": "web-7c9d8b6f5",
                    "uid": "u",
                    "controller": True,
                }
            ],
        },
        "spec": {
            "containers": [{"name": "main", "image": "registry.example/web:1", **container}],
            "tolerations": [{"key": f"key-{number}", "operator": "Exists"} for number in range(8)],
        },
    }


def review(obj: dict[str, Any]) -> bytes:
    """Return the body that the API server sends when a pod is made."""
    request = {
        "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "operation": "CREATE",
        "namespace": "shop",
        "userInfo": {"username": "system:serviceaccount:kube-system:replicaset-controller"},
        "object": obj,
    }
    return json.dumps(
        {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    ).encode()


def hostile_bodies() -> dict[str, bytes]:
    """Return one of each kind, as large as goes without a slot where size is what costs."""
    fraction = {names.FRACTION: "0.5"}
    letters = random.Random(1)
    near = (f"gpushare.io/fractio{''.join(letters.choices('abcdefgh', k=8))}" for _ in range(SMALL_BYTES // 40))
    variables = [{"name": f"CUDA_LAUNCH_{number:05}", "value": "1"} for number in range(SMALL_BYTES // 50)]
    containers = [{"name": f"c{number}", "image": "x"} for number in range(SMALL_BYTES // 40)]
    crowded = pod(fraction)
    crowded["spec"]["containers"] = containers
    deep = b'{"request":' + b"[" * SMALL_BYTES
    return {
        "1,500 misspelt annotations": review(pod(fraction | dict.fromkeys(near, "x"))),
        "1,200 variables": review(pod(fraction, env=variables)),
        "1,500 containers": review(crowded),
        "a variable that is refused": review(pod(fraction, env=[{"name": "CUDA_MPS_PIPE_DIRECTORY"}])),
        "a fraction of 30,000 digits": review(pod({names.FRACTION: "9" * (SMALL_BYTES // 2)})),
        "60,000 brackets": deep,
        "no review": b"{}",
    }


@dataclass
class Answers:
    """Durations of one sender's reviews, and the answers."""

    milliseconds: list[float] = field(default_factory=list)
    codes: Counter[str] = field(default_factory=Counter)


class Sender:
    """Sender of bodies at a rate, over kept connections that it opens as needed, as the API server does."""

    def __init__(
        self, port: int, trusted: ssl.SSLContext, clock: Callable[[], float], patience: float, *, keeps: bool
    ) -> None:
        self._port, self._trusted, self._clock, self._patience = port, trusted, clock, patience
        self._keeps = keeps
        self._under_way = 0
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._may_open = asyncio.Semaphore(CONNECTIONS)

    async def send(self, bodies: Sequence[bytes], per_second: float, seconds: float) -> Answers:
        """Send the bodies in turn, at their times; return the answers once all have come or were given up."""
        answers = Answers()
        begun = self._clock()
        async with asyncio.TaskGroup() as tasks:
            for number in range(int(per_second * seconds)):
                due = begun + number / per_second
                await self._until(due)
                self._under_way += 1
                tasks.create_task(self._one(bodies[number % len(bodies)], min(due, self._clock()), answers))
        return answers

    async def _until(self, due: float) -> None:
        """Wait until a time, or until the server has nothing to do: its processor time stands still then."""
        idle_looks = 0
        while (early := due - self._clock()) > 0 and idle_looks < IDLE_LOOKS:
            idle_looks = 0 if self._under_way else idle_looks + 1
            await asyncio.sleep(min(early, 0.002))

    async def _one(self, body: bytes, due: float, answers: Answers) -> None:
        try:
            async with asyncio.timeout(self._patience):
                async with self._may_open:
                    code = await self._ask(body)
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            code = "no answer"
        answers.milliseconds.append(1000 * (self._clock() - due))
        answers.codes[code] += 1
        self._under_way -= 1

    async def _ask(self, body: bytes) -> str:
        if self._free:
            reader, writer = self._free.pop()
        else:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port, ssl=self._trusted)
        head = f"POST /mutate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        try:
            writer.write(head.encode() + body)
            answered = await reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line.partition(b":")[2])
                for line in answered.splitlines()
                if line.lower().startswith(b"content-le")
            )
            await reader.readexactly(length)
        except BaseException:
            writer.close()
            raise
        if b"onnection: close" in answered or not self._keeps:
            writer.close()
        else:
            self._free.append((reader, writer))
        return answered.split()[1].decode()


def make_certificate(directory: Path) -> ssl.SSLContext:
    """Write tls.crt and tls.key for localhost; return a context that trusts them."""
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
            *("-keyout", str(directory / "tls.key"), "-out", str(directory / "tls.crt")),
        ],
        check=True,
        capture_output=True,
    )
    return ssl.create_default_context(cafile=str(directory / "tls.crt"))


# The server with other time-outs: those of the clock on the wall say nothing where it hardly gets a processor.
_PATIENT: Final = """
import asyncio, logging, sys
from pathlib import Path
from gpushare_operator.admission.server import AdmissionServerSettings, ServerLimits, serve
logging.disable(logging.WARNING)
port, directory, seconds = int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
limits = ServerLimits(read_seconds=seconds, wait_seconds=seconds, handshake_seconds=seconds, idle_seconds=seconds,
                      usual_handshake_seconds=10)
settings = AdmissionServerSettings(directory, "127.0.0.1", port, limits=limits)
asyncio.run(serve(settings, asyncio.Event()))
"""


def client_hello(trusted: ssl.SSLContext) -> bytes:
    """Return the first message of a TLS client, which costs a server a signature each time that it is sent."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusted.wrap_bio(incoming, outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def shake_hands(port: int, authority: str, enough: Path) -> Counter[str]:
    """Begin handshakes as fast as connections open, until a file is there; finish none, keep the latest open."""
    hello = client_hello(ssl.create_default_context(cafile=authority))
    begun: deque[socket.socket] = deque()
    codes: Counter[str] = Counter()

    def close_oldest() -> None:
        with begun.popleft() as oldest:
            try:
                codes["answered" if oldest.recv(1) else "closed"] += 1
            except BlockingIOError:
                codes["waiting"] += 1
            except OSError:
                codes["closed"] += 1

    while not enough.exists():
        if len(begun) >= HANDSHAKES_OPEN:
            close_oldest()
        one = socket.socket()
        one.settimeout(1.0)
        try:
            one.bind((HOSTILE_ADDRESS, 0))
            one.connect(("127.0.0.1", port))
            one.sendall(hello)
        except OSError:
            one.close()
            codes["not opened"] += 1
            continue
        one.setblocking(False)
        begun.append(one)
    while begun:
        close_oldest()
    return codes


async def _ask_in_loop(
    port: int, trusted: ssl.SSLContext, body: bytes, is_enough: Callable[[], bool], codes: Counter[str]
) -> None:
    asked = f"POST /mutate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    opened = partial(asyncio.open_connection, local_addr=(HOSTILE_ADDRESS, 0), server_hostname="localhost")
    while not is_enough():
        try:
            reader, writer = await opened("127.0.0.1", port, ssl=trusted)
            while not is_enough():
                writer.write(asked)
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split()[0]))
                codes[head.split()[1].decode()] += 1
            writer.close()
        except (OSError, asyncio.IncompleteReadError):
            codes["no answer"] += 1


def ask_in_loop(port: int, authority: str, body: bytes, enough: Path) -> Counter[str]:
    """Keep connections and send the body again on each answer, from another address, until a file is there."""
    codes: Counter[str] = Counter()

    async def all_of_them() -> None:
        trusted = ssl.create_default_context(cafile=authority)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(CONNECTIONS):
                tasks.create_task(_ask_in_loop(port, trusted, body, enough.exists, codes))

    asyncio.run(all_of_them())
    return codes


@contextlib.contextmanager
def server(directory: Path, *, is_patient: bool) -> Iterator[tuple[int, int]]:
    """Run the admission server; yields its port and its process id."""
    trusted, port = make_certificate(directory), unused_port()
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "operator")])
    usual = ("-m", "gpushare_operator.admission", "--port", str(port), "--cert-dir", str(directory))
    patient = ("-c", _PATIENT, str(port), str(directory), str(BUSY_PATIENCE_SECONDS))
    running = subprocess.Popen(
        [sys.executable, *(patient if is_patient else usual)],
        env={
            **os.environ,
            "PYTHONPATH": path,
            "KUBECONFIG": str(directory / "none"),
            "GPUSHARE_LOG_LEVEL": "ERROR",
        },
    )
    try:
        for _ in range(1200):
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port), 5) as plain,
                trusted.wrap_socket(plain, server_hostname="localhost"),
            ):
                break
            time.sleep(0.1)
        yield port, running.pid
    finally:
        running.kill()
        running.wait()


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process's first thread, its event loop."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def send(
    port: int,
    authority: str,
    bodies: Sequence[bytes],
    per_second: float,
    seconds: float,
    pid: int | None,
    *,
    keeps: bool = True,
) -> Answers:
    """Send from a process of its own, so that no sender's work delays another's clock.

    Args:
        pid: the server's, whose processor time is the clock; None: the clock on the wall.
        keeps: connections for the next review, as the API server does; else each review has one of its own.
    """
    trusted = ssl.create_default_context(cafile=authority)
    clock = time.perf_counter if pid is None else partial(processor_seconds, pid)
    patience = PATIENCE_SECONDS if pid is None else BUSY_PATIENCE_SECONDS
    return asyncio.run(Sender(port, trusted, clock, patience, keeps=keeps).send(bodies, per_second, seconds))


@dataclass(frozen=True, slots=True)
class ReviewScene:
    """Load beside the honest reviews.

    Attributes:
        bodies: of hostile reviews; none are sent where it is empty.
        handshakes: whether one process begins TLS handshakes as fast as it can.
        in_loop: body that one process sends from another address, on each connection as soon as it had an answer.
        keeps: whether the honest keep their connections, else each review has a new one.
    """

    bodies: Sequence[bytes] = ()
    handshakes: bool = False
    in_loop: bytes = b""
    keeps: bool = True


def figures_of(name: str, scene: ReviewScene, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one scene."""
    honest = [review(pod({names.FRACTION: "0.25", names.MEMORY: "8Gi"}))]
    with (
        tempfile.TemporaryDirectory() as directory,
        server(Path(directory), is_patient=options.processor_time) as (port, pid),
        ProcessPoolExecutor(2 + SENDERS, multiprocessing.get_context("spawn")) as pool,
    ):
        authority = str(Path(directory, "tls.crt"))
        first = [pool.submit(send, port, authority, honest, 10, 1, None) for _ in range(1 + SENDERS)]
        of = pid if options.processor_time else None
        wait(first)
        before, begun = cpu_seconds(pid), time.perf_counter()
        rate = options.hostile / SENDERS
        flood = [
            pool.submit(send, port, authority, scene.bodies, rate, options.seconds, of)
            for _ in range(SENDERS if scene.bodies else 0)
        ]
        enough = Path(directory, "enough")
        others = [pool.submit(shake_hands, port, authority, enough)] if scene.handshakes else []
        if scene.in_loop:
            others.append(pool.submit(ask_in_loop, port, authority, scene.in_loop, enough))
        told = pool.submit(send, port, authority, honest, options.honest, options.seconds, of, keeps=scene.keeps)
        answers = told.result()
        enough.touch()
        hostile = sum((each.result().codes for each in flood), Counter[str]())
        hostile = sum((each.result() for each in others), hostile)
        took = time.perf_counter() - begun
        return {
            "scene": name,
            "seconds": took,
            "honest_ms": {
                "p50": percentile(answers.milliseconds, 0.5),
                "p99": percentile(answers.milliseconds, 0.99),
                "max": max(answers.milliseconds),
            },
            "honest": dict(answers.codes),
            "hostile": dict(hostile),
            "server_cpu": (cpu_seconds(pid) - before) / took,
            "server_mib": resident_mib(pid, "VmHWM"),
        }


def main(arguments: Sequence[str]) -> None:
    """Print a row for each scene."""
    parser = argparse.ArgumentParser(prog="python -m bench admission", description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each scene")
    parser.add_argument("--hostile", type=float, default=1000.0, help="reviews a second")
    parser.add_argument("--honest", type=float, default=50.0, help="reviews a second")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--processor-time", action="store_true", help="by the server's, see above")
    parser.add_argument("--scene", action="append", help="only those that have this in their names")
    options = parser.parse_args(arguments)
    kinds = hostile_bodies()
    scenes = {"honest alone": ReviewScene(), "all kinds in turn": ReviewScene(list(kinds.values()))}
    scenes |= {name: ReviewScene([body]) for name, body in kinds.items()}
    scenes["tiny ones in a loop"] = ReviewScene(in_loop=b"{}")
    scenes["large ones in a loop"] = ReviewScene(in_loop=kinds["1,500 containers"])
    scenes["handshakes"] = ReviewScene(handshakes=True)
    scenes["newcomers alone"] = ReviewScene(keeps=False)
    scenes["newcomers beside handshakes"] = ReviewScene(handshakes=True, keeps=False)
    scenes = {name: one for name, one in scenes.items() if any(part in name for part in options.scene or [""])}
    load = os.getloadavg()[0]
    print(
        f"{os.cpu_count()} cores, Python {platform.python_version()}, load {load:.1f}: {options.hostile:g} hostile"
    )
    print(f"and {options.honest:g} honest reviews a second, {options.seconds:g} s each. Bar: {BAR_MS:g} ms.\n")
    print(
        "| scene | honest: median, ms | p99, ms | longest, ms | honest answered | hostile | server, cores | MiB |"
    )
    print("|---|---|---|---|---|---|---|---|")
    found = []
    for name, one in scenes.items():
        figures = figures_of(name, one, options)
        found.append(figures)
        took, codes = figures["honest_ms"], figures["honest"]
        answered = f"{codes.get('200', 0)} of {sum(codes.values())}"
        hostile = ", ".join(f"{count} {code}" for code, count in sorted(figures["hostile"].items())) or "-"
        print(
            f"| {name} | {took['p50']:.1f} | {took['p99']:.1f} | {took['max']:.0f} | {answered} | {hostile} "
            f"| {figures['server_cpu']:.2f} | {figures['server_mib']:.0f} |",
            flush=True,
        )
    print(f"\nLoad at the end: {os.getloadavg()[0]:.1f}.")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
