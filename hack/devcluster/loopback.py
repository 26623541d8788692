"""Ports for servers that tests and benchmarks start on this machine."""

import random
import socket
from contextlib import suppress

# Below the ports of outgoing connections, which could take one before its server binds it, and below those of
# Services of type NodePort
_PORTS = range(20000, 30000)
_returned: set[int] = set()


def unused_port() -> int:
    """Return a TCP port that nobody has bound, on any address, and that this process was not given before."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    while True:
        port = random.choice(_PORTS)
        if port in _returned:
            continue
        with suppress(OSError), socket.create_server(("", port), family=family, dualstack_ipv6=both):
            _returned.add(port)
            return port
