"""The agent's options: numbers that are none are refused before anything starts."""

import pytest
from floatoptions import float_options

from gpushare_deviceplugin.options import parse_options


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
@pytest.mark.parametrize("option", float_options(parse_options))
def test_a_number_that_is_none_or_below_nothing_is_refused(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_options(["--node-name=n1", f"{option}={value}"], {})
    assert caught.value.code == 2
    assert option in capsys.readouterr().err


def test_the_options_with_numbers_are_found() -> None:
    expected = {"--sample-seconds", "--max-slowdown", "--stalled-after-seconds", "--retract-after-seconds"}
    assert expected <= set(float_options(parse_options))
