"""The extender's only state: which pod holds what on which GPU, updated by watches and by its own bindings."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from gpushare.core.api import Decision, GpuShare, PodView, Reason, Rejection
from gpushare.core.control import SILENT_SECONDS
from gpushare.core.interference import InterferenceModel
from gpushare.core.placement import (
    AGENT_AWAY,
    Candidates,
    ClusterState,
    DecisionContext,
    Judge,
    KeptGpus,
    KnownWorkload,
    LearningPolicy,
    NodeList,
    NodeSpec,
    Placement,
    PlacementRequest,
    Settings,
    Undecided,
    bound_request,
    cap_of,
    decide,
    lost_place,
    nodes_by_decision,
    request_of,
    resize,
    survey,
    window_seconds,
)
from gpushare.data import default_model
from gpushare.extender.claims import GpuClaims
from gpushare.extender.closed import ClosedNodes
from gpushare.extender.fence import Fence
from gpushare.extender.idle import IdlePods
from gpushare.extender.others import OtherPod, OtherPods
from gpushare.extender.presence import AgentPresence
from gpushare.extender.probations import Probations
from gpushare.extender.queued import QueuedPods
from gpushare.extender.reduce import GpuNodeView, NodeView
from gpushare.extender.workloads import KnownWorkloads, LastRequest
from gpushare.kube import Change
from gpushare.runtime.moments import unix_seconds

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Unseen:
    """A pod that the watch has not shown as bound yet.

    Attributes:
        at: when a request to bind it was sent, or it was found to be bound, in monotonic seconds.
    """

    namespace: str
    name: str
    at: float


class ShareLedger:
    """The state behind filter, prioritize, bind and preempt. Synchronous: each call sees a consistent state.

    Rules of reservations: `bind` reserves before it asks the API. A bound pod counts where its annotations say,
    whoever bound it. A pod that has ended or is gone releases its room at once. An event or a request of
    kube-scheduler that shows a pod as unbound releases nothing before the watch has shown our own binding, because
    it may be older. A bind request without an answer keeps its reservation until its outcome is known, and is only
    repeated unchanged (ADR 0169).
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        fence: Fence | None = None,
        idle: IdlePods | None = None,
        claims: GpuClaims | None = None,
        on_room: Callable[[], None] = lambda: None,
        model: Callable[[], InterferenceModel] = default_model,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create an empty ledger.

        Args:
            idle: pods that run no process, which the agents' reports go into.
            claims: which node a GPU belongs to.
            on_room: called when something became free or healthy.
            model: returns the interference model; called when the first profile appears.
            now: returns Unix time, by which retractions end and pods wait, and probations unless it is set.
            monotonic: returns seconds of a clock that is never set.
        """
        settings = settings or Settings()
        self.state = ClusterState(gpu_memory_reserve_mib=settings.gpu_memory_reserve_mib)
        self.pods: dict[str, PodView] = {}
        self.fence = fence or Fence()
        self.on_room = on_room
        self.on_cap: Callable[[str], object] = lambda _: None
        """Called with the uid of a placed pod whose cap has changed, by whichever replica."""
        self.binding: set[str] = set()
        """Uids whose bind is in progress."""
        self.unanswered: dict[str, Unseen] = {}
        """Pods, by uid, that hold a reservation and may be bound to it, or be bound to it yet."""
        self.ahead: dict[str, Unseen] = {}
        """Pods, by uid, known to be bound before the watch has shown it; of those gone by then it never does."""
        self._defaults = settings.defaults
        judge = Judge(model, self._known, self._knows_anything, headroom_ratio=settings.slowdown_headroom_ratio)
        self._context = DecisionContext.of(self.state, settings, judge, learns_aside=True)
        self._now, self._monotonic = now, monotonic
        self._workloads = KnownWorkloads(self._context.judge.forget, settings)
        self._queued = QueuedPods(settings.reserve_after_seconds)
        self._closed_to = ClosedNodes()
        self._probations = Probations(self.state, self._workloads.share_of)
        self._uids: dict[str, str] = {}
        self._reports: dict[str, GpuNodeView] = {}
        """Every GpuNode as its agent wrote it, also of a node that is gone."""
        self._gpunodes: dict[str, GpuNodeView] = {}
        self.claims = claims or GpuClaims()
        self._nodes: dict[str, NodeView] = {}
        self.others = OtherPods(self.state)
        self._other_pods: dict[str, OtherPod] = {}
        self._undecided = Undecided(self.state)
        self._second_choices: set[str] = set()
        self._last_request: LastRequest | None = None
        self.silent: frozenset[str] = frozenset()
        """Nodes whose agent has not written for `SILENT_SECONDS`: they get no new pods."""
        self.away: set[str] = set()
        """Nodes whose agent does not run, or where kubelet has just rejected a pod: no new pods either."""
        self._presence = AgentPresence()
        self.idle = idle or IdlePods()
        """Pods that run no process, by their agents' newest reports."""
        self._heard: set[str] = set()
        self._heard_at: dict[str, float] = {}

    # -- what the watches say -------------------------------------------------------------------------------------

    def pod_changed(self, change: Change, key: str, pod: PodView) -> None:
        """Record a managed pod that appeared, changed or disappeared."""
        before = self._uids.get(key)
        if before is not None and before != pod.uid and change is not Change.DELETED and before not in self.ahead:
            self._forget(self._uids.pop(key))  # replaced; one that is ahead may be the later of the two
        if change is Change.DELETED or pod.finished:
            if pod.unserved and pod.node is not None and before == pod.uid:  # news, not an old pod from a list
                self._presence.rejected(pod.node)
                self._presence_changed(pod.node)
            self._forget(pod.uid)
            if before == pod.uid:
                del self._uids[key]
            return
        known = self.pods.get(pod.uid)
        if pod.node is None:
            if pod.uid in self.ahead:
                return
            if known is not None and known.node is not None:
                # Nothing takes a binding back that was shown but a restore of etcd from an older backup.
                _log.warning("pod %s is not bound to %s any more: it is placed anew", key, known.node)
                self._undecided.forget(pod.uid)
                self.release(pod.uid)
        self._uids[key] = pod.uid
        self._probations.follow_clock(now := self._now(), self._monotonic())
        self._probations.look(known, pod, now)
        self._workloads.pod_changed(known, pod)
        self.pods[pod.uid] = pod
        self._queued.put(pod, now)
        if pod.node is None:
            return
        self.ahead.pop(pod.uid, None)
        self.unanswered.pop(pod.uid, None)
        if pod.decision is None:
            if pod.uid not in self._undecided:
                _log.warning("pod %s runs on %s without a decision: counted by its limit", key, pod.node)
            self._undecided.hold(pod.uid, pod.node, pod.limit_percent, pod.cpu_milli, pod.memory_mib)
            self._place_undecided(pod.uid, pod.node)
            return
        self._undecided.forget(pod.uid)
        self._count(pod, pod.node, pod.decision)

    def bound(self, pod: PodView, at: float) -> None:
        """Count a pod with a reservation that was bound on the API server at `at`, before the watch shows it."""
        if self.state.reservation(pod.uid) is None:  # the pod has ended meanwhile
            return
        self.pod_changed(Change.MODIFIED, pod.key, pod)
        if pod.uid in self.pods:
            self.ahead[pod.uid] = Unseen(pod.namespace, pod.name, at)

    def not_bound(self, pod: PodView) -> None:
        """Record that the API server, asked just now, has a pod unbound."""
        self.ahead.pop(pod.uid, None)
        self.pod_changed(Change.MODIFIED, pod.key, pod)

    def may_be_bound(self, pod_uid: str) -> bool:
        """Return whether the pod is bound, or may still be bound by a request of ours."""
        pod = self.pods.get(pod_uid)
        is_bound = pod is not None and pod.node is not None
        return is_bound or pod_uid in self.ahead or pod_uid in self.unanswered

    def other_pod_changed(self, change: Change, key: str, pod: OtherPod) -> None:
        """Record a pod of another system that was bound to a node, changed, or left it."""
        before = self._other_pods.get(key)
        if before is not None and before.uid != pod.uid:  # replaced while the watch was down
            self.other_pod_changed(Change.DELETED, key, before)
        if pod.serves is not None:
            if change is Change.DELETED:
                self._presence.drop(pod.node, pod.uid)
                if pod.node not in self._gpunodes:  # the node was removed before its agent's pod
                    self._presence.forget(pod.node)
            else:
                self._presence.put(pod.node, pod.uid, serving=pod.serves)
            self._presence_changed(pod.node)
        if change is Change.DELETED:
            self._other_pods.pop(key, None)
            self.others.drop(pod)
            if pod.limit_percent and pod.uid not in self.pods:
                self._undecided.forget(pod.uid)
                self.release(pod.uid)
            if pod.node in self._gpunodes:
                self.on_room()
            return
        self._other_pods[key] = pod
        if self.others.put(pod) and pod.node in self._gpunodes:
            self.on_room()
        if pod.limit_percent and pod.uid not in self.pods:
            if pod.uid not in self._undecided:
                _log.warning("pod %s on %s has a share that gpushare did not place", key, pod.node)
            self._undecided.hold(pod.uid, pod.node, pod.limit_percent)
            self._place_undecided(pod.uid, pod.node)

    def gpunode_changed(self, change: Change, key: str, view: GpuNodeView) -> None:
        """Record a change of a node's GPUs, their health or their tenants; they count while its Node has shares.

        An agent may outlive its Node; what it then writes would keep the GPUs from the machine's next name.
        """
        if change is Change.DELETED:
            self._reports.pop(key, None)
            self._gpus_gone(key)
            return
        self._reports[key] = view
        if key not in self._nodes:
            return
        before = self._gpunodes.get(key)
        if before is None or before.observed_at != view.observed_at:
            self._heard.add(key)
            if before is not None:  # the first one may have been written long ago
                self.idle.heard(key, view.idle)
        losers, gainers = self.claims.put(view)
        self._gpus_changed_hands((*losers, key) if gainers else losers, (key, *gainers))

    def _gpus_gone(self, key: str) -> None:
        """Take a node's GPUs out, and end its claims to them."""
        self._heard.discard(key)
        self._heard_at.pop(key, None)
        self._gpunodes.pop(key, None)
        self.idle.drop(key)
        self._presence.forget(key)
        self._presence_changed(key)
        self.state.remove_node(key)
        self._gpus_changed_hands((), self.claims.drop(key))

    def settle_claims(self) -> None:
        """Give GPUs that several nodes list to those with pods on them; call this after the first lists."""
        self._gpus_changed_hands(*self.claims.settle(nodes_by_decision(self.pods.values())))

    def _decided_on(self, nodes: AbstractSet[str]) -> dict[str, set[str]]:
        return nodes_by_decision(pod for pod in self.pods.values() if pod.node in nodes)

    def _gpus_changed_hands(self, losers: Sequence[str], others: Sequence[str]) -> None:
        """Count GPUs where they belong now; a GPU is taken from its former node before it is put on another."""
        for name in losers:
            self.state.remove_node(name)
        for name in dict.fromkeys((*losers, *others)):
            self._count_gpus(name, self.claims.own(name))

    def _count_gpus(self, key: str, view: GpuNodeView) -> None:
        """Count a node's GPUs, their health and their pods by its agent's report, without other nodes' GPUs."""
        before = self._gpunodes.get(key)
        self._gpunodes[key] = view
        self.state.set_reading(key, works=view.reads)
        if before is None or before.gpus != view.gpus:
            self._update_node(key)
        if before is None or before.unhealthy != view.unhealthy or before.gpus != view.gpus:
            self._set_healths(key)
            self.on_room()
        if before is None or before.allocated != view.allocated:
            for uid in view.allocated:
                known = self.state.reservation(uid)  # not a pod that has just gone, nor another node's
                if known is not None and known.placement.node == key:
                    self.fence.allocated(uid)
        if self._undecided.place_all(key, view.allocated):
            self.on_room()

    def listen(self, now: float) -> None:
        """Check for silent agents, whose nodes get no new pods until they write again, and for claims that end.

        A GpuNode without a time of observation is not judged.

        Args:
            now: monotonic seconds; no agent's clock is compared with it.
        """
        self._heard_at |= dict.fromkeys(self._heard, now)
        self._heard.clear()
        before = self.silent
        self.silent = frozenset(
            key
            for key, at in self._heard_at.items()
            if now - at > SILENT_SECONDS and self._gpunodes[key].observed_at
        )
        for key in (before ^ self.silent) & self._gpunodes.keys():
            self._set_healths(key)
        for key in self.silent - before:
            _log.warning("the agent of node %s has been silent for %.0f s: no new pods there", key, SILENT_SECONDS)
        if before - self.silent:
            self.on_room()
        for key in self._presence.listen(now):
            self._presence_changed(key)
        self._gpus_changed_hands((), self.claims.end_kept(self._decided_on))

    def _presence_changed(self, key: str) -> None:
        """Take a node's GPUs out, or put them back, as its agent goes or comes."""
        away = self._presence.is_away(key)
        if away == (key in self.away):
            return
        self.away ^= {key}
        _log.info(
            "node %s: kubelet has %s", key, "no shares to give, no new pods there" if away else "shares again"
        )
        if key in self._gpunodes:
            self._set_healths(key)
        if not away:
            self.on_room()

    def end_probations(self) -> None:
        """Report room if a GPU is no longer reserved for one pod, or workloads are no longer kept apart.

        A probation ends with its window or with a profile.
        """
        context = self.context
        have_ended = self._probations.have_ended(context)
        if self._workloads.joins_again(context.now) or have_ended:
            self.on_room()

    def _set_healths(self, key: str) -> None:
        view = self._gpunodes[key]
        silence = AGENT_AWAY if key in self.away else int(SILENT_SECONDS) if key in self.silent else 0
        self.state.set_silence(key, silence)
        for gpu in view.gpus:
            self.state.set_health(gpu.uuid, healthy=gpu.uuid not in view.unhealthy)

    def node_changed(self, change: Change, key: str, view: NodeView) -> None:
        """Record a change of a node's CPU, memory or taints."""
        self._second_choices.discard(key)
        known = self._nodes.get(key)
        if change is Change.DELETED or known is None or (known.labels, known.taints) != (view.labels, view.taints):
            self._queued.node_changed(key, None if change is Change.DELETED else view)
            self._closed_to.clear()
        if change is Change.DELETED:
            self._nodes.pop(key, None)
            self._gpus_gone(key)
            return
        self._nodes[key] = view
        if view.is_second_choice:
            self._second_choices.add(key)
        if key in self._gpunodes:
            self._update_node(key)
            self.on_room()
        elif key in self._reports:
            self.gpunode_changed(Change.ADDED, key, self._reports[key])

    def share_changed(self, change: Change, key: str, share: GpuShare) -> None:
        """Record a GpuShare that appeared, changed or disappeared; it counts for pods placed from now on."""
        namespace, _, name = key.partition("/")
        if change is Change.DELETED:
            self._workloads.drop(namespace, name)
        elif not self._workloads.put(share):
            return
        self.on_room()

    # -- questions ------------------------------------------------------------------------------------------------

    @property
    def context(self) -> DecisionContext:
        """Return the present inputs of decisions."""
        self._probations.follow_clock(now := self._now(), self._monotonic())
        return self._queued.nominated.keeping(self._context.at(now), self.request_of)

    def request_of(self, pod: PodView) -> PlacementRequest | Rejection:
        """Return the pod's request, from its annotations, its GpuShare and the defaults."""
        share, known, since = self._workloads.share_of(pod), self._workloads.of(pod), self._queued.since(pod)
        last = self._last_request
        if last is None or not last.is_of(pod, share, known, since):
            request = request_of(pod, share, known, self._defaults, queued_at=since)
            self._last_request = last = LastRequest(pod, share, known, since, request)
        return last.request

    def untried(self) -> Iterator[PodView]:
        """Yield the pods that nothing holds back and that kube-scheduler has not tried."""
        return self._queued.untried()

    def keep(self) -> None:
        """Update the GPUs that are kept for pods that have waited long; call this about every second."""
        before = (*self._context.kept, *self._context.nominated)
        self._context = self._queued.keeping(self.context, self.request_of, self._nodes)
        if {(each.pod.name, each.gpu_uuids) for each in before} - {
            (each.pod.name, each.gpu_uuids) for each in (*self._context.kept, *self._context.nominated)
        }:
            self.on_room()  # for the pods that stood back

    @property
    def kept(self) -> Sequence[KeptGpus]:
        """Return the GPUs that are kept now."""
        return self._context.kept

    def candidates(self, pod: PodView, node_names: Sequence[str] | NodeList) -> Candidates | Rejection:
        """Return where a pod fits; if it may be bound already, only whether it fits there."""
        self._queued.asked(pod.uid)
        request = self.request_of(pod)
        if isinstance(request, Rejection):
            return request
        context = self.context  # first, as it moves the windows of pods with a reservation if the clock was set
        reservation = self.state.reservation(pod.uid)
        if reservation is None or pod.uid in self.binding or not self.may_be_bound(pod.uid):
            return survey(request, context, node_names)
        node = reservation.placement.node
        if node not in (node_names.names if isinstance(node_names, NodeList) else node_names):
            return Rejection(Reason.CONFLICT, f"it may be bound to {node} already")
        self.state.release(pod.uid)
        try:
            return survey(request, context, [node])
        finally:
            self.state.reserve(pod.uid, reservation.placement, reservation.request, reservation.order)

    def leaves_a_choice(self, pod: PodView) -> bool:
        """Return whether kube-scheduler has a choice for the pod, by its preferences or a node's."""
        return pod.has_preferences or bool(self._second_choices)

    def fenced(self, pod: PodView, now: float) -> set[str]:
        """Return the nodes where the pod's binding would have to wait now, to avoid if others fit (ADR 0042)."""
        size = fence_size(pod)
        announced, busy = self.fence.announced(pod.uid, size, now), self.fence.busy(size)
        if not busy:
            return announced
        request = self.request_of(pod)
        if isinstance(request, Rejection):
            return set()
        return announced | {
            node for node, gpus in busy.items() if gpus is None or not self._has_room(request, gpus, node)
        }

    def _knows_anything(self) -> bool:
        return self._workloads.anything or self.state.known_tenants > 0

    def _known(self, pod_uid: str) -> KnownWorkload | None:
        pod = self.pods.get(pod_uid)
        if pod is not None:
            return self._workloads.of(pod)
        reservation = self.state.reservation(pod_uid)  # bound before the watch reported it
        return reservation.request.known if reservation is not None else None

    def _has_room(self, request: PlacementRequest, gpu_uuids: Sequence[str], node: str) -> bool:
        """Return whether exactly those GPUs probably have room; a few lookups only, as prioritize asks often."""
        state, row = self.state, self.state.row(node)
        if row is None:
            return False
        uuids = state.uuids(row)
        slots = [uuids.index(uuid) for uuid in gpu_uuids if uuid in uuids]
        return len(slots) == request.gpu_count and all(
            state.share_free_milli[slot, row] >= request.share_milli
            and state.memory_free_mib[slot, row] >= (request.memory_mib or 0)
            for slot in slots
        )

    def fits_somewhere(self, pod: PodView) -> bool:
        """Return whether a waiting pod would fit on any node now."""
        request = self.request_of(pod)
        closed = self.closed_to(pod)
        return not isinstance(request, Rejection) and len(survey(request, self.context, excluded=closed).rows) > 0

    def closed_to(self, pod: PodView) -> Mapping[str, Rejection]:
        """Return the nodes that kube-scheduler does not ask about for a pod, by the pod's own rules, and why."""
        return self._closed_to.of(pod.rules, self._nodes)

    def begin_round(self) -> None:
        """Allow pods' rules to be matched with nodes anew, as much as a round may."""
        self._closed_to.begin_round()

    def choose(self, pod: PodView, request: PlacementRequest, node: str) -> Placement | Rejection:
        """Choose the GPUs of a node for a pod that is being bound, preferring GPUs without a wait at the fence."""
        return decide(request, self.context, node=node, preferred_gpus=self.fence.busy(fence_size(pod)).get(node))

    def decision(self, pod_uid: str, decided_at: str) -> Decision:
        """Return the decision for a pod that has a reservation."""
        reservation = self.state.reservation(pod_uid)
        assert reservation is not None, "decided only for pods that hold a reservation"
        placement = reservation.placement
        cap = placement.thread_percentage or cap_of(reservation.request)
        seconds = None
        if placement.probation is not None:
            seconds = window_seconds(reservation.request, self._context.probation)
        return Decision(placement.gpu_uuids, cap, placement.memory_mib, decided_at, seconds)

    def priorities(self) -> dict[str, int]:
        """Return the priorities of our pods by uid."""
        return {uid: pod.priority for uid, pod in self.pods.items()}

    # -- learning -------------------------------------------------------------------------------------------------

    async def learn(self, now: float) -> bool:
        """Let the policy learn what it lacks, in another thread; return whether there was anything to learn.

        Args:
            now: monotonic seconds.
        """
        policy = self.context.policy
        if not isinstance(policy, LearningPolicy) or (lesson := policy.lesson(self.state, now)) is None:
            return False
        learnt = await asyncio.to_thread(lesson.learn)
        policy.adopt(self.state, lesson, learnt)
        return True

    # -- reservations ---------------------------------------------------------------------------------------------

    def reserve(self, request: PlacementRequest, chosen: Placement) -> None:
        """Reserve room for a pod that is about to be bound."""
        self.state.reserve(request.pod_uid, chosen, request, self._now())

    def set_cap(self, pod_uid: str, thread_percentage: int) -> None:
        """Record the cap of a pod's next processes, if the pod still has its room."""
        known = self.state.reservation(pod_uid)
        if known is not None and known.placement.thread_percentage != thread_percentage:
            self.state.set_cap(pod_uid, thread_percentage)
            self.on_cap(pod_uid)
            self.on_room()

    def lost_place(self, pod_uid: str) -> str:
        """Return a sentence on why a pod can no longer start where it has room reserved; empty if it still can."""
        reservation = self.state.reservation(pod_uid)
        return lost_place(self.state, reservation) if reservation is not None else ""

    def release(self, pod_uid: str) -> None:
        """Release a pod's room."""
        self.ahead.pop(pod_uid, None)
        self.unanswered.pop(pod_uid, None)
        self.fence.gone(pod_uid)
        if self.state.release(pod_uid) is not None:
            self.on_room()

    def _forget(self, pod_uid: str) -> None:
        pod = self.pods.pop(pod_uid, None)
        self._workloads.forget(pod_uid)
        self._undecided.forget(pod_uid)
        self._queued.drop(pod_uid)
        self._probations.forget(pod_uid)
        self.release(pod_uid)
        other = self.others.get(pod.node, pod_uid) if pod is not None else None
        if other is not None and other.limit_percent:  # it still runs, but without our label
            self._undecided.hold(pod_uid, other.node, other.limit_percent)
            self._place_undecided(pod_uid, other.node)

    def _place_undecided(self, pod_uid: str, node: str) -> None:
        view = self._gpunodes.get(node)
        if self._undecided.place(pod_uid, view.allocated.get(pod_uid, ()) if view is not None else ()):
            self.on_room()

    def _count(self, pod: PodView, node: str, decision: Decision) -> None:
        """Count a bound pod on the GPUs in its annotations."""
        decided = Placement(node, decision.gpu_uuids, decision.memory_limit_mib, decision.thread_percentage)
        known = self.state.reservation(pod.uid)
        if known is not None and known.placement == decided and known.placement.thread_percentage is not None:
            self.set_cap(pod.uid, decision.thread_percentage)
            if resize(self.state, pod):
                self.on_room()
        else:
            request = bound_request(self.request_of(pod), pod, decision)
            if self.state.release(pod.uid) is not None:
                self.on_room()  # the decision was corrected
            # By the decision's time, as lists of the API have pods by name and a replica may have just started.
            self.state.reserve(pod.uid, decided, request, unix_seconds(decision.decided_at))
        self._probations.count(pod)
        gpunode = self._gpunodes.get(node)
        if pod.admitted or (gpunode is not None and pod.uid in gpunode.allocated):
            self.fence.allocated(pod.uid)
        else:
            self.fence.expect(pod.uid, node, fence_size(pod), decision.gpu_uuids, decision.memory_limit_mib)

    def _update_node(self, name: str) -> None:
        offered = self._nodes[name]
        self.state.update_node(
            NodeSpec(name, self._gpunodes[name].gpus, cpu_milli=offered.cpu_milli, memory_mib=offered.memory_mib)
        )


def fence_size(pod: PodView) -> int:
    """Return how many units kubelet allocates for a pod, which is all that kubelet knows of its size."""
    return pod.limit_percent
