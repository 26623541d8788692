import importlib
import re
from pathlib import Path

import pytest
import typer

from gpushare import __version__
from gpushare.cli import main as command
from gpushare.cli.errors import ExitStatus
from gpushare.cli.root import GROUPS


def run(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["gpushare", *arguments])
    with pytest.raises(SystemExit) as stopped:
        command()
    return int(stopped.value.code or 0)


def test_version_is_printed(monkeypatch, capsys):
    assert run(monkeypatch, "version") == 0
    assert capsys.readouterr().out.strip() == __version__


def test_help_names_every_group_without_loading_it(monkeypatch, capsys):
    monkeypatch.setattr("gpushare.cli.root.importlib", None)
    assert run(monkeypatch, "--help") == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in GROUPS)


@pytest.mark.parametrize("name", sorted(GROUPS))
def test_every_group_loads_and_has_help(name, monkeypatch, capsys):
    assert isinstance(importlib.import_module(GROUPS[name][0]).app, typer.Typer)
    assert run(monkeypatch, name, "--help") == 0
    assert "Usage: gpushare " + name in capsys.readouterr().out


def test_bad_input_is_one_sentence_and_exit_code_2(monkeypatch, capsys, tmp_path):
    missing = tmp_path / "solo.csv"
    code = run(monkeypatch, "pairs", "evaluate", "--solo", str(missing), "--pairs", str(missing), "--gpu", "k80")
    err = capsys.readouterr().err
    assert code == 2
    assert err == f"gpushare: {missing}: cannot be read: No such file or directory\n"


def test_the_page_on_the_command_line_names_every_command():
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    assert [name for name in GROUPS if f"`{name}" not in page] == []


def test_the_page_on_the_command_line_names_every_exit_status():
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    listed = {int(found) for found in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    assert listed == {*map(int, ExitStatus), 130}
