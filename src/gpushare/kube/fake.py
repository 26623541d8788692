"""An API server in memory, for tests and benchmarks, which use the real client class `Api` with it.

`FakeApi(store)` is an `Api` whose requests go to the store; `app(store)` serves the same store over HTTP to other
processes. tests/kube/test_contract.py compares both with a real API server. It has no schema, admission or
controllers; every object stays as it was written.
"""

import asyncio
import copy
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import orjson
from aiohttp import web

from gpushare.kube.api import Api, Body, Json, PatchType, WatchEvent
from gpushare.kube.errors import from_status
from gpushare.kube.resources import Resource

HISTORY: Final = 10_000
Selector = Callable[[Json], bool]


class Refusal(Exception):  # noqa: N818 - the API's answer, not a defect
    """An error response of the API server."""

    def __init__(self, status: HTTPStatus, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.status, self.reason = status, reason

    @property
    def body(self) -> Json:
        """Return the Status object."""
        return {"kind": "Status", "code": int(self.status), "reason": self.reason, "message": str(self)}


@dataclass(frozen=True, slots=True)
class _StoredWrite:
    """One write: the object before and after it; None if there was none."""

    version: int
    kind: str
    before: Json | None
    after: Json | None

    def seen_by(self, selector: Selector, namespace: str | None) -> Json | None:
        """Return the event for one watcher; an object that no longer matches its selector counts as deleted."""
        either = self.after or self.before or {}
        if namespace is not None and either["metadata"].get("namespace") != namespace:
            return None
        was = self.before is not None and selector(self.before)
        stays = self.after is not None and selector(self.after)
        if not was and not stays:
            return None
        kind = ("MODIFIED" if was else "ADDED") if stays else "DELETED"
        obj = copy.deepcopy(either)
        obj["metadata"]["resourceVersion"] = str(self.version)
        return {"type": kind, "object": obj}


@dataclass(frozen=True, slots=True)
class _Path:
    """A URL path of the API, parsed."""

    kind: str
    namespace: str | None
    name: str
    subresource: str

    @classmethod
    def parse(cls, path: str) -> "_Path":
        parts = path.strip("/").split("/")
        group, rest = ("", parts[2:]) if parts[0] == "api" else (parts[1], parts[3:])
        namespace = None
        if len(rest) > 2 and rest[0] == "namespaces":
            namespace, rest = rest[1], rest[2:]
        plural, name, subresource = (*rest, "", "")[:3]
        return cls(f"{group}/{plural}", namespace, name, subresource)

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


class ObjectStore:
    """Objects by resource and key, their history and their watchers.

    Attributes:
        version: resource version of the last write.
        requests: (method, path) of every request, in order.
        served: versions of API groups, for discovery.
    """

    def __init__(self) -> None:
        self.served: dict[str, tuple[str, ...]] = {}
        self.version = 1
        self.requests: list[tuple[str, str]] = []
        self._objects: dict[str, dict[str, Json]] = {}
        # copies of the last write, unaffected by later changes to the objects
        self._as_written: dict[tuple[str, str], Json] = {}
        self._history: deque[_StoredWrite] = deque(maxlen=HISTORY)
        self._forgotten = 0
        self._watches: list[tuple[_Path, Selector, asyncio.Queue[Json | None]]] = []
        self._uids = itertools.count(1)

    # -- the test's side

    def objects(self, resource: Resource) -> dict[str, Json]:
        """Return every object of a resource by key, live; write with `put` and `remove`, which notify watches."""
        return self._objects.setdefault(_kind(resource), {})

    def put(self, resource: Resource, obj: Json) -> Json:
        """Write an object as it is, including its status, replacing any former one."""
        return self._write(_kind(resource), obj)

    def remove(self, resource: Resource, key: str) -> None:
        """Delete an object by "namespace/name", or "name"."""
        self._delete(_kind(resource), key)

    def break_watches(self) -> None:
        """End every watch, as a restart of the server does."""
        for *_, queue in self._watches:
            queue.put_nowait(None)

    def forget_history(self) -> None:
        """Answer 410 Gone to watches and lists that continue from any version so far."""
        self._history.clear()
        self._forgotten = self.version = self.version + 1

    @property
    def is_settled(self) -> bool:
        """Return whether every watch has delivered all events so far."""
        return all(queue.empty() for *_, queue in self._watches)

    # -- the client's side

    def respond(
        self, method: str, path: str, query: Mapping[str, Any], body: Any = None, content_type: str = ""
    ) -> Json:
        """Return the response to a request.

        Raises:
            Refusal: as the API server would refuse it.
        """
        self.requests.append((method, path))
        if path.count("/") == 2 and path.startswith("/apis/"):
            return self._discover(path.rpartition("/")[2])
        at = _Path.parse(path)
        if not at.name:
            return self._create(at, body) if method == "POST" else self._list(at, query)
        if (
            method == "PATCH"
            and content_type == PatchType.APPLY
            and at.key not in self._of(at)
            and not at.subresource
        ):
            return self._create(at, body)
        old = self._of(at).get(at.key)
        if old is None:
            raise Refusal(HTTPStatus.NOT_FOUND, "NotFound", f"{at.kind} {at.key} not found")
        match method, at.subresource:
            case "GET", _:
                return copy.deepcopy(old)
            case "POST", "binding":
                return self._bind(at, old, body)
            case "POST", "eviction":
                _check_same(old, (body.get("deleteOptions") or {}).get("preconditions") or {})
                self._delete(at.kind, at.key)
                return {"kind": "Status"}
            case "DELETE", _:
                _check_same(old, (body or {}).get("preconditions") or {})
                self._delete(at.kind, at.key)
                return {"kind": "Status"}
            case "PUT", _:
                _check_unchanged(old, body["metadata"])
                return self._update(at, old, body)
            case "PATCH", _:
                if content_type == PatchType.JSON:
                    return self._update(at, old, _json_patched(old, body))
                _check_unchanged(old, body.get("metadata") or {})
                return self._update(at, old, _merged(old, body))
        raise Refusal(HTTPStatus.METHOD_NOT_ALLOWED, "MethodNotAllowed")

    async def watch(self, path: str, query: Mapping[str, Any]) -> AsyncIterator[Json]:
        """Yield events after the query's resourceVersion, until `break_watches`; ERROR if it is forgotten."""
        self.requests.append(("WATCH", path))
        at, selector, since = _Path.parse(path), _selector(query), int(query["resourceVersion"])
        if since < self._forgotten:
            yield {"type": "ERROR", "object": Refusal(HTTPStatus.GONE, "Expired", "too old resource version").body}
            return
        queue: asyncio.Queue[Json | None] = asyncio.Queue()
        for change in self._history:
            if change.version > since and change.kind == at.kind:
                queue.put_nowait(change.seen_by(selector, at.namespace) or _NOTHING)
        entry = (at, selector, queue)
        self._watches.append(entry)
        try:
            while (event := await queue.get()) is not None:
                if event is not _NOTHING:
                    yield event
        finally:
            self._watches.remove(entry)

    # -- inside

    def _of(self, at: _Path) -> dict[str, Json]:
        return self._objects.setdefault(at.kind, {})

    def _discover(self, group: str) -> Json:
        if group not in self.served:
            raise Refusal(HTTPStatus.NOT_FOUND, "NotFound", "the server could not find the requested resource")
        return {"kind": "APIGroup", "name": group, "versions": [{"version": each} for each in self.served[group]]}

    def _list(self, at: _Path, query: Mapping[str, Any]) -> Json:
        version, start = self.version, 0
        if query.get("continue"):
            version, start = map(int, str(query["continue"]).split(":"))
            if version < self._forgotten:
                raise Refusal(HTTPStatus.GONE, "Expired", "the continue token is too old")
        selector, objects = _selector(query), self._of(at)
        found = [
            objects[key]
            for key in sorted(objects)
            if selector(objects[key]) and at.namespace in {None, objects[key]["metadata"].get("namespace")}
        ]
        limit = int(query.get("limit") or 0) or len(found)
        metadata = {"resourceVersion": str(version)}
        if start + limit < len(found):
            metadata["continue"] = f"{version}:{start + limit}"
        return {"metadata": metadata, "items": copy.deepcopy(found[start : start + limit])}

    def _create(self, at: _Path, body: Json) -> Json:
        obj = copy.deepcopy(body)
        metadata = obj["metadata"]
        if at.namespace is not None:
            metadata["namespace"] = at.namespace
        if not metadata.get("name"):
            metadata["name"] = f"{metadata.get('generateName', '')}{next(self._uids):05d}"
        key = f"{at.namespace}/{metadata['name']}" if at.namespace else metadata["name"]
        if key in self._of(at):
            raise Refusal(HTTPStatus.CONFLICT, "AlreadyExists", f"{at.kind} {key} already exists")
        metadata |= {"uid": f"uid-{next(self._uids)}", "generation": 1}
        return copy.deepcopy(self._write(at.kind, obj))

    def _update(self, at: _Path, old: Json, new: Json) -> Json:
        """Return the object after a write to the main resource or its status, which change only their own part."""
        if at.subresource == "status":
            new = {**old, "status": new.get("status") or {}}
        else:
            new = {key: value for key, value in new.items() if key != "status"}
            new |= {"status": old["status"]} if "status" in old else {}
        new = copy.deepcopy(new)
        kept = ("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp")
        new["metadata"] |= {key: old["metadata"][key] for key in kept if key in old["metadata"]}
        if new == old:
            return copy.deepcopy(old)
        if new.get("spec") != old.get("spec"):
            new["metadata"]["generation"] = old["metadata"].get("generation", 1) + 1
        return copy.deepcopy(self._write(at.kind, new))

    def _bind(self, at: _Path, old: Json, body: Json) -> Json:
        asked = body["metadata"]
        if asked.get("uid") not in {None, old["metadata"]["uid"]}:
            raise Refusal(HTTPStatus.CONFLICT, "Conflict", "the UID in the precondition is another")
        if old["spec"].get("nodeName"):
            raise Refusal(HTTPStatus.CONFLICT, "Conflict", f"pod {at.name} is already assigned to a node")
        new = copy.deepcopy(old)
        new["spec"]["nodeName"] = body["target"]["name"]
        new["metadata"]["annotations"] = {
            **(new["metadata"].get("annotations") or {}),
            **asked.get("annotations", {}),
        }
        self._write(at.kind, new)
        return {"kind": "Status"}

    def _write(self, kind: str, obj: Json) -> Json:
        objects, key = self._objects.setdefault(kind, {}), _key(obj)
        before = self._as_written.get((kind, key))
        self.version += 1
        obj["metadata"]["resourceVersion"] = str(self.version)
        objects[key] = obj
        self._as_written[kind, key] = copy.deepcopy(obj)
        self._tell(_StoredWrite(self.version, kind, before, self._as_written[kind, key]))
        return obj

    def _delete(self, kind: str, key: str) -> None:
        self.version += 1
        del self._objects[kind][key]
        self._tell(_StoredWrite(self.version, kind, self._as_written.pop((kind, key)), None))

    def _tell(self, change: _StoredWrite) -> None:
        self._history.append(change)
        for at, selector, queue in self._watches:
            if at.kind == change.kind and (event := change.seen_by(selector, at.namespace)) is not None:
                queue.put_nowait(event)


_NOTHING: Final[Json] = {}


class FakeApi(Api):
    """A client whose requests are answered by a store in this process."""

    def __init__(self, store: ObjectStore | None = None) -> None:
        self.store = store or ObjectStore()
        self._field_manager = "fake"

    async def close(self) -> None:
        """Do nothing, as no connection is open."""

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        body: Body | None = None,
        *,
        content_type: str = "application/json",
    ) -> Json:
        try:
            return self.store.respond(method, path, query or {}, copy.deepcopy(body), content_type)
        except Refusal as refusal:
            raise from_status(int(refusal.status), refusal.body) from None

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
        """Yield events of the store; `timeout_seconds` has no effect without a clock."""
        del timeout_seconds
        query = {
            "resourceVersion": resource_version,
            "labelSelector": label_selector,
            "fieldSelector": field_selector,
        }
        async for event in self.store.watch(resource.path(namespace=namespace), query):
            if event["type"] == "ERROR":
                raise from_status(event["object"]["code"], event["object"])
            yield WatchEvent(event["type"], event["object"])


def app(store: ObjectStore) -> web.Application:
    """Return an application that serves a store as the API server serves its objects."""

    async def handle(request: web.Request) -> web.StreamResponse:
        if request.query.get("watch") == "true":
            return await watch(request)
        raw = await request.read()
        body = orjson.loads(raw) if raw else None
        try:
            found = store.respond(request.method, request.path, request.query, body, request.content_type)
        except Refusal as refusal:
            return web.json_response(refusal.body, status=int(refusal.status))
        created = HTTPStatus.CREATED if request.method == "POST" else HTTPStatus.OK
        return web.json_response(found, status=int(created))

    async def watch(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        async for event in store.watch(request.path, request.query):
            await response.write(orjson.dumps(event) + b"\n")
        return response

    made = web.Application()
    made.router.add_route("*", "/{path:.*}", handle)
    return made


def _kind(resource: Resource) -> str:
    return f"{resource.group}/{resource.plural}"


def _key(obj: Json) -> str:
    metadata = obj["metadata"]
    return f"{metadata['namespace']}/{metadata['name']}" if metadata.get("namespace") else str(metadata["name"])


def _check_same(old: Json, wanted: Mapping[str, Any]) -> None:
    """Check a deletion's preconditions: uid and resourceVersion must match the object."""
    for name in ("uid", "resourceVersion"):
        if wanted.get(name) not in {None, old["metadata"].get(name)}:
            raise Refusal(HTTPStatus.CONFLICT, "Conflict", f"the {name} in the precondition is another")


def _check_unchanged(old: Json, wanted: Mapping[str, Any]) -> None:
    """Refuse a write with another resourceVersion as a conflict, and one with another uid as invalid."""
    if wanted.get("resourceVersion") not in {None, old["metadata"].get("resourceVersion")}:
        raise Refusal(HTTPStatus.CONFLICT, "Conflict", "the object has been modified")
    if wanted.get("uid") not in {None, old["metadata"].get("uid")}:
        raise Refusal(HTTPStatus.UNPROCESSABLE_ENTITY, "Invalid", "metadata.uid: field is immutable")


def _selector(query: Mapping[str, Any]) -> Selector:
    """Return the predicate of label and field selectors; supports `=`, `!=` and names that must exist."""
    labels = [_term(one) for one in str(query.get("labelSelector") or "").split(",") if one]
    fields = [_term(one) for one in str(query.get("fieldSelector") or "").split(",") if one]

    def matches(obj: Json) -> bool:
        own = obj["metadata"].get("labels") or {}
        return all(
            name in own if value is None else (own.get(name) == value) is equal for name, equal, value in labels
        ) and all((_field(obj, path) == value) is equal for path, equal, value in fields)

    return matches


def _term(text: str) -> tuple[str, bool, str | None]:
    for sign, equal in (("!=", False), ("==", True), ("=", True)):
        name, found, value = text.partition(sign)
        if found:
            return name, equal, value
    return text, True, None


def _field(obj: Any, path: str) -> str:
    for part in path.split("."):
        obj = (obj or {}).get(part)
    return str(obj or "")


def _merged(old: Any, patch: Any) -> Any:
    """Return the merged object by RFC 7386; a strategic patch of maps is the same."""
    if not isinstance(patch, Mapping):
        return patch
    found = dict(old) if isinstance(old, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = _merged(found.get(key), value)
    return found


def _json_patched(old: Json, operations: Any) -> Json:
    """Return the patched object by RFC 6902, on maps and list indices."""
    new = copy.deepcopy(old)
    for one in operations:
        *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in one["path"].split("/")[1:]]
        target: Any = new
        for part in parents:
            target = target[int(part)] if isinstance(target, list) else target[part]
        at: Any = len(target) if last == "-" else int(last) if isinstance(target, list) else last
        present = at < len(target) if isinstance(target, list) else at in target
        if one["op"] == "test" and (not present or target[at] != one["value"]):
            raise Refusal(
                HTTPStatus.UNPROCESSABLE_ENTITY, "Invalid", f"{one['path']} is not what the patch expects"
            )
        if one["op"] == "remove":
            del target[at]
        elif one["op"] == "add" and isinstance(target, list):
            target.insert(at, one["value"])
        elif one["op"] in {"add", "replace"}:
            target[at] = one["value"]
    return new
