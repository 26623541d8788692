"""Reconciler: give each pod a GpuShare, keep each GpuShare's status. Core decides; this reads and writes."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final
from weakref import WeakValueDictionary

from gpushare.core import admission, control
from gpushare.core.admission import ShareKey
from gpushare.core.api import GpuShare, GpuShareStatus, OwnerReference, Phase, PodView, to_json
from gpushare.kube import (
    GPUSHARES,
    PODS,
    AlreadyExists,
    Api,
    ApiError,
    Invalid,
    NotFound,
    Retryable,
)
from gpushare.runtime.moments import unix_seconds
from gpushare.runtime.tasks import is_asked_to_end, without_end
from gpushare_operator.announcements import Announcements
from gpushare_operator.dropped import DroppedFields
from gpushare_operator.intake import Intake
from gpushare_operator.metrics import OperatorMetrics, WorkKind, WorkResult
from gpushare_operator.owners import OwnerGoneError, Owners
from gpushare_operator.profiling import profiling_of
from gpushare_operator.workqueue import WorkQueue
from gpushare_operator.world import ClusterView, Key, PodKey

_log = logging.getLogger(__name__)
CONTROLLER: Final = "gpushare.io/operator"
# An agent writes its GpuNode at this interval; changed figures alone do not justify more writes.
FIGURES_SECONDS: Final = 10.0
# Limit for such writes over all GpuShares, so that a large cluster's API server hardly notices them.
FIGURE_WRITES_PER_SECOND: Final = 20.0
# Pods arrive by the dozen; after this wait one write covers all changes.
_SETTLE_SECONDS: Final = 0.1
# Computing a status takes 45 us a pod (10,000 pods); so it takes a GpuShare with many at most a tenth of the time.
_REST_SECONDS_PER_POD: Final = 0.0005
_BACKOFF_LOOK_SECONDS: Final = 60.0
_AT_ONCE: Final = 16
_IDLE_SECONDS: Final = 30.0
_WARNINGS: Final = frozenset({"Isolated", "Retracted", "PromiseBroken", "SloMissed"})


@dataclass(frozen=True, slots=True)
class _Written:
    """The last status that this process wrote, and what the API server made of it.

    An API server with an older CRD drops what that does not know; this process goes on by what it wrote. A status
    that is neither was written by somebody else, by a restore or a benchmark, and counts instead.
    """

    at: float
    uid: str
    status: GpuShareStatus
    answered: GpuShareStatus


@dataclass(frozen=True, slots=True)
class _Pace:
    """The earliest times of the next look at a GpuShare: after any change, and after one of figures alone.

    The latter comes no earlier than figures alone may be written, as it would be in vain.
    """

    changed: float
    measured: float


class ShareReconciler:
    """Worker on the keys that the ClusterView has queued; `run` is its loop.

    Attributes:
        world: the known objects.
        intake: puts pods and GpuShares into it.
        beat: last time, by `clock`, at which there was room for more work; the liveness probe reads it.
    """

    def __init__(
        self,
        api: Api,
        settings: control.OperatorSettings,
        metrics: OperatorMetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        is_known: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """Know nothing.

        Args:
            is_known: returns whether all pods and GpuShares of a namespace are known. Until then they are left
                alone: a GpuShare would seem to have no pods, and a pod no GpuShare.
        """
        self.world = ClusterView(
            self._touch,
            lambda: now().timestamp(),
            monotonic=clock,
            measured=self._touch_measured,
            joined=settings.joined,
        )
        self.intake = Intake(self.world)
        self.beat = clock()
        self._api = api
        self._owners = Owners(api)
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._now = now
        self._queue: WorkQueue[Key] = WorkQueue()
        self._is_known = is_known
        self._left_alone: dict[str, set[Key]] = {}
        self._in_work: dict[Key, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self._written: dict[ShareKey, _Written] = {}
        self._paces: dict[Key, _Pace] = {}
        self._dropped = DroppedFields()
        self._announcements = Announcements(api, CONTROLLER, now)
        self._making: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        metrics.show(
            queued=lambda: len(self._queue) + len(self._in_work),
            events=lambda: len(self._announcements),
            pods=lambda: len(self.world.pods),
            phases=lambda: [share.status.phase for share in list(self.world.shares.values())],
        )

    async def run(self) -> None:
        """Work until cancelled: some keys concurrently, the next one as soon as one is done."""
        self.beat = self._clock()
        announcing = asyncio.create_task(without_end("writing events", self._announcements.run()), name="events")
        try:
            while not announcing.done():
                self._start()
                due = self._queue.next_due() if len(self._in_work) < _AT_ONCE else None
                wait = _IDLE_SECONDS if due is None else min(_IDLE_SECONDS, max(0.0, due - self._clock()))
                self._wake.clear()
                with suppress(TimeoutError):  # not wait_for: before Python 3.12 it can swallow a cancellation
                    async with asyncio.timeout(wait):
                        await self._wake.wait()
            await announcing
        finally:
            for task in self._in_work.values():
                task.cancel()
            announcing.cancel()
            await asyncio.gather(announcing, return_exceptions=True)

    async def step(self) -> int:
        """Do the work that is due now and wait for it; return how many keys that were."""
        started = self._start()
        await asyncio.gather(*self._in_work.values())
        await self._announcements.drain()
        return started

    def _start(self) -> int:
        """Start the work that is due while there is room; return how many keys were taken."""
        now, room = self._clock(), _AT_ONCE - len(self._in_work)
        if room:
            self.beat = now
        keys = self._queue.take(now, room)
        for key in keys:
            if not self._is_known(key.namespace):
                self._left_alone.setdefault(key.namespace, set()).add(key)
                continue
            if key in self._in_work:  # touched meanwhile: do it once more when this is done
                self._queue.add(key, now + _SETTLE_SECONDS)
                continue
            self._in_work[key] = asyncio.create_task(self._work(key))
            self._in_work[key].add_done_callback(partial(self._ended, key))
        return len(keys)

    def take_up(self) -> None:
        """Queue what was left alone in namespaces that are known by now."""
        for namespace in [each for each in self._left_alone if self._is_known(each)]:
            for key in self._left_alone.pop(namespace):
                self._touch(key)

    def _ended(self, key: Key, _: asyncio.Task[None]) -> None:
        del self._in_work[key]
        self._wake.set()

    def _touch(self, key: Key) -> None:
        pace = self._paces.get(key)
        self._queue.add(key, max(self._clock() + _SETTLE_SECONDS, pace.changed if pace is not None else 0.0))
        self._wake.set()

    def _touch_measured(self, key: ShareKey) -> None:
        pace = self._paces.get(key)
        self._queue.add(key, max(self._clock() + _SETTLE_SECONDS, pace.measured if pace is not None else 0.0))
        self._wake.set()

    async def _work(self, key: Key) -> None:
        kind, started = (WorkKind.POD if isinstance(key, PodKey) else WorkKind.SHARE), self._clock()
        try:
            await (self._adopt(key) if isinstance(key, PodKey) else self._update(key))
        except OwnerGoneError as error:
            result = WorkResult.SKIPPED
            self._queue.succeeded(key)
            _log.info("%s", error)
        except Invalid as error:  # a retry cannot help; the next change of the object is another attempt
            result = WorkResult.REFUSED
            self._queue.succeeded(key)
            _log.error("the API server refuses the object for %s: %s", key, error)
        except ApiError as error:
            result = WorkResult.FAILED
            after = error.retry_after_seconds if isinstance(error, Retryable) else 0.0
            wait = self._queue.failed(key, self._clock(), after)
            _log.warning("%s not reconciled, again in %.1f s: %s", key, wait, error)
        except (Exception, asyncio.CancelledError) as error:  # one object must not stop the work on all others
            if is_asked_to_end(error):
                raise
            result = WorkResult.FAILED
            wait = self._queue.failed(key, self._clock())
            _log.exception("%s not reconciled, again in %.1f s", key, wait)
        else:
            result = WorkResult.DONE
            self._queue.succeeded(key)
        self._metrics.reconciliations.labels(kind.value, result.value).inc()
        self._metrics.seconds.labels(kind.value).observe(self._clock() - started)

    async def _adopt(self, key: PodKey) -> None:
        """Ensure that a pod has a GpuShare: that of its top owner, created when missing."""
        pod = self.world.pods.get(key.uid)
        if pod is None or self.world.share_of_pod(key.uid) is not None:
            return
        try:
            raw = await self._api.get(PODS, pod.name, namespace=pod.namespace)
        except NotFound:
            return
        chain = await self._owners.chain(pod.namespace, raw)
        async with self._making.setdefault((pod.namespace, chain[-1].uid), asyncio.Lock()):
            existing = self.world.share_of_owners(pod.namespace, [owner.uid for owner in chain])
            if existing is None:
                await self._create(pod, chain)
            elif admission.missing_owners(existing, chain):
                await self._add_owners(existing, chain)

    async def _create(self, pod: PodView, chain: tuple[OwnerReference, ...]) -> None:
        name = admission.share_name(chain[-1])
        if ShareKey(pod.namespace, name) in self.world.shares:  # a user's own, or of a replaced owner
            name = admission.share_name(chain[-1], distinct=True)
        body = admission.new_share(pod.namespace, name, chain, pod.fraction or "")
        try:
            made = await self._api.create(GPUSHARES, body, namespace=pod.namespace)
            _log.info("made GpuShare %s/%s for %s %s", pod.namespace, name, chain[-1].kind, chain[-1].name)
        except AlreadyExists:  # the watch has not delivered it yet, or both names are taken by others' objects
            self.intake.share(await self._api.get(GPUSHARES, name, namespace=pod.namespace))
            if self.world.share_of_owners(pod.namespace, [owner.uid for owner in chain]) is None:
                name = admission.share_name(chain[-1], distinct=True)
                if ShareKey(pod.namespace, name) in self.world.shares:
                    raise
            self._touch(PodKey(pod.namespace, pod.uid))
            return
        self.intake.share(made)

    async def _add_owners(self, share: GpuShare, chain: tuple[OwnerReference, ...]) -> None:
        """Add a pod's new owners, such as a rollout's ReplicaSet, so that all components find the GpuShare."""
        missing = admission.missing_owners(share, chain)
        references = admission.references((*missing, *reversed(share.owners)))
        body = {"metadata": {"uid": share.uid, "ownerReferences": references}}
        try:
            changed = await self._api.patch(GPUSHARES, share.name, body, namespace=share.namespace)
        except NotFound:
            self._gone(share)
            return
        self._learn(share, changed)

    def _learn(self, share: GpuShare, changed: dict[str, Any]) -> None:
        """Record the answer to our write, unless the watch reported meanwhile that the object is gone."""
        known = self.world.shares.get(ShareKey(share.namespace, share.name))
        if known is not None and known.uid == share.uid:
            self.intake.share(changed)

    def _gone(self, share: GpuShare) -> None:
        """Forget an object that the API server no longer has, in case the watch missed its deletion."""
        known = self.world.shares.get(ShareKey(share.namespace, share.name))
        if known is not None and known.uid == share.uid:
            self.world.drop_share(share.namespace, share.name)

    async def _update(self, key: ShareKey) -> None:
        """Write a GpuShare's status when it changed; changed figures alone wait for the next interval.

        They wait unlooked at: a status takes time to compute, and each report touches those of all its pods.
        """
        share = self.world.shares.get(key)
        if share is None:
            self._written.pop(key, None)
            self._paces.pop(key, None)
            return
        written = self._written.get(key)
        is_ours = written is not None and written.uid == share.uid and written.answered == share.status
        before = written.status if written is not None and is_ours else share.status
        moment = self._now()
        now = moment.isoformat(timespec="seconds").replace("+00:00", "Z")
        pods, looked_at = self.world.pods_of(key), self._clock()
        pause = max(FIGURES_SECONDS, len(self.world.shares) / FIGURE_WRITES_PER_SECOND)
        due = written.at + pause if written is not None else 0.0
        rest = _REST_SECONDS_PER_POD * len(pods)
        self._paces[key] = _Pace(looked_at + rest, max(due, looked_at + FIGURES_SECONDS))
        profiling, ends = profiling_of(self.world, key, self._settings, moment.timestamp())
        standing = self.world.standing_of(key)
        ended = control.ended_lately(standing.neighbours_ended, moment.timestamp(), unix_seconds)
        replaced = control.lately_replaced(standing.replacements, moment.timestamp(), unix_seconds)
        status = control.status_of(
            replace(share, status=before),
            pods,
            self.world.pod_reports_of(key),
            self._settings,
            now,
            standing=replace(standing, neighbours_ended=ended, replacements=replaced),
            profiling=profiling,
            joined=self.world.joined,
        )
        if ends is not None:  # no event announces it
            self._queue.add(key, self._clock() + max(_SETTLE_SECONDS, ends - moment.timestamp()))
        if status.phase is Phase.RETRACTED:  # it ends with the back-off, which no event announces
            self._queue.add(key, self._clock() + _BACKOFF_LOOK_SECONDS)
        if status.neighbours_ended or status.replacements:  # they expire after a day, which no event announces
            self._queue.add(key, self._clock() + _BACKOFF_LOOK_SECONDS)
        if status == before:  # an API server with an older CRD may have kept less of it
            return
        if self._clock() < due and control.differs_only_in_figures(status, before):
            self._queue.add(key, due)
            return
        body = {"metadata": {"uid": share.uid}, "status": to_json(status, nulls=True)}
        try:
            changed = await self._api.patch(
                GPUSHARES, share.name, body, namespace=share.namespace, subresource="status"
            )
        except NotFound:
            self._gone(share)
            return
        self._metrics.status_writes.inc()
        self._dropped.look(body["status"], changed.get("status") or {})
        self._learn(share, changed)
        known = self.world.shares.get(key)
        self._written[key] = _Written(self._clock(), share.uid, status, status if known is None else known.status)
        for reason, note in control.transitions(before, status):
            await self._announcements.add(changed, reason, note, warning=reason in _WARNINGS)
