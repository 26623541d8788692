"""No running part waits by `asyncio.wait_for`: in Python 3.11 it may lose a cancellation, and then nothing ends.

It returns the result where the task is cancelled in the moment in which what it waits for is done
(https://github.com/python/cpython/issues/86296, mended in 3.12). `asyncio.timeout` does not.
"""

import ast
from pathlib import Path

from syntax import nodes

ROOT = Path(__file__).resolve().parents[2]


def test_nothing_that_runs_uses_wait_for() -> None:
    found = []
    for folder in ("src", "operator", "deviceplugin"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in nodes(path.read_text()):
                if (
                    isinstance(node, ast.Attribute)
                    and node.attr == "wait_for"
                    and ast.unparse(node.value) == "asyncio"
                ):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
                elif isinstance(node, ast.ImportFrom) and node.module == "asyncio":
                    found += [f"{path.relative_to(ROOT)}" for each in node.names if each.name == "wait_for"]
    assert found == []
