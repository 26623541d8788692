"""A small client: raw JSON in and out over the official client's configuration and REST transport."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Generic, TypeVar
from urllib.parse import quote, urlencode
from urllib.request import getproxies

import aiohttp
import orjson

from gpushare.kube.errors import (
    DEFAULT_RETRY_AFTER_SECONDS,
    ApiError,
    Forbidden,
    Gone,
    NotFound,
    Retryable,
    from_status,
    from_watch,
)
from gpushare.kube.kubeconfig import NO_CREDENTIALS, context_of, credentials_of, is_pod, read_configuration
from gpushare.kube.resources import PODS, Resource
from gpushare.kube.transport import RESTClientObject, kube_config

Json = dict[str, Any]
Body = Mapping[str, Any] | Sequence[Mapping[str, Any]]
T = TypeVar("T")

PAGE_LIMIT: Final = 500  # client-go's pager; 500 pods are about 3 MB of JSON, parsed in some 15 ms
REQUEST_TIMEOUT_SECONDS: Final = 30.0
SILENT_WATCH_SECONDS: Final = 90.0  # longer silence is a dead link; bookmarks come about every 60 s

_UNAUTHORIZED: Final = 401


class PatchType(StrEnum):
    """Interpretation of a patch's body by the server."""

    MERGE = "application/merge-patch+json"
    JSON = "application/json-patch+json"
    APPLY = "application/apply-patch+yaml"


@dataclass(frozen=True, slots=True)
class Listing(Generic[T]):
    """A complete list as of `resource_version`."""

    items: list[T]
    resource_version: str


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a list, raw."""

    items: list[Json]
    resource_version: str


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One event of a watch; `type` is ADDED, MODIFIED, DELETED or BOOKMARK."""

    type: str
    object: Json


class Api:
    """The Kubernetes API. Every method raises `ApiError` or one of its kinds, nothing else.

    Args:
        read_again: reads the configuration again, with new credentials, once the server refuses ours (401); None
            if they renew themselves, as a pod's do.
    """

    def __init__(
        self,
        configuration: Any,
        *,
        field_manager: str = "gpushare",
        read_again: Callable[[], Awaitable[Any]] | None = None,
    ) -> None:
        self._configuration = configuration
        self._rest: Any = RESTClientObject(configuration)
        self._field_manager = field_manager
        self._read_again = read_again
        self._renewing = asyncio.Lock()
        self._former: list[Any] = []  # transports with former client certificates, which watches may still use

    async def close(self) -> None:
        """Close the connections."""
        for transport in (self._rest, *self._former):
            await transport.close()

    async def get(self, resource: Resource, name: str, *, namespace: str | None = None) -> Json:
        """Return one object.

        Raises:
            ApiError: as for every request; `Retryable` also for an answer that is no object.
        """
        found = await self._call("GET", resource.path(namespace=namespace, name=name))
        if not _is_named_object(found):
            raise _no_api_server("an object without a name")
        return found

    async def versions_of(self, group: str) -> tuple[str, ...]:
        """Return the versions of an API group that the server serves; empty if it does not know the group."""
        try:
            found = await self._call("GET", f"/apis/{quote(group, safe='')}")
        except NotFound:
            return ()
        versions = found.get("versions") or ()
        if not isinstance(versions, list | tuple) or not all(isinstance(each, dict) for each in versions):
            raise _no_api_server("an API group without versions")
        return tuple(str(each.get("version")) for each in versions)

    async def pages(
        self,
        resource: Resource,
        *,
        namespace: str | None = None,
        label_selector: str | None = None,
        field_selector: str | None = None,
        limit: int = PAGE_LIMIT,
    ) -> AsyncIterator[Page]:
        """Yield a list page by page, so that only one page of raw JSON is in memory; `limit` 0 means one page.

        Raises:
            ApiError: as for every request; `Retryable` also for an answer that is no list of objects.
        """
        query = _query(labelSelector=label_selector, fieldSelector=field_selector, limit=limit or None)
        path = resource.path(namespace=namespace)
        token: str | None = None
        while True:
            body = await self._call("GET", path, {**query, **_query(**{"continue": token})})
            found, metadata = body.get("items", 0), body.get("metadata") or {}
            if not isinstance(found, list | None) or not isinstance(metadata, dict):
                raise _no_api_server("a list without items")
            if not all(map(_is_named_object, found or ())):
                raise _no_api_server("a list whose items are no objects with a name")
            yield Page(found or [], str(metadata.get("resourceVersion") or ""))
            token = metadata.get("continue")
            if not token:
                return

    async def list(
        self,
        resource: Resource,
        reduce: Callable[[Json], T],
        *,
        namespace: str | None = None,
        label_selector: str | None = None,
        field_selector: str | None = None,
    ) -> Listing[T]:
        """Return a whole list, each object reduced on arrival; restart when the continue token has expired."""
        limit = PAGE_LIMIT
        while True:
            items: list[T] = []
            version = ""
            try:
                async for page in self.pages(
                    resource,
                    namespace=namespace,
                    label_selector=label_selector,
                    field_selector=field_selector,
                    limit=limit,
                ):
                    items.extend(map(reduce, page.items))
                    version = page.resource_version
            except Gone:
                if not limit:
                    raise
                limit = 0  # too many changes between pages: read it in one request, as client-go does
            else:
                return Listing(items, version)

    async def watch(
        self,
        resource: Resource,
        *,
        resource_version: str,
        namespace: str | None = None,
        label_selector: str | None = None,
        field_selector: str | None = None,
        timeout_seconds: int = 290,
    ) -> AsyncIterator[WatchEvent]:
        """Yield events after `resource_version` until the server ends the watch; raise an ERROR event."""
        query = _query(
            watch="true",
            allowWatchBookmarks="true",
            resourceVersion=resource_version,
            labelSelector=label_selector,
            fieldSelector=field_selector,
            timeoutSeconds=timeout_seconds,
        )
        limit = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=SILENT_WATCH_SECONDS)
        response = await self._send("GET", resource.path(namespace=namespace), query, limit)
        try:
            async for line in _lines(response):
                event = orjson.loads(line)
                if event["type"] == "ERROR":
                    raise from_watch(event["object"])
                yield WatchEvent(event["type"], event["object"])
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _unreachable(error) from error
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise _unreachable(error) from error
        finally:
            response.close()

    async def create(
        self,
        resource: Resource,
        body: Mapping[str, Any],
        *,
        namespace: str | None = None,
        name: str | None = None,
        subresource: str | None = None,
    ) -> Json:
        """Create an object, or with `name` and `subresource` post to a subresource such as `binding`."""
        path = resource.path(namespace=namespace, name=name, subresource=subresource)
        return await self._call("POST", path, _query(fieldManager=self._field_manager), body)

    async def replace(
        self,
        resource: Resource,
        name: str,
        body: Mapping[str, Any],
        *,
        namespace: str | None = None,
        subresource: str | None = None,
    ) -> Json:
        """Replace a whole object; fails with Conflict if its resourceVersion has changed."""
        path = resource.path(namespace=namespace, name=name, subresource=subresource)
        return await self._call("PUT", path, _query(fieldManager=self._field_manager), body)

    async def patch(
        self,
        resource: Resource,
        name: str,
        body: Body,
        *,
        namespace: str | None = None,
        subresource: str | None = None,
        patch_type: PatchType = PatchType.MERGE,
        force: bool = False,
    ) -> Json:
        """Patch an object or its `status`; a metadata.uid or resourceVersion in a merge patch is a precondition.

        Args:
            force: with APPLY, take over fields that another manager owns.

        Raises:
            Conflict: the resourceVersion differs.
            Invalid: the uid differs.
        """
        path = resource.path(namespace=namespace, name=name, subresource=subresource)
        query = _query(fieldManager=self._field_manager, force="true" if force else None)
        return await self._call("PATCH", path, query, body, content_type=patch_type.value)

    async def apply(self, resource: Resource, body: Mapping[str, Any], *, force: bool = True) -> Json:
        """Apply an object server-side; it contains its own metadata.name and metadata.namespace.

        Args:
            force: take over fields that another manager owns; otherwise that is a Conflict.
        """
        metadata = body["metadata"]
        whole = {"apiVersion": resource.api_version, "kind": resource.kind, **body}
        return await self.patch(
            resource,
            metadata["name"],
            whole,
            namespace=metadata.get("namespace"),
            patch_type=PatchType.APPLY,
            force=force,
        )

    async def delete(
        self,
        resource: Resource,
        name: str,
        *,
        namespace: str | None = None,
        uid: str | None = None,
        grace_seconds: int | None = None,
    ) -> None:
        """Delete an object; with `uid`, only the one with this uid (Conflict otherwise)."""
        await self._call("DELETE", resource.path(namespace=namespace, name=name), {}, _options(uid, grace_seconds))

    async def evict(self, name: str, *, namespace: str, uid: str | None = None) -> None:
        """Evict a pod; with `uid`, only the one with this uid (Conflict otherwise).

        Raises:
            Retryable: with status 429, while a PodDisruptionBudget forbids it.
        """
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace},
            "deleteOptions": _options(uid),
        }
        await self.create(PODS, body, namespace=namespace, name=name, subresource="eviction")

    async def bind(
        self, name: str, node: str, *, namespace: str, uid: str, annotations: Mapping[str, str] | None = None
    ) -> None:
        """Bind a pod to a node; the API server writes `annotations` on the pod in the same transaction.

        Raises:
            Conflict: another pod has that name, or the pod is already bound.
            NotFound: the pod is gone.
        """
        metadata: Json = {"name": name, "namespace": namespace, "uid": uid}
        if annotations:
            metadata["annotations"] = dict(annotations)
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": target}
        await self.create(PODS, body, namespace=namespace, name=name, subresource="binding")

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        body: Body | None = None,
        *,
        content_type: str = "application/json",
    ) -> Json:
        limit = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_SECONDS)
        response = await self._send(method, path, query, limit, body=body, content_type=content_type)
        try:
            raw = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _unreachable(error) from error
        return _object(raw)

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None,
        limit: aiohttp.ClientTimeout,
        *,
        body: Body | None = None,
        content_type: str = "application/json",
    ) -> aiohttp.ClientResponse:
        """Send a request and return its response after its headers have arrived and show success.

        Credentials that the server refuses (401) are renewed, and the request is sent once more.
        """
        used = self._configuration
        try:
            return await self._send_once(method, path, query, limit, body=body, content_type=content_type)
        except Forbidden as refusal:
            if refusal.status != _UNAUTHORIZED or not await self._renew(used):
                raise
        return await self._send_once(method, path, query, limit, body=body, content_type=content_type)

    async def _send_once(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None,
        limit: aiohttp.ClientTimeout,
        *,
        body: Body | None,
        content_type: str,
    ) -> aiohttp.ClientResponse:
        url = self._configuration.host + path + ("?" + urlencode(query) if query else "")
        headers = {"Accept": "application/json", "Content-Type": content_type, **await self._authorization()}
        try:
            answer = await self._rest.request(method, url, headers=headers, body=body, _request_timeout=limit)
            response: aiohttp.ClientResponse = answer.response
            if response.status < 400:
                return response
            raw = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _unreachable(error) from error
        raise from_status(response.status, _status_object(raw), response.headers.get("Retry-After"))

    async def _renew(self, refused: Any) -> bool:
        """Read the configuration again, unless another request has; return whether its credentials are new ones.

        A kubeconfig may get them from a program (EKS, GKE, OIDC), for 15 minutes to an hour.

        Raises:
            Forbidden: it cannot be read any more.
        """
        if self._read_again is None:
            return False
        async with self._renewing:
            if self._configuration is not refused:
                return True
            try:
                fresh = await self._read_again()
                # Without any, such as after a program's failure, requests would be anonymous.
                if credentials_of(fresh) in (credentials_of(refused), NO_CREDENTIALS):
                    return False
                if _certificates(fresh) != _certificates(refused):
                    transport = RESTClientObject(fresh)
                    self._former.append(self._rest)
                    self._rest = transport
            except (ApiError, OSError) as error:  # OSError: certificates that TLS does not take
                words = f"our credentials are refused, and cannot be renewed: {error}"
                raise Forbidden(words, status=_UNAUTHORIZED) from error
            self._configuration = fresh
            return True

    async def _authorization(self) -> dict[str, str]:
        """Return the headers with our credentials; a pod's token is read from its file again each minute."""
        try:
            auth: Any = await self._configuration.auth_settings()
        except (kube_config.ConfigException, OSError, ValueError) as error:
            raise Retryable(
                f"the credentials cannot be read: {error}", retry_after_seconds=DEFAULT_RETRY_AFTER_SECONDS
            ) from error
        return {setting["key"]: setting["value"] for setting in auth.values()}


@asynccontextmanager
async def connect(
    kubeconfig: str | Path | None = None, *, context: str | None = None, field_manager: str = "gpushare"
) -> AsyncIterator[Api]:
    """Connect with `kubeconfig`, else in-cluster credentials, else $KUBECONFIG or ~/.kube/config.

    Raises:
        ApiError: there is no usable configuration; the message says what was looked for.
    """
    inside = is_pod(kubeconfig, context)
    # The active context may be another one by the time at which the kubeconfig is read again.
    name = context if context or inside else (context_of(kubeconfig, None) or {}).get("name")

    async def read() -> Any:
        configuration = await read_configuration(kubeconfig, context=name)
        # aiohttp's search for a proxy and a netrc file costs two thread hops per request: only do it with a proxy.
        configuration.client_session_kwargs = {"trust_env": bool(getproxies())}
        configuration.retries = None  # callers decide about retries; a Reflector has its own back-off
        return configuration

    configuration = await read()
    try:
        api = Api(configuration, field_manager=field_manager, read_again=None if inside else read)
    except OSError as error:  # TLS's errors are such
        raise ApiError(f"no usable cluster configuration: its certificates cannot be used: {error}") from error
    try:
        yield api
    finally:
        await api.close()
        await asyncio.sleep(0)  # let aiohttp close its transports


def _certificates(configuration: Any) -> tuple[Any, ...]:
    return configuration.cert_file, configuration.key_file, configuration.ssl_ca_cert


def _query(**parameters: Any) -> dict[str, Any]:
    return {key: value for key, value in parameters.items() if value is not None}


def _options(uid: str | None, grace_seconds: int | None = None) -> Json:
    """Return the DeleteOptions with a precondition and a grace period, each if given."""
    options: Json = {"apiVersion": "v1", "kind": "DeleteOptions"}
    if uid is not None:
        options["preconditions"] = {"uid": uid}
    if grace_seconds is not None:
        options["gracePeriodSeconds"] = grace_seconds
    return options


def _unreachable(error: Exception) -> Retryable:
    what = str(error) or type(error).__name__
    return Retryable(f"the API server did not answer: {what}", retry_after_seconds=DEFAULT_RETRY_AFTER_SECONDS)


def _object(raw: bytes) -> Json:
    try:
        body = orjson.loads(raw) if raw else {}
    except orjson.JSONDecodeError as error:
        raise _no_api_server(str(error)) from error
    return body if isinstance(body, dict) else {}


def _is_named_object(found: Any) -> bool:
    """Return whether an answer is an object of the API: every one has a name."""
    metadata = found.get("metadata") if isinstance(found, dict) else None
    return isinstance(metadata, dict) and isinstance(metadata.get("name"), str)


def _no_api_server(why: str) -> Retryable:
    return Retryable(
        f"what answers is no API server, or its answer was cut off ({why})",
        retry_after_seconds=DEFAULT_RETRY_AFTER_SECONDS,
    )


def _status_object(raw: bytes) -> Json:
    try:
        return _object(raw)
    except ApiError:
        return {"message": " ".join(raw[:200].decode(errors="replace").split())}  # no object, such as a page


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield lines of any length, up to 1.5 MB for an object (aiohttp's own reader refuses long lines)."""
    rest: list[bytes] = []
    async for chunk in response.content.iter_any():
        *whole, tail = chunk.split(b"\n")
        for line in whole:
            rest.append(line)
            joined = b"".join(rest)
            rest.clear()
            if joined:
                yield joined
        rest.append(tail)
