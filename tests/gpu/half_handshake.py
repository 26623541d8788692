"""What the MPS server and its daemon do while a client stops half way in its handshake, and afterwards.

    PYTHONPATH=src python3 tests/gpu/half_handshake.py OUT [--only NAME,...]

Needs root, nvcc and an idle GPU. No gate: each round has an MPS daemon of its own, one client that works all the
while, and one that takes the server's socket as a client does and then goes another way. Every wait is bounded.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from gate_bench import compile_tenant
from limit import time_limit

from gpushare.twin.mps.client import (
    ACKNOWLEDGED,
    COMPUTE_TYPE,
    CREDENTIALS,
    DESCRIPTOR,
    MAX_PACKET,
    request_server,
)

CONTROL = "nvidia-cuda-mps-control"
SIT_SECONDS = 3.0
ROUND_SECONDS = 45.0


class Daemon:
    """An MPS daemon with one server, and what was asked of it."""

    def __init__(self, base: Path, tenant: list[str]) -> None:
        self.base, self.tenant = base, tenant
        self.pipe, self.log = base / "pipe", base / "log"
        for directory in (self.pipe, self.log):
            directory.mkdir(parents=True)
        self.env = {
            **os.environ,
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(self.log),
        }
        self.clients: list[subprocess.Popen[str]] = []
        self.hangs = True
        subprocess.run([CONTROL, "-multiuser-server", "-d"], env=self.env, timeout=20, check=True)
        time.sleep(0.5)
        self.control = (self.pipe / "nvidia-cuda-mps-control.pid").read_text()
        self.ask("start_server -uid 0")
        self.server = (self.ask("get_server_list")["answer"] or "0").split()[0]

    def ask(self, line: str, seconds: float = 4.0) -> dict[str, Any]:
        """One command: its answer, or None where none came in time."""
        began = time.monotonic()
        try:
            done = subprocess.run(
                [CONTROL], input=line + "\n", env=self.env, capture_output=True, text=True, timeout=seconds
            )
            answer = done.stdout.strip() or done.stderr.strip()
        except subprocess.TimeoutExpired:
            answer = None
        return {"asked": line, "answer": answer, "seconds": round(time.monotonic() - began, 3)}

    def client(self, seconds: float, pipe: Path | None = None) -> subprocess.Popen[str]:
        env = {**self.env, "CUDA_MPS_PIPE_DIRECTORY": str(pipe or self.pipe)}
        process = subprocess.Popen(
            [*self.tenant, "run", str(seconds), "64"], env=env, stdout=subprocess.PIPE, text=True
        )
        self.clients.append(process)
        return process

    def starts(self, seconds: float = 8.0) -> dict[str, Any]:
        """Whether a newcomer has a context in time."""
        process = self.client(0.3)
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()), daemon=True)
        reader.start()
        began = time.monotonic()
        while time.monotonic() < began + seconds and not any('"context"' in line for line in list(lines)):
            time.sleep(0.02)
        return {
            "newcomer": any('"context"' in line for line in list(lines)),
            "seconds": round(time.monotonic() - began, 2),
            "said": [line.strip()[:160] for line in lines[:3]],
        }

    def well(self) -> list[dict[str, Any]]:
        """What the daemon answers, and whether a newcomer starts."""
        seen = [self.ask(f"get_client_list {self.server}", 2)]
        self.hangs = seen[0]["answer"] is None
        if not self.hangs:
            seen += [self.starts(), self.ask(f"get_client_list {self.server}")]
        return seen

    def close(self) -> None:
        for process in self.clients:
            process.kill()
        for process in self.clients:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        if not self.hangs:
            self.ask("quit -t 1", 6)
        for pid in (self.server, self.control):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.5)


def taker(daemon: Daemon, body: Callable[[socket.socket], None]) -> int:
    """Fork a process that takes the server's socket and goes on as `body` says; return its pid."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            body(request_server(daemon.pipe / "control", 5))
        os._exit(0)
    return pid


def ended(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def leaves(daemon: Daemon) -> dict[str, Any]:
    """It closes at once."""
    ended(taker(daemon, lambda server: server.close()))
    return {}


def sits(daemon: Daemon) -> dict[str, Any]:
    """It says nothing for three seconds and exits; nobody asks the daemon anything meanwhile."""
    ended(taker(daemon, lambda server: time.sleep(SIT_SECONDS)))
    return {}


def sits_asked(daemon: Daemon) -> dict[str, Any]:
    """The same, and the daemon is asked for its clients meanwhile, with patience."""
    pid = taker(daemon, lambda server: time.sleep(SIT_SECONDS))
    time.sleep(0.2)
    asked = daemon.ask(f"get_client_list {daemon.server}", 10)
    ended(pid)
    return {"asked_meanwhile": asked}


def shut(daemon: Daemon) -> dict[str, Any]:
    """It sits; whoever kept a duplicate shuts the socket down after a second, the daemon asked before."""
    server = request_server(daemon.pipe / "control", 5)
    asking: list[dict[str, Any]] = []
    asker = threading.Thread(target=lambda: asking.append(daemon.ask(f"get_client_list {daemon.server}", 8)))
    asker.start()
    time.sleep(1)
    at = time.monotonic()
    server.shutdown(socket.SHUT_RDWR)
    asker.join()
    took = round(time.monotonic() - at, 3)
    server.close()
    return {"asked_meanwhile": asking, "answered_after_the_shutdown_s": took}


def garbage(daemon: Daemon) -> dict[str, Any]:
    """It says what the protocol does not know."""

    def body(server: socket.socket) -> None:
        server.send(b"garbage")
        time.sleep(1)

    ended(taker(daemon, body))
    return {}


def _completed(daemon: Daemon, *packets: bytes, reads: bool = False, asks: bool = True) -> dict[str, Any]:
    """Nobody speaks for a second, the daemon is asked meanwhile; then the holder of a duplicate says this."""
    duplicate = request_server(daemon.pipe / "control", 5)
    duplicate.settimeout(1)
    asking: list[dict[str, Any]] = []
    asker = threading.Thread(target=lambda: asking.append(daemon.ask(f"get_client_list {daemon.server}", 4)))
    if asks:
        asker.start()
        time.sleep(1)
    result: dict[str, Any] = {"read": []}
    at = time.monotonic()
    if reads:
        result["read"].append(_read(duplicate))
    for word in packets:
        duplicate.send(word)
    result["read"].append(_read(duplicate))
    duplicate.close()
    if asks:
        asker.join()
    return {**result, "asked_meanwhile": asking, "answered_after_s": round(time.monotonic() - at, 3)}


def _read(duplicate: socket.socket) -> str:
    try:
        data, descriptors, _, _ = socket.recv_fds(duplicate, MAX_PACKET, 8)
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    files = [_file_of(each) for each in descriptors]
    for each in descriptors:
        os.close(each)
    return f"{len(data)} {data[:48].hex()} {files}"


def completed(daemon: Daemon) -> dict[str, Any]:
    return _completed(daemon, CREDENTIALS)


def completed_typed(daemon: Daemon) -> dict[str, Any]:
    return _completed(daemon, CREDENTIALS, COMPUTE_TYPE)


def completed_acknowledged(daemon: Daemon) -> dict[str, Any]:
    return _completed(daemon, ACKNOWLEDGED, CREDENTIALS, reads=True)


def completed_both(daemon: Daemon) -> dict[str, Any]:
    return _completed(daemon, CREDENTIALS, ACKNOWLEDGED, reads=True)


def completed_unasked(daemon: Daemon) -> dict[str, Any]:
    return _completed(daemon, CREDENTIALS, reads=True, asks=False)


def replayed(daemon: Daemon) -> dict[str, Any]:
    """The words that a CUDA program was seen to say first, said by us."""
    seen = words(daemon)
    first = [line.partition("server > ")[2].split(" ") for line in seen["words"] if "server > " in line]
    packets = [bytes.fromhex(parts[1]) for parts in first if parts[0].isdigit() and 0 < int(parts[0]) <= 48]
    seen["said"] = [word.hex() for word in packets]
    if packets:
        seen |= _completed(daemon, packets[0])
    return seen


def stopped(daemon: Daemon) -> dict[str, Any]:
    """A CUDA program is stopped at a moment of its start, again and again, and the daemon is asked."""
    seen = []
    for milliseconds in (20, 40, 60, 80, 100, 120, 140, 160):
        process = daemon.client(0.2)
        time.sleep(milliseconds / 1000)
        process.send_signal(signal.SIGSTOP)
        asked = daemon.ask(f"get_client_list {daemon.server}", 2)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.4)
        seen.append({"after_ms": milliseconds, **asked})
    return {"asked_meanwhile": seen}


def words(daemon: Daemon) -> dict[str, Any]:
    """Both sockets of a CUDA program are relayed, and every word noted."""
    noted: list[str] = []
    front = daemon.base / "front"
    front.mkdir()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(front / "control"))
    listener.listen(16)
    threading.Thread(target=_serve, args=(listener, daemon.pipe / "control", noted), daemon=True).start()
    process = daemon.client(2, front)
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()), daemon=True)
    reader.start()
    reader.join(8)
    return {"words": noted[:160], "count": len(noted), "client": [line.strip()[:160] for line in lines[:8]]}


def _serve(listener: socket.socket, upstream: Path, noted: list[str]) -> None:
    for number in range(100):
        client, _ = listener.accept()
        daemon = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        daemon.connect(str(upstream))
        _carry(f"{number} daemon", client, daemon, noted)


def _carry(name: str, client: socket.socket, other: socket.socket, noted: list[str]) -> None:
    pid, uid, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    client.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)

    def one_way(source: socket.socket, target: socket.socket, arrow: str) -> None:
        while True:
            try:
                data, ancillary, _, _ = source.recvmsg(MAX_PACKET, 8192)
            except OSError as error:
                noted.append(f"{name} {arrow} {error}")
                break
            kinds = [(kind, len(payload)) for _, kind, payload in ancillary]
            noted.append(f"{name} {arrow} {len(data)} {data[:48].hex()} {kinds}")
            if not data:
                break
            passed = []
            for level, kind, payload in ancillary:
                if kind == socket.SCM_RIGHTS:
                    descriptors = [
                        descriptor for (descriptor,) in struct.iter_unpack("i", payload[: len(payload) // 4 * 4])
                    ]
                    if data == DESCRIPTOR and arrow == "<" and "server" not in name:
                        ours, theirs = socket.socketpair(socket.AF_UNIX, _kind_of(descriptors[0], noted))
                        server = socket.socket(fileno=descriptors[0])
                        _carry(f"{name}'s server", ours, server, noted)
                        passed.append((level, kind, struct.pack("i", theirs.detach())))
                    else:
                        noted.append(f"{name} {arrow} " + ", ".join(_file_of(each) for each in descriptors))
                        passed.append((level, kind, struct.pack(f"{len(descriptors)}i", *descriptors)))
                elif kind == socket.SCM_CREDENTIALS and "server" in name:
                    passed.append((level, kind, payload))
                    noted.append(f"{name} credentials {struct.unpack('3i', payload)}")
            try:
                target.sendmsg([data], passed)
            except OSError as error:
                noted.append(f"{name} {arrow} not sent: {error}")
                break
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    noted.append(f"{name} from pid {pid} uid {uid}")
    for source, target, arrow in ((client, other, ">"), (other, client, "<")):
        threading.Thread(target=one_way, args=(source, target, arrow), daemon=True).start()


def _file_of(descriptor: int) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())


def _kind_of(descriptor: int, noted: list[str]) -> int:
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        kind = copy.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
        peer = struct.unpack("3i", copy.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        noted.append(f"the server's socket: family {copy.family}, type {kind}, peer {peer}")
    return kind


ROUNDS = (
    words,
    replayed,
    completed,
    completed_unasked,
    completed_both,
    completed_acknowledged,
    completed_typed,
    leaves,
    sits,
    sits_asked,
    shut,
    garbage,
    stopped,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=240.0)
    options = parser.parse_args()
    only = [name for name in options.only.split(",") if name]
    tenant = compile_tenant(Path(tempfile.mkdtemp()))
    results: list[dict[str, Any]] = []
    began = time.monotonic()
    for body in ROUNDS:
        if (only and body.__name__ not in only) or time.monotonic() - began > options.seconds:
            continue
        at = time.monotonic()
        row: dict[str, Any] = {"round": body.__name__}
        with tempfile.TemporaryDirectory() as base:
            daemon = None
            try:
                with time_limit(ROUND_SECONDS):
                    daemon = Daemon(Path(base), tenant)
                    bystander = daemon.client(60)
                    time.sleep(1.0)
                    row |= body(daemon)
                    row["afterwards"] = daemon.well()
                    row["bystander_lives"] = bystander.poll() is None
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"
            row["seconds"] = round(time.monotonic() - at, 1)
            for name in ("server.log", "control.log"):
                with contextlib.suppress(OSError):
                    text = (Path(base) / "log" / name).read_text(errors="replace")
                    row[name] = text.splitlines()[-14:]
            with contextlib.suppress(Exception), time_limit(20):
                if daemon is not None:
                    daemon.close()
        results.append(row)
        print(json.dumps({key: value for key, value in row.items() if "log" not in key})[:900], flush=True)
        (options.out / "half_handshake.json").write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
