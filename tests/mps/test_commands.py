import pytest

from gpushare.mps import commands
from gpushare.mps.commands import ServerState
from gpushare.mps.errors import CommandRefusedError, DaemonDownError, MpsError


def test_lists_of_pids():
    assert commands.server_list().parse("") == ()
    assert commands.client_list(7).parse("12\n13\n") == (12, 13)
    assert commands.client_list(7).text == "get_client_list 7"


def test_no_daemon_is_worth_a_retry_and_a_refusal_is_not():
    with pytest.raises(DaemonDownError) as down:
        commands.server_list().parse("Cannot find MPS control daemon process\n")
    assert down.value.retryable
    with pytest.raises(CommandRefusedError, match="Insufficient privileges") as refused:
        commands.set_active_thread_percentage(7, 20).parse("Insufficient privileges\n")
    assert not refused.value.retryable


def test_noise_instead_of_pids_is_an_error_and_not_an_empty_list():
    with pytest.raises(MpsError, match="not a list of pids"):
        commands.client_list(7).parse("12\nhello\n")


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        ("ACTIVE\n", ServerState.ACTIVE),
        ("FAULT\n", ServerState.FAULT),
        ("", ServerState.UNKNOWN),
        ("Server state: INITIALIZING\n", ServerState.INITIALIZING),
    ],
)
def test_server_states(answer, state):
    assert commands.server_status(7).parse(answer) is state


def test_percentages():
    assert commands.get_active_thread_percentage(7).parse("20.0\n") == 20.0
    with pytest.raises(MpsError, match="not a percentage"):
        commands.get_active_thread_percentage(7).parse("\n")


def test_ps():
    answer = (
        "PID       ID    SERVER    DEVICE             NAMESPACE      COMMAND\n"
        "9741      0     6472      GPU-cb1213a3-d6a4  9741           ./nbody -benchmark\n"
    )
    (entry,) = commands.ps().parse(answer)
    assert (entry.pid, entry.server_pid, entry.device, entry.command) == (
        9741,
        6472,
        "GPU-cb1213a3-d6a4",
        "./nbody -benchmark",
    )
    assert commands.ps().parse("") == ()


@pytest.mark.parametrize("value", [0, 101, -5])
def test_percentages_that_cannot_be_are_refused_before_they_are_sent(value):
    with pytest.raises(CommandRefusedError, match="thread percentage"):
        commands.set_active_thread_percentage(7, value)


def test_no_limit_of_zero_is_ever_sent_since_that_means_none():
    with pytest.raises(CommandRefusedError, match="memory limit"):
        commands.set_device_pinned_mem_limit(7, 0, 0)
    assert commands.set_device_pinned_mem_limit(7, 0, 8192).text == "set_device_pinned_mem_limit 7 0 8192M"
