"""Files of a readable size, laid out by ruff alone."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ("_pb2.py", "_pb2_grpc.py")
MOST_LINES = 600
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
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, int | float)
        and node.end_lineno != node.lineno
    ]
    assert not wrapped
