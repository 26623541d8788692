"""Record the words between a CUDA process, the control daemon and nvidia-cuda-mps-control, packet by packet.

    python3 tests/gpu/handshake.py

Needs root, PyTorch and an NVIDIA driver; starts a control daemon of its own in a temporary directory and ends it.
What it printed on an H200 (driver 580.159.04) is tests/data/mps/handshake-driver-580.txt.
"""

import os
import select
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
PROGRAM = (
    "import torch; print(torch.cuda.get_device_properties(0).multi_processor_count, torch.cuda.mem_get_info())"
)


def command(text: str, directory: Path, log: Path) -> str:
    env = dict(os.environ, CUDA_MPS_PIPE_DIRECTORY=str(directory), CUDA_MPS_LOG_DIRECTORY=str(log))
    return subprocess.run([CONTROL], input=text + "\n", text=True, env=env, timeout=15, capture_output=True).stdout


def connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(str(path))
    return connection


def relay(number: int, client: socket.socket, daemon: socket.socket) -> None:
    """Carry packets both ways and print each: connection, direction, length, bytes, descriptors."""
    other, name = {client: daemon, daemon: client}, {client: "client>", daemon: "daemon<"}
    with client, daemon:
        while True:
            for source in select.select(list(other), [], [], 15)[0]:
                data, ancillary, _, _ = source.recvmsg(65536, 8192)
                print(number, name[source], len(data), data.hex(), len(ancillary), "descriptors", flush=True)
                if not data:
                    return
                rights = [(a, b, c[: len(c) // 4 * 4]) for a, b, c in ancillary if b == socket.SCM_RIGHTS]
                other[source].sendmsg([data], rights)


def serve(listener: socket.socket, upstream: Path) -> None:
    number = 0
    while True:
        client, _ = listener.accept()
        number += 1
        pid, uid, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        print(number, "connect from pid", pid, "uid", uid, flush=True)
        threading.Thread(target=relay, args=(number, client, connect(upstream)), daemon=True).start()


def main() -> None:
    with tempfile.TemporaryDirectory() as base:
        pipe, log, tenant = (Path(base) / name for name in ("pipe", "log", "tenant"))
        for directory in (pipe, log, tenant):
            directory.mkdir()
        env = dict(os.environ, CUDA_MPS_PIPE_DIRECTORY=str(pipe), CUDA_MPS_LOG_DIRECTORY=str(log))
        subprocess.run([CONTROL, "-multiuser-server", "-d"], env=env, timeout=20, check=True)
        try:
            time.sleep(0.5)
            command("start_server -uid 0", pipe, log)
            time.sleep(1)
            with connect(pipe / "control") as greeted:
                print("greeting", greeted.recv(65536).hex())
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            listener.bind(str(tenant / "control"))
            listener.listen(64)
            threading.Thread(target=serve, args=(listener, pipe / "control"), daemon=True).start()
            print("== a control command", flush=True)
            command("get_server_list", tenant, log)
            time.sleep(0.5)
            print("== a CUDA program", flush=True)
            env = dict(os.environ, CUDA_MPS_PIPE_DIRECTORY=str(tenant))
            subprocess.run([sys.executable, "-c", PROGRAM], env=env, timeout=60, check=True)
        finally:
            command("quit", pipe, log)


if __name__ == "__main__":
    main()
