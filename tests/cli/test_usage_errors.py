"""Words that no command takes: one line on standard error that says what is wrong and where the help is."""

import sys
from collections.abc import Callable

import pytest

from gpushare.cli import main

Call = Callable[..., tuple[int, str, str]]
# What is typed after the program's name, and what is said of it; {} stands for that name.
WRONG = {
    "gain -o foo": (
        "invalid value for '--output' / '-o': 'foo' is not one of 'table', 'wide', 'json', 'yaml'; "
        "see {} gain --help"
    ),
    "top --sort bogus": (
        "invalid value for '--sort': 'bogus' is not one of 'gpu', 'name', 'progress', 'share', 'memory', 'broken'"
        "; see {} top --help"
    ),
    "report --points 3": (
        "invalid value for '--points': Input should be greater than or equal to 12; see {} report --help"
    ),
    "report --points few": (
        "invalid value for '--points': Input should be a valid integer, unable to parse string as an integer; "
        "see {} report --help"
    ),
    "explain": "missing argument 'pod'; see {} explain --help",
    "plan": "missing option '--pods'; see {} plan --help",
    "report --since": "option '--since' requires an argument; see {} report --help",
    "sim jobs --trace": "option '--trace' requires an argument; see {} sim jobs --help",
    "snapshot -o -": (
        "a snapshot's folder has to have a name and cannot be written to standard output: name another than -"
    ),
    "calibrate -o -": (
        "a dataset, which is resumed, has to have a name and cannot be written to standard output: "
        "name another than -"
    ),
    "explain web gain": "got unexpected extra argument(s) (gain); see {} explain --help",
    "gain now": "got unexpected extra argument(s) (now); see {} gain --help",
    "nonsense": "no such command 'nonsense'; see {} --help",
    "sim nonsense": "no such command 'nonsense'; see {} sim --help",
    "topp": "no such command 'topp'. Did you mean 'top'? See {} --help",
    "--nope": "no such option: --nope; see {} --help",
    "gain --nope": "no such option: --nope; see {} gain --help",
    "gain --outptu json": "no such option: --outptu (Possible options: --output); see {} gain --help",
}


@pytest.mark.parametrize(("typed", "told"), WRONG.items(), ids=WRONG)
def test_wrong_words_are_one_line_and_exit_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: str, told: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpushare", *typed.split()])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert capsys.readouterr() == ("", f"gpushare: {told.format('gpushare')}\n")


@pytest.mark.parametrize(("typed", "told"), WRONG.items(), ids=WRONG)
def test_on_a_terminal_they_are_the_same_line_and_the_plugin_names_its_own_help(
    narrow: Call, typed: str, told: str
) -> None:
    """The plugin's name is kubectl's."""
    assert narrow(*typed.split()) == (2, "", f"gpushare: {told.format('kubectl gpushare')}\n")


def test_a_word_of_two_lines_is_told_on_one(call: Call) -> None:
    code, out, err = call("gain", "-o", "two\nlines")
    assert (code, out, err.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("typed", ["", "sim"])
def test_a_group_without_a_command_shows_its_help_and_no_error(call: Call, typed: str) -> None:
    code, out, err = call(*typed.split())
    assert (code, err) == (2, "")
    assert f"Usage: kubectl gpushare {typed}".rstrip() in out


@pytest.mark.parametrize(
    ("typed", "usage"),
    [
        ("explain", "explain [OPTIONS] {pod}"),
        ("gain", "gain [OPTIONS]"),
        ("sim", "sim [OPTIONS] COMMAND [ARGS]..."),
    ],
)
def test_the_usage_line_has_a_command_only_where_there_are_commands(call: Call, typed: str, usage: str) -> None:
    lines = [line.strip() for line in call(typed, "--help")[1].splitlines()]
    assert f"Usage: kubectl gpushare {usage}" in lines
