"""Kopf's connection to the API server, which reports each list that Kopf takes."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import aiohttp
import kopf


async def log_in(listed: Callable[[str], None], **arguments: Any) -> kopf.AiohttpSession:
    """Log in as Kopf would on its own (in-cluster, else by kubeconfig); call `listed` with the path of each list.

    Raises:
        kopf.PermanentError: there are no credentials.
    """
    info = await asyncio.to_thread(kopf.login_via_client, **arguments)
    if info is None:
        raise kopf.PermanentError("no credentials for the API server, neither in-cluster nor in a kubeconfig")

    async def heard(
        _session: aiohttp.ClientSession, _context: SimpleNamespace, request: aiohttp.TraceRequestEndParams
    ) -> None:
        if is_list(request):
            listed(request.url.path)

    trace = aiohttp.TraceConfig()
    trace.on_request_end.append(heard)
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
        headers=info.as_http_headers(),
        proxy=info.proxy_url,
        trust_env=info.trust_env,
        trace_configs=[trace],
    )
    return kopf.AiohttpSession(
        server=info.server,
        aiohttp_session=session,
        default_namespace=info.default_namespace,
        priority=info.priority,
        expiration=info.expiration,
    )


def is_list(request: aiohttp.TraceRequestEndParams) -> bool:
    """Return whether the answer is a list or its first page; later pages show the same moment."""
    query = request.url.query
    return (
        request.method.upper() == "GET"
        and request.response.status == 200
        and "watch" not in query
        and "continue" not in query
    )
