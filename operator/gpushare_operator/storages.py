"""Where Kopf would keep what it has handled: nowhere, as our handlers only observe.

For each event Kopf compares the object with what it stored of it the last time, and copies it for that several
times, whether or not a handler asks for changes. Ours are all `on.event` (ADR 0102): there is nothing to compare.
The storages are Kopf's own extension point, `settings.persistence` (ADR 0192).
"""

from typing import Any

import kopf


class NothingStoredError(RuntimeError):
    """A handler was added that needs Kopf's own storages, such as `on.update`."""


class NoDiffBase(kopf.DiffBaseStorage):
    """Storage of objects as last handled that sees nothing to compare in any of them."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        """Return nothing, so that no two states differ."""
        return {}

    def fetch(self, **_: Any) -> None:
        """Return that nothing is stored."""

    def store(self, **_: Any) -> None:
        """Refuse to store, as what changes would never be noticed.

        Raises:
            NothingStoredError: always.
        """
        raise NothingStoredError("the operator compares no objects; a handler of changes needs Kopf's storages")


class NoProgress(kopf.ProgressStorage):
    """Storage of handlers' progress on an object, for handlers that keep none."""

    def fetch(self, **_: Any) -> None:
        """Return that nothing is stored."""

    def store(self, **_: Any) -> None:
        """Refuse to store, as the progress would be lost.

        Raises:
            NothingStoredError: always.
        """
        raise NothingStoredError("the operator stores no progress; a handler with retries needs Kopf's storages")

    def purge(self, **_: Any) -> None:
        """Do nothing, as nothing is stored."""

    def touch(self, **_: Any) -> None:
        """Do nothing: no handler of ours is tried again later."""

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        """Return the object as it is, as nothing is stored in it."""
        return essence
