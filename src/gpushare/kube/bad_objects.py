"""Objects that could not be parsed: all are counted, a few are logged, and those that are bad now are known."""

import logging
from typing import Final

_log = logging.getLogger(__name__)
MAX_LOGGED_BAD_OBJECTS: Final = 20  # each once, so that a whole cluster of them does not flood the log


class BadObjects:
    """One kind's objects that could not be parsed.

    Attributes:
        count: number of failures, repetitions included.
        present: identity -> key of the objects that are bad now: they failed when last read, and still exist.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.count = 0
        self.present: dict[str, str] = {}
        self._logged: set[tuple[str, str]] = set()

    def add(self, key: str, error: Exception, uid: str = "") -> None:
        """Count an object; log it the first time that it fails in this way.

        Args:
            uid: identity of the object where events of an earlier one with its key may come late; else the key.
        """
        self.count += 1
        self.present[uid or key] = key
        seen = (key, type(error).__name__)
        if seen in self._logged or len(self._logged) >= MAX_LOGGED_BAD_OBJECTS:
            return
        self._logged.add(seen)
        _log.error("cannot understand %s %s: %r", self.kind, key, error)
        _log.debug("where it failed", exc_info=error)
        if len(self._logged) == MAX_LOGGED_BAD_OBJECTS:
            _log.error("further bad objects of kind %s are counted only", self.kind)

    def clear(self, identity: str) -> None:
        """Forget that an object is bad: it was understood, or it is gone."""
        self.present.pop(identity, None)
