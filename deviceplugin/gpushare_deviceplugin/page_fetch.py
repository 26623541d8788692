"""Fetch a page of a pod by HTTP/1.1; the event loop only moves its bytes (docs/adr/0263).

A tenant writes every byte of the answer. An HTTP library parses it in the event loop while it comes, and a body in
chunks of one byte costs that seconds of CPU time. Here a complete answer is parsed, in a thread.
"""

import asyncio
import ipaddress
import re
import socket
from typing import Final

from gpushare.core.control import SloReason, SloTrouble

MOST_HEAD_BYTES: Final = 16 * 2**10
MOST_CHUNKS: Final = 20_000  # 4 MiB in chunks of 210 bytes; servers write some KiB at once
_PART_BYTES: Final = 256 * 2**10
# After a small part the reader pauses, so that an answer that comes by the byte wakes it 100 times a second.
_SMALL_PART_BYTES: Final = 16 * 2**10
_PAUSE_SECONDS: Final = 0.01
_END_OF_HEAD: Final = b"\r\n\r\n"
_LAST_CHUNK: Final = b"\n0\r\n\r\n"
_STATUS: Final = re.compile(rb"HTTP/1\.[01] ([1-5][0-9]{2})[ \r]")
_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,9})[ \t]*\r\n", re.IGNORECASE)
_CHUNK: Final = re.compile(rb"([0-9A-Fa-f]{1,7})(?:[ \t;][^\r\n]{0,200})?\r\n")


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


def body_of(answer: bytes | bytearray, who: str) -> bytes | bytearray | SloTrouble:
    """Return the body of an answer; it costs time that grows with the answer, so call it in a thread.

    Args:
        who: named by the trouble.
    """
    status, end = _STATUS.match(answer), answer.find(_END_OF_HEAD, 0, MOST_HEAD_BYTES)
    if status is None or end < 0:
        return SloTrouble(SloReason.UNREACHABLE, f"{who} cannot be read: it does not answer by HTTP/1.1")
    if status[1] != b"200":
        return SloTrouble(SloReason.UNREACHABLE, f"{who} answers with status {int(status[1])}")
    lines = (line.partition(b":") for line in bytes(answer[:end]).split(b"\r\n")[1:])
    head = {name.lower(): value.strip().lower() for name, _, value in lines}
    if head.get(b"content-encoding", b"identity") != b"identity":
        return SloTrouble(SloReason.BAD_ANSWER, f"{who} answers compressed, which was not asked for")
    begin, length = end + len(_END_OF_HEAD), _length_of(answer)
    if b"transfer-encoding" in head:
        return _joined(answer, begin, who)
    return _broken_off(who) if length is not None and len(answer) < length else answer[begin:length]


def _joined(body: bytes | bytearray, at: int, who: str) -> bytes | SloTrouble:
    """Return the chunks that begin at a place in one."""
    chunks: list[bytes | bytearray] = []
    while len(chunks) <= MOST_CHUNKS:
        head = _CHUNK.match(body, at)
        if head is None:
            return _broken_off(who)
        size = int(head[1], 16)
        if size == 0:
            return b"".join(chunks)
        at = head.end() + size + 2
        if body[at - 2 : at] != b"\r\n":
            return _broken_off(who)
        chunks.append(body[head.end() : at - 2])
    return SloTrouble(SloReason.TOO_LARGE, f"{who} answers in more than {MOST_CHUNKS} chunks")


def _is_complete(answer: bytearray) -> bool:
    length = _length_of(answer)
    return answer.endswith(_LAST_CHUNK) if length is None else len(answer) >= length


def _length_of(answer: bytes | bytearray) -> int | None:
    """Return the length of the complete answer, as far as its head has come and says it."""
    end = answer.find(_END_OF_HEAD, 0, MOST_HEAD_BYTES)
    found = _LENGTH.search(answer, 0, end + 2) if end >= 0 else None
    return end + len(_END_OF_HEAD) + int(found[1]) if found is not None else None


def _broken_off(who: str) -> SloTrouble:
    return SloTrouble(SloReason.UNREACHABLE, f"{who} cannot be read: its answer is broken off")
