"""The runtime's dependencies: each is used by a running part, and no running part needs more than these."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from syntax import tree

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOLDERS = [ROOT / folder for folder in ("src", "operator", "deviceplugin")]
RESEARCH = ROOT / "src" / "gpushare" / "research"
SOURCES = [path for folder in FOLDERS for path in folder.rglob("*.py") if RESEARCH not in path.parents]
OWN = {"gpushare", "gpushare_operator", "gpushare_deviceplugin"}
FIT = {"matplotlib", "networkx", "scipy", "sklearn"}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def required(requirements: list[str]) -> set[str]:
    """Distributions that requirements name."""
    return {normal(re.split(r"[<>=!~;\[ ]", requirement)[0]) for requirement in requirements}


def imported(tree: ast.AST, *, in_functions: bool) -> Iterator[str]:
    """Top-level names of the modules that a module imports."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").partition(".")[0]
        elif in_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imported(node, in_functions=in_functions)


def third_party(*, in_functions: bool) -> dict[str, Path]:
    """Modules that are neither ours nor the standard library's, each with a file that imports it."""
    found = {
        name: path for path in SOURCES for name in imported(tree(path.read_text()), in_functions=in_functions)
    }
    return {name: path for name, path in found.items() if name not in OWN | sys.stdlib_module_names}


def distributions(modules: dict[str, Path]) -> set[str]:
    """What installs these modules."""
    known = importlib.metadata.packages_distributions()
    return {normal(name) for module in modules for name in known.get(module, [])}


def test_every_dependency_is_imported_by_a_running_part() -> None:
    unused = required(PROJECT["dependencies"]) - distributions(third_party(in_functions=True))
    assert not unused, "nothing imports these; take them out of `dependencies`"


def test_running_parts_import_nothing_that_is_not_a_dependency() -> None:
    installed, wanted = importlib.metadata.packages_distributions(), required(PROJECT["dependencies"])
    missing = {
        module: path.relative_to(ROOT)
        for module, path in third_party(in_functions=False).items()
        if not {normal(name) for name in installed.get(module, [])} & wanted
    }
    assert not missing, "add them to `dependencies`, or import them where they are used and name the extra"


def test_the_command_line_loads_without_the_extra_for_fitting() -> None:
    program = f"""
import importlib, sys
sys.path[:0] = {[str(folder) for folder in FOLDERS]}
sys.modules.update(dict.fromkeys({sorted(FIT)}))  # as if they were not installed
from gpushare.cli.root import GROUPS
for module, _ in GROUPS.values():
    importlib.import_module(module)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
