"""Index that finds the GpuShare of a pod among thousands."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from gpushare.core.admission.joined import JoinedShares, JoinedWorkload
from gpushare.core.admission.label_terms import Term, terms_of_labels, ways_to_file
from gpushare.core.admission.ownership import DEPLOYMENT
from gpushare.core.api import GpuShare, LabelSelector


@dataclass(frozen=True, slots=True)
class ShareKey:
    """Namespace and name of a GpuShare."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class ListsPods(Protocol):
    """A record about a GpuShare that knows the uids of the pods listed in its status."""

    @property
    def pod_uids(self) -> frozenset[str]:
        """Return the uids of those pods."""
        ...

    @property
    def partly_listed(self) -> GpuShare | None:
        """Return the GpuShare itself if its status may not list all of its pods; its own status is not read."""
        ...


class OwnedPod(Protocol):
    """Part of a pod that its GpuShare depends on."""

    @property
    def namespace(self) -> str:
        """Return its namespace."""
        ...

    @property
    def labels(self) -> Mapping[str, str]:
        """Return its labels."""
        ...

    @property
    def owner_uids(self) -> tuple[str, ...]:
        """Return the uids of its ownerReferences."""
        ...


PlacedT = TypeVar("PlacedT", bound=ListsPods)


class PlacedShares(MutableMapping[str, PlacedT]):
    """GpuShares by "namespace/name", found by the pods that the operator lists in their status.

    For a node's agent, which keeps only the GpuShares of its own pods: the operator has asked `ShareIndex` and
    recorded the answer. Its list ends at 1,000 pods; a pod that none lists belongs to the one that the operator
    would find among those with a full list (ADR 0238).

    Args:
        pods: the node's pods by uid, a live view.
    """

    def __init__(
        self,
        shares: Mapping[str, PlacedT] = MappingProxyType({}),
        pods: Mapping[str, OwnedPod] = MappingProxyType({}),
    ) -> None:
        self._shares: dict[str, PlacedT] = {}
        self._by_pod: dict[tuple[str, str], set[str]] = {}
        self._partly_listed = ShareIndex()
        self._pods = pods
        self.update(shares)

    def __getitem__(self, key: str) -> PlacedT:
        return self._shares[key]

    def __setitem__(self, key: str, share: PlacedT) -> None:
        self.pop(key, None)
        self._shares[key] = share
        namespace = key.partition("/")[0]
        for uid in share.pod_uids:
            self._by_pod.setdefault((namespace, uid), set()).add(key)
        if share.partly_listed is not None:
            self._partly_listed.put(share.partly_listed)

    def __delitem__(self, key: str) -> None:
        share = self._shares.pop(key)
        namespace = key.partition("/")[0]
        for uid in share.pod_uids:
            keys = self._by_pod[namespace, uid]
            keys.discard(key)
            if not keys:
                del self._by_pod[namespace, uid]
        if share.partly_listed is not None:
            self._partly_listed.drop(share.partly_listed.namespace, share.partly_listed.name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shares)

    def __len__(self) -> int:
        return len(self._shares)

    def of(self, namespace: str, pod_uid: str) -> list[PlacedT]:
        """Return the GpuShares of a pod in its own namespace, sorted by name; more than one only for a moment."""
        keys = self._by_pod.get((namespace, pod_uid))
        return [self._shares[key] for key in sorted(keys or self._beyond_the_lists(namespace, pod_uid))]

    def _beyond_the_lists(self, namespace: str, pod_uid: str) -> Iterator[str]:
        pod = self._pods.get(pod_uid)
        if pod is None or pod.namespace != namespace:
            return
        found = self._partly_listed.of(namespace, pod.labels, (*pod.owner_uids, pod_uid))
        if found is not None:
            yield str(ShareKey(namespace, found.name))


class ShareIndex:
    """GpuShares, indexed by the pods that they apply to.

    In a pod's namespace, a GpuShare whose selector matches the pod wins over one that shares an owner with the
    pod. Among several the first by name wins, so that every process chooses the same one.

    Attributes:
        joined: those of workloads that are joined over namespaces.
    """

    def __init__(self, shares: Iterable[GpuShare] = (), joined: Iterable[JoinedWorkload] = ()) -> None:
        self.joined = JoinedShares(joined)
        self._shares: dict[ShareKey, GpuShare] = {}
        self._by_term: dict[tuple[str, Term], set[str]] = {}  # those with a selector
        self._terms: dict[ShareKey, tuple[Term, ...]] = {}  # the terms each one is filed under
        self._selecting: Counter[str] = Counter()  # number with a selector, by namespace
        self._by_owner: dict[tuple[str, str], set[str]] = {}  # those without, by owner uid
        self._by_deployment: dict[tuple[str, str], set[str]] = {}  # and by the name of an owning Deployment
        for share in shares:
            self.put(share)

    @property
    def shares(self) -> Mapping[ShareKey, GpuShare]:
        """Return all of them as a live view."""
        return MappingProxyType(self._shares)

    def put(self, share: GpuShare) -> GpuShare | None:
        """Add or replace a GpuShare; return the one that it replaces, if any."""
        before = self._remove(share.namespace, share.name)
        self._shares[ShareKey(share.namespace, share.name)] = share
        for index, key in self._keys(share):
            index.setdefault(key, set()).add(share.name)
        self._selecting[share.namespace] += share.spec.selector is not None
        self.joined.put(share)
        return before

    def drop(self, namespace: str, name: str) -> GpuShare | None:
        """Remove a GpuShare; return it, or None if it was not in the index."""
        self.joined.drop(namespace, name)
        return self._remove(namespace, name)

    def _remove(self, namespace: str, name: str) -> GpuShare | None:
        share = self._shares.pop(ShareKey(namespace, name), None)
        if share is not None:
            for index, key in self._keys(share):
                found = index.get(key, set())
                found.discard(name)
                if not found:
                    index.pop(key, None)
            self._terms.pop(ShareKey(namespace, name), None)
            self._selecting[namespace] -= share.spec.selector is not None
            if not self._selecting[namespace]:
                del self._selecting[namespace]
        return share

    def get(self, namespace: str, name: str) -> GpuShare | None:
        """Return a GpuShare by its name, or None."""
        return self._shares.get(ShareKey(namespace, name))

    def selecting(self, namespace: str, *, besides: str | None = None) -> int:
        """Return how many GpuShares of a namespace have a selector, not counting the one named `besides`."""
        own = self.get(namespace, besides) if besides is not None else None
        return self._selecting[namespace] - (own is not None and own.spec.selector is not None)

    def of(self, namespace: str, labels: Mapping[str, str], owner_uids: Iterable[str]) -> GpuShare | None:
        """Return the GpuShare that applies to a pod, or None.

        Args:
            owner_uids: uids of the pod's owners, at every level that the caller knows, and the pod's own uid.
        """
        if not self._shares:
            return None
        name = next(self.selecting_names(namespace, labels), None)
        return self.get(namespace, name) if name is not None else self.of_owners(namespace, owner_uids)

    def selecting_names(self, namespace: str, labels: Mapping[str, str]) -> Iterator[str]:
        """Return the names of the GpuShares whose selector matches a pod, sorted; the first one applies to it."""
        names = {name for term in terms_of_labels(labels) for name in self._by_term.get((namespace, term), ())}
        return (name for name in sorted(names) if self._matches(namespace, name, labels))

    def of_owners(self, namespace: str, owner_uids: Iterable[str]) -> GpuShare | None:
        """Return the first GpuShare by name that has no selector and has one of these owners."""
        owned = (self._by_owner.get((namespace, uid), ()) for uid in owner_uids)
        first = min((name for names in owned for name in names), default=None)
        return None if first is None else self.get(namespace, first)

    def of_deployment(self, namespace: str, name: str) -> GpuShare | None:
        """Return the first GpuShare by name that has no selector and lists a Deployment of this name as an owner.

        For a caller that knows a pod's Deployment by name only.
        """
        first = min(self._by_deployment.get((namespace, name), ()), default=None)
        return None if first is None else self.get(namespace, first)

    def _matches(self, namespace: str, name: str, labels: Mapping[str, str]) -> bool:
        selector = self._shares[ShareKey(namespace, name)].spec.selector
        return selector is not None and selector.matches(labels)

    def _keys(self, share: GpuShare) -> Iterator[tuple[dict[Any, set[str]], object]]:
        """Yield each (index, key) under which a GpuShare is filed."""
        selector = share.spec.selector
        if selector is None:
            for owner in share.owners:
                yield self._by_owner, (share.namespace, owner.uid)
                if owner.kind == DEPLOYMENT:
                    yield self._by_deployment, (share.namespace, owner.name)
        else:
            for term in self._file(share, selector):
                yield self._by_term, (share.namespace, term)

    def _file(self, share: GpuShare, selector: LabelSelector) -> tuple[Term, ...]:
        """Return the terms that a selector is filed under: of its alternatives, the one that fewest others use."""

        def others(terms: tuple[Term, ...]) -> int:
            return sum(len(self._by_term.get((share.namespace, term), ())) for term in terms)

        key = ShareKey(share.namespace, share.name)
        if key not in self._terms:
            self._terms[key] = min(ways_to_file(selector), key=others)
        return self._terms[key]


def rank(share: GpuShare) -> tuple[bool, str]:
    """Return the sort key of GpuShares that may apply to one pod: those with a selector first, then by name."""
    return (share.spec.selector is None, share.name)
