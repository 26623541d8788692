"""A queue of items that is fair to the source addresses that they come from."""

from collections import Counter
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class BySource(Generic[T]):
    """Set of items by source; `take` serves sources in turn.

    So a source with very many items delays only itself.
    """

    def __init__(self) -> None:
        self._of: dict[str, dict[T, None]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        return (one for own in self._of.values() for one in own)

    def add(self, source: str, one: T) -> None:
        """Add an item that is not in it, as the newest of its source."""
        self._of.setdefault(source, {})[one] = None
        self._count += 1

    def discard(self, source: str, one: T) -> None:
        """Remove an item, if present."""
        own = self._of.get(source, {})
        if one in own:
            del own[one]
            self._count -= 1
            if not own:
                del self._of[source]

    def counts(self) -> Counter[str]:
        """Return the number of items of each source that has any."""
        return Counter({source: len(own) for source, own in self._of.items()})

    def oldest_of(self, source: str) -> T | None:
        """Return the oldest item of a source, None if it has none."""
        return next(iter(self._of.get(source, ())), None)

    def oldest_of_most(self) -> T:
        """Return the oldest item of the source with the most; of several such sources, of the first to come."""
        return next(iter(self._of[max(self._of, key=lambda source: len(self._of[source]))]))

    def take(self) -> T:
        """Remove and return the oldest item of the source whose turn it is."""
        source = next(iter(self._of))
        one = next(iter(self._of[source]))
        self.discard(source, one)
        if source in self._of:
            self._of[source] = self._of.pop(source)
        return one
