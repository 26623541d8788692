"""Kopf's connection to the API server, which shows each list that Kopf takes."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Protocol

import aiohttp
import kopf
import orjson

from gpushare.kube import ApiError, Json, read_configuration


class ListObserver(Protocol):
    """Receiver of the lists that Kopf takes."""

    def begins(self, path: str) -> None:
        """Learn that the first page of the list at `path` is about to be asked for."""

    def page(self, path: str, body: Json) -> None:
        """Read a page of the list at `path` before Kopf does."""


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

    async def asked(
        _session: aiohttp.ClientSession, _context: SimpleNamespace, request: aiohttp.TraceRequestStartParams
    ) -> None:
        if is_list(request.method, request.url.query) and "continue" not in request.url.query:
            observer.begins(request.url.path)

    class _ShownResponse(aiohttp.ClientResponse):
        async def json(self, **_: Any) -> Any:
            body = await super().json(loads=orjson.loads)
            if self.ok and is_list(self.method, self.url.query) and "items" in body:
                observer.page(self.url.path, body)
            return body

    trace = aiohttp.TraceConfig()
    trace.on_request_start.append(asked)
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
        headers=info.as_http_headers(),
        trust_env=info.trust_env,
        trace_configs=[trace],
        response_class=_ShownResponse,
    )
    return kopf.AiohttpSession(server=info.server, aiohttp_session=session)


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
