"""The server of metrics and probes, in its own thread, so that no client can delay a probe's answer.

Each connection carries one request. A request must arrive within seconds, and its answer must be read within
seconds. Connections are bounded: if there are too many, the one that has been silent for longest is closed. So
kubelet is answered even while others hold silent connections open, and while the event loop under probe is stuck.
"""

import asyncio
import contextlib
import hmac
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from gpushare.runtime.certificates import Certificate, CertificateCollector, metrics_certificate

_log = logging.getLogger(__name__)
METRICS_PATH: Final = "/metrics"
CREDENTIAL_VARIABLE: Final = "GPUSHARE_METRICS_TOKEN_FILE"
TEXT: Final = "text/plain; charset=utf-8"
_STOP_SECONDS: Final = 5.0
_LAG_BUCKETS: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits for clients of a server.

    Attributes:
        connections: most open connections.
        head_bytes: largest head of a request; a body is not read.
        request_seconds: time from the connection's start within which its request must arrive.
        answer_seconds: time within which its answer must be read.
    """

    connections: int = 64
    head_bytes: int = 16 * 2**10
    request_seconds: float = 5.0
    answer_seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A route's answer."""

    body: bytes
    content_type: str = TEXT
    status: HTTPStatus = HTTPStatus.OK


class BearerToken:
    """The token that a scrape must send; read from the file each time, as a mounted Secret may change."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def admits(self, authorization: str) -> bool:
        """Return whether an Authorization header contains the token; always False without a token."""
        try:
            token = self._path.read_text().strip()
        except OSError as error:
            _log.error("metrics cannot be scraped: %s", error)
            return False
        scheme, _, given = authorization.partition(" ")
        return (
            bool(token)
            and scheme.lower() == "bearer"
            and hmac.compare_digest(given.strip().encode(), token.encode())
        )


def metrics_token(environment: Mapping[str, str]) -> BearerToken | None:
    """Return the token in the file that the environment names; None leaves metrics open."""
    path = environment.get(CREDENTIAL_VARIABLE)
    return BearerToken(Path(path)) if path else None


Route = Callable[[], HttpAnswer]
"""Called in the server's thread for each request of its path; must not block."""


def registry_of(*collectors: Collector) -> CollectorRegistry:
    """Return a registry whose collectors are only called at scrapes."""
    registry = CollectorRegistry(auto_describe=False)
    for collector in collectors:
        registry.register(collector)
    return registry


def lag_histogram(registry: CollectorRegistry) -> Histogram:
    """Return the histogram of how late a process's event loop is; its label `part` tells whose it is."""
    return Histogram(
        "gpushare_event_loop_lag_seconds",
        "How late a wait of 0.1 s ended in the event loop of a part.",
        ["part"],
        buckets=_LAG_BUCKETS,
        registry=registry,
    )


def metrics_route(registry: CollectorRegistry) -> Route:
    """Return a route that renders a registry in Prometheus' format."""
    return lambda: HttpAnswer(generate_latest(registry), CONTENT_TYPE_LATEST)


def probe_route(trouble: Callable[[], str]) -> Route:
    """Return the route of a probe; `trouble` returns a sentence on why it fails, or "" if it succeeds."""

    def answer() -> HttpAnswer:
        why = trouble()
        status = HTTPStatus.SERVICE_UNAVAILABLE if why else HTTPStatus.OK
        return HttpAnswer((why or "ok").encode() + b"\n", status=status)

    return answer


class MetricsServer:
    """Serves routes by path; it binds its port at once and serves from `start` to `close`.

    Args:
        port: 0 lets the system choose; the attribute `port` has the chosen one.
        token: token that requests of /metrics need; None for no token. Probes never need it.
        certificate: for TLS, also on probes; it is reloaded, and its end is served with the metrics. None: plain
            HTTP.
    """

    def __init__(
        self,
        routes: Mapping[str, Route],
        port: int,
        address: str = "",
        limits: HttpLimits | None = None,
        *,
        token: BearerToken | None = None,
        certificate: Certificate | None = None,
    ) -> None:
        self._routes = dict(routes)
        self._token = token
        self._certificate = certificate
        if certificate is not None and METRICS_PATH in self._routes:
            self._routes[METRICS_PATH] = _with_end_of(certificate, self._routes[METRICS_PATH])
        self._limits = limits or HttpLimits()
        self._socket = listen_at(address, port, backlog=self._limits.connections)
        self.port: int = self._socket.getsockname()[1]
        # Connections waiting for a request, the oldest first.
        self._waiting: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
        self._answering: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> None:
        """Start serving; no effect if it serves already."""
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Stop serving and close every connection."""
        self._is_closed = True  # for a thread that has no loop yet
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread.ident is not None:  # it was started
            self._thread.join(_STOP_SECONDS)
        self._socket.close()

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, sock=self._socket, limit=self._limits.head_bytes)
        fresh = asyncio.create_task(self._certificate.keep()) if self._certificate is not None else None
        if not self._is_closed:
            await self._stop.wait()
        if fresh is not None:
            fresh.cancel()
        # An accepted connection takes some steps to reach us; a server that is closed before would leak it.
        asyncio.get_running_loop().remove_reader(self._socket)
        for _ in range(4):
            await asyncio.sleep(0)
            for writer, task in (*self._waiting.items(), *self._answering.items()):
                _end(writer, task)
        server.close()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._make_room()
        if self._certificate is not None:
            writer.transport.pause_reading()  # type: ignore[attr-defined]  # what comes belongs to the handshake
        self._waiting[writer] = asyncio.create_task(self._converse(reader, writer))

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read one request and answer it."""
        try:
            async with asyncio.timeout(self._limits.request_seconds):
                if self._certificate is not None:
                    # TLS starts here, not in start_server, so that connections without a handshake are bounded
                    # too.
                    await writer.start_tls(self._certificate.context)
                head = await reader.readuntil(b"\r\n\r\n")
            if writer not in self._waiting:
                return  # it was closed to make room for another
            self._answering[writer] = self._waiting.pop(writer)
            writer.write(self._answer(head))
            async with asyncio.timeout(self._limits.answer_seconds):
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            pass  # the client was silent, slow or closed, or its request too long
        finally:
            self._waiting.pop(writer, None)
            self._answering.pop(writer, None)
            writer.transport.abort()

    def _make_room(self) -> None:
        """Close the connection that has been silent for longest if there are too many."""
        if len(self._waiting) + len(self._answering) < self._limits.connections:
            return
        among = self._waiting or self._answering
        oldest = next(iter(among))
        _end(oldest, among.pop(oldest))

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.split(b"\r\n", 1)[0].decode("latin-1").partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method not in {"GET", "HEAD"}:
            answer = HttpAnswer(b"", status=HTTPStatus.METHOD_NOT_ALLOWED)
        elif path == METRICS_PATH and self._token and not self._token.admits(_header(head, b"authorization")):
            answer = HttpAnswer(b"", status=HTTPStatus.UNAUTHORIZED)
        elif path not in self._routes:
            answer = HttpAnswer(" ".join(self._routes).encode() + b"\n", status=HTTPStatus.NOT_FOUND)
        else:
            try:
                answer = self._routes[path]()
            except Exception:  # noqa: BLE001 - a route that fails is one answer, not the end of the server
                _log.exception("%s cannot be answered", path)
                answer = HttpAnswer(b"", status=HTTPStatus.INTERNAL_SERVER_ERROR)
        status = answer.status
        lines = (
            f"HTTP/1.1 {status.value} {status.phrase}",
            f"Content-Type: {answer.content_type}",
            f"Content-Length: {len(answer.body)}",
            "Connection: close",
        )
        return "\r\n".join((*lines, "", "")).encode("latin-1") + (b"" if method == "HEAD" else answer.body)


class MetricsAndProbes:
    """A component's metrics, and its probes on a separate port, so that a flood of one does not delay kubelet.

    Each port has its own thread and its own connections. The metrics port serves the probes too, for people.

    Args:
        routes: metrics and probes by path; the probe port serves all but `METRICS_PATH`.
        port: port of metrics; 0 for none.
        probe_port: port of probes; 0 for none.
        environment: names the token file, and the directory of the certificate for both ports.

    Raises:
        OSError: one of the ports is in use; the other is free again.
    """

    def __init__(
        self,
        routes: Mapping[str, Route],
        port: int,
        probe_port: int,
        environment: Mapping[str, str],
        *,
        address: str = "",
        limits: HttpLimits | None = None,
    ) -> None:
        probes = {path: route for path, route in routes.items() if path != METRICS_PATH}
        token = metrics_token(environment)
        self.servers: list[MetricsServer] = []
        try:
            for served, at in ((routes, port), (probes, probe_port)):
                if at:
                    certificate = metrics_certificate(environment)
                    server = MetricsServer(served, at, address, limits, token=token, certificate=certificate)
                    self.servers.append(server)
        except OSError:
            self.close()
            raise

    def start(self) -> None:
        """Start serving."""
        for server in self.servers:
            server.start()

    def close(self) -> None:
        """Stop serving and close every connection."""
        for server in self.servers:
            server.close()


def _end(writer: asyncio.StreamWriter, task: asyncio.Task[None]) -> None:
    """Close a connection at once.

    The task is cancelled first, because an interrupted handshake would give it no transport.
    """
    task.cancel()
    writer.transport.abort()


def _with_end_of(certificate: Certificate, route: Route) -> Route:
    """Return the metrics route with the expiry time of the server's own certificate added."""
    registry = registry_of(CertificateCollector({"metrics": certificate}))

    def answer() -> HttpAnswer:
        own = route()
        return replace(own, body=own.body + generate_latest(registry))

    return answer


def _header(head: bytes, name: bytes) -> str:
    """Return a header's value; empty if missing, the first if repeated."""
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip().decode("latin-1")
    return ""


def listen_at(address: str, port: int, backlog: int) -> socket.socket:
    """Return a listening socket; without an address on all, of IPv4 and, if the node has it, IPv6."""
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=backlog)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    return socket.create_server(("", port), backlog=backlog)
