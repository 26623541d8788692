"""The page about gpushare.mps without the rest: its program runs as it stands and prints what the page shows."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpushare.mps import ControlProgram, SyncMpsControl, commands
from gpushare.mps.control import TWIN_EXECUTABLE
from gpushare.mps.errors import MpsError

from .conftest import SRC

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "mps.md"
STEP = re.compile(r"^```python\n(.*?)^```\n\n(?:```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_program_of_the_page_prints_what_the_page_shows(short_path: Path) -> None:
    steps = STEP.findall(PAGE.read_text())
    assert len(steps) >= 5
    program = "".join(code for code, _ in steps)
    assert "/tmp/mps-demo" in program
    try:
        done = subprocess.run(
            [sys.executable, "-c", program.replace("/tmp/mps-demo", str(short_path))],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(SRC)},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    finally:
        SyncMpsControl(ControlProgram(short_path / "pipe", short_path / "log", executable=TWIN_EXECUTABLE)).stop()
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(shown for _, shown in steps)


def test_the_page_names_every_command_and_every_error() -> None:
    page = PAGE.read_text()
    named = set(re.findall(r"`(\w+)`", page))
    written = {
        name
        for name, each in inspect.getmembers(commands, inspect.isfunction)
        if not name.startswith("_") and "Command[" in str(inspect.signature(each).return_annotation)
    }
    assert len(written) >= 15
    assert written <= named, written - named
    public = [each for each in MpsError.__subclasses__() if each.__module__ == MpsError.__module__]
    assert len(public) >= 3
    assert {each.__name__ for each in public} <= named
