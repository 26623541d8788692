"""Kopf's connection to the API server, which reports each list that Kopf takes."""

from collections.abc import Callable
from types import SimpleNamespace

import aiohttp
import kopf

from gpushare.kube import ApiError, read_configuration


async def log_in(listed: Callable[[str], None], settings: kopf.OperatorSettings) -> kopf.AiohttpSession:
    """Log in as `gpushare.kube` does (in-cluster, else by kubeconfig); call `listed` with the path of each list.

    Kopf's own `login_via_client` would load the Kubernetes package's synchronous client (ADR 0181).

    Raises:
        kopf.LoginError: there are no credentials.
    """
    try:
        info = await _connection(settings)
    except ApiError as error:
        raise kopf.LoginError(str(error)) from error

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
        trust_env=info.trust_env,
        trace_configs=[trace],
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


def is_list(request: aiohttp.TraceRequestEndParams) -> bool:
    """Return whether the answer is a list or its first page; later pages show the same moment."""
    query = request.url.query
    return (
        request.method.upper() == "GET"
        and request.response.status == 200
        and "watch" not in query
        and "continue" not in query
    )
