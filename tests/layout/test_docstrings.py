"""A function's docstring says what it does: it begins with a verb in the imperative, such as "Return"."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("src", "operator", "deviceplugin", "bench", "hack")
CLAUSE = re.compile(
    r"(What|Who|Whom|Whose|Which|Why|When|Where|Whether|How|A|An|The|This|These|That|Those|There|It|Its|One|Each"
    r"|Every|All|Both|Some|No|None|Nobody|Nothing|Only|As|Like|If|So|For|From|Of|In|On|At|By|With|Without|After"
    r"|Before|Since|Until)\b"
)


def docstrings(source: str) -> Iterator[tuple[str, str, int]]:
    """The docstring of each function, with the function's name and line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
            yield text, node.name, node.lineno


def test_no_docstring_of_a_function_begins_with_a_clause() -> None:
    count, wrong = 0, []
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        for text, name, line in docstrings(path.read_text()):
            count += 1
            if CLAUSE.match(text):
                wrong.append(f"{path.relative_to(ROOT)}:{line} {name}: {text.splitlines()[0]}")
    assert count > 2500
    assert not wrong


def test_a_clause_is_noticed() -> None:
    source = 'def cap():\n    """What a pod may use."""\n\n\ndef drop():\n    """Drop what is over."""\n'
    found = [(name, bool(CLAUSE.match(text))) for text, name, _ in docstrings(source)]
    assert found == [("cap", True), ("drop", False)]
