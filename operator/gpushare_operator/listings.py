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
from http import HTTPStatus
from typing import Final

from gpushare.kube import Json, Resource

_log = logging.getLogger(__name__)
# An API server that starts refuses for a few seconds, until it has read its roles and bindings.
LASTING_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class WatchedResource:
    """A resource type that Kopf watches, with the functions that keep its known objects.

    Attributes:
        take: records an object of a list.
        known: returns the uids known in a namespace (None: in all).
        forget: forgets these uids as deleted at that resourceVersion; returns how many were still known. None: as
            unknown, so that a list brings back those that still exist.
        newest: returns the newest resourceVersion known of any object.
        start_over: forgets which versions are known, but no object.
    """

    resource: Resource
    take: Callable[[Json], None]
    known: Callable[[str | None], set[str]]
    forget: Callable[[set[str], int | None], int]
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
        done: set once the first list was recorded, or Kopf was refused it for longer than a moment.
        is_asked: whether Kopf has asked for a list.
        missed: deletions that no watch reported.
        refused_since: when Kopf was first told that it may not list or watch, by the caller's clock; None while
            it may.
    """

    def __init__(self, watched: WatchedResource, namespace: str | None) -> None:
        self.watched = watched
        self.namespace = namespace
        self.done = asyncio.Event()
        self.missed = 0
        self.refused_since: float | None = None
        self._is_listed = self.is_asked = False
        self.path = watched.resource.path(namespace=namespace)
        self._open: _OpenList | None = None

    def begins(self, path: str) -> None:
        """Note what is known as Kopf asks for a list's first page, if it is ours.

        Args:
            path: of the request, possibly behind a prefix of the API server's address.
        """
        if path.endswith(self.path):
            self.is_asked = True
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
        self._is_listed = True
        self.done.set()

    @property
    def is_known(self) -> bool:
        """Return whether all objects are known: they were listed, and Kopf may watch them."""
        return self._is_listed and self.refused_since is None

    def must_list(self, path: str) -> bool:
        """Return whether a watch at `path` is ours and no whole list came before it, so that it cannot go on."""
        return path.endswith(self.path) and not self._is_listed

    def forget(self) -> None:
        """Forget every object, whether or not it still exists; Kopf's next whole list makes them known again."""
        self._is_listed, self._open = False, None
        self.watched.forget(self.watched.known(self.namespace), None)

    def answered(self, path: str, status: int, now: float) -> bool:
        """Record whether Kopf may list and watch, if it asked for ours; return whether that has changed.

        Args:
            status: HTTP status of the answer.
            now: the caller's clock, in seconds.
        """
        if not path.endswith(self.path):
            return False
        before = self.is_known, self.refused_since
        if status == HTTPStatus.FORBIDDEN:
            self.refused_since = now if self.refused_since is None else self.refused_since
            self._is_listed = self._is_listed and self._open is None  # a refused list is asked for again as a list
        elif status == HTTPStatus.OK:
            self.refused_since = None
        return before != (self.is_known, self.refused_since)


class KopfRefusals:
    """Namespaces in which Kopf may not list or watch: they do not exist, or have no RoleBinding of the chart's.

    Kopf asks again for as long as it takes, and nobody waits for it. A refusal that lasts is logged once, and its
    end once. What was known of the namespace is forgotten then, as a restart would: no watch tells any more what
    ends there, and a pod that was leaving would keep all others of its GPU from being moved, for ever.

    Args:
        listings: the lists that Kopf takes.
    """

    def __init__(self, listings: Iterable[KopfListings]) -> None:
        self._of: dict[str | None, list[KopfListings]] = {}
        for each in listings:
            self._of.setdefault(each.namespace, []).append(each)
        self._lasting: set[str | None] = set()

    def __len__(self) -> int:
        """Return the number of namespaces that are refused for longer than a moment."""
        return len(self._lasting)

    def is_known(self, namespace: str) -> bool:
        """Return whether all objects of a namespace are known."""
        return all(each.is_known for each in self._of.get(namespace, self._of.get(None, ())))

    def look(self, now: float) -> None:
        """Find refusals that last, and those that have ended.

        Args:
            now: the clock of `KopfListings.answered`, in seconds.
        """
        for namespace, listings in self._of.items():
            refused = [each.path for each in listings if each.refused_since is not None]
            since = min((each.refused_since for each in listings if each.refused_since is not None), default=now)
            where = f"namespace {namespace}" if namespace is not None else "all namespaces"
            if namespace in self._lasting and not refused:
                self._lasting.discard(namespace)
                _log.info("the operator may list and watch in %s now", where)
            elif namespace not in self._lasting and refused and now - since >= LASTING_SECONDS:
                self._lasting.add(namespace)
                _log.warning(
                    "the operator may not list in %s, and does nothing there until it may: it does not exist, or "
                    "lacks the chart's binding, which `helm upgrade` makes (refused: %s)",
                    *(where, ", ".join(refused)),
                )
                for each in listings if namespace is not None else ():
                    each.forget()
                    each.done.set()
