"""A function's docstring begins with a verb in the imperative, such as "Return"; a class's is no question."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from syntax import nodes

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("src", "operator", "deviceplugin", "bench", "hack")
CLAUSE = re.compile(
    r"(What|Who|Whom|Whose|Which|Why|When|Where|Whether|How|A|An|The|This|These|That|Those|There|It|Its|One|Each"
    r"|Every|All|Both|Some|No|None|Nobody|Nothing|Only|As|Like|If|So|For|From|Of|In|On|At|By|With|Without|After"
    r"|Before|Since|Until)\b"
)
QUESTION = re.compile(r"(What|Who|Whom|Whose|Why|When|Where|How)\b")


def docstrings(source: str) -> Iterator[tuple[str, str, bool]]:
    """The docstring of each function and class, with its name and whether its first words are against the rule."""
    for node in nodes(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            rule = QUESTION if isinstance(node, ast.ClassDef) else CLAUSE
            if text := ast.get_docstring(node):
                yield text, f"{node.lineno} {node.name}", rule.match(text) is not None


def test_no_docstring_begins_with_a_clause() -> None:
    count, wrong = 0, []
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        for text, where, is_wrong in docstrings(path.read_text()):
            count += 1
            if is_wrong:
                wrong.append(f"{path.relative_to(ROOT)}:{where}: {text.splitlines()[0]}")
    assert count > 3000
    assert not wrong


def test_a_clause_is_noticed() -> None:
    found = docstrings(
        'def cap():\n    """What a pod may use."""\n\n\ndef drop():\n    """Drop what is over."""\n\n\n'
        'class Cap:\n    """The cap of a pod."""\n\n\nclass Why:\n    """Why it waits."""\n'
    )
    assert [(where, is_wrong) for _, where, is_wrong in found] == [
        ("1 cap", True),
        ("5 drop", False),
        ("9 Cap", False),
        ("13 Why", True),
    ]
