"""Notice deletions that happened while Kopf had no watch open.

When a watch cannot be continued (410 Gone: the API server restarted, or its history was compacted), Kopf lists
again and watches from there. It reports the objects in the list, but not the ones missing from it (ADR 0102). So
each time after Kopf lists, we list too, and forget known objects that are missing. Kopf's watch reports all
deletions after its list.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gpushare.core.backoff import Backoff
from gpushare.kube import Api, ApiError, Json, Resource

_log = logging.getLogger(__name__)
_BACKOFF: Final = Backoff(first_seconds=2.0, longest_seconds=30.0)
_AT_A_STRETCH: Final = 50


@dataclass(frozen=True, slots=True)
class WatchedResource:
    """A resource type that Kopf watches, with the functions that keep its known objects.

    Attributes:
        take: records an object of a list.
        known: returns the uids known in a namespace (None: in all).
        forget: forgets these uids as deleted at that resourceVersion; returns how many were still known.
        newest: returns the newest resourceVersion known of any object.
        start_over: forgets which versions are known, but no object.
    """

    resource: Resource
    take: Callable[[Json], None]
    known: Callable[[str | None], set[str]]
    forget: Callable[[set[str], int], int]
    newest: Callable[[], int]
    start_over: Callable[[], None]
    label_selector: str | None = None


class Relist:
    """Lists of one resource type of one namespace (None: of all), each taken after Kopf's own.

    Attributes:
        path: of the list in the API.
        done: set once the first list was recorded.
        missed: deletions that no watch reported.
    """

    def __init__(self, api: Api, watched: WatchedResource, namespace: str | None) -> None:
        self.watched = watched
        self.done = asyncio.Event()
        self.missed = 0
        self._api = api
        self._namespace = namespace
        self.path = watched.resource.path(namespace=namespace)
        self._due = asyncio.Event()

    def kopf_listed(self, path: str) -> None:
        """List again if this is the path of our list, possibly behind a prefix of the API server's address."""
        if path.endswith(self.path):
            self._due.set()

    async def run(self) -> None:
        """Follow Kopf's lists until cancelled."""
        failures = 0
        while True:
            await self._due.wait()
            self._due.clear()
            try:
                await self.look()
                failures = 0
            except ApiError as error:
                failures += 1
                pause = _BACKOFF.seconds(failures)
                _log.warning("%s not listed, again in %.0f s: %s", self.path, pause, error)
                self._due.set()
                await asyncio.sleep(pause)

    async def look(self) -> None:
        """List, record every object, and forget known objects that are missing from the list.

        A list is never older than what was known before it, unless etcd was restored from a backup.

        Raises:
            ApiError: the list failed; nothing was forgotten.
        """
        watched, present, version = self.watched, set(), 0
        before, newest = watched.known(self._namespace), watched.newest()
        async for page in self._api.pages(
            watched.resource, namespace=self._namespace, label_selector=watched.label_selector
        ):
            version = int(page.resource_version or 0)
            if 0 < version < newest:
                _log.warning(
                    "%s is at version %d after %d, as if restored from a backup: its list is taken for the newest",
                    *(self.path, version, newest),
                )
                watched.start_over()
                newest = 0
            for number, obj in enumerate(page.items, start=1):
                present.add(obj["metadata"]["uid"])
                watched.take(obj)
                if number % _AT_A_STRETCH == 0:
                    await asyncio.sleep(0)  # let other tasks run
        missed = watched.forget(before - present, version)
        if missed:
            _log.info("%d objects at %s were deleted while no watch was open", missed, self.path)
        self.missed += missed
        self.done.set()
