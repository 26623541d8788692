"""Which GpuShare speaks for a pod, found at once among thousands."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from gpushare.core.api import GpuShare


@dataclass(frozen=True, slots=True)
class ShareKey:
    """Namespace and name of a GpuShare."""

    namespace: str
    name: str


class ShareIndex:
    """GpuShares by whom they speak for.

    In a pod's namespace, one whose selector matches the pod wins over one that has an owner of the pod. Among
    several it is the first by name, so that every part of gpushare picks the same.
    """

    def __init__(self, shares: Iterable[GpuShare] = ()) -> None:
        self._shares: dict[ShareKey, GpuShare] = {}
        self._by_label: dict[tuple[str, str, str], set[str]] = {}  # by namespace and the selector's first label
        self._by_expression: dict[str, set[str]] = {}  # selectors without a label, by namespace
        self._by_owner: dict[tuple[str, str], set[str]] = {}  # without a selector, by namespace and owner's uid
        for share in shares:
            self.put(share)

    @property
    def shares(self) -> Mapping[ShareKey, GpuShare]:
        """All of them, live."""
        return MappingProxyType(self._shares)

    def put(self, share: GpuShare) -> GpuShare | None:
        """Add or replace a GpuShare; return what it replaces."""
        before = self.drop(share.namespace, share.name)
        self._shares[ShareKey(share.namespace, share.name)] = share
        for index, key in self._keys(share):
            index.setdefault(key, set()).add(share.name)
        return before

    def drop(self, namespace: str, name: str) -> GpuShare | None:
        """Remove a GpuShare; return it, or None when it was not here."""
        share = self._shares.pop(ShareKey(namespace, name), None)
        if share is not None:
            for index, key in self._keys(share):
                found = index.get(key, set())
                found.discard(name)
                if not found:
                    index.pop(key, None)
        return share

    def get(self, namespace: str, name: str) -> GpuShare | None:
        """One GpuShare by its name."""
        return self._shares.get(ShareKey(namespace, name))

    def of(self, namespace: str, labels: Mapping[str, str], owner_uids: Iterable[str]) -> GpuShare | None:
        """Return the GpuShare that speaks for a pod.

        Args:
            owner_uids: uids of the pod's owners, at any level that the caller knows; the pod's own uid among them.
        """
        if not self._shares:
            return None
        names = [
            name
            for label in labels.items()
            for name in self._by_label.get((namespace, *label), ())
            if self._matches(namespace, name, labels)
        ]
        names += [n for n in self._by_expression.get(namespace, ()) if self._matches(namespace, n, labels)]
        if names:
            return self.get(namespace, min(names))
        return self.of_owners(namespace, owner_uids)

    def of_owners(self, namespace: str, owner_uids: Iterable[str]) -> GpuShare | None:
        """Return the first GpuShare without a selector that has one of these owners."""
        owned = (self._by_owner.get((namespace, uid), ()) for uid in owner_uids)
        first = min((name for names in owned for name in names), default=None)
        return None if first is None else self.get(namespace, first)

    def _matches(self, namespace: str, name: str, labels: Mapping[str, str]) -> bool:
        selector = self._shares[ShareKey(namespace, name)].spec.selector
        return selector is not None and selector.matches(labels)

    def _keys(self, share: GpuShare) -> Iterator[tuple[dict[Any, set[str]], object]]:
        """Where a GpuShare is listed."""
        selector = share.spec.selector
        if selector is None:
            for owner in share.owners:
                yield self._by_owner, (share.namespace, owner.uid)
        elif selector.match_labels:
            yield self._by_label, (share.namespace, *min(selector.match_labels.items()))
        else:
            yield self._by_expression, share.namespace
