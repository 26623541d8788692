"""Find and read the configuration of a cluster: a kubeconfig, or a pod's own credentials."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import yaml

from gpushare.kube.errors import ApiError
from gpushare.kube.transport import Configuration, kube_config

NO_CREDENTIALS: Final = (None, None, None)
_POD_NAMESPACE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
# Errors that the library raises for a file that is not YAML, or YAML of another shape.
_BAD_KUBECONFIG: Final = (yaml.YAMLError, ValueError, TypeError, AttributeError, KeyError)


def _check_exists(kubeconfig: str | None) -> None:
    """Raise ApiError for a missing file, because the library's own error for it is misleading."""
    looked_for = kubeconfig or os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    paths = [one for one in looked_for.split(os.pathsep) if one]
    if not any(Path(one).exists() for one in paths):
        raise ApiError(f"no usable cluster configuration: there is no {' and no '.join(paths) or looked_for}")


def _check_context(kubeconfig: str | None, context: str) -> None:
    """Raise ApiError for a context that the file lacks, because the library calls the whole file invalid."""
    try:
        with _logged():
            contexts, _ = kube_config.list_kube_config_contexts(kubeconfig or _named_kubeconfig())
        known = [str(each["name"]) for each in contexts]
    except (kube_config.ConfigException, OSError, *_BAD_KUBECONFIG):
        return  # told when it is loaded
    if context not in known:
        raise ApiError(
            f'no usable cluster configuration: there is no context "{context}", only {", ".join(known) or "none"}'
        )


async def read_configuration(kubeconfig: str | Path | None = None, *, context: str | None = None) -> Any:
    """Return the Kubernetes package's Configuration, with credentials, found as described for `connect`.

    Raises:
        ApiError: there is no usable configuration; the message says what was looked for.
    """
    configuration = Configuration()
    path = str(kubeconfig) if kubeconfig is not None else None
    try:
        if is_pod(kubeconfig, context):
            kube_config.load_incluster_config(configuration)
        else:
            _check_exists(path)
            if context is not None:
                _check_context(path, context)
            with _logged() as complaints:
                await kube_config.load_kube_config(
                    path or _named_kubeconfig(), context=context, client_configuration=configuration
                )
            # The library only logs that the user's program failed; its requests would be anonymous.
            if complaints and credentials_of(configuration) == NO_CREDENTIALS:
                raise ApiError(
                    f"no usable cluster configuration: no credentials: {' '.join(complaints[0].split())}"
                )
    except kube_config.ConfigException as error:
        raise ApiError(f"no usable cluster configuration: {error}") from error
    except OSError as error:
        why = f"{error.filename}: cannot be read: {error.strerror}" if error.filename else str(error)
        raise ApiError(f"no usable cluster configuration: {why}") from error
    except _BAD_KUBECONFIG as error:
        where = path or os.environ.get("KUBECONFIG") or "~/.kube/config"
        raise ApiError(f"no usable cluster configuration: {where} is not a kubeconfig") from error
    if not _is_address(configuration.host):
        raise ApiError(
            f'no usable cluster configuration: its server "{configuration.host}" is no address; '
            "write it as https://HOST:6443"
        )
    return configuration


@contextmanager
def _logged() -> Iterator[list[str]]:
    """Collect what the library logs of a kubeconfig; where nobody handles logs it would go to standard error."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(f"{kube_config.__name__}.kube_config")
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)


def _is_address(server: str) -> bool:
    try:
        parts = urlsplit(server)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _named_kubeconfig() -> str | None:
    """Return the present $KUBECONFIG; the library reads it only once, when it is imported."""
    return os.environ.get("KUBECONFIG") or None


def current_namespace(kubeconfig: str | Path | None = None, *, context: str | None = None) -> str:
    """Return kubectl's default namespace: the context's, or the pod's own."""
    if is_pod(kubeconfig, context):
        try:
            return _POD_NAMESPACE.read_text().strip() or "default"
        except OSError:
            return "default"
    chosen = context_of(kubeconfig, context) or {}
    return str((chosen.get("context") or {}).get("namespace") or "default")


def is_pod(kubeconfig: str | Path | None, context: str | None) -> bool:
    """Return whether we are to use a pod's own credentials."""
    return kubeconfig is None and context is None and "KUBERNETES_SERVICE_HOST" in os.environ


def context_of(kubeconfig: str | Path | None, context: str | None) -> dict[str, Any] | None:
    """Return the named context of the kubeconfig, or its active one; None if it cannot be read."""
    try:
        with _logged():
            contexts, active = kube_config.list_kube_config_contexts(
                str(kubeconfig) if kubeconfig else _named_kubeconfig()
            )
    except (kube_config.ConfigException, OSError, *_BAD_KUBECONFIG):
        return None
    chosen: dict[str, Any] | None = (
        next((each for each in contexts if each["name"] == context), active) if context else active
    )
    return chosen


def credentials_of(configuration: Any) -> tuple[Any, ...]:
    """Return the token and the files of the client certificate; `NO_CREDENTIALS` if there are none."""
    return configuration.api_key.get("BearerToken"), configuration.cert_file, configuration.key_file
