"""Ports of the loopback for servers of tests."""

import random
import socket
from contextlib import suppress


def unused_port() -> int:
    """Return a port below the kernel's ephemeral ones, so that no outgoing connection takes it in the meantime."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
