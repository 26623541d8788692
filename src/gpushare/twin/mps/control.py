"""Substitute for the program nvidia-cuda-mps-control, with its arguments, environment, commands and output.

    control.py -d [-multiuser-server]    start the twin's daemon in the background
    echo COMMAND | control.py            run commands, one a line

It is run by file name and imports only the fastest modules of the standard library, because the gate calls it
several times in each turn: a start takes about 15 ms. One command is not the real program's: `twin_fault` injects
a server fault.
"""

import os
import socket
import sys
from typing import Final

HELLO: Final = b"OUTBHELL\0"
CREDENTIALS: Final = b"OUTBCRED\0"
CONTROL_TYPE: Final = bytes.fromhex("04000000")
TIMEOUT_SECONDS: Final = 30.0
MAX_PACKET: Final = 65536


def connect(pipe: str) -> socket.socket:
    """Connect as the real program does: by the privileged socket if it can be reached, else by `control`."""
    for name in ("control_privileged", "control"):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(TIMEOUT_SECONDS)
        try:
            connection.connect(os.path.join(pipe, name))  # noqa: PTH118 (pathlib alone doubles the start-up time)
        except OSError:
            connection.close()
        else:
            return connection
    raise ConnectionError("Cannot find MPS control daemon process")


def main() -> int:
    """Run the daemon or the commands on standard input."""
    pipe = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")  # noqa: S108 (the real program's default)
    if "-d" in sys.argv[1:]:
        src = os.path.abspath(__file__)  # noqa: PTH100 (pathlib again)
        for _ in range(4):
            src = os.path.dirname(src)  # noqa: PTH120 (pathlib again)
        argv = [sys.executable, "-m", "gpushare.twin.mps.daemon", *sys.argv[1:]]
        os.execve(sys.executable, argv, {**os.environ, "PYTHONPATH": src})  # noqa: S606 (no shell wanted)
    try:
        for line in sys.stdin:
            command = line.strip()
            if not command:
                continue
            connection = connect(pipe)
            if connection.recv(MAX_PACKET) != HELLO:
                raise ConnectionError("unexpected greeting")
            connection.send(CREDENTIALS)
            connection.send(CONTROL_TYPE)
            connection.send(command.encode())
            while (answer := connection.recv(MAX_PACKET)) not in {b"", b"\0"}:
                sys.stdout.write(answer.decode(errors="replace"))
            connection.close()
    except (OSError, ConnectionError) as error:
        sys.stdout.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
