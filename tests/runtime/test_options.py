"""Options from the environment are held to the same words as those of the command line."""

import argparse

import pytest

from gpushare.runtime.options import VariableError, Variables, options_of


def read(arguments: list[str], environment: dict[str, str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="part")
    add = options_of(parser, environment)
    add("mode", "event", "what becomes of it", choices=["event", "end"])
    add("every-seconds", "1", "how often", type=float)
    add("folders", "/var/run", "where, with commas between")
    return parser.parse_args(arguments)


def test_the_command_line_beats_the_environment_and_that_the_default() -> None:
    given = {"GPUSHARE_MODE": "end", "GPUSHARE_EVERY_SECONDS": "2"}
    assert vars(read([], {})) == {"mode": "event", "every_seconds": 1.0, "folders": "/var/run"}
    assert vars(read([], given)) == {"mode": "end", "every_seconds": 2.0, "folders": "/var/run"}
    assert read(["--mode", "event"], given).mode == "event"


@pytest.mark.parametrize("value", ["End", "kill", "true", " "])
def test_a_word_of_the_environment_that_is_not_allowed_is_refused(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        read([], {"GPUSHARE_MODE": value})
    assert stopped.value.code == 2
    assert f'GPUSHARE_MODE: "{value}" is not one of event, end' in capsys.readouterr().err


def test_an_empty_variable_is_the_default_but_for_free_text() -> None:
    empty = dict.fromkeys(("GPUSHARE_MODE", "GPUSHARE_EVERY_SECONDS", "GPUSHARE_FOLDERS"), "")
    assert vars(read([], empty)) == {"mode": "event", "every_seconds": 1.0, "folders": ""}


def test_without_an_environment_no_variable_is_read() -> None:
    parser = argparse.ArgumentParser(prog="part")
    add = options_of(parser, None)
    add("port", 1, "where", type=int)
    add("keep", False, "what stays", action="store_true")
    assert vars(parser.parse_args([])) == {"port": 1, "keep": False}
    assert vars(parser.parse_args(["--keep", "--port", "2"])) == {"port": 2, "keep": True}
    assert "GPUSHARE_PORT" not in parser.format_help()


def test_variables_are_read_by_their_kind_and_empty_ones_are_not_given() -> None:
    given = {"GPUSHARE_A_NAME": "x", "GPUSHARE_ON": "true", "GPUSHARE_MOST": "7", "GPUSHARE_LIST": "a, b,,c d"}
    for variables, expected in (
        (Variables(given), ("x", True, 7, ("a", "b", "c", "d"))),
        (Variables({}), ("", False, 3, ())),
        (Variables(dict.fromkeys(given, "")), ("", False, 3, ())),
    ):
        assert (
            variables.text("a-name"),
            variables.flag("on"),
            variables.count("most", 3),
            variables.words("list"),
        ) == expected


@pytest.mark.parametrize(
    ("value", "says"),
    [("0", '"0" is not a whole number from 1'), ("-1", '"-1"'), ("1.5", '"1.5"'), ("many", '"many"')],
)
def test_a_number_that_is_none_is_named(value: str, says: str) -> None:
    with pytest.raises(VariableError, match=f"GPUSHARE_MOST: {says}"):
        Variables({"GPUSHARE_MOST": value}).count("most", 3, least=1)


def test_a_word_that_is_not_allowed_is_named() -> None:
    with pytest.raises(VariableError, match='GPUSHARE_ON: "yes" is not one of true, false'):
        Variables({"GPUSHARE_ON": "yes"}).flag("on")
