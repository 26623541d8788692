"""Things in the order of their coming, by the address that they come from."""

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class BySource(Generic[T]):
    """A set of things that knows whose turn it is, and who has the most.

    Each source has its turn after the others, so that one that brings very many delays only itself.
    """

    def __init__(self) -> None:
        self._of: dict[str, dict[T, None]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        return (one for own in self._of.values() for one in own)

    def add(self, source: str, one: T) -> None:
        """Add one that is not in it, as the latest."""
        self._of.setdefault(source, {})[one] = None
        self._count += 1

    def discard(self, source: str, one: T) -> None:
        """Take one out, if it is in."""
        own = self._of.get(source, {})
        if one in own:
            del own[one]
            self._count -= 1
            if not own:
                del self._of[source]

    def oldest_of_most(self) -> T:
        """Return the oldest of the source that has the most; of several such, of the one that came first."""
        return next(iter(self._of[max(self._of, key=lambda source: len(self._of[source]))]))

    def take(self) -> T:
        """Take out the oldest of the source whose turn it is."""
        source = next(iter(self._of))
        one = next(iter(self._of[source]))
        self.discard(source, one)
        if source in self._of:
            self._of[source] = self._of.pop(source)
        return one
