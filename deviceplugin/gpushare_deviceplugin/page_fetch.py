"""Fetch a page of a pod by HTTP/1.1; the event loop only moves its bytes (docs/adr/0263).

A tenant writes every byte of the answer. aiohttp parses it in the event loop while it comes, and a body in chunks
of one byte costs that seconds of CPU time. Here the complete answer is parsed, by http.client, in a thread.
"""

import asyncio
import http.client
import io
import ipaddress
import re
import socket
from typing import Final

from gpushare.core.api import shown
from gpushare.core.control import SloReason, SloTrouble

MOST_HEAD_BYTES: Final = 16 * 2**10
MOST_CHUNKS: Final = 20_000  # 4 MiB in chunks of 210 bytes; servers write some KiB at once
_PART_BYTES: Final = 256 * 2**10
# After a small part the reader pauses, so that an answer that comes by the byte wakes it 100 times a second.
_SMALL_PART_BYTES: Final = 16 * 2**10
_PAUSE_SECONDS: Final = 0.01
_END_OF_HEAD: Final = b"\r\n\r\n"
_LAST_CHUNK: Final = b"\n0\r\n\r\n"
# No informational answer (1xx): the library would skip any number of them.
_STATUS: Final = re.compile(rb"HTTP/1\.[01] [2-5][0-9]{2}[ \r]")
_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,9})[ \t]*\r\n", re.IGNORECASE)


async def fetch(ip: str, port: int, path: str, most_bytes: int) -> bytearray | None:
    """Return a server's answer to a GET, with its head; None if it is longer than `most_bytes`.

    Raises:
        OSError: the server cannot be reached, or breaks off.
        ValueError: `ip` is no address; names are never looked up.
    """
    address = ipaddress.ip_address(ip)
    family, host = (socket.AF_INET6, f"[{ip}]") if address.version == 6 else (socket.AF_INET, ip)
    request = (
        f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nAccept: text/plain;version=0.0.4\r\n"
        "Accept-Encoding: identity\r\nUser-Agent: gpushare\r\nConnection: close\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    answer = bytearray()
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        await loop.sock_connect(connection, (ip, port))
        await loop.sock_sendall(connection, request.encode())
        while part := await loop.sock_recv(connection, _PART_BYTES):
            answer += part
            if len(answer) > most_bytes:
                return None
            if _is_complete(answer):
                break
            await asyncio.sleep(_PAUSE_SECONDS if len(part) < _SMALL_PART_BYTES else 0)
    return answer


def body_of(answer: bytes | bytearray, who: str) -> bytes | SloTrouble:
    """Return the body of an answer; it costs time that grows with the answer, so call it in a thread.

    Args:
        who: named by the trouble.
    """
    if _STATUS.match(answer) is None:
        return SloTrouble(SloReason.UNREACHABLE, f"{who} cannot be read: it does not answer by HTTP/1.1")
    response = http.client.HTTPResponse(_Received(answer), method="GET")  # type: ignore[arg-type]
    try:
        response.begin()
        if response.status != http.HTTPStatus.OK:
            return SloTrouble(SloReason.UNREACHABLE, f"{who} answers with status {response.status}")
        if response.getheader("Content-Encoding", "identity").lower() != "identity":
            return SloTrouble(SloReason.BAD_ANSWER, f"{who} answers compressed, which was not asked for")
        if not response.chunked:
            return response.read()
        chunks: list[bytes] = []
        while chunk := response.read1():
            chunks.append(chunk)
            if len(chunks) > MOST_CHUNKS:
                return SloTrouble(SloReason.TOO_LARGE, f"{who} answers in more than {MOST_CHUNKS} chunks")
        return b"".join(chunks)
    except (http.client.HTTPException, OSError, ValueError) as error:
        return SloTrouble(SloReason.UNREACHABLE, f"{who} cannot be read: {shown(str(error) or repr(error), 160)}")


class _Received:
    """An answer that has come, as the socket that the HTTP library reads."""

    def __init__(self, answer: bytes | bytearray) -> None:
        self._answer = answer

    def makefile(self, _mode: str) -> io.BytesIO:
        return io.BytesIO(self._answer)


def _is_complete(answer: bytearray) -> bool:
    length = _length_of(answer)
    return answer.endswith(_LAST_CHUNK) if length is None else len(answer) >= length


def _length_of(answer: bytes | bytearray) -> int | None:
    """Return the length of the complete answer, as far as its head has come and says it."""
    end = answer.find(_END_OF_HEAD, 0, MOST_HEAD_BYTES)
    found = _LENGTH.search(answer, 0, end + 2) if end >= 0 else None
    return end + len(_END_OF_HEAD) + int(found[1]) if found is not None else None
