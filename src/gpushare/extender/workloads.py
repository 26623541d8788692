"""What is known of each pod's workload: its GpuShare's profile and tolerance, found quickly for 20,000 pods."""

from collections.abc import Callable

from gpushare.core.admission import Defaults, ShareIndex
from gpushare.core.api import GpuShare, PodView
from gpushare.core.placement import KnownWorkload, known_of


class KnownWorkloads:
    """What the profiles of GpuShares say of pods, remembered by pod.

    Args:
        defaults: for what a GpuShare does not say.
        on_change: called when what is known of some pods may have changed.

    Attributes:
        shares: every GpuShare.
    """

    def __init__(self, defaults: Defaults, on_change: Callable[[], None]) -> None:
        self._defaults, self._on_change = defaults, on_change
        self.shares = ShareIndex()
        self._known: dict[tuple[str, str], KnownWorkload] = {}
        self._of_pod: dict[str, KnownWorkload | None] = {}

    def put(self, share: GpuShare) -> None:
        """A GpuShare came or changed."""
        at = (share.namespace, share.name)
        before, known = self.shares.put(share), known_of(share, self._defaults)
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
        if self.shares.drop(namespace, name) is not None:
            self._of_pod.clear()
        self._known.pop((namespace, name), None)

    def of(self, pod: PodView) -> KnownWorkload | None:
        """What is known of a pod's workload; None without a profile."""
        if not self._known:
            return None
        if pod.uid not in self._of_pod:
            self._of_pod[pod.uid] = self._find(pod)
        return self._of_pod[pod.uid]

    def forget(self, pod_uid: str) -> None:
        """A pod is gone."""
        self._of_pod.pop(pod_uid, None)

    def share_of(self, pod: PodView) -> GpuShare | None:
        """The GpuShare that speaks for a pod."""
        return self.shares.of(pod.namespace, pod.labels, (*pod.owner_uids, pod.uid))

    def _find(self, pod: PodView) -> KnownWorkload | None:
        share = self.share_of(pod)
        return None if share is None else self._known.get((share.namespace, share.name))
