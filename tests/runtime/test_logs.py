"""Every process sets up its log alike."""

import ast
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from gpushare.runtime.logs import log_level_of, set_up_logging

ROOT = Path(__file__).resolve().parents[2]


def test_the_level_is_the_environments_else_info() -> None:
    assert log_level_of({}) == log_level_of({"GPUSHARE_LOG_LEVEL": ""}) == "INFO"
    assert log_level_of({"GPUSHARE_LOG_LEVEL": "debug"}) == "debug"


def test_a_line_has_time_level_part_and_message() -> None:
    script = (
        "import logging; from gpushare.runtime.logs import set_up_logging; set_up_logging('warning');"
        "logging.getLogger('part').info('quiet'); logging.getLogger('part').warning('loud')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    (line,) = done.stderr.splitlines()
    day, moment, *rest = line.split(" ")
    assert (len(day), moment[2], rest) == (10, ":", ["WARNING", "part", "loud"])


def test_an_unknown_level_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "basicConfig", lambda **_: pytest.fail("was set up"))
    with pytest.raises(SystemExit, match='"loud" is not one of DEBUG, INFO'):
        set_up_logging("loud")


def test_no_process_sets_up_its_log_otherwise() -> None:
    """Kopf sets up the operator's by its own options; every other process by `set_up_logging`."""
    for room in ("src/gpushare", "operator", "deviceplugin"):
        for path in (ROOT / room).rglob("*.py"):
            named = {
                each.attr for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, ast.Attribute)
            }
            assert "basicConfig" not in named or path.name == "logs.py", path
