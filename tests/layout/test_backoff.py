"""Waits that double with each failure come from `core/backoff.py`; no module doubles a delay by hand."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from syntax import nodes

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("src", "operator", "deviceplugin", "bench")
# The one implementation, and models of neural networks, whose widths double with each stage.
EXCEPT_IN = ("src/gpushare/core/backoff.py", "src/gpushare/research/calibration/suite/")


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant)


def _is_two(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value == 2


def _doubles_a_variable(node: ast.AST) -> bool:
    """Return whether it is `2 * x` or `x * 2`."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
        return False
    return (_is_two(node.left) and not _is_number(node.right)) or (
        _is_two(node.right) and not _is_number(node.left)
    )


def _is_power_of_two(node: ast.AST) -> bool:
    """Return whether it is `2 ** n` with a variable n; `64 * 2**10` is a number of bytes."""
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Pow)
        and _is_two(node.left)
        and not _is_number(node.right)
    )


def doublings(source: str) -> Iterator[int]:
    """Yield the lines with `min(limit, 2 * x)`, `x * 2 ** n`, `x *= 2` or `x = 2 * x`."""
    for node in nodes(source):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "min":
            is_doubling = any(map(_doubles_a_variable, node.args))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            is_doubling = _is_power_of_two(node.left) or _is_power_of_two(node.right)
        elif isinstance(node, ast.AugAssign):
            is_doubling = isinstance(node.op, ast.Mult) and _is_two(node.value)
        elif isinstance(node, ast.Assign) and _doubles_a_variable(node.value):
            is_doubling = ast.unparse(node.targets[0]) in {ast.unparse(each) for each in ast.walk(node.value)}
        else:
            continue
        if is_doubling:
            yield node.lineno


def test_no_module_doubles_a_delay_by_hand() -> None:
    found = []
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if not name.startswith(EXCEPT_IN):
            found += [f"{name}:{line}" for line in doublings(path.read_text())]
    assert not found


@pytest.mark.parametrize(
    "statement",
    [
        "retry = min(LONGEST, 2 * retry)",
        "retry = min(retry * 2.0, 30)",
        "wait = FIRST * 2 ** min(count, 8)",
        "wait = 2.0**count * FIRST",
        "self.wait *= 2",
        "self.wait = 2 * self.wait",
    ],
)
def test_each_way_to_double_a_delay_is_found(statement: str) -> None:
    assert list(doublings(statement)) == [1]


@pytest.mark.parametrize("statement", ["LIMIT = 64 * 2**10", "least = max(8, 2 * rows)", "error = min(1.0, x**2)"])
def test_other_arithmetic_is_no_doubling(statement: str) -> None:
    assert not list(doublings(statement))
