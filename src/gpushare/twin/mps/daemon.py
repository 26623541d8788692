"""The twin's control daemon: a real process with the sockets, files, commands and failures of the real one.

Its control path serves one connection at a time and waits up to 10 s for a silent one (docs/facts.md 14). The MPS
server is a child process that holds nothing: when it dies, or the daemon does, every client loses its connection
(docs/facts.md 6).
"""

import array
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Final

from gpushare.core.gpu import GpuInfo
from gpushare.data import default_model
from gpushare.mps.control import PID_FILE
from gpushare.twin.contention import Plant
from gpushare.twin.drawn import DrawnProgress
from gpushare.twin.mps.server import Grant, TwinServer
from gpushare.twin.mps.stopped import StoppedTenants
from gpushare.twin.table import TableProgress

HELLO: Final = b"OUTBHELL\0"
CREDENTIALS: Final = b"OUTBCRED\0"
DESCRIPTOR: Final = b"OUTBCUFD\0"
COMPUTE_TYPE: Final = bytes.fromhex("02000000")
CONTROL_TYPE: Final = bytes.fromhex("04000000")
END_OF_ANSWER: Final = b"\0"
SILENCE_SECONDS: Final = 10.0  # docs/facts.md 14
MAX_PACKET: Final = 65536
# Commands that change nothing: the only ones allowed on the unprivileged socket (docs/facts.md 2).
READ_ONLY: Final = frozenset({"get_default_active_thread_percentage", "device_query"})
DENIED: Final = "Insufficient privileges\n"


class Daemon:
    """One simulated GPU's control daemon."""

    def __init__(self, gpu: GpuInfo, pipe: Path, log: Path, model: Plant) -> None:
        self._pipe, self._log_directory = pipe, log
        stopped = StoppedTenants()
        self._server = TwinServer(gpu, model, pipe.parent / "twin.json", self._log_server, stopped.is_stopped)
        self._child: subprocess.Popen[bytes] | None = None
        self._default_percentage = 100.0
        self._running = True

    def run(self) -> None:
        """Serve until told to quit; the pid file and sockets are gone afterwards."""
        signal.signal(signal.SIGTERM, lambda *_: self._quit())
        self._log_control(f"Starting control daemon using socket {self._pipe}/control")
        listeners = {}
        for name, privileged in (("control", False), ("control_privileged", True)):
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            listener.bind(str(self._pipe / name))
            (self._pipe / name).chmod(0o600 if privileged else 0o666)
            listener.listen(128)
            listeners[listener] = privileged
        (self._pipe / PID_FILE).write_text(f"{os.getpid()}\n")
        threading.Thread(target=self._server.run, name="mps-server", daemon=True).start()
        while self._running:
            ready, _, _ = select.select(list(listeners), [], [], 0.25)
            self._reap()
            for listener in ready:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(SILENCE_SECONDS)
                    self._serve(connection, privileged=listeners[listener])
        self._server.close()
        self._end_child()
        for name in ("control", "control_privileged", PID_FILE):
            (self._pipe / name).unlink(missing_ok=True)

    def _quit(self) -> None:
        self._running = False

    def _serve(self, connection: socket.socket, *, privileged: bool) -> None:
        connection.send(HELLO)
        if connection.recv(MAX_PACKET) != CREDENTIALS:
            self._log_control("User did not send valid credentials")
            return
        kind = connection.recv(MAX_PACKET)
        if kind == CONTROL_TYPE:
            line = connection.recv(MAX_PACKET).decode(errors="replace").strip()
            self._log_control(f"NEW UI: {line}")
            answer = self._command(line.split(), privileged=privileged) if line else ""
            if answer:
                connection.send(answer.encode()[:MAX_PACKET])
            connection.send(END_OF_ANSWER)
        elif kind == COMPUTE_TYPE:
            self._new_client(connection)

    def _new_client(self, connection: socket.socket) -> None:
        server_pid = self._server_pid() or self._start_server(0)
        self._until_the_server_hears()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # The ceilings in force now are this client's for its life (docs/facts.md 5).
            self._server.admit(ours, Grant(self._default_percentage, *self._server.ceilings()))
            descriptors = array.array("i", [theirs.fileno()]).tobytes()
            try:
                connection.sendmsg([DESCRIPTOR], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
            except OSError:  # the kernel carries no more
                self._server.withdraw(ours)
                raise
        connection.recv(MAX_PACKET)
        self._log_control(f"NEW CLIENT from server {server_pid}")

    def _server_pid(self) -> int | None:
        self._reap()
        return self._child.pid if self._child else None

    def _reap(self) -> None:
        if self._child is not None and self._child.poll() is not None:
            self._log_control(f"Server {self._child.pid} exited with status {self._child.returncode}")
            self._child = None
            self._server.stop()

    def _start_server(self, uid: int) -> int:
        # Its standard input is a pipe from us: when we die, however that happens, it ends.
        self._child = subprocess.Popen(
            ["nvidia-cuda-mps-server", "-I", "-S", "-c", "import sys; sys.stdin.read()"],
            executable=sys.executable,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._server.start(self._child.pid)
        self._log_control(f"Starting new server {self._child.pid} for user {uid}")
        self._log_server(f"Server {self._child.pid} has started")
        return self._child.pid

    def _end_child(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
        self._reap()

    def _command(self, words: list[str], *, privileged: bool) -> str:
        name, arguments = words[0], words[1:]
        if not privileged and name not in READ_ONLY:
            return "" if name.startswith("get_") or name == "ps" else DENIED
        server_pid = self._server_pid()
        try:
            match name, arguments:
                case "get_server_list", []:
                    return f"{server_pid}\n" if server_pid else ""
                case "start_server", ["-uid", uid]:
                    if not server_pid:
                        self._start_server(int(uid))
                    return ""
                case "quit", _:
                    self._quit()
                    return ""
                case "ps", _:
                    return self._server.ps()
                case "device_query", []:
                    return self._server.device_query()
                case "get_default_active_thread_percentage", []:
                    return f"{self._default_percentage:.1f}\n"
                case "set_default_active_thread_percentage", [value]:
                    self._default_percentage = _percentage(value)
                    return f"{self._default_percentage:.1f}\n"
                case "set_default_device_pinned_mem_limit", ["0", value]:
                    self._server.default_memory_mib = _mib(value)
                    return ""
                case "set_default_client_priority", [("0" | "1") as value]:
                    self._server.default_priority = int(value)
                    return ""
                case "twin_fault", []:
                    self._server.fault()
                    return ""
                case _, [pid, *rest]:
                    if not server_pid or pid != str(server_pid):
                        return f"Server {pid} not found\n"
                    return self._server_command(name, rest)
                case _:
                    return f'Unknown command "{name}"\n'
        except ValueError:
            return ""  # the real daemon keeps the old value and prints nothing

    def _until_the_server_hears(self) -> None:
        """Wait, as the real daemon does, while the server waits for a client's first message."""
        while self._running and self._server_pid() is not None and self._server.is_waiting:
            time.sleep(0.005)

    def _server_command(self, name: str, arguments: list[str]) -> str:
        self._until_the_server_hears()
        match name, arguments:
            case "get_server_status", []:
                return f"{self._server.state}\n"
            case "get_client_list", []:
                return "".join(f"{pid}\n" for pid in self._server.client_pids())
            case "get_active_thread_percentage", []:
                return f"{self._server.ceilings()[0]:.1f}\n"
            case "set_active_thread_percentage", [value]:
                with contextlib.suppress(ValueError):
                    self._server.thread_ceiling = _percentage(value)
                return f"{self._server.ceilings()[0]:.1f}\n"
            case "get_device_pinned_mem_limit", ["0"]:
                mib = self._server.ceilings()[1]
                return f"{mib // 1024}G\n" if mib % 1024 == 0 else f"{mib}M\n"
            case "set_device_pinned_mem_limit", ["0", value]:
                self._server.memory_ceiling_mib = _mib(value)
                return ""
            case "terminate_client", [pid]:
                return "" if self._server.terminate(int(pid)) else f"Invalid process {pid}!\n1\n"
            case "shutdown_server", _:
                self._end_child()
                return ""
            case _:
                return f'Unknown command "{name}"\n'

    def _log_control(self, text: str) -> None:
        self._write_log("control.log", f"Control {os.getpid():5d}", text)

    def _log_server(self, text: str) -> None:
        self._write_log("server.log", f"Server {self._child.pid if self._child else 0:5d}", text)

    def _write_log(self, name: str, who: str, text: str) -> None:
        # A full disk must not stop MPS, as it does not stop the real one.
        stamp = datetime.now().isoformat(sep=" ", timespec="milliseconds")  # noqa: DTZ005 - local, as the real one's
        with contextlib.suppress(OSError), (self._log_directory / name).open("a") as file:
            file.write(f"[{stamp} {who}] {text}\n")


def _percentage(text: str) -> float:
    value = float(text)
    if not 0 < value <= 100:
        raise ValueError(f"{text} is not a percentage")
    return value


def _mib(text: str) -> int:
    units = {"M": 1, "G": 1024}
    if text[-1:] not in units or not text[:-1].isdigit() or int(text[:-1]) <= 0:
        raise ValueError(f"{text} is not a memory limit")
    return int(text[:-1]) * units[text[-1]]


def main() -> int:
    """Take the place of the calling process's grandchild, as a daemon does."""
    environment = os.environ
    pipe, log = Path(environment["CUDA_MPS_PIPE_DIRECTORY"]), Path(environment["CUDA_MPS_LOG_DIRECTORY"])
    gpu = GpuInfo(**json.loads(environment["GPUSHARE_TWIN_GPU"]))
    if (pipe / "control").exists():
        print("An instance of this daemon is already running")  # noqa: T201 (the real program's words)
        return 1
    if os.fork():
        return 0
    os.setsid()
    if os.fork():
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    drawn = DrawnProgress(lambda: default_model().for_gpu(gpu.model))
    Daemon(gpu, pipe, log, TableProgress(drawn, gpu.model)).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
