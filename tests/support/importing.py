"""Import every module of benchmarks, tools and GPU scripts, and print as JSON what of ours they miss.

    python tests/support/importing.py ROOT

Two looks, as each sees what the other does not: the import itself, and the text, where imports within functions
and those after a missing third-party module count too.
"""

import ast
import gc
import importlib
import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

# Where ours are found.
PATHS: Final = (
    ".",
    "src",
    "operator",
    "deviceplugin",
    "hack",
    "tests/support",
    "tests/gpu",
)
FOLDERS: Final = {"bench": ".", "hack": "hack", "tests/support": "tests/support", "tests/gpu": "tests/gpu"}
ON_GPU_MACHINES_ONLY: Final = {"torch", "cupy"}


def sources(root: Path) -> dict[Path, str | None]:
    """Return the files to check, each with its module's name; None for a command such as hack/chaos."""
    found: dict[Path, str | None] = {}
    for folder, base in FOLDERS.items():
        for path in sorted((root / folder).rglob("*")):
            if path.suffix == ".py":
                name = ".".join(path.relative_to(root / base).with_suffix("").parts)
                found[path] = name.removesuffix(".__init__")
            elif path.is_file() and not path.suffix and path.read_bytes().startswith(b"#!/usr/bin/env python3"):
                found[path] = None
    return found


def needs_gpu_machine(why: str) -> bool:
    """Return whether all that keeps a module from being imported is what only GPU machines have."""
    return why.partition(".")[0] in ON_GPU_MACHINES_ONLY


@cache
def imported(name: str) -> str:
    """Import a module; return "" or why it cannot be."""
    try:
        importlib.import_module(name)
    except SystemExit as end:
        return "" if name.endswith("__main__") else f"ends with {end.code!r}"
    except ModuleNotFoundError as error:
        return error.name if error.name and needs_gpu_machine(error.name) else str(error)
    except Exception as error:  # noqa: BLE001 - whatever it is, the module cannot be used
        return f"{type(error).__name__}: {error}"
    return ""


def missing(root: Path, tree: ast.AST, ours: set[str]) -> Iterator[str]:
    """Return what a text imports of ours that is not there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            wanted = {alias.name: [] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            wanted = {str(node.module): [alias.name for alias in node.names]}
        else:
            continue
        for module, names in wanted.items():
            if module.partition(".")[0] not in ours:
                continue
            why = imported(module)
            if why and not needs_gpu_machine(why):
                yield why
                continue
            for name in names:
                is_bound = name in defined(root, module) if why else hasattr(sys.modules[module], name)
                if not is_bound and text_of(root, f"{module}.{name}") is None:
                    yield f"{module} has no {name}"


def text_of(root: Path, module: str) -> Path | None:
    """Return a module's file; None where there is none."""
    place = module.replace(".", "/")
    files = (root / path / end for path in PATHS for end in (f"{place}.py", f"{place}/__init__.py"))
    return next((path for path in files if path.is_file()), None)


def defined(root: Path, module: str) -> set[str]:
    """Return the names that the text of a module binds at its top; it cannot be imported here."""
    path = text_of(root, module)
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body if path else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        else:
            names |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return names


def main(root: Path) -> dict[str, object]:
    gc.disable()  # the process ends soon, and the looks for garbage among trees take longer than parsing
    sys.path[:0] = [str(root / path) for path in PATHS]
    files = sources(root)
    ours = {name.partition(".")[0] for name in files.values() if name}
    ours |= {"gpushare", "gpushare_operator", "gpushare_deviceplugin", "tests"}
    problems: set[str] = set()
    absent: dict[str, str] = {}
    for path, name in files.items():
        found = list(missing(root, ast.parse(path.read_text()), ours))
        if name is not None and (why := imported(name)):
            if needs_gpu_machine(why):
                absent[name] = why
            else:
                found.append(why)
        problems |= {f"{path.relative_to(root)}: {why}" for why in found}
    return {
        "modules": sorted(name for name in files.values() if name),
        "absent": absent,
        "problems": sorted(problems),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]).resolve())))
