"""The operator's view of the cluster: managed pods, GpuShares, each pod's progress; finds the statuses to update.

In memory only, rebuilt from the API at every start; no I/O. It tells its listener which GpuShares may need a new
status and which pods have no GpuShare.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

from gpushare.core.admission import (
    JoinedShares,
    JoinedWorkload,
    ShareIndex,
    ShareKey,
    Term,
    rank,
    terms_of_labels,
    ways_to_file,
)
from gpushare.core.api import (
    GpuShare,
    GpuShareStatus,
    GroupReplacements,
    LearnedEffect,
    NeighboursEnded,
    PodView,
    Retraction,
    WorkloadSignature,
)
from gpushare.core.control import PodReport, Standing, learnt_with, reports_only_figures, usual_work, with_ended
from gpushare.core.placement import WindowStarts
from gpushare.runtime.moments import ClockSteps, unix_seconds

_MOST_MODELS: Final = 16  # as in the schema
_MOST_COMPARED: Final = 1000  # pods of a GpuShare that are checked for belonging to another one
_MOST_DEPARTED: Final = 1000  # a fault is reported within seconds of its pod's end
_MOST_TOUCHED: Final = 8  # GpuShares that report this about one pod


@dataclass(frozen=True, slots=True)
class PodKey:
    """A pod without a GpuShare."""

    namespace: str
    uid: str


Key = ShareKey | PodKey


class ClusterView:
    """Known objects.

    Attributes:
        starts: when the pods on probation started.
    """

    def __init__(
        self,
        touched: Callable[[Key], None],
        now: Callable[[], float] = time.time,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        measured: Callable[[ShareKey], None] | None = None,
        joined: Iterable[JoinedWorkload] = (),
    ) -> None:
        """Create an empty view.

        Args:
            touched: called for each key that a change affects.
            now: returns Unix time; monotonic: seconds of a clock that is never set.
            measured: called instead for a GpuShare in whose status a change affects figures alone.
            joined: workload keys that mean one workload in several namespaces.
        """
        self._now, self._monotonic, self._steps = now, monotonic, ClockSteps()
        self.starts = WindowStarts(unix_seconds, self._was_set)
        self._touched = touched
        self._measured = measured or touched
        self._shares = ShareIndex(joined=joined)
        self._pods: dict[str, PodView] = {}
        self._pods_of_owner: dict[tuple[str, str], set[str]] = {}
        self._pods_of_term: dict[tuple[str, Term], set[str]] = {}
        self._share_of_pod: dict[str, ShareKey | None] = {}
        self._pods_of_share: dict[ShareKey, set[str]] = {}
        self._pod_reports: dict[str, dict[str, PodReport]] = {}  # by node and pod uid
        self._node_of_pod: dict[str, dict[str, PodReport]] = {}
        self._silent: frozenset[str] = frozenset()
        self._retracted: set[ShareKey] = set()  # with retractions in their status
        self._wanted: dict[ShareKey, tuple[Retraction, ...]] = {}  # not written yet
        self._refusals: dict[ShareKey, tuple[str, str]] = {}
        self._learnt: dict[ShareKey, tuple[LearnedEffect, ...]] = {}  # not written yet
        self._ended: dict[ShareKey, tuple[NeighboursEnded, ...]] = {}  # not written yet
        self._replacements: dict[ShareKey, GroupReplacements | None] = {}  # not written yet
        self._departed: dict[str, tuple[ShareKey, PodView]] = {}  # the last deleted pods, by uid

    def _was_set(self) -> float:
        return self._steps.seconds(self._now(), self._monotonic())

    @property
    def shares(self) -> Mapping[ShareKey, GpuShare]:
        """Return every GpuShare."""
        return self._shares.shares

    @property
    def pods(self) -> Mapping[str, PodView]:
        """Return every managed pod by uid."""
        return self._pods

    @property
    def joined(self) -> JoinedShares:
        """Return the GpuShares of joined workloads, with what was learnt of them, written yet or not."""
        return self._shares.joined

    def pods_of(self, key: ShareKey) -> list[PodView]:
        """Return the pods of a GpuShare."""
        return [self._pods[uid] for uid in self._pods_of_share.get(key, ())]

    def pod_reports_of(self, key: ShareKey) -> dict[str, PodReport]:
        """Return the progress of a GpuShare's pods, by uid, as the agents of their own nodes report it.

        A report about a pod that is on no node yet, by what the watch has brought, counts once the pod is there.
        """
        found = {}
        for uid in self._pods_of_share.get(key, ()):
            own = self._pods[uid].node
            for node, pod_reports in self._node_of_pod.get(uid, {}).items():
                if own == node:
                    found[uid] = PodReport(is_silent=True) if node in self._silent else pod_reports
        return found

    def share_of_pod(self, uid: str) -> ShareKey | None:
        """Return the GpuShare of a pod."""
        return self._share_of_pod.get(uid)

    def share_of_owners(self, namespace: str, uids: Iterable[str]) -> GpuShare | None:
        """Return the GpuShare without a selector that one of these owners has; the first by name."""
        return self._shares.of_owners(namespace, uids)

    def standing_of(self, key: ShareKey) -> Standing:
        """Return the decisions about a GpuShare, written yet or not."""
        share = self.shares.get(key)
        status = share.status if share is not None else GpuShareStatus()
        return Standing(
            self._wanted.get(key, status.retractions),
            self._refusals.get(key),
            self._learnt.get(key, status.learned),
            self._overlap_of(key),
            self._ended.get(key, status.neighbours_ended),
            self.replacements_of(key),
        )

    def _overlap_of(self, key: ShareKey) -> tuple[tuple[str, int], ...]:
        """Return the other GpuShares that have pods which this one selects too, with the number of pods."""
        share = self.shares.get(key)
        selector = share.spec.selector if share is not None else None
        if share is None or selector is None or self._shares.selecting(key.namespace) < 2:
            return ()
        looked_at = islice(self._may_concern(share), _MOST_COMPARED)
        firsts = Counter(
            first.name
            for uid in looked_at
            if (first := self._share_of_pod.get(uid)) not in {None, key}
            and selector.matches(self._pods[uid].labels)
        )
        return tuple(sorted(firsts.items()))

    def retractions(self) -> dict[ShareKey, tuple[Retraction, ...]]:
        """Return the retractions of every GpuShare that has any, written yet or not."""
        keys = [key for key in self._retracted | self._wanted.keys() if key in self.shares]
        return {key: self.standing_of(key).retractions for key in keys}

    def retract(self, key: ShareKey, retractions: tuple[Retraction, ...]) -> None:
        """Let a GpuShare's status hold these retractions."""
        if key in self.shares and self.standing_of(key).retractions != retractions:
            self._wanted[key] = retractions
            self._touched(key)

    def replacements_of(self, key: ShareKey) -> GroupReplacements | None:
        """Return how often a GpuShare's pods in trouble were replaced, written yet or not."""
        share = self.shares.get(key)
        return self._replacements.get(key, share.status.replacements if share is not None else None)

    def count_replacements(self, key: ShareKey, replacements: GroupReplacements | None) -> None:
        """Let a GpuShare's status hold how often its pods in trouble were replaced; None if never lately."""
        if key in self.shares:
            self._replacements[key] = replacements
            self._touched(key)

    def learn(self, key: ShareKey, effect: LearnedEffect) -> None:
        """Let a GpuShare's status hold what was learnt of its workload on one GPU model."""
        if key in self.shares:
            kept = [each for each in self.standing_of(key).learned if each.gpu_model != effect.gpu_model]
            self._learnt[key] = (*kept, effect)[-_MOST_MODELS:]
            self._join(self.shares[key])
            self._measured(key)

    def learned_of(self, key: ShareKey) -> tuple[LearnedEffect, ...]:
        """Return what was learnt of a GpuShare's workload, of a joined one by any of its GpuShares."""
        share, own = self.shares.get(key), self.standing_of(key).learned
        profile = share.status.profile if share is not None else None
        if share is None or profile is None:
            return own
        joint = self.joined.of(key.namespace, share.status.workload).get(profile.gpu_model)
        return own if joint is None else learnt_with(profile, [(joint.profile, joint.learned), (profile, own)])

    def _join(self, share: GpuShare) -> None:
        """Record a GpuShare with what was learnt of it, written yet or not, if its workload is joined."""
        learnt = self._learnt.get(ShareKey(share.namespace, share.name))
        if learnt is not None and self.joined:
            self.joined.put(replace(share, status=replace(share.status, learned=learnt)))

    def blame(self, node: str, ended: NeighboursEnded) -> None:
        """Record that a pod of this node ended its neighbours lately; reports about other nodes' pods are ignored.

        The pod may be gone by now: a force-deleted one leaves the API before it is killed.
        """
        uid = ended.pod_uid
        key, pod = self._share_of_pod.get(uid), self._pods.get(uid)
        if pod is None or key is None:
            key, pod = self._departed.get(uid, (None, None))
        if key is None or key not in self.shares or pod is None or pod.node != node:
            return
        if pod.decision is None or ended.gpu not in pod.decision.gpu_uuids:
            return
        before = self.standing_of(key).neighbours_ended
        after = with_ended(before, ended)
        if after != before:
            self._ended[key] = after
            self._touched(key)

    def refuse(self, refusals: Mapping[ShareKey, tuple[str, str]]) -> None:
        """Record why pods that should leave their GPUs stay: one (reason, sentence) for each GpuShare."""
        before, self._refusals = self._refusals, dict(refusals)
        for key in before.keys() | refusals.keys():
            if before.get(key) != refusals.get(key) and key in self.shares:
                self._touched(key)

    def put_pod(self, pod: PodView) -> None:
        """Record a new or changed pod; one without our annotation is ignored, whatever its labels."""
        if pod.fraction is None:
            self.drop_pod(pod.uid)
            return
        before = self._pods.get(pod.uid)
        if before == pod:
            return
        self.starts.look(before, pod, self._now())
        self._forget_pod(pod.uid)
        self._pods[pod.uid] = pod
        for index, key in self._keys(pod):
            index.setdefault(key, set()).add(pod.uid)
        if before is None or (before.labels, before.owner_uids) != (pod.labels, pod.owner_uids):
            self._assign(pod, self._find(pod))
            self._requeue_overlapping(pod)
        else:
            self._assign(pod, self._share_of_pod[pod.uid])

    def drop_pod(self, uid: str) -> None:
        """Forget a pod that is gone."""
        pod = self._pods.get(uid)
        self.starts.forget(uid)
        self._forget_pod(uid)
        share = self._share_of_pod.pop(uid, None)
        if pod is not None:
            self._requeue_overlapping(pod)
            if share is not None:
                self._departed[uid] = (share, pod)
                if len(self._departed) > _MOST_DEPARTED:
                    del self._departed[next(iter(self._departed))]
        if share is not None:
            self._pods_of_share[share].discard(uid)
            self._touched(share)

    def put_share(self, share: GpuShare) -> None:
        """Record a new or changed GpuShare; pods may join it, or move from it to another."""
        key = ShareKey(share.namespace, share.name)
        profiles = self._joint_profiles(share)
        before = self._shares.put(share)
        if self._wanted.get(key) == share.status.retractions or (before is not None and before.uid != share.uid):
            self._wanted.pop(key, None)
        if (
            self._learnt.get(key) == share.status.learned
            or (self.joined and _windows(self._learnt.get(key, ())) <= _windows(share.status.learned))
            or (
                before is not None
                and (before.uid, usual_work(before.status.profile))
                != (share.uid, usual_work(share.status.profile))
            )
        ):
            self._learnt.pop(key, None)
        self._join(share)
        is_another = before is not None and before.uid != share.uid
        if is_another or self._ended.get(key) == share.status.neighbours_ended:
            self._ended.pop(key, None)
        if is_another or self._replacements.get(key) == share.status.replacements:
            self._replacements.pop(key, None)
        (self._retracted.add if share.status.retractions else self._retracted.discard)(key)
        if before == share:
            return
        if profiles != self._joint_profiles(share):
            for beside in self.joined.beside(share.namespace, share.name):
                self._touched(ShareKey(*beside))
        if before is None or (before.spec.selector, before.owners) != (share.spec.selector, share.owners):
            self._let_go(key)
            for uid in self._may_concern(share):
                self._offer(self._pods[uid], share)
        self._touched(key)

    def _joint_profiles(self, share: GpuShare) -> list[WorkloadSignature]:
        known = self.joined.of(share.namespace, share.status.workload)
        return [each.profile for each in known.values()]

    def drop_share(self, namespace: str, name: str) -> None:
        """Forget a deleted GpuShare; its pods are assigned to another, and the listener can forget it too."""
        key = ShareKey(namespace, name)
        self._wanted.pop(key, None)
        self._learnt.pop(key, None)
        self._ended.pop(key, None)
        self._replacements.pop(key, None)
        self._retracted.discard(key)
        if self._shares.drop(namespace, name) is not None:
            self._let_go(key)
            self._pods_of_share.pop(key, None)
            self._touched(key)

    def put_node(self, node: str, pod_reports: Mapping[str, PodReport]) -> None:
        """Record what a node's agent reports; an empty mapping forgets the node."""
        before = self._pod_reports.pop(node, {})
        if pod_reports:
            self._pod_reports[node] = dict(pod_reports)
        for uid in before.keys() | pod_reports.keys():
            was, now = before.get(uid), pod_reports.get(uid)
            if was == now:
                continue
            of_pod = self._node_of_pod.setdefault(uid, {})
            if now is not None:
                of_pod[node] = now
            else:
                of_pod.pop(node, None)
            if not of_pod:
                del self._node_of_pod[uid]
            if (share := self._share_of_pod.get(uid)) is not None:
                only_figures = was is not None and now is not None and reports_only_figures(was, now)
                (self._measured if only_figures else self._touched)(share)

    def silence(self, nodes: frozenset[str]) -> None:
        """Record which nodes' agents are silent: their last reports no longer count."""
        changed, self._silent = nodes ^ self._silent, nodes
        for node in changed:
            for uid in self._pod_reports.get(node, {}):
                if (share := self._share_of_pod.get(uid)) is not None:
                    self._touched(share)

    def _let_go(self, key: ShareKey) -> None:
        """Reassign the pods of a GpuShare."""
        for uid in set(self._pods_of_share.get(key, ())):
            self._assign(self._pods[uid], self._find(self._pods[uid]))

    def _requeue_overlapping(self, pod: PodView) -> None:
        """Queue the other GpuShares that select a pod; their condition Overlapping may change."""
        if self._shares.selecting(pod.namespace) > 1:
            for name in islice(self._shares.selecting_names(pod.namespace, pod.labels), 1, 1 + _MOST_TOUCHED):
                self._touched(ShareKey(pod.namespace, name))

    def _assign(self, pod: PodView, new: ShareKey | None) -> None:
        """Assign a pod to a GpuShare; touch both it and the former one."""
        old = self._share_of_pod.get(pod.uid)
        self._share_of_pod[pod.uid] = new
        if old is not None and old != new:
            self._pods_of_share.get(old, set()).discard(pod.uid)
            self._touched(old)
        if new is not None:
            self._pods_of_share.setdefault(new, set()).add(pod.uid)
            self._touched(new)
        elif not pod.finished:
            self._touched(PodKey(pod.namespace, pod.uid))

    def _find(self, pod: PodView) -> ShareKey | None:
        share = self._shares.of(pod.namespace, pod.labels, (*pod.owner_uids, pod.uid))
        return ShareKey(share.namespace, share.name) if share is not None else None

    def _offer(self, pod: PodView, share: GpuShare) -> None:
        """Assign a pod to a GpuShare that matches it, if it takes precedence over the pod's present one."""
        selector, present = share.spec.selector, self._share_of_pod.get(pod.uid)
        if selector is not None and not selector.matches(pod.labels):
            return
        if present is None or rank(share) < rank(self.shares[present]):
            self._assign(pod, ShareKey(share.namespace, share.name))

    def _may_concern(self, share: GpuShare) -> set[str]:
        """Return the pods that may belong to this GpuShare: by its rarest label, or by its owners."""
        selector, namespace = share.spec.selector, share.namespace
        if selector is None:
            owned = (self._pods_of_owner.get((namespace, owner.uid), ()) for owner in share.owners)
            return set[str]().union(*owned)
        ways = ([self._pods_of_term.get((namespace, term), ()) for term in way] for way in ways_to_file(selector))
        return set[str]().union(*min(ways, key=lambda way: sum(map(len, way))))

    def _keys(self, pod: PodView) -> Iterator[tuple[dict[Any, set[str]], object]]:
        """Return the index keys of a pod."""
        for term in terms_of_labels(pod.labels):
            yield self._pods_of_term, (pod.namespace, term)
        for owner in {*pod.owner_uids, pod.uid}:
            yield self._pods_of_owner, (pod.namespace, owner)

    def _forget_pod(self, uid: str) -> None:
        pod = self._pods.pop(uid, None)
        if pod is None:
            return
        for index, key in self._keys(pod):
            index[key].discard(uid)
            if not index[key]:
                del index[key]


def _windows(learned: Iterable[LearnedEffect]) -> int:
    return sum(effect.windows for effect in learned)
