"""Notice a GpuShare CRD of an older release: the API server silently drops the fields that it does not know."""

import logging
from collections.abc import Iterator
from typing import Any

_log = logging.getLogger(__name__)


class DroppedFields:
    """Status fields that the API server dropped; each is reported once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def look(self, sent: dict[str, Any], answered: dict[str, Any]) -> None:
        """Compare a status that was written with the one that the API server answered."""
        new = sorted(set(_missing("status", sent, answered)) - self._told)
        if new:
            self._told.update(new)
            _log.warning(
                "the API server drops %s: its definition of GpuShares is of an older release, and what "
                "stands there is lost when the operator restarts; apply this one's (docs/install.md, Upgrading)",
                ", ".join(new),
            )


def _missing(path: str, sent: Any, answered: Any) -> Iterator[str]:
    """Yield the paths of fields that were sent but are not in the answer; elements of lists share one path."""
    if isinstance(sent, dict):
        kept = answered if isinstance(answered, dict) else {}
        for name, value in sent.items():
            if value is None:
                continue
            if name in kept:
                yield from _missing(f"{path}.{name}", value, kept[name])
            else:
                yield f"{path}.{name}"
    elif isinstance(sent, list) and isinstance(answered, list):
        for one, other in zip(sent, answered, strict=False):
            yield from _missing(path, one, other)
