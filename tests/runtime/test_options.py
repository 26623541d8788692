"""Options from the environment are held to the same words as those of the command line."""

import argparse

import pytest

from gpushare.runtime.options import options_of


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
