"""python -m bench imports [TREE ...]: what each process imports, and what an installation takes.

A tree is a checkout of this repository, say of an older commit (`git worktree add DIR COMMIT`); the default is
this one. Each is measured with the packages of this virtual environment and of PYTHONPATH. Resident memory is
after the imports, without what a process does then: the median of `--repeats` fresh interpreters. An installation
is the files of all distributions that the tree's dependencies ask for without an extra, without their bytecode.
"""

import argparse
import importlib.metadata as metadata
import json
import re
import statistics
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PROCESSES = {
    "operator": ("gpushare_operator.__main__", "gpushare_operator.handlers"),
    "admission": ("gpushare_operator.admission.__main__",),
    "extender": ("gpushare.extender.__main__",),
    "agent": ("gpushare_deviceplugin.__main__", "gpushare_deviceplugin.agent"),
}
MIB = 2**20
SCRIPT = """
import importlib, json, sys
sys.path[:0] = {paths!r}
if "gpushare_deviceplugin.agent" in {modules!r}:  # as its main function does
    importlib.import_module("gpushare_deviceplugin.frugal").before_imports()
for name in {modules!r}:
    importlib.import_module(name)
status = open("/proc/self/status").read()
resident = int(status.split("VmRSS:")[1].split()[0]) / 1024
print(json.dumps([resident, sorted(sys.modules)]))
"""


def imports_of(tree: Path, modules: Sequence[str], repeats: int) -> tuple[float, list[str]]:
    """Return the MiB resident after these imports in a fresh interpreter, and the names of all modules.

    An older tree may lack one of these modules: it is left out.
    """
    paths = [tree / each for each in ("src", "operator", "deviceplugin")]
    present = [
        name for name in modules if any((path / f"{name.replace('.', '/')}.py").is_file() for path in paths)
    ]
    script = SCRIPT.format(paths=[str(path) for path in paths], modules=present)
    found: list[tuple[float, list[str]]] = []
    for _ in range(repeats):
        done = subprocess.run(
            [sys.executable, "-s", "-P", "-c", script], capture_output=True, text=True, check=True
        )
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return statistics.median(resident for resident, _ in found), found[0][1]


def dependencies_of(tree: Path) -> list[str]:
    return list(tomllib.loads((tree / "pyproject.toml").read_text())["project"]["dependencies"])


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def distributions(wanted: Sequence[str]) -> Iterator[tuple[str, metadata.Distribution | None]]:
    """Yield each distribution that these requirements lead to; None for one that is not installed."""
    seen: set[tuple[str, str]] = set()
    environment = {key: str(value) for key, value in default_environment().items()}
    open_requirements = [Requirement(one) for one in wanted]
    while open_requirements:
        one = open_requirements.pop()
        for extra in ("", *sorted(one.extras)):
            if (canonical(one.name), extra) in seen:
                continue
            is_new = not any(name == canonical(one.name) for name, _ in seen)
            seen.add((canonical(one.name), extra))
            try:
                distribution = metadata.distribution(one.name)
            except metadata.PackageNotFoundError:
                yield canonical(one.name), None
                continue
            if is_new:
                yield canonical(one.name), distribution
            needed = (Requirement(text) for text in distribution.requires or ())
            open_requirements += [
                each
                for each in needed
                if each.marker is None or each.marker.evaluate({**environment, "extra": extra})
            ]


def size_mib(distribution: metadata.Distribution) -> float:
    paths = (
        Path(str(distribution.locate_file(file))) for file in distribution.files or () if file.suffix != ".pyc"
    )
    return sum(path.stat().st_size for path in paths if path.is_file()) / MIB


def own_mib(tree: Path) -> float:
    """Return the size of the tree's own packages, data included."""
    folders = ("src/gpushare", "operator/gpushare_operator", "deviceplugin/gpushare_deviceplugin")
    files = (path for folder in folders for path in (tree / folder).rglob("*"))
    return sum(path.stat().st_size for path in files if path.is_file() and path.suffix != ".pyc") / MIB


def by_package(modules: Sequence[str]) -> Counter[str]:
    return Counter(name.partition(".")[0] for name in modules)


def main(arguments: Sequence[str]) -> None:
    """Print both tables; of trees after the first also what differs by package."""
    parser = argparse.ArgumentParser(prog="python -m bench imports", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("trees", nargs="*", type=Path, metavar="TREE", default=[ROOT])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    first: dict[str, list[str]] = {}
    for tree in options.trees:
        print(f"{tree.resolve().name}:")
        for process, modules in PROCESSES.items():
            resident, names = imports_of(tree.resolve(), modules, options.repeats)
            print(f"  {process}: {len(names)} modules, {resident:.1f} MiB resident")
            before = by_package(first.setdefault(process, names))
            counts = by_package(names)
            changes = {
                name: counts[name] - before[name] for name in counts | before if counts[name] != before[name]
            }
            for name, change in sorted(changes.items(), key=lambda each: -abs(each[1]))[:12]:
                print(f"    {change:+d} {name}")
        sizes = {
            name: None if found is None else size_mib(found)
            for name, found in distributions(dependencies_of(tree))
        }
        total = sum(size or 0.0 for size in sizes.values())
        print(
            f"  installed: {total:.1f} MiB in {len(sizes)} distributions, and {own_mib(tree):.1f} MiB of our own"
        )
        for name, size in sorted(sizes.items(), key=lambda each: -(each[1] or 0.0)):
            if size is None:
                print(f"    {name}: not installed here")
            elif size >= 1.0:
                print(f"    {name}: {size:.1f} MiB")


if __name__ == "__main__":
    main(sys.argv[1:])
