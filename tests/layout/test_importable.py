"""Nothing of ours that benchmarks, tools and GPU scripts import is gone; no type checker looks at them."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def look(root: Path) -> dict:
    """What a fresh interpreter finds there."""
    command = [sys.executable, "-I", str(ROOT / "tests" / "support" / "importing.py"), str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_what_benchmarks_tools_and_gpu_scripts_import_is_there() -> None:
    found = look(ROOT)
    assert not found["problems"]
    assert set(found["absent"].values()) <= {"torch"}, "only a GPU machine has it"
    assert {"bench.papers.collecting", "bench.chaos.cli", "devcluster.gpunode", "gate_faults"} <= set(
        found["modules"]
    )
    (commands,) = (
        ast.literal_eval(node.value)
        for node in ast.parse((ROOT / "bench" / "__main__.py").read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COMMANDS"
    )
    assert set(commands.values()) <= set(found["modules"])


OURS = "def here(): ...\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("from tool import here\nimport tool\n", ""),
        ("from tool import gone\n", "cannot import name 'gone'"),
        ("def run():\n    from tool import gone\n", "tool has no gone"),
        ("def run():\n    import tool.gone\n", "No module named 'tool.gone'"),
        ("import torch\nfrom tool import gone\n", "tool has no gone"),
        ("import torch\nfrom tool import here\n", ""),
        ("import tool\ntool.gone()\n", "AttributeError"),
        ("import a_module_that_nobody_installed\n", "No module named 'a_module_that_nobody_installed'"),
        ("from heavy import Net, size\n", ""),
        ("from heavy import gone\n", "heavy has no gone"),
    ],
)
def test_a_name_of_ours_that_is_gone_is_found_and_torch_is_not_missed(
    tmp_path: Path, text: str, problem: str
) -> None:
    for folder in ("bench", "hack", "tests/gpu", "tests/support"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "bench" / "__init__.py").touch()
    (tmp_path / "hack" / "tool.py").write_text(OURS)
    (tmp_path / "hack" / "heavy.py").write_text("import torch.nn\nsize = 3\nclass Net(torch.nn.Module): ...\n")
    (tmp_path / "bench" / "probed.py").write_text(text)
    found = look(tmp_path)
    problems = [one for one in found["problems"] if not one.startswith("hack")]
    assert (problem in problems[0]) if problem else not problems
    assert {one.partition(":")[0] for one in problems} <= {"bench/probed.py"}
