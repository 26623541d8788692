"""The server of metrics and probes: bounded connections, time-outs, and probes that are answered all the same."""

import contextlib
import http.client
import shutil
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
from certificates import make_pair
from devcluster.loopback import unused_port
from prometheus_client import CollectorRegistry, Gauge

from gpushare.runtime import certificates
from gpushare.runtime.certificates import Certificate
from gpushare.runtime.http import (
    CREDENTIAL_VARIABLE,
    HttpAnswer,
    HttpLimits,
    MetricsAndProbes,
    MetricsServer,
    metrics_route,
    metrics_token,
    probe_route,
)

PATIENCE_SECONDS = 60.0
PATIENT = HttpLimits(request_seconds=10 * PATIENCE_SECONDS, answer_seconds=10 * PATIENCE_SECONDS)


@contextlib.contextmanager
def serving(limits=None, token=None, certificate=None, **routes):
    paths = {f"/{name}": route for name, route in routes.items()}
    server = MetricsServer(paths, 0, "127.0.0.1", limits or PATIENT, token=token, certificate=certificate)
    server.start()
    try:
        yield server
    finally:
        server.close()


def ok():
    return HttpAnswer(b"ok\n")


def ask(server, path, method="GET", headers=None, trust=None):
    if trust is None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_SECONDS)
    else:
        context = ssl.create_default_context(cadata=trust.decode())
        connection = http.client.HTTPSConnection(
            "127.0.0.1", server.port, timeout=PATIENCE_SECONDS, context=context
        )
    connection.request(method, path, headers=headers or {})
    answer = connection.getresponse()
    return answer.status, answer.read()


def answered(server, path, trust=None):
    """Ask until there is an answer: a busy machine's client may be later than the server's limit allows."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return ask(server, path, trust=trust)
        except OSError:
            assert time.monotonic() < deadline, "never answered"


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_SECONDS)


def is_closed(connection):
    """Wait for the server to close a connection that it owes nothing."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_metrics_and_probes():
    registry = CollectorRegistry()
    Gauge("answer", "What it is.", registry=registry).set(42)
    trouble = ["no round of sampling for 130 s"]
    with serving(metrics=metrics_route(registry), healthz=probe_route(lambda: trouble[0])) as server:
        status, body = ask(server, "/metrics?name=x")
        assert status == 200
        assert b"answer 42.0" in body
        assert ask(server, "/healthz") == (503, b"no round of sampling for 130 s\n")
        trouble[0] = ""
        assert ask(server, "/healthz") == (200, b"ok\n")
        assert ask(server, "/healthz", "HEAD") == (200, b"")
        assert ask(server, "/else") == (404, b"/metrics /healthz\n")
        assert ask(server, "/healthz", "POST")[0] == 405


def test_a_route_that_fails_is_one_answer(caplog):
    def fails():
        raise RuntimeError("no figures")

    with serving(metrics=fails, healthz=ok) as server:
        assert ask(server, "/metrics")[0] == 500
        assert ask(server, "/healthz")[0] == 200
    assert "no figures" in caplog.text


def test_200_idle_connections_keep_nobody_from_an_answer():
    limits = HttpLimits(connections=64, request_seconds=10 * PATIENCE_SECONDS)
    with serving(limits, healthz=ok) as server, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connect(server)) for _ in range(200)]
        for _ in range(20):
            assert ask(server, "/healthz") == (200, b"ok\n")
        assert all(is_closed(one) for one in idle[: 200 - 64]), "the oldest made room"
        late = connect(server)
        late.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert late.recv(12) == b"HTTP/1.1 200"


def test_clients_that_ask_and_never_read_keep_nobody_from_an_answer():
    def large():
        return HttpAnswer(b"x" * 16 * 2**20)

    limits = HttpLimits(connections=8, answer_seconds=10 * PATIENCE_SECONDS)
    with serving(limits, metrics=large, healthz=ok) as server, contextlib.ExitStack() as stack:
        for _ in range(20):
            slow = stack.enter_context(connect(server))
            slow.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert slow.recv(1) == b"H", "its answer has begun"
        assert ask(server, "/healthz") == (200, b"ok\n")


@pytest.mark.parametrize(
    "sent", [b"", b"GET /healthz HTTP/1.1\r\n", b"GET /healthz HTTP/1.1\r\nX: " + b"y" * 40_000]
)
def test_a_request_that_does_not_arrive_ends_its_connection(sent):
    with serving(HttpLimits(request_seconds=0.2), healthz=ok) as server, connect(server) as connection:
        connection.sendall(sent)
        assert is_closed(connection)
        assert answered(server, "/healthz") == (200, b"ok\n")


def test_an_answer_that_is_not_taken_ends_its_connection():
    def large():
        return HttpAnswer(b"x" * 16 * 2**20)

    with serving(HttpLimits(answer_seconds=0.2), metrics=large) as server, connect(server) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert connection.recv(1) == b"H"
        deadline = time.monotonic() + PATIENCE_SECONDS
        while server._answering:
            assert time.monotonic() < deadline, "given up"
            time.sleep(0.01)
        received = 1
        with contextlib.suppress(ConnectionResetError):
            while chunk := connection.recv(2**16):
                received += len(chunk)
        assert received < 16 * 2**20, "the rest was never sent"


def test_whoever_takes_all_of_metrics_keeps_no_probe_waiting():
    """A scrape that never ends stands for any flood: the thread and all connections of metrics are taken."""
    begun, over = threading.Event(), threading.Event()

    def endless():
        begun.set()
        over.wait(PATIENCE_SECONDS)
        return HttpAnswer(b"")

    limits = HttpLimits(connections=4, request_seconds=10 * PATIENCE_SECONDS)
    routes = {"/metrics": endless, "/healthz": ok}
    ports = (unused_port(), unused_port())
    server = MetricsAndProbes(routes, *ports, {}, address="127.0.0.1", limits=limits)
    scraped, probed = server.servers
    server.start()
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                scrape = stack.enter_context(connect(scraped))
                scrape.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert begun.wait(PATIENCE_SECONDS)
            for _ in range(5):
                assert ask(probed, "/healthz") == (200, b"ok\n")
            assert ask(probed, "/metrics")[0] == 404
            over.set()
    finally:
        over.set()
        server.close()


@pytest.mark.parametrize(("port", "probe_port", "expected"), [(0, 0, 0), (1, 0, 1), (0, 1, 1), (1, 1, 2)])
def test_a_port_that_is_0_is_not_served(port, probe_port, expected, monkeypatch):
    made = []
    monkeypatch.setattr("gpushare.runtime.http.MetricsServer", lambda routes, *_, **__: made.append(set(routes)))
    MetricsAndProbes({"/metrics": ok, "/healthz": ok}, port, probe_port, {})
    assert len(made) == expected
    assert all("/metrics" in paths for paths in made[: bool(port)])
    assert all(paths == {"/healthz"} for paths in made[bool(port) :])


def test_a_server_that_is_closed_as_soon_as_it_was_started_ends():
    """Before: its thread, which had no loop yet, was not told and kept serving."""
    for _ in range(20):
        server = MetricsServer({"/healthz": ok}, 0, "127.0.0.1")
        server.start()
        server.close()
        assert not server._thread.is_alive()


def test_if_one_port_is_in_use_the_other_is_free_again():
    """The operator tries again until both are free."""
    ports = (unused_port(), unused_port())
    with socket.create_server(("127.0.0.1", ports[1])), pytest.raises(OSError, match="in use"):
        MetricsAndProbes({"/healthz": ok}, *ports, {}, address="127.0.0.1")
    server = MetricsAndProbes({"/healthz": ok}, *ports, {}, address="127.0.0.1")
    server.start()
    try:
        assert [ask(one, "/healthz") for one in server.servers] == [(200, b"ok\n")] * 2
    finally:
        server.close()


def test_closing_closes_connections():
    server = MetricsServer({"/healthz": ok}, 0, "127.0.0.1")
    server.start()
    assert ask(server, "/healthz")[0] == 200
    with connect(server) as connection:
        connection.sendall(b"GET /healthz")
        server.close()
        assert is_closed(connection)
    with pytest.raises(ConnectionRefusedError):
        connect(server)


def test_who_brings_no_token_reads_no_metrics_and_probes_need_none(tmp_path):
    file = tmp_path / "token"
    file.write_text("secret\n")
    token = metrics_token({CREDENTIAL_VARIABLE: str(file)})
    with serving(token=token, metrics=ok, healthz=ok) as server:

        def scrape(authorization):
            return ask(server, "/metrics", headers={"Authorization": authorization} if authorization else None)[0]

        assert ask(server, "/healthz") == (200, b"ok\n")
        for wrong in (
            None,
            "",
            "secret",
            "Bearer",
            "Bearer ",
            "Bearer secre",
            "Bearer secrets",
            "Basic secret",
            "Bearer \xe9",
        ):
            assert scrape(wrong) == 401, wrong
        assert ask(server, "/metrics?x=1")[0] == 401
        assert scrape("Bearer secret") == 200
        assert scrape("bearer  secret ") == 200
        file.write_text("another")
        assert (scrape("Bearer secret"), scrape("Bearer another")) == (401, 200)
        file.write_text("")
        assert scrape("Bearer ") == 401, "an empty token lets nobody in"
        file.unlink()
        assert scrape("Bearer another") == 401


def test_without_a_token_metrics_are_open():
    assert metrics_token({}) is None
    assert metrics_token({CREDENTIAL_VARIABLE: ""}) is None


def test_metrics_and_probes_over_https(tmp_path):
    until = datetime.now(UTC).replace(microsecond=0) + timedelta(days=5)
    trust = make_pair(tmp_path, since=until - timedelta(days=30), until=until)
    registry = CollectorRegistry()
    Gauge("answer", "What it is.", registry=registry).set(42)
    file = tmp_path / "token"
    file.write_text("secret")
    token = metrics_token({CREDENTIAL_VARIABLE: str(file)})
    tls = Certificate(tmp_path)
    with serving(token=token, certificate=tls, metrics=metrics_route(registry), healthz=ok) as server:
        assert ask(server, "/healthz", trust=trust) == (200, b"ok\n")
        assert ask(server, "/metrics", trust=trust)[0] == 401
        status, body = ask(server, "/metrics", headers={"Authorization": "Bearer secret"}, trust=trust)
        assert status == 200
        lines = body.decode().splitlines()
        assert "answer 42.0" in lines
        validity = [line for line in lines if line.startswith("gpushare_certificate_")]
        assert [line.split()[0] for line in validity] == [
            'gpushare_certificate_not_before_timestamp_seconds{certificate="metrics"}',
            'gpushare_certificate_expiry_timestamp_seconds{certificate="metrics"}',
        ]
        until_seconds = until.timestamp()
        assert [float(line.split()[-1]) for line in validity] == [until_seconds - 30 * 86400, until_seconds]
        with pytest.raises(ssl.SSLCertVerificationError):
            ask(server, "/healthz", trust=make_pair(tmp_path / "another"))
        with connect(server) as plain:
            plain.sendall(b"GET /metrics HTTP/1.1\r\nAuthorization: Bearer secret\r\n\r\n")
            assert not plain.recv(64).startswith(b"HTTP"), "nothing is said in the open"
        assert ask(server, "/healthz", trust=trust)[0] == 200


def test_a_large_answer_over_https_arrives_whole(tmp_path):
    trust = make_pair(tmp_path)
    with serving(certificate=Certificate(tmp_path), big=lambda: HttpAnswer(b"x" * 3_000_000)) as server:
        for _ in range(3):
            assert ask(server, "/big", trust=trust) == (200, b"x" * 3_000_000)


def test_a_renewed_certificate_is_served_without_a_restart(tmp_path, monkeypatch):
    monkeypatch.setattr(certificates, "CHECK_SECONDS", 0.05)
    first = make_pair(tmp_path)
    with serving(certificate=Certificate(tmp_path), healthz=ok) as server:
        assert ask(server, "/healthz", trust=first)[0] == 200
        second = make_pair(tmp_path)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while ssl.get_server_certificate(("127.0.0.1", server.port)) != second.decode():
            assert time.monotonic() < deadline, "the new one is never served"
            time.sleep(0.02)
        assert ask(server, "/healthz", trust=second)[0] == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            ask(server, "/healthz", trust=first)


def test_no_handshake_fails_while_certificates_are_renewed(tmp_path):
    """A certificate taken up before its key, in a context that is in use, failed one in five of these."""
    pairs = [tmp_path / "one", tmp_path / "two"]
    for pair in pairs:
        make_pair(pair)
    directory = tmp_path / "served"
    shutil.copytree(pairs[0], directory)
    certificate = Certificate(directory)
    renewals, seen = 0, []
    with serving(certificate=certificate, healthz=ok) as server, ThreadPoolExecutor(1) as pool:
        address = ("127.0.0.1", server.port)

        def handshakes():
            while len(seen) < 200 or renewals < 50:
                seen.append(ssl.get_server_certificate(address, timeout=PATIENCE_SECONDS))

        asked = pool.submit(handshakes)
        while not asked.done():
            for name in ("tls.crt", "tls.key"):
                shutil.copy(pairs[renewals % 2] / name, directory / name)
            renewals += certificate.reload_if_changed()
    asked.result()
    assert set(seen) == {(pair / "tls.crt").read_text() for pair in pairs}


def test_idle_connections_without_a_handshake_keep_nobody_from_an_answer(tmp_path):
    trust = make_pair(tmp_path)
    limits = HttpLimits(connections=16, request_seconds=10 * PATIENCE_SECONDS)
    with serving(limits, certificate=Certificate(tmp_path), healthz=ok) as server, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connect(server)) for _ in range(60)]
        for one in idle[::2]:
            one.sendall(b"\x16\x03\x01")  # the first bytes of a handshake
        for _ in range(5):
            assert ask(server, "/healthz", trust=trust) == (200, b"ok\n")
        assert all(is_closed(one) for one in idle[: 60 - 16]), "the oldest made room"


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x00", b"GET / HTTP/1.1\r\n\r\n"])
def test_a_handshake_that_does_not_come_ends_its_connection(tmp_path, sent):
    trust = make_pair(tmp_path)
    limits = HttpLimits(request_seconds=1.0)
    with serving(limits, certificate=Certificate(tmp_path), healthz=ok) as server, connect(server) as connection:
        connection.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(64):
                pass  # an alert may come first
        assert answered(server, "/healthz", trust)[0] == 200


def test_without_a_good_pair_nobody_is_answered_and_then_everybody_is(tmp_path, monkeypatch):
    monkeypatch.setattr(certificates, "CHECK_SECONDS", 0.05)
    tls = Certificate(tmp_path / "tls", is_needed=False)
    with serving(certificate=tls, healthz=ok) as server:
        with pytest.raises(OSError):  # an alert or a reset, by the version of OpenSSL
            ssl.get_server_certificate(("127.0.0.1", server.port), timeout=PATIENCE_SECONDS)
        trust = make_pair(tmp_path / "tls")
        taken = threading.Event()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while tls.reloads == 0:
            assert time.monotonic() < deadline
            taken.wait(0.02)
        assert ask(server, "/healthz", trust=trust) == (200, b"ok\n")
