"""List and watch one resource type, reduced to what the caller needs, until cancelled."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum
from types import MappingProxyType, TracebackType
from typing import Final, Generic, Self, TypeVar

from gpushare.core.backoff import Backoff
from gpushare.kube.api import Api, Json
from gpushare.kube.bad_objects import BadObjects
from gpushare.kube.errors import ApiError, Gone, Retryable
from gpushare.kube.resources import Resource
from gpushare.runtime.tasks import is_asked_to_end

T = TypeVar("T")
_log = logging.getLogger(__name__)

BACKOFF: Final = Backoff(
    first_seconds=0.25,
    longest_seconds=8.0,  # short, so that pods are served within seconds of the API server's return
    jitter_ratio=0.5,
)


class Change(StrEnum):
    """Kind of change to an object."""

    ADDED = "Added"
    MODIFIED = "Modified"
    DELETED = "Deleted"


OnChange = Callable[[Change, str, T], None]


class Reflector(Generic[T]):
    """A local copy of one resource type, updated by list and watch; use as `async with Reflector(...)`.

    An object on which `reduce` fails is logged once and counted in `bad_objects`. It keeps its last parsed state,
    and counts in `present_bad_objects` until it is understood or gone.

    Args:
        reduce: returns the needed fields of an object (a pure function); None means "not of interest".
        on_change: called with the change, the key ("namespace/name", or "name") and the reduced object (the last
            known one on DELETED), in order, in the event loop. It must not raise; if it does, that is logged and
            counted like a bad object.
        on_answer: called before `on_change`, once for a whole list and for each event of the watch. Bookmarks,
            which come about every minute, are included, so the caller knows how long nothing was heard. It must
            not raise.
        name: name in logs and metrics; by default the resource's plural.

    Attributes:
        synced: set once the first complete list was delivered.
        restarts: how often the watch ended for another reason than the server's ordinary time-out.
    """

    def __init__(
        self,
        api: Api,
        resource: Resource,
        reduce: Callable[[Json], T | None],
        *,
        on_change: OnChange[T] | None = None,
        on_answer: Callable[[], None] | None = None,
        namespace: str | None = None,
        label_selector: str | None = None,
        field_selector: str | None = None,
        name: str | None = None,
        rng: random.Random | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.resource = resource
        self.name = name or resource.plural
        self.synced = asyncio.Event()
        self.restarts = 0
        self._bad = BadObjects(resource.kind)
        self._api = api
        self._reduce = reduce
        self._on_change = on_change
        self._on_answer = on_answer
        self._namespace = namespace
        self._label_selector = label_selector
        self._field_selector = field_selector
        self._rng = rng or random.Random()
        self._sleep = sleep
        self._items: dict[str, T] = {}
        self._task: asyncio.Task[None] | None = None
        self._version: str | None = None
        self._failures = 0

    @property
    def bad_objects(self) -> int:
        """Return how often an object could not be parsed, repetitions included."""
        return self._bad.count

    @property
    def present_bad_objects(self) -> int:
        """Return how many objects could not be parsed when last read, and still exist."""
        return len(self._bad.present)

    @property
    def items(self) -> Mapping[str, T]:
        """Return the present objects by key, as a live view."""
        return MappingProxyType(self._items)

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self.run(), name=f"reflector-{self.name}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def relist(self) -> None:
        """Forget the watch's position and list again; not `synced` until that is done. Known objects are kept."""
        if self._task is None or self._task.done():
            return
        self.synced.clear()
        self._task.cancel()
        self._version = None
        self._task = asyncio.create_task(self.run(), name=f"reflector-{self.name}")

    async def run(self) -> None:
        """List and watch until cancelled; log every failure and retry after a back-off."""
        while True:
            try:
                await self._watch(self._version or await self._list())
                delay = self._backoff(0)  # the server's ordinary time-out; a delay still avoids a tight loop
            except Gone:
                self._version = None
                self.restarts += 1
                delay = self._backoff(self._failures)
                _log.info("watch history of %s has expired, listing again", self.name)
            except ApiError as error:
                self.restarts += 1
                delay = self._backoff(self._failures)
                if isinstance(error, Retryable):
                    asked = error.retry_after_seconds * self._rng.random()
                    delay = max(delay, min(asked, BACKOFF.longest_seconds))
                else:
                    self._version = None
                _log.warning("watch of %s failed, again in %.1f s: %s", self.name, delay, error)
                self._failures += 1
            except (Exception, asyncio.CancelledError) as error:
                if is_asked_to_end(error):
                    raise
                self._version = None
                self.restarts += 1
                delay = self._backoff(self._failures)
                _log.exception("watch of %s failed on what was answered, again in %.1f s", self.name, delay)
                self._failures += 1
            await self._sleep(delay)

    def _backoff(self, failures: int) -> float:
        """Return the pause, in seconds, after one more failure than these."""
        return BACKOFF.seconds(failures + 1, self._rng.random())

    async def _list(self) -> str:
        listing = await self._api.list(
            self.resource,
            self._understand,
            namespace=self._namespace,
            label_selector=self._label_selector,
            field_selector=self._field_selector,
        )
        self._answered()
        present = {key for key, _ in listing.items}
        for key in (self._items.keys() | self._bad.present.keys()) - present:
            self._delete(key)
        for key, value in listing.items:
            self._put(key, value)
        self._version = listing.resource_version
        self._failures = 0
        self.synced.set()
        return listing.resource_version

    async def _watch(self, version: str) -> None:
        """Deliver events until the server ends the watch."""
        async for event in self._api.watch(
            self.resource,
            resource_version=version,
            namespace=self._namespace,
            label_selector=self._label_selector,
            field_selector=self._field_selector,
            timeout_seconds=self._rng.randint(240, 300),
        ):
            self._answered()
            if event.type != "BOOKMARK":
                key, value = self._understand(event.object)
                if event.type == "DELETED":
                    self._delete(key)
                else:
                    self._put(key, value)
            self._version = str(event.object["metadata"]["resourceVersion"])
            self._failures = 0

    def _understand(self, obj: Json) -> tuple[str, T | None]:
        """Return key and reduced object; an object that cannot be parsed keeps its last known state."""
        metadata = obj.get("metadata") or {}
        name, namespace = metadata.get("name", ""), metadata.get("namespace")
        key = f"{namespace}/{name}" if namespace else name
        try:
            value = self._reduce(obj)
        except Exception as error:  # noqa: BLE001 - whatever bad data does to the caller's function, the watch goes on
            self._bad.add(key, error)
            return key, self._items.get(key)
        self._bad.clear(key)
        return key, value

    def _put(self, key: str, value: T | None) -> None:
        if value is None:
            self._drop(key)
            return
        old = self._items.get(key)
        self._items[key] = value
        if old is None:
            self._tell(Change.ADDED, key, value)
        elif old != value:
            self._tell(Change.MODIFIED, key, value)

    def _delete(self, key: str) -> None:
        self._drop(key)
        self._bad.clear(key)

    def _drop(self, key: str) -> None:
        old = self._items.pop(key, None)
        if old is not None:
            self._tell(Change.DELETED, key, old)

    def _answered(self) -> None:
        if self._on_answer is not None:
            self._on_answer()

    def _tell(self, change: Change, key: str, value: T) -> None:
        if self._on_change is None:
            return
        try:
            self._on_change(change, key, value)
        except Exception as error:  # noqa: BLE001 - a failing consumer must not end the watch
            self._bad.add(key, error)
