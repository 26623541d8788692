"""docs/design.md 3 says which function carries out each rule: every name on its map exists."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECTION = re.search(r"^## 3\. .*?(?=^## 4\. )", (ROOT / "docs/design.md").read_text(), re.MULTILINE | re.DOTALL)
PACKAGES = sorted(
    folder.name for folder in (ROOT / "src" / "gpushare").iterdir() if (folder / "__init__.py").exists()
)
NAMED = re.findall(rf"`((?:gpushare_\w+|gpushare|{'|'.join(PACKAGES)})(?:\.\w+)+)`", SECTION[0] if SECTION else "")


def resolve(name: str) -> object:
    """Return the package, module, class, method or function of a dotted name; gpushare's packages may be bare."""
    path = name if name.startswith("gpushare") else f"gpushare.{name}"
    for length in range(len(path.split(".")), 0, -1):
        module, rest = path.split(".")[:length], path.split(".")[length:]
        try:
            found: object = importlib.import_module(".".join(module))
        except ImportError:
            continue
        for part in rest:
            found = getattr(found, part)
        return found
    raise ImportError(path)


@pytest.mark.parametrize("name", sorted(set(NAMED)))
def test_what_the_map_names_exists(name: str) -> None:
    assert resolve(name) is not None


def test_the_map_names_every_room() -> None:
    """Every package, and every package of core, has its line."""
    rooms = {
        f"core.{folder.name}" for folder in (ROOT / "src/gpushare/core").iterdir() if list(folder.glob("*.py"))
    }
    text = SECTION[0] if SECTION else ""
    missing = [room for room in rooms | set(PACKAGES) - {"core"} if not re.search(rf"`(gpushare\.)?{room}`", text)]
    assert not missing
    assert len(set(NAMED)) > 15


def test_readme_links_the_file_that_decides() -> None:
    """So the rule that packs pods is three hops away: README, `decide`, the module that carries out its step."""
    link = re.search(r"\[`decide`\]\(([^)#]+)\)", (ROOT / "README.md").read_text())
    assert link is not None
    assert link[1] == "src/gpushare/core/placement/decide.py"
    assert "\ndef decide(" in (ROOT / link[1]).read_text()


def test_a_name_that_is_gone_is_noticed() -> None:
    with pytest.raises((ImportError, AttributeError)):
        resolve("core.placement.refusal")


def test_the_page_of_placement_names_every_module_of_the_decision() -> None:
    """So the way from README to a rule ends at a module: `decide`, the page's table, the module."""
    folder = ROOT / "src/gpushare/core/placement"
    modules = {path.stem for path in folder.glob("*.py") if path.stem != "__init__"}
    rows = re.findall(r"^\| (`.+?`) \| ", (ROOT / "docs/placement.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(modules) > 25
    assert not modules - named
