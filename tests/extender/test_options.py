import pytest
from floatoptions import float_options

from gpushare.core.api import JobClass
from gpushare.extender import parse_options


def test_defaults_environment_and_command_line():
    options = parse_options([], {})
    assert (options.host, options.port, options.settings.policy, options.kubeconfig) == (
        "127.0.0.1",
        8888,
        "gpushare",
        None,
    )
    chart = {
        "GPUSHARE_DEFAULT_CLASS": "latency",
        "GPUSHARE_DEFAULT_FRACTION": "0.3",
        "GPUSHARE_MAX_SLOWDOWN": "2",
        "GPUSHARE_LOG_LEVEL": "debug",
    }
    options = parse_options(["--max-slowdown", "3"], chart)
    assert options.settings.defaults.job_class is JobClass.LATENCY
    defaults = options.settings.defaults
    assert (defaults.auto_fraction, defaults.max_slowdown_ratio) == ("0.3", 3.0)
    assert options.log_level == "DEBUG"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--default-class", "fast"], "not throughput or latency"),
        (["--default-fraction", "auto"], "fraction"),
        (["--default-fraction", "1.5"], "fraction"),
        (["--max-slowdown", "0.5"], "1 or more"),
        (["--policy", "magic"], "invalid choice"),
        (["--port", "x"], "invalid int"),
        (["--best-nodes", "-1"], "0 or more"),
    ],
)
def test_wrong_options_are_refused_in_a_sentence(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_options(arguments, {})
    assert caught.value.code == 2
    assert sentence in capsys.readouterr().err


def test_a_policy_of_the_simulators_alone_is_refused_in_a_sentence(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_options([], {"GPUSHARE_POLICY": "fgd"})
    assert caught.value.code == 2
    assert '"fgd" is not one of bestfit, gpushare' in capsys.readouterr().err


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
@pytest.mark.parametrize("option", float_options(parse_options))
def test_a_number_that_is_none_or_below_nothing_is_refused(option, value, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_options([f"{option}={value}"], {})
    assert caught.value.code == 2
    assert capsys.readouterr().err.strip()


def test_the_options_with_numbers_are_found():
    assert {"--fence-timeout", "--unseen-seconds", "--max-slowdown", "--probation-seconds"} <= set(
        float_options(parse_options)
    )
