"""Kopf's connection to the API server: shows each list that Kopf takes, and keeps from Kopf what would end it.

Kopf's watchers survive broken connections and a watch that cannot be continued. ADR 0253 says what else happens to
them, and what is done here about it.
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from http import HTTPStatus
from itertools import count
from typing import Any, Final, Protocol

import aiohttp
import kopf
import orjson
from aiohttp.base_protocol import BaseProtocol

from gpushare.core.backoff import Backoff
from gpushare.kube import ApiError, Json, read_configuration

_log = logging.getLogger(__name__)
_STREAM_BYTES: Final = 2**16
RETRIES: Final = Backoff(
    first_seconds=0.5,
    longest_seconds=8.0,  # short, so that all goes on within seconds of the API server's or a right's return
    jitter_ratio=0.5,
)


class EndlessRetries:
    """Waits between the attempts of a request of Kopf's, without end: after its own nine a watcher would end."""

    def __iter__(self) -> Iterator[float]:
        return (RETRIES.seconds(failures, random.random()) for failures in count(1))


class FirstRefusals(logging.Filter):
    """Drops what Kopf logs of each further refusal of one request, as it may be refused for days.

    A watch that brings nothing for 70 s, one that is refused too, Kopf begins anew with the same request.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, str] = {}  # by address without its query, the last refusal that was logged

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log this."""
        text = record.getMessage()
        if "APIForbiddenError" not in text:
            return True
        address = text.partition("?")[0]
        if "attempt #1 failed" not in text or self._last.get(address) == text:
            return False
        self._last[address] = text
        return True


class ListObserver(Protocol):
    """Receiver of the lists that Kopf takes."""

    def begins(self, path: str) -> None:
        """Learn that the first page of the list at `path` is about to be asked for."""

    def page(self, path: str, body: Json) -> None:
        """Read a page of the list at `path` before Kopf does."""

    def answered(self, path: str, status: int) -> None:
        """Learn the HTTP status of the answer to a list or watch at `path`."""

    def must_list(self, path: str) -> bool:
        """Return whether a watch at `path` cannot go on where it was, as its objects were forgotten."""


async def log_in(observer: ListObserver, settings: kopf.OperatorSettings) -> kopf.AiohttpSession:
    """Log in as `gpushare.kube` does (in-cluster, else by kubeconfig); show `observer` each page of each list.

    Kopf's own `login_via_client` would load the Kubernetes package's synchronous client (ADR 0181).

    Raises:
        kopf.LoginError: there are no credentials.
    """
    try:
        info = await _connection(settings)
    except ApiError as error:
        raise kopf.LoginError(str(error)) from error

    observed = _KopfRequests(observer)

    class _ShownResponse(aiohttp.ClientResponse):
        async def json(self, **_: Any) -> Any:
            body = await super().json(loads=orjson.loads)
            if self.ok and is_list(self.method, self.url.query) and "items" in body:
                observed.page(self.url.path, body)
            return body

    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
        headers=info.as_http_headers(),
        trust_env=info.trust_env,
        middlewares=[observed.send],
        response_class=_ShownResponse,
    )
    return kopf.AiohttpSession(server=info.server, aiohttp_session=session)


class _KopfRequests:
    """Kopf's lists and watches as its session sees them.

    Args:
        sleep: waits for some seconds.
    """

    def __init__(self, observer: ListObserver, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._observer = observer
        self._sleep = sleep
        self._expired: Counter[str] = Counter()  # in a row, by path

    async def send(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Send a request of Kopf's; begin a list anew whose next page is not to be had any more (410).

        Kopf then goes on with the first page of the new list, and sees some objects twice. A watch that cannot go
        on where it was is shown to Kopf as one whose history is gone, after which Kopf lists anew.

        Raises:
            aiohttp.ClientConnectionError: the type is not served, as while its definition is replaced. Kopf asks
                again after this; after a 404 its watcher would end.
        """
        path = request.url.path
        if is_list(request.method, request.url.query) and "continue" not in request.url.query:
            self._observer.begins(path)
        response = await handler(request)
        while response.status == HTTPStatus.GONE and "continue" in request.url.query:
            response.release()
            self._expired[path] += 1
            wait = RETRIES.seconds(self._expired[path], random.random())
            _log.warning("the list at %s expired between two pages, it begins again in %.1f s", path, wait)
            await self._sleep(wait)
            request.url = request.url.without_query_params("continue")
            self._observer.begins(path)
            response = await handler(request)
        self._observer.answered(path, response.status)
        is_watch = "watch" in request.url.query
        if is_watch and response.status == HTTPStatus.OK and self._observer.must_list(path):
            _log.info("the watch at %s begins anew with a list, as its objects were forgotten", path)
            response.close()
            response.content = _expired()
        if response.status == HTTPStatus.NOT_FOUND and request.url.query.keys() & {"limit", "watch"}:
            response.release()
            raise aiohttp.ClientConnectionError(f"the API server does not serve {path}")
        return response

    def page(self, path: str, body: Json) -> None:
        """Show a page of a list."""
        self._observer.page(path, body)
        if not (body.get("metadata") or {}).get("continue"):
            self._expired.pop(path, None)


def _expired() -> aiohttp.StreamReader:
    """Return what the API server sends on a watch from a version that it has no more."""
    loop = asyncio.get_running_loop()
    content = aiohttp.StreamReader(BaseProtocol(loop), limit=_STREAM_BYTES, loop=loop)
    error = {"kind": "Status", "code": int(HTTPStatus.GONE), "reason": "Expired"}
    content.feed_data(orjson.dumps({"type": "ERROR", "object": error}) + b"\n")
    content.feed_eof()
    return content


async def _connection(settings: kopf.OperatorSettings) -> kopf.ConnectionInfo:
    """Return the server, its certificate and our credentials as Kopf has them."""
    configuration = await read_configuration()
    auth = await configuration.auth_settings()
    authorization = auth["BearerToken"]["value"] if "BearerToken" in auth else None
    scheme, _, token = (authorization or "").partition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        username=configuration.username or None,
        password=configuration.password or None,
        scheme=scheme or None,
        token=token or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
        trust_env=settings.networking.trust_env,
    )


def is_list(method: str, query: Mapping[str, str]) -> bool:
    """Return whether a request is one for a list, or for a single object: for no watch."""
    return method.upper() == "GET" and "watch" not in query
