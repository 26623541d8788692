"""Record Kopf's own lists, and notice deletions that happened while Kopf had no watch open.

When a watch cannot be continued (410 Gone: the API server restarted, or its history was compacted), Kopf lists
again and watches from there. It reports the objects in the list, but not the ones missing from it (ADR 0102). So
its session shows us each page of its lists, and known objects that a whole list lacks are forgotten. Kopf's watch
begins at that list and reports all later deletions.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gpushare.kube import NAMESPACES, Json, Resource

_log = logging.getLogger(__name__)


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


@dataclass(slots=True)
class _OpenList:
    """A list of which pages are still to come: what was known before it, and what its pages had so far."""

    before: set[str]
    newest: int
    present: set[str]


class KopfListings:
    """Kopf's lists of one resource type of one namespace (None: of all), page by page.

    A list is never older than what was known before it was asked for, unless etcd was restored from a backup.

    Attributes:
        path: of the list in the API.
        done: set once the first list was recorded, or there is none as the namespace does not exist.
        missed: deletions that no watch reported.
    """

    def __init__(self, watched: WatchedResource, namespace: str | None) -> None:
        self.watched = watched
        self.namespace = namespace
        self.done = asyncio.Event()
        self.missed = 0
        self.path = watched.resource.path(namespace=namespace)
        self._open: _OpenList | None = None

    def begins(self, path: str) -> None:
        """Note what is known as Kopf asks for a list's first page, if it is ours.

        Args:
            path: of the request, possibly behind a prefix of the API server's address.
        """
        if path.endswith(self.path):
            self._open = _OpenList(self.watched.known(self.namespace), self.watched.newest(), set())

    def page(self, path: str, body: Json) -> None:
        """Record every object of a page; after the last one forget known objects that no page had."""
        if not path.endswith(self.path) or (listed := self._open) is None:
            return
        watched, metadata = self.watched, body.get("metadata") or {}
        version = int(metadata.get("resourceVersion") or 0)
        if 0 < version < listed.newest:
            _log.warning(
                "%s is at version %d after %d, as if restored from a backup: versions seen before are forgotten",
                *(self.path, version, listed.newest),
            )
            watched.start_over()
            listed.newest = 0
        for obj in body.get("items") or ():
            listed.present.add(obj["metadata"]["uid"])
            watched.take(obj)
        if metadata.get("continue"):
            return
        self._open = None
        missed = watched.forget(listed.before - listed.present, version)
        if missed:
            _log.info("%d objects at %s were deleted while no watch was open", missed, self.path)
        self.missed += missed
        self.done.set()


class KopfNamespaces:
    """Kopf's list of namespaces: in those that it lacks, or that are being deleted, Kopf lists nothing.

    Args:
        listings: the lists that Kopf takes where they exist.
    """

    def __init__(self, listings: Iterable[KopfListings]) -> None:
        self._awaited = [each for each in listings if each.namespace is not None]
        self._path = NAMESPACES.path()
        self._present: set[str] = set()

    def begins(self, path: str) -> None:
        """Begin anew as Kopf asks for the first page, if it is of this list."""
        if path.endswith(self._path):
            self._present = set()

    def page(self, path: str, body: Json) -> None:
        """Read a page; after the last one, let nobody wait for lists of namespaces that do not exist."""
        if not path.endswith(self._path):
            return
        metadata = [each["metadata"] for each in body.get("items") or ()]
        self._present |= {each["name"] for each in metadata if not each.get("deletionTimestamp")}
        if (body.get("metadata") or {}).get("continue"):
            return
        for each in self._awaited:
            if each.namespace not in self._present and not each.done.is_set():
                _log.warning("namespace %s does not exist: nothing is listed at %s", each.namespace, each.path)
                each.done.set()
