"""What to say, and to advise, where Prometheus' API does not answer."""

import os
import socket
import ssl
from typing import Final

import aiohttp

from gpushare.cli.errors import CommandError, ForbiddenError, UnreachableError, UsageError

_FORWARD: Final = (
    "from outside the cluster forward its port, as by `kubectl -n monitoring port-forward svc/prometheus 9090`, "
    "and give --prometheus http://127.0.0.1:9090"
)
_NOT_NOW: Final = frozenset({502, 503, 504})  # of a proxy before it, or its own while it reads its log at a start


def no_answer(url: str, error: Exception, *, connect_seconds: float, answer_seconds: float) -> CommandError:
    """Return the sentence, of its kind, for a question that got no answer.

    Args:
        error: what aiohttp raised.
        connect_seconds, answer_seconds: after which it gave up.
    """
    match error:
        case aiohttp.ClientSSLError():
            return UnreachableError(_no_tls(url, error.__cause__))
        case aiohttp.ClientConnectorError(os_error=socket.gaierror() as cause):
            return UnreachableError(f"the host of --prometheus {url} is not known ({cause.strerror}): {_FORWARD}")
        case aiohttp.ClientConnectorError(os_error=cause):
            why = os.strerror(cause.errno) if cause.errno else "no connection"
            return UnreachableError(f"nothing answers at --prometheus {url} ({why}): {_FORWARD}")
        case aiohttp.ServerTimeoutError():
            why = f"no connection within {connect_seconds:.0f} s"
            return UnreachableError(f"nothing answers at --prometheus {url} ({why}): {_FORWARD}")
        case TimeoutError():
            return UnreachableError(
                f"Prometheus at {url} does not answer the question within {answer_seconds:.0f} s: a shorter "
                "--since or fewer --points ask for less"
            )
        case aiohttp.ClientResponseError():
            return no_prometheus(url, "it does not speak HTTP as a server does")
        case aiohttp.ClientError() if not isinstance(error, ValueError):  # as InvalidURL is
            return UnreachableError(f"Prometheus at {url} ends the connection ({error}): try again in a moment")
    return UsageError(f'--prometheus "{url}" is no address; write it as http://prometheus.monitoring:9090')


def _no_tls(url: str, cause: BaseException | None) -> str:
    if isinstance(cause, ssl.SSLCertVerificationError):
        return (
            f"the certificate of --prometheus {url} is not trusted ({cause.verify_message}): name the file of its "
            "authority in SSL_CERT_FILE"
        )
    why = getattr(cause, "reason", None) or "no TLS"
    return f"no TLS connection to --prometheus {url} ({why}): does it take http:// instead?"


def forbidden(url: str, status: int, *, has_token: bool) -> ForbiddenError:
    """Return the sentence for an HTTP status that asks who we are."""
    what = "another token, one that may read it," if has_token else "a token that may read it"
    return ForbiddenError(f"Prometheus at {url} refuses (HTTP {status}): give {what} by --token-file")


def no_prometheus(url: str, why: str) -> UnreachableError:
    """Return the sentence for another server in Prometheus' place."""
    return UnreachableError(
        f"{url} is no Prometheus: {why}; give the address below which /api/v1/query answers, such as "
        "http://prometheus.monitoring:9090"
    )


def no_api(url: str, status: int) -> UnreachableError:
    """Return the sentence for an answer that is none of Prometheus' API, such as a page."""
    if status in _NOT_NOW:
        return UnreachableError(
            f"Prometheus at {url} takes no questions now (HTTP {status}): one that has just started reads its log "
            "first; try again in a minute"
        )
    return no_prometheus(url, f"its answer (HTTP {status}) is not one of Prometheus' API")
