"""Header compression, by the examples of RFC 7541's appendix C."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.front.hpack import TABLE_BYTES, HeaderDecoder, HeaderError, Headers, encode

GET = [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"www.example.com")]
NEXT = [*GET, (b"cache-control", b"no-cache")]
LAST = [
    (b":method", b"GET"),
    (b":scheme", b"https"),
    (b":path", b"/index.html"),
    (b":authority", b"www.example.com"),
    (b"custom-key", b"custom-value"),
]
PLAIN = (
    "828684410f7777772e6578616d706c652e636f6d",
    "828684be58086e6f2d6361636865",
    "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565",
)
HUFFMAN = (
    "828684418cf1e3c2e5f23a6ba0ab90f4ff",
    "828684be5886a8eb10649cbf",
    "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
)


@pytest.mark.parametrize("blocks", [PLAIN, HUFFMAN])
def test_three_requests_in_a_row(blocks: tuple[str, ...]) -> None:
    decoder = HeaderDecoder()
    assert [decoder.decode(bytes.fromhex(block)) for block in blocks] == [GET, NEXT, LAST]


def test_a_table_that_is_made_small_forgets_its_oldest() -> None:
    decoder = HeaderDecoder()
    decoder.decode(bytes.fromhex(PLAIN[0]))
    decoder.decode(bytes.fromhex(PLAIN[1]))
    assert decoder.decode(bytes.fromhex("3f16" + "be")) == [(b"cache-control", b"no-cache")]  # 53 bytes hold one
    with pytest.raises(HeaderError):
        decoder.decode(bytes.fromhex("bf"))


@pytest.mark.parametrize(
    "block",
    [
        "80",  # index 0
        "be",  # an entry that is not there
        "410f7777",  # ends within a text
        "3fe2ffffff7f",  # a table larger than was agreed
        "7fffffffffffff",  # a number without an end
        "0081008100",  # Huffman: zeros at the end, which are no padding
        "0084ffffffff00",  # Huffman: the end of the text within it
    ],
)
def test_what_breaks_the_format_is_refused(block: str) -> None:
    with pytest.raises(HeaderError):
        HeaderDecoder().decode(bytes.fromhex(block))


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=300), st.binary(max_size=2 * TABLE_BYTES)), max_size=5))
def test_what_we_write_is_read_the_same(headers: Headers) -> None:
    assert HeaderDecoder().decode(encode(headers)) == headers
