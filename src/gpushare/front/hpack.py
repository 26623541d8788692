"""HPACK (RFC 7541), the header compression of HTTP/2: all of it to read, its simplest form to write."""

from collections.abc import Iterable, Iterator
from typing import Final

Headers = list[tuple[bytes, bytes]]

# Appendix A.
_STATIC: Final[Headers] = [
    (b":authority", b""),
    (b":method", b"GET"),
    (b":method", b"POST"),
    (b":path", b"/"),
    (b":path", b"/index.html"),
    (b":scheme", b"http"),
    (b":scheme", b"https"),
    *((b":status", code) for code in (b"200", b"204", b"206", b"304", b"400", b"404", b"500")),
    (b"accept-charset", b""),
    (b"accept-encoding", b"gzip, deflate"),
    *(
        (name, b"")
        for name in (
            b"accept-language accept-ranges accept access-control-allow-origin age allow authorization"
            b" cache-control content-disposition content-encoding content-language content-length"
            b" content-location content-range content-type cookie date etag expect expires from host"
            b" if-match if-modified-since if-none-match if-range if-unmodified-since last-modified link"
            b" location max-forwards proxy-authenticate proxy-authorization range referer refresh"
            b" retry-after server set-cookie strict-transport-security transfer-encoding user-agent vary"
            b" via www-authenticate"
        ).split()
    ),
]
# Appendix B: the length of each symbol's code in bits, as the letters from A for 5. The codes follow from the
# lengths, since the code is canonical.
_HUFFMAN_BITS: Final = (
    b"ISXXXXXXXTZXXZXXXXXXXXZXXXXXXXXXBFFHIBDGFFDGDBBBAAABBBBBBBCDKBHFIBCCCCCCCCCCCCCCCCCCCCCCDCDIOIJBKABA"
    b"BABBBACCBBBABCBAABCCCCCKGJIXPRPPRRRSRSSSSSTSTTRSTSSSSQRSRSSTRQPRRSSQSRRTQRSSQQRQSRSSPRRRSRRSVVPORSRU"
    b"VVVWWVTUOQVWWVWTQQVVXWWWPTPQRQQSRRUUTTVSVWVVWWWWWXWWWWWVZ"
)
_END: Final = 256
TABLE_BYTES: Final = 4096  # the protocol's initial size, which we do not change
_ENTRY_BYTES: Final = 32


class HeaderError(ValueError):
    """A header block that cannot be read; the connection is of no more use."""


def _codes(lengths: bytes) -> dict[tuple[int, int], int]:
    """Return the symbol of each (length in bits, code)."""
    codes, code, last = {}, 0, 0
    for bits, symbol in sorted((letter - ord("A") + 5, symbol) for symbol, letter in enumerate(lengths)):
        code <<= bits - last
        last = bits
        codes[bits, code] = symbol
        code += 1
    return codes


class HeaderDecoder:
    """Reads the header blocks of one connection, in their order."""

    def __init__(self) -> None:
        self._codes = _codes(_HUFFMAN_BITS)
        self._dynamic: Headers = []  # the latest first
        self._size = 0
        self._limit = TABLE_BYTES

    def decode(self, block: bytes) -> Headers:
        """Return a block's headers.

        Raises:
            HeaderError: it breaks the format.
        """
        try:
            return list(self._fields(block))
        except IndexError:
            raise HeaderError("a header block that ends too early or names an entry that is not there") from None

    def _fields(self, block: bytes) -> Iterator[tuple[bytes, bytes]]:
        at = 0
        while at < len(block):
            first = block[at]
            if first & 0x80:
                index, at = _integer(block, at, 7)
                yield self._entry(index)
                continue
            if first & 0xE0 == 0x20:
                self._limit, at = _integer(block, at, 5)
                if self._limit > TABLE_BYTES:
                    raise HeaderError("a header table larger than we take")
                self._evict()
                continue
            is_kept = bool(first & 0x40)
            index, at = _integer(block, at, 6 if is_kept else 4)
            if index:
                name = self._entry(index)[0]
            else:
                name, at = self._text(block, at)
            value, at = self._text(block, at)
            if is_kept:
                self._dynamic.insert(0, (name, value))
                self._size += len(name) + len(value) + _ENTRY_BYTES
                self._evict()
            yield name, value

    def _entry(self, index: int) -> tuple[bytes, bytes]:
        if index == 0:
            raise HeaderError("a header of index 0")
        return _STATIC[index - 1] if index <= len(_STATIC) else self._dynamic[index - 1 - len(_STATIC)]

    def _evict(self) -> None:
        while self._size > self._limit:
            name, value = self._dynamic.pop()
            self._size -= len(name) + len(value) + _ENTRY_BYTES

    def _text(self, block: bytes, at: int) -> tuple[bytes, int]:
        is_huffman = bool(block[at] & 0x80)
        length, at = _integer(block, at, 7)
        if at + length > len(block):
            raise HeaderError("a header block that ends too early")
        raw = block[at : at + length]
        return (self._unhuffman(raw) if is_huffman else raw), at + length

    def _unhuffman(self, raw: bytes) -> bytes:
        text = bytearray()
        code = bits = 0
        for byte in raw:
            for shift in range(7, -1, -1):
                code, bits = code << 1 | byte >> shift & 1, bits + 1
                symbol = self._codes.get((bits, code))
                if symbol is None:
                    continue
                if symbol == _END:
                    raise HeaderError("the end of a text within it")
                text.append(symbol)
                code = bits = 0
        if bits > 7 or code != (1 << bits) - 1:
            raise HeaderError("a text that ends within a symbol")
        return bytes(text)


def encode(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a block that no decoder has to remember anything of."""
    return b"".join(b"\0" + _length(len(name)) + name + _length(len(value)) + value for name, value in headers)


def _integer(block: bytes, at: int, bits: int) -> tuple[int, int]:
    """Return the number whose first byte has so many bits of it, and where the next field begins."""
    most = (1 << bits) - 1
    value, at = block[at] & most, at + 1
    if value < most:
        return value, at
    shift = 0
    while True:
        byte, at = block[at], at + 1
        value += (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return value, at
        if shift > 28:
            raise HeaderError("a number that is too large")


def _length(value: int) -> bytes:
    """Return the length of a text in its own bytes, without Huffman's code."""
    if value < 0x7F:
        return bytes([value])
    value, found = value - 0x7F, bytearray([0x7F])
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])
