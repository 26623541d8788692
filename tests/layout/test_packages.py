"""The layout that docs/design.md 3 fixes, where a slip would break something far away."""

import ast
import operator
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PARTS = ["gpushare", "gpushare_operator", "gpushare_deviceplugin"]


@pytest.mark.parametrize("folder", ["operator", "deviceplugin"])
def test_no_package_stands_in_the_way_of_pythons_own(folder: str) -> None:
    """A top-level package named operator would hide the standard library's, which half of Python imports."""
    assert not (ROOT / folder / "__init__.py").exists()
    assert not list((ROOT / folder).glob("*.py"))


def test_pythons_operator_is_pythons_with_the_sources_first_on_the_path() -> None:
    assert operator.itemgetter(1)([1, 2]) == 2
    script = (
        "import operator; print(operator.__file__)\n"
        "from importlib.util import find_spec\n"
        "assert find_spec('gpushare_operator') and find_spec('gpushare_deviceplugin')"
    )
    paths = [str(ROOT), str(ROOT / "src"), str(ROOT / "operator"), str(ROOT / "deviceplugin")]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}\n{script}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert str(ROOT) not in done.stdout


def test_the_wheel_holds_all_parts() -> None:
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert sorted(Path(package).name for package in packages) == sorted(PARTS)
    for package in packages:
        assert (ROOT / package / "__init__.py").exists()


def test_every_part_has_the_version_of_the_project() -> None:
    version = PROJECT["project"]["version"]
    chart = yaml.safe_load((ROOT / "helm" / "gpushare" / "Chart.yaml").read_text())
    assert chart["appVersion"] == version
    assert chart["version"] == version
    for package in PARTS:
        folder = next(ROOT.glob(f"*/{package}/__init__.py"))
        for node in ast.walk(ast.parse(folder.read_text())):
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__version__":
                assert isinstance(node.value, ast.Constant)
                assert node.value.value == version


def test_generated_grpc_code_imports_absolutely() -> None:
    """protoc with -I deviceplugin: `from gpushare_deviceplugin import api_pb2`, which works from the wheel."""
    generated = list((ROOT / "deviceplugin").rglob("*_pb2_grpc.py"))
    assert generated
    for path in generated:
        imports = re.findall(r"^(.*import .*_pb2\b.*)$", path.read_text(), re.MULTILINE)
        assert imports
        assert all(line.startswith("from gpushare_deviceplugin import ") for line in imports), path


def test_every_changelog_fragment_says_something() -> None:
    for fragment in (ROOT / "changelog.d").glob("*.md"):
        assert fragment.read_text().strip(), fragment
