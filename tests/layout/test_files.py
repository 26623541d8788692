"""Files of a readable size, laid out by ruff alone."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from syntax import nodes

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ("_pb2.py", "_pb2_grpc.py")
MOST_LINES = 600
SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return, ast.Raise, ast.Assert)
CLOSED_WITH_COMMENT = re.compile(r"^\s*[)\]}].*  # ", re.MULTILINE)
SKIP = "fmt: " + "skip"  # not as one word, lest this file be found


def files() -> Iterator[Path]:
    for folder in ("src", "operator", "deviceplugin", "bench", "hack", "tests"):
        yield from (path for path in (ROOT / folder).rglob("*.py") if not path.name.endswith(GENERATED))


def test_no_file_is_longer_than_a_reader_can_bear() -> None:
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in files()}
    assert len(lengths) > 800
    assert not {name: lines for name, lines in lengths.items() if lines > MOST_LINES}


def test_no_line_is_kept_from_the_formatter() -> None:
    assert not [path.relative_to(ROOT).as_posix() for path in files() if SKIP in path.read_text()]


def test_no_number_is_wrapped_round_its_comment() -> None:
    """The formatter does that where a comment makes the line too long: such a comment goes above."""
    wrapped = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in files()
        for node in nodes(path.read_text())
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, int | float)
        and node.end_lineno != node.lineno
    ]
    assert not wrapped


def head_of(node: ast.stmt) -> tuple[str, int] | None:
    """A simple statement, or a condition's first line, on one line, and the line on which the written one ends."""
    if isinstance(node, ast.If | ast.While):
        word = "if" if isinstance(node, ast.If) else "while"
        return f"{word} {ast.unparse(node.test)}:", node.body[0].lineno - 1
    if isinstance(node, SIMPLE):
        return ast.unparse(node), node.end_lineno or node.lineno
    return None


def wrapped(source: str) -> Iterator[int]:
    """Lines of statements that would fit on one, but for the comment behind them."""
    if not CLOSED_WITH_COMMENT.search(source):
        return
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}
    lines = source.splitlines()
    for node in nodes(source):
        head = head_of(node) if isinstance(node, ast.stmt) else None
        if head is None or head[1] == node.lineno or comments.get(head[1], "noqa").find("noqa") >= 0:
            continue
        is_alone = not any(line in comments for line in range(node.lineno, head[1]))
        is_closing = lines[head[1] - 1].lstrip()[:1] in (")", "]", "}") and not lines[head[1] - 2].endswith(",")
        if is_alone and is_closing and node.col_offset + len(head[0]) <= 115:
            yield node.lineno


def test_no_statement_is_wrapped_round_its_comment() -> None:
    assert not [f"{path.relative_to(ROOT)}:{line}" for path in files() for line in wrapped(path.read_text())]


def test_a_statement_that_is_wrapped_round_its_comment_is_found() -> None:
    assert list(wrapped("a = f(\n    1\n)  # why\nif (\n    a\n):  # why not\n    pass\n")) == [1, 4]
    assert not list(wrapped("# why\na = f(1)\nb = [\n    1,\n]  # two\nc = f(\n    1,  # one\n)\n"))
