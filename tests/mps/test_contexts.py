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
