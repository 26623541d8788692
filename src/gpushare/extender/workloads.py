"""Knowledge about each pod's workload: its GpuShare's profile and tolerance, looked up quickly for 20,000 pods."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from gpushare.core.admission import ShareIndex
from gpushare.core.api import GpuShare, GpuShareSpec, PodView, Rejection, names
from gpushare.core.placement import (
    KeptApart,
    KnownWorkload,
    PlacementRequest,
    Settings,
    known_of,
    with_joint_profile,
)
from gpushare.runtime.moments import unix_seconds


class KnownWorkloads:
    """Knowledge about pods' workloads from GpuShares, cached by pod.

    Args:
        on_change: called when the knowledge about some pods may have changed.
        settings: of the installation, for workloads that it joins over namespaces.

    Attributes:
        shares: every GpuShare.
    """

    def __init__(self, on_change: Callable[[], None], settings: Settings | None = None) -> None:
        self._on_change = on_change
        settings = settings or Settings()
        self._defaults = settings.defaults
        self.shares = ShareIndex(joined=settings.joined)
        self._known: dict[tuple[str, str], KnownWorkload] = {}
        self._mattering = 0
        self._of_pod: dict[str, KnownWorkload | None] = {}
        self._apart: dict[tuple[str, str], tuple[KeptApart, ...]] = {}
        self._apart_at = -math.inf

    def put(self, share: GpuShare) -> bool:
        """Record a GpuShare that came or changed; return whether a decision about its pods may be another now."""
        at = (share.namespace, share.name)
        joint = self.shares.joined.version
        before, known = self.shares.put(share), known_of(share, unix_seconds)
        speaks_for_the_same = before is not None and (before.owners, before.spec.selector) == (
            share.owners,
            share.spec.selector,
        )
        if not speaks_for_the_same:
            self._of_pod.clear()
        was = self._known.get(at)
        if known == was and speaks_for_the_same and joint == self.shares.joined.version:
            return before is None or _asked(before) != _asked(share)
        self._replace(at, known)
        changed = [each for each in (was, known) if each is not None and _decides(each)]
        takes_pods_over = not speaks_for_the_same and (_selects(share) or _selects(before))
        if (changed or takes_pods_over) and (self._mattering or any(each.matters for each in changed)):
            self._on_change()
        return True

    def drop(self, namespace: str, name: str) -> None:
        """Forget a GpuShare that is gone."""
        share, was = self.shares.drop(namespace, name), self._known.get((namespace, name))
        self._replace((namespace, name), None)
        if (was is not None and _decides(was)) or (_selects(share) and self._mattering):
            self._on_change()

    def of(self, pod: PodView) -> KnownWorkload | None:
        """Return the knowledge about a pod's workload; None if nothing is known that could change a decision."""
        if not self._mattering:
            return None
        if pod.uid not in self._of_pod:
            self._of_pod[pod.uid] = self._find(pod)
        return self._of_pod[pod.uid]

    @property
    def anything(self) -> bool:
        """Return whether anything is known of any workload that could change a decision."""
        return self._mattering > 0

    def joins_again(self, now: float) -> bool:
        """Return whether the time for which some workloads are kept apart has ended since the last call.

        Args:
            now: Unix time.
        """
        since, self._apart_at = self._apart_at, now
        return any(since < each.until <= now for apart in self._apart.values() for each in apart)

    def pod_changed(self, before: PodView | None, pod: PodView) -> None:
        """Look a pod's workload up again if another GpuShare may apply to the pod now.

        Args:
            before: the pod as it was seen last, if it was.
        """
        if before is None or pod.uid not in self._of_pod or _selects_by(before) == _selects_by(pod):
            return
        was = self._of_pod.pop(pod.uid)
        if self.of(pod) != was:
            self._on_change()

    def forget(self, pod_uid: str) -> None:
        """Forget a pod that is gone."""
        self._of_pod.pop(pod_uid, None)

    def share_of(self, pod: PodView) -> GpuShare | None:
        """Return the GpuShare that applies to a pod, with the profile of its joined workload if it has none."""
        share = self.shares.of(pod.namespace, pod.labels, (*pod.owner_uids, pod.uid))
        return with_joint_profile(share, pod.namespace, pod.annotations, self.shares, self._defaults)

    def _replace(self, at: tuple[str, str], known: KnownWorkload | None) -> None:
        was = self._known.pop(at, None)
        self._apart.pop(at, None)
        if known is not None:
            self._known[at] = known
            if known.apart:
                self._apart[at] = known.apart
        self._mattering += int(known is not None and known.matters) - int(was is not None and was.matters)
        self._of_pod.clear()

    def _find(self, pod: PodView) -> KnownWorkload | None:
        share = self.share_of(pod)
        if share is None:
            return None
        if share is not self.shares.get(share.namespace, share.name):
            return known_of(share, unix_seconds)
        return self._known.get((share.namespace, share.name))


def _selects_by(pod: PodView) -> tuple[object, ...]:
    """Return what decides which GpuShare, and which joined workload's profile, applies to a pod."""
    return pod.labels, pod.owner_uids, pod.annotations.get(names.WORKLOAD)


def _asked(share: GpuShare) -> tuple[GpuShareSpec, str | None, bool]:
    """Return what requests take from a GpuShare besides what is known of its workload: no measured figure."""
    return share.spec, share.status.recommended_fraction, share.status.ends_neighbours


def _selects(share: GpuShare | None) -> bool:
    """Return whether a GpuShare takes pods over from others; without a selector it has only its owner's."""
    return share is not None and share.spec.selector is not None


def _decides(known: KnownWorkload) -> bool:
    """Return whether decisions about its neighbours depend on it."""
    return known.matters or known.max_slowdown is not None


@dataclass(frozen=True, slots=True)
class LastRequest:
    """The request that was made last, and what of: prioritize asks about the pod that filter asked about."""

    pod: PodView
    share: GpuShare | None
    known: KnownWorkload | None
    since: float
    request: PlacementRequest | Rejection

    def is_of(self, pod: PodView, share: GpuShare | None, known: KnownWorkload | None, since: float) -> bool:
        """Return whether a request for these would be the same."""
        return self.share is share and self.known is known and self.since == since and self.pod == pod
