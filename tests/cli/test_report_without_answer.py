"""`gpushare report` where no Prometheus answers: one sentence each, with what to try."""

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

import aiohttp
import pytest
from certificates import make_pair

from gpushare.cli.errors import UnreachableError
from gpushare.cli.report import prometheus as prometheus_module
from gpushare.cli.report.no_answer import no_answer
from gpushare.runtime.http import Certificate, HttpAnswer, MetricsServer

Call = Callable[..., tuple[int, str, str]]
FORWARD = (
    "from outside the cluster forward its port, as by `kubectl -n monitoring port-forward svc/prometheus 9090`, "
    "and give --prometheus http://127.0.0.1:9090"
)
NO_API = "is not one of Prometheus' API; give the address below which /api/v1/query answers"


@pytest.fixture
def fails(call: Call, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Ask for a report that cannot be had; the exit status and the sentence."""

    def run(*arguments: object) -> tuple[int, str]:
        status, out, err = call("report", *arguments, "-o", tmp_path / "page.html")
        assert (out, err.count("\n")) == ("", 1), err
        assert not (tmp_path / "page.html").exists()
        return status, err.strip().removeprefix("gpushare: ")

    return run


Fails = Callable[..., tuple[int, str]]


def test_where_nothing_listens(fails: Fails) -> None:
    url = "http://127.0.0.1:1"
    assert fails("--prometheus", url) == (
        5,
        f"nothing answers at --prometheus {url} (Connection refused): {FORWARD}",
    )


def test_where_the_host_is_not_known(fails: Fails) -> None:
    """A name that is known inside the cluster only, which is the usual case."""
    url = "http://prometheus.nowhere.invalid:9090"
    status, told = fails("--prometheus", url)
    assert status == 5
    assert re.fullmatch(
        re.escape(f"the host of --prometheus {url} is not known (") + r"[\w ]+" + re.escape(f"): {FORWARD}"), told
    )


def test_where_no_connection_is_made_in_time() -> None:
    """As a firewall does that drops what it forbids."""
    told = no_answer("http://10.0.0.1", aiohttp.ConnectionTimeoutError(), connect_seconds=10, answer_seconds=120)
    assert isinstance(told, UnreachableError)
    assert str(told) == f"nothing answers at --prometheus http://10.0.0.1 (no connection within 10 s): {FORWARD}"


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:99999"])
def test_what_is_no_address(fails: Fails, url: str) -> None:
    told = f'--prometheus "{url}" is no address; write it as http://prometheus.monitoring:9090'
    assert fails("--prometheus", url) == (2, told)


@contextmanager
def answering(raw: bytes) -> Iterator[int]:
    """The port of a server that answers every connection with these bytes and closes it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        try:
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(raw)
        except OSError:  # the test is over
            return

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        server.join(30)


def test_a_server_that_speaks_no_http(fails: Fails) -> None:
    with answering(b"SSH-2.0-OpenSSH_9.2\r\n") as port:
        status, told = fails("--prometheus", f"http://127.0.0.1:{port}")
    assert (status, "is no Prometheus: it does not speak HTTP as a server does; give the" in told) == (5, True), (
        told
    )


def test_a_server_that_hangs_up(fails: Fails) -> None:
    with answering(b"") as port:
        url = f"http://127.0.0.1:{port}"
        assert fails("--prometheus", url) == (
            5,
            f"Prometheus at {url} ends the connection (Server disconnected): try again in a moment",
        )


def test_https_asked_of_a_server_of_http(fails: Fails) -> None:
    with answering(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n") as port:
        url = f"https://127.0.0.1:{port}"
        status, told = fails("--prometheus", url)
    assert status == 5
    assert re.fullmatch(
        re.escape(f"no TLS connection to --prometheus {url} (") + r"\w+\): does it take http:// instead\?", told
    )


def test_a_certificate_that_nobody_trusts(fails: Fails, tmp_path: Path) -> None:
    make_pair(tmp_path)
    server = MetricsServer({}, 0, "127.0.0.1", certificate=Certificate(tmp_path))
    server.start()
    try:
        url = f"https://127.0.0.1:{server.port}"
        status, told = fails("--prometheus", url)
    finally:
        server.close()
    assert status == 5
    assert told.startswith(f"the certificate of --prometheus {url} is not trusted (self")
    assert told.endswith("): name the file of its authority in SSL_CERT_FILE")


@pytest.mark.parametrize(
    ("http", "body", "status", "words"),
    [
        (403, b"no", 4, "refuses (HTTP 403): give a token that may read it by --token-file"),
        (401, b"no", 4, "refuses (HTTP 401): give a token that may read it by --token-file"),
        (200, b"<html>a login page</html>", 5, f"is no Prometheus: its answer (HTTP 200) {NO_API}"),
        (404, b"not here", 5, f"is no Prometheus: its answer (HTTP 404) {NO_API}"),
        (503, b"Service Unavailable", 5, "takes no questions now (HTTP 503): one that has just started"),
        (200, b'{"status":"success","data":{"result":[{"metric":{}}]}}', 5, "its series are not those"),
        (200, b'{"status":"success","data":{"result":[7]}}', 5, "its series are not those"),
        (
            200,
            b'{"status":"success","data":{"result":[{"metric":{},"values":[[1,"many"]]}]}}',
            5,
            "series are not",
        ),
        (200, b'{"status":"success","data":{"result":[]}}', 3, "has no figure of gpushare in that time: look"),
        (422, b'{"status":"error","errorType":"execution","error":"too many samples"}', 2, "too many samples"),
        (
            503,
            b'{"status":"error","errorType":"timeout","error":"query timed out"}',
            2,
            "query timed out; a shorter",
        ),
    ],
)
def test_what_another_server_answers(fails: Fails, http: int, body: bytes, status: int, words: str) -> None:
    with _api(HttpAnswer(body, status=HTTPStatus(http))) as url:
        found, told = fails("--prometheus", url)
    assert (found, words in told) == (status, True), told


@pytest.mark.parametrize("text", ["Bearer mine", "mine\nand another one", "mine\x00"])
def test_a_file_with_more_than_a_token_is_named(fails: Fails, tmp_path: Path, text: str) -> None:
    """A header has no line ends: the address was said to be none."""
    (tmp_path / "token").write_text(text)
    code, words = fails("--prometheus", "http://127.0.0.1:1", "--token-file", tmp_path / "token")
    assert (code, words) == (2, f"{tmp_path / 'token'} is to hold a bearer token and nothing else, without spaces")


def test_a_token_that_may_not_read_it(fails: Fails, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("mine\n")
    with _api(HttpAnswer(b"no", status=HTTPStatus.FORBIDDEN)) as url:
        assert fails("--prometheus", url, "--token-file", tmp_path / "token") == (
            4,
            f"Prometheus at {url} refuses (HTTP 403): give another token, one that may read it, by --token-file",
        )


@contextmanager
def _api(answer: HttpAnswer) -> Iterator[str]:
    """A server that gives one answer to every question."""
    server = MetricsServer(dict.fromkeys(("/api/v1/query_range", "/api/v1/query"), lambda: answer), 0, "127.0.0.1")
    server.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.close()


def test_a_prometheus_that_hangs_is_told_of_and_given_up(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus_module, "_PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(prometheus_module, "_ANSWER_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and never says a word
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        status, _, err = call("report", "--prometheus", url, "-o", tmp_path / "page.html")
    assert status == 5
    less = "a shorter --since or fewer --points ask for less"
    assert err.splitlines() == [
        f"Prometheus at {url} has not answered yet, waiting 1 s at most (ctrl-c stops)",
        f"gpushare: Prometheus at {url} does not answer the question within 1 s: {less}",
    ]
