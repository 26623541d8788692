"""How many contexts a client has, by lines as the server of driver 580 writes them (recorded on an H200)."""

from gpushare.mps.contexts import ContextLog

SERVER = "[2026-11-23 23:11:44.341 Server   524] "
CAME = "".join(
    f"{SERVER}{words}\n"
    for words in (
        "Client {PID: 1496, Context ID: 0} connected",
        "Creating worker thread for client {PID: 1496, Context ID: 0}",
        "Received new client request for {PID: 1496, Context ID: 0}",
        "Client {PID: 1496, Context ID: 1} connected",
        "Status of client {PID: 1496, Context ID: 1} is ACTIVE",
        "Client {PID: 1496, Context ID: 2} connected",
        "Client {PID: 1496, Context ID: 3} connected",
    )
)
WENT = "".join(
    f"{SERVER}{words}\n"
    for words in (
        "Server failed to recevie command with status 806, assuming client {PID: 1496, Context ID: 3} exit",
        "Client {PID: 1496, Context ID: 3} exiting. Number of active client contexts is 2.",
    )
)
ALL_WENT = "".join(
    f"{SERVER}{words}\n"
    for words in (
        "Client {PID: 1496, Context ID: 2} exiting. Number of active client contexts is 1.",
        "Client {PID: 1496, Context ID: 1} exiting. Number of active client contexts is 0.",
        "Client process 1496 disconnected",
    )
)


def added(path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_contexts_come_and_go_as_the_server_tells(tmp_path):
    log = ContextLog(tmp_path / "server.log")
    log.read()
    assert log.count(1496) == 0, "there is no log yet"
    assert log.heard(1496) is None
    for text, count in ((CAME, 3), (WENT, 2), (ALL_WENT, 0)):
        added(tmp_path / "server.log", text)
        log.read()
        assert log.count(1496) == count
    assert log.count(1497) == 0
    assert (log.heard(1496), log.heard(1497)) == (4, 0)


def test_the_clients_of_a_server_that_ended_are_forgotten(tmp_path):
    added(tmp_path / "server.log", CAME)
    log = ContextLog(tmp_path / "server.log")
    log.read()
    added(tmp_path / "server.log", "[2026-11-23 23:12:00.000 Server   777] Server 777 has started\n")
    log.read()
    assert log.count(1496) == 0
    assert log.heard(1496) == 0


def test_another_process_with_the_same_pid_has_none_of_its_contexts(tmp_path):
    added(tmp_path / "server.log", CAME + CAME.partition("\n")[0] + "\n")
    log = ContextLog(tmp_path / "server.log")
    log.read()
    assert log.count(1496) == 0


def test_a_half_written_line_is_read_when_it_is_whole(tmp_path):
    log = ContextLog(tmp_path / "server.log")
    lines = CAME.splitlines(keepends=True)
    added(tmp_path / "server.log", "".join(lines[:3]) + lines[3][:60])
    log.read()
    assert log.count(1496) == 0
    added(tmp_path / "server.log", lines[3][60:])
    log.read()
    assert log.count(1496) == 1


def test_contexts_that_a_trimmed_log_no_longer_shows_are_counted_until_they_go(tmp_path):
    log = ContextLog(tmp_path / "server.log")
    log.read()
    log.at_least(1496, 3)
    assert log.count(1496) == 3
    assert log.heard(1496) == 0, "this driver's log tells of contexts"
    added(tmp_path / "server.log", f"{SERVER}Client {{PID: 1496, Context ID: 4}} connected\n")
    for text, count in (("", 4), (WENT, 3), (ALL_WENT, 0)):
        added(tmp_path / "server.log", text)
        log.read()
        assert log.count(1496) == count


def test_one_after_the_other_of_them_goes(tmp_path):
    log = ContextLog(tmp_path / "server.log")
    log.at_least(1496, 2)
    for count, line in zip((1, 0, 0), ALL_WENT.splitlines(), strict=True):
        added(tmp_path / "server.log", line + "\n")
        log.read()
        assert log.count(1496) == count


def test_a_log_that_shows_all_of_a_process_is_right_about_it(tmp_path):
    """A context may have gone since the former reader counted."""
    added(tmp_path / "server.log", CAME + WENT)
    log = ContextLog(tmp_path / "server.log")
    log.read()
    log.at_least(1496, 3)
    assert log.count(1496) == 2
    log.at_least(1497, 0)
    assert log.count(1497) == 0
