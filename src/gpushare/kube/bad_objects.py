"""Objects that could not be parsed: all are counted, a few are logged."""

import logging
from typing import Final

_log = logging.getLogger(__name__)
MAX_LOGGED_BAD_OBJECTS: Final = 20  # each once, so that a whole cluster of them does not flood the log


class BadObjects:
    """Count of one kind's objects that could not be parsed.

    Attributes:
        count: number of failures, repetitions included.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.count = 0
        self._logged: set[tuple[str, str]] = set()

    def add(self, key: str, error: Exception) -> None:
        """Count an object; log it the first time that it fails in this way."""
        self.count += 1
        seen = (key, type(error).__name__)
        if seen in self._logged or len(self._logged) >= MAX_LOGGED_BAD_OBJECTS:
            return
        self._logged.add(seen)
        _log.error("cannot understand %s %s: %r", self.kind, key, error)
        _log.debug("where it failed", exc_info=error)
        if len(self._logged) == MAX_LOGGED_BAD_OBJECTS:
            _log.error("further bad objects of kind %s are counted only", self.kind)
