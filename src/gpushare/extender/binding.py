"""The bind verb: check again, reserve, wait at the fence, write decision and binding in one transaction."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Final

from gpushare.core.api import PodView, Rejection
from gpushare.core.placement import Placement
from gpushare.extender.ledger import ShareLedger, Unseen, fence_size
from gpushare.extender.metrics import ExtenderMetrics
from gpushare.extender.wire import BindArgs
from gpushare.kube import PODS, Api, ApiError, Change, Conflict, NotFound, Retryable

_log = logging.getLogger(__name__)
FENCE_REASON: Final = "BindFence"
UNANSWERED_SECONDS: Final = 120.0
"""How long an unanswered bind request may still take effect: the API server's own time-out for a request is 60 s,
and etcd may finish what it has begun."""


class Binder:
    """Binds pods.

    Args:
        now: returns the time that is written to `decided-at`.
        clock: returns monotonic seconds.
        refusal: returns why no pod may be bound now; empty if pods may.
    """

    def __init__(
        self,
        api: Api,
        ledger: ShareLedger,
        metrics: ExtenderMetrics,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        *,
        clock: Callable[[], float] = time.monotonic,
        refusal: Callable[[], str] = lambda: "",
    ) -> None:
        self._api = api
        self._ledger = ledger
        self._metrics = metrics
        self._now = now
        self._clock = clock
        self._refusal = refusal

    async def bind(self, args: BindArgs) -> str:
        """Bind a pod to a node; return an empty string, or why it failed (kube-scheduler then retries)."""
        ledger = self._ledger
        if args.pod_uid in ledger.binding:
            return self._refused("AlreadyBinding", f"pod {args.key} is being bound already")
        ledger.binding.add(args.pod_uid)
        try:
            pod = await self._pod(args)
            if isinstance(pod, str):
                return self._refused("PodChanged", pod)
            if pod.node is not None:
                return self._is_bound(pod, args)
            if pod.uid not in ledger.unanswered and ledger.may_be_bound(pod.uid):
                ledger.not_bound(pod)
            return await self._bind(pod, args)
        finally:
            ledger.binding.discard(args.pod_uid)

    async def look_again(self, now: float) -> None:
        """Find out what became of bind requests that were never answered, and of bound pods that no watch showed.

        Call this about every second. A pod that is bound and gone while the watch is down is in no later list.

        Args:
            now: by this object's clock.
        """
        ledger = self._ledger
        for uid, asked in (*ledger.unanswered.items(), *ledger.ahead.items()):
            if now - asked.at <= UNANSWERED_SECONDS or uid in ledger.binding:
                continue
            seen: PodView | None = None
            try:
                seen = PodView.from_object(await self._api.get(PODS, asked.name, namespace=asked.namespace))
            except NotFound:
                pass
            except ApiError as error:
                _log.warning("pod %s/%s cannot be read: %s", asked.namespace, asked.name, error)
                if isinstance(error, Retryable):
                    return  # others would take as long, and the caller has other work
                continue
            if uid in ledger.binding:
                continue
            if ledger.unanswered.get(uid) is asked:
                if seen is not None and seen.uid == uid and seen.node is not None:
                    ledger.bound(seen, now)
                else:
                    ledger.release(uid)
            elif ledger.ahead.get(uid) is asked:
                if seen is not None and seen.uid == uid and seen.node is None:
                    ledger.not_bound(seen)
                elif seen is not None and seen.uid == uid:
                    ledger.bound(seen, now)  # and ask again as much later
                else:
                    ledger.pod_changed(Change.DELETED, f"{asked.namespace}/{asked.name}", ledger.pods[uid])

    async def _bind(self, pod: PodView, args: BindArgs) -> str:
        ledger = self._ledger
        is_first = pod.uid not in ledger.unanswered
        placement = self._choose(pod, args.node) if is_first else ledger.state.reservations[pod.uid].placement
        if isinstance(placement, Rejection):
            self._metrics.rejections.labels(reason=placement.reason.value).inc()
            return f"node {args.node}: {placement.detail}"
        if placement.node != args.node:
            earlier = f"a request to bind pod {args.key} to {placement.node} was not answered and may still come"
            return self._refused("Unreachable", earlier)
        awaited = (pod.uid, args.node, fence_size(pod), placement.gpu_uuids, placement.memory_mib)
        try:
            with self._metrics.fence_wait.time():
                await ledger.fence.enter(*awaited)
            if ledger.state.reservation(pod.uid) is None:
                return self._refused("PodChanged", f"pod {pod.key} ended while it waited at the fence")
            if missing := self._refusal() or ledger.lost_place(pod.uid):
                return self._refused("PodChanged", f"pod {pod.key} is not bound now: {missing}")
            moment = self._now().isoformat(timespec="milliseconds").replace("+00:00", "Z")
            decision = ledger.decision(pod.uid, moment)
            ledger.unanswered[pod.uid] = Unseen(pod.namespace, pod.name, self._clock())
            await self._api.bind(
                pod.name, args.node, namespace=pod.namespace, uid=pod.uid, annotations=decision.to_annotations()
            )
            bound = replace(pod, node=args.node, decision=decision, rules=None)
            ledger.bound(bound, self._clock())
        except TimeoutError:
            before = ", ".join(ledger.fence.blockers(*awaited))
            return self._refused(
                FENCE_REASON, f"node {args.node}: kubelet has not allocated an earlier pod of this size ({before})"
            )
        except (Retryable, Conflict) as error:
            return await self._outcome(pod, args, error, is_first=is_first)
        except ApiError as error:
            if is_first:
                ledger.unanswered.pop(pod.uid, None)
            return self._refused(error.reason or type(error).__name__, str(error))
        finally:
            if not ledger.may_be_bound(pod.uid):
                ledger.release(pod.uid)
        gpus = ",".join(placement.gpu_uuids)
        _log.info("bound %s to %s on %s at %d%%", pod.key, args.node, gpus, decision.thread_percentage)
        return ""

    def _choose(self, pod: PodView, node: str) -> Placement | Rejection:
        """Choose a pod's GPUs and reserve them."""
        request = self._ledger.request_of(pod)
        if isinstance(request, Rejection):
            return request
        chosen = self._ledger.choose(pod, request, node)
        if not isinstance(chosen, Rejection):
            self._ledger.reserve(request, chosen)
        return chosen

    async def _outcome(self, pod: PodView, args: BindArgs, error: Retryable | Conflict, *, is_first: bool) -> str:
        """Return the answer after a failed request; the pod may be bound by it, by an earlier one, or later.

        The reservation is kept, unless the API server said that it did not execute the pod's only request.
        """
        ledger = self._ledger
        reason = "Unreachable" if isinstance(error, Retryable) else error.reason or type(error).__name__
        try:
            seen = PodView.from_object(await self._api.get(PODS, pod.name, namespace=pod.namespace))
        except NotFound:
            ledger.release(pod.uid)
            return self._refused("PodChanged", f"pod {pod.key} is gone")
        except ApiError as unknown:
            return self._refused(reason, f"{error}; and then: {unknown}")
        if seen.uid != pod.uid:
            ledger.release(pod.uid)
            return self._refused("PodChanged", f"pod {pod.key} was replaced by another of its name")
        if seen.node is not None:
            return self._is_bound(seen, args)
        if is_first and (isinstance(error, Conflict) or error.status == HTTPStatus.TOO_MANY_REQUESTS):
            ledger.unanswered.pop(pod.uid, None)
        return self._refused(reason, str(error))

    def _is_bound(self, pod: PodView, args: BindArgs) -> str:
        """Return the answer for a pod that the API server has already bound, and count it where it is."""
        self._ledger.bound(pod, self._clock())
        if pod.node == args.node and pod.decision is not None:
            return ""
        return self._refused("PodChanged", f"pod {args.key} is bound to {pod.node} already")

    async def _pod(self, args: BindArgs) -> PodView | str:
        """Return the pod from the watch, or from the API server if the watch may be behind our own requests."""
        pod = self._ledger.pods.get(args.pod_uid)
        if pod is not None and not self._ledger.may_be_bound(args.pod_uid):
            return pod
        try:
            pod = PodView.from_object(await self._api.get(PODS, args.pod_name, namespace=args.pod_namespace))
        except ApiError as error:
            return f"pod {args.key} cannot be read: {error}"
        if args.pod_uid and pod.uid != args.pod_uid:
            return f"pod {args.key} was replaced by another of its name"
        return pod

    def _refused(self, reason: str, sentence: str) -> str:
        self._metrics.bind_failures.labels(reason=reason).inc()
        _log.warning("not bound: %s", sentence)
        return sentence
