"""What is known of each pod's workload: its GpuShare's profile and tolerance, found quickly for 20,000 pods."""

from collections.abc import Callable

from gpushare.core.api.objects import GpuShare
from gpushare.core.control.profiles import known_of
from gpushare.core.placement.known import Known
from gpushare.extender.reduce import PodView


class KnownWorkloads:
    """GpuShares by the pods that they speak for, as `core.resolve.share_of` finds them.

    Args:
        max_slowdown: tolerated where a GpuShare does not say.
        on_change: called when what is known of some pods may have changed.
    """

    def __init__(self, max_slowdown: float, on_change: Callable[[], None]) -> None:
        self._max_slowdown, self._on_change = max_slowdown, on_change
        self._shares: dict[tuple[str, str], GpuShare] = {}
        self._known: dict[tuple[str, str], Known] = {}
        self._selecting: dict[str, set[str]] = {}
        self._by_owner: dict[tuple[str, str], set[str]] = {}
        self._of_pod: dict[str, Known | None] = {}

    def put(self, share: GpuShare) -> None:
        """A GpuShare came or changed."""
        at = (share.namespace, share.name)
        before, known = self._shares.get(at), known_of(share, self._max_slowdown)
        if before is not None:
            self._unindex(before)
        self._shares[at] = share
        if share.spec.selector is not None:
            self._selecting.setdefault(share.namespace, set()).add(share.name)
        for owner in share.owners if share.spec.selector is None else ():
            self._by_owner.setdefault((share.namespace, owner.uid), set()).add(share.name)
        speaks_for_the_same = before is not None and (before.owners, before.spec.selector) == (
            share.owners,
            share.spec.selector,
        )
        if not speaks_for_the_same:
            self._of_pod.clear()
        if known == self._known.get(at) and (known is None or speaks_for_the_same):
            return
        if known is None:
            del self._known[at]
        else:
            self._known[at] = known
        self._of_pod.clear()
        self._on_change()

    def drop(self, namespace: str, name: str) -> None:
        """A GpuShare is gone."""
        share = self._shares.pop((namespace, name), None)
        if share is not None:
            self._unindex(share)
            self._of_pod.clear()
        self._known.pop((namespace, name), None)

    def of(self, pod: PodView) -> Known | None:
        """What is known of a pod's workload; None without a profile."""
        if not self._known:
            return None
        if pod.uid not in self._of_pod:
            self._of_pod[pod.uid] = self._find(pod)
        return self._of_pod[pod.uid]

    def forget(self, pod_uid: str) -> None:
        """A pod is gone."""
        self._of_pod.pop(pod_uid, None)

    def _find(self, pod: PodView) -> Known | None:
        namespace = pod.namespace
        for name in sorted(self._selecting.get(namespace, ())):
            selector = self._shares[namespace, name].spec.selector
            if selector is not None and selector.matches(pod.labels):
                return self._known.get((namespace, name))
        owners = (self._by_owner.get((namespace, uid), ()) for uid in (*pod.owner_uids, pod.uid))
        first = min((name for names in owners for name in names), default=None)
        return self._known.get((namespace, first)) if first is not None else None

    def _unindex(self, share: GpuShare) -> None:
        self._selecting.get(share.namespace, set()).discard(share.name)
        for owner in share.owners:
            names = self._by_owner.get((share.namespace, owner.uid), set())
            names.discard(share.name)
            if not names:
                self._by_owner.pop((share.namespace, owner.uid), None)
