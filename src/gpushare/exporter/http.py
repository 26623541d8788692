"""Serve /metrics and /healthz from a thread, so that a scrape never waits for the event loop."""

import threading
from collections.abc import Callable, Iterable
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

_TEXT: Final = "text/plain; charset=utf-8"


class _Quiet(WSGIRequestHandler):
    """Handler that logs no requests."""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Log nothing."""


class _Server(WSGIServer):
    """One request at a time: a slow scraper must not start many threads."""

    daemon_threads = True
    request_queue_size = 16


class MetricsServer:
    """Serves collectors and a health check.

    Args:
        port: 0 lets the system choose; `port` then says which.
        trouble: a sentence when the process is sick, else empty; asked at each /healthz.
    """

    def __init__(
        self, collectors: Iterable[Collector], port: int, trouble: Callable[[], str], address: str = ""
    ) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        for collector in collectors:
            self._registry.register(collector)
        self._trouble = trouble
        self._server = make_server(address, port, self._answer, server_class=_Server, handler_class=_Quiet)
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)

    def start(self) -> None:
        """Serve from now on."""
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        match environ.get("PATH_INFO"):
            case "/metrics":
                start_response("200 OK", [("Content-Type", CONTENT_TYPE_LATEST)])
                return [generate_latest(self._registry)]
            case "/healthz":
                trouble = self._trouble()
                start_response("503 Service Unavailable" if trouble else "200 OK", [("Content-Type", _TEXT)])
                return [(trouble or "ok").encode() + b"\n"]
            case _:
                start_response("404 Not Found", [("Content-Type", _TEXT)])
                return [b"/metrics or /healthz\n"]
