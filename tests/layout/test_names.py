"""A type has one name in the project, and a name one type: a reader who searches for it finds one thing."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from syntax import nodes, tree

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ("_pb2.py", "_grpc.py")


def sources() -> Iterator[Path]:
    for folder in ("src", "operator", "deviceplugin", "bench", "hack"):
        yield from (path for path in (ROOT / folder).rglob("*.py") if not path.name.endswith(GENERATED))


def types(path: Path) -> Iterator[tuple[str, str]]:
    """Names of a module's types and what they stand for: each class differs from all, equal aliases do not.

    A private class counts by its name without the underscore, wherever it stands, and a private alias not at all.
    Options of the command line (`Annotated[..., typer.Option(...)]`) belong to their command and are left out.
    """
    for node in tree(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            yield node.name.lstrip("_"), f"the class {node.name} in {path.relative_to(ROOT)}"
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, value = node.targets[0].id, ast.unparse(node.value)
            is_alias = isinstance(node.value, ast.Subscript | ast.BinOp) and not value.startswith("Annotated[")
            if is_alias and name[:1].isupper() and not name.isupper():
                yield name, value


def test_every_type_has_a_name_of_its_own() -> None:
    meanings: dict[str, set[str]] = defaultdict(set)
    for path in sources():
        for name, meaning in types(path):
            meanings[name].add(meaning)
    assert len(meanings) > 700
    assert not {name: found for name, found in meanings.items() if len(found) > 1}


def test_no_two_modules_of_core_share_a_file_name() -> None:
    modules: dict[str, list[str]] = defaultdict(list)
    for path in (ROOT / "src/gpushare/core").rglob("*.py"):
        modules[path.name].append(str(path.relative_to(ROOT)))
    assert len(modules) > 50
    assert not {name: found for name, found in modules.items() if len(found) > 1 and name != "__init__.py"}


SAYS_NOTHING = {"said", "held", "there", "which", "cast", "together"}


def names_of_values(path: Path) -> Iterator[tuple[str, int]]:
    """Names that a file binds, fields of dataclasses included; methods may be verbs, as in `ledger.held()`."""
    found = nodes(path.read_text())
    methods = {id(each) for node in found if isinstance(node, ast.ClassDef) for each in node.body}
    for node in found:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and id(node) not in methods:
            yield node.name, node.lineno


def test_a_value_is_named_by_what_it_is() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in [*sources(), *(ROOT / "tests").rglob("*.py")]
        for name, line in names_of_values(path)
        if name.strip("_") in SAYS_NOTHING
    ]
    assert not found
