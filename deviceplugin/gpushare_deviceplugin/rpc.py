"""gRPC over kubelet's unix sockets: channels, servers, and the errors of a call."""

import errno
import os
from pathlib import Path
from typing import Final

import grpc

# sun_path of unix(7) is 108 bytes with the closing zero.
MAX_PATH_BYTES: Final = 107
# The limit that kubelet sets for PodResources; gRPC's default is 4 MiB.
MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024
_CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel connects at once, even if an older one is in back-off
)

# The errors of a call to kubelet. A later call can succeed.
CALL_ERRORS: Final = (grpc.RpcError, grpc.aio.BaseError, OSError)


def open_channel(socket: Path) -> grpc.aio.Channel:
    """Return a channel to a unix socket; use it in `async with`, which closes it.

    Raises:
        OSError: the path is too long for a unix socket.
    """
    return grpc.aio.insecure_channel(_address(socket), options=_CHANNEL_OPTIONS)


def bind_server(socket: Path) -> grpc.aio.Server:
    """Return a server, not started yet, that is bound to a unix socket. It removes the socket when it stops.

    Raises:
        OSError: the path is too long for a unix socket.
        RuntimeError: gRPC could not bind; it logs why.
    """
    server = grpc.aio.server()  # no limit on streams: gRPC would reset those above it instead of queueing them
    server.add_insecure_port(_address(socket))
    return server


def describe(error: Exception) -> str:
    """Return what went wrong with a call, for a log line."""
    if isinstance(error, grpc.aio.AioRpcError):
        return error.details() or error.code().name
    return str(error) or type(error).__name__


def _address(socket: Path) -> str:
    if len(os.fsencode(socket)) > MAX_PATH_BYTES:
        raise OSError(errno.ENAMETOOLONG, f"a unix socket's path has at most {MAX_PATH_BYTES} bytes", str(socket))
    return f"unix:{socket}"
