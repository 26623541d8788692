"""bind: check again, reserve, wait at the fence, write decision and binding in one transaction."""

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from gpushare.core.api import PodView, Rejection
from gpushare.extender.ledger import ShareLedger, fence_size
from gpushare.extender.metrics import ExtenderMetrics
from gpushare.extender.wire import BindArgs
from gpushare.kube import PODS, Api, ApiError, NotFound, Retryable

_log = logging.getLogger(__name__)
FENCE_REASON: Final = "BindFence"


class Binder:
    """Binds pods. `now` returns the time written to `decided-at`."""

    def __init__(
        self,
        api: Api,
        ledger: ShareLedger,
        metrics: ExtenderMetrics,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._api = api
        self._ledger = ledger
        self._metrics = metrics
        self._now = now

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
                if pod.node == args.node and pod.decision is not None:
                    return ""
                return self._refused("PodChanged", f"pod {args.key} is bound to {pod.node} already")
            return await self._bind(pod, args)
        finally:
            ledger.binding.discard(args.pod_uid)

    async def _bind(self, pod: PodView, args: BindArgs) -> str:
        ledger = self._ledger
        ledger.release(pod.uid)  # left over from a bind whose outcome is unknown
        request = ledger.request_of(pod)
        chosen = request if isinstance(request, Rejection) else ledger.choose(pod, request, args.node)
        if isinstance(request, Rejection) or isinstance(chosen, Rejection):
            assert isinstance(chosen, Rejection), "a refused request has no placement"
            self._metrics.rejections.labels(reason=chosen.reason.value).inc()
            return f"node {args.node}: {chosen.detail}"
        ledger.reserve(request, chosen)
        keep = False
        try:
            with self._metrics.fence_wait.time():
                await ledger.fence.enter(pod.uid, args.node, fence_size(pod), chosen.gpu_uuids)
            if ledger.state.reservation(pod.uid) is None:
                return self._refused("PodChanged", f"pod {pod.key} ended while it waited at the fence")
            moment = self._now().isoformat(timespec="milliseconds").replace("+00:00", "Z")
            decision = ledger.decision(pod.uid, moment)
            await self._api.bind(
                pod.name, args.node, namespace=pod.namespace, uid=pod.uid, annotations=decision.to_annotations()
            )
            keep = True
        except TimeoutError:
            before = ", ".join(ledger.fence.blockers(pod.uid, args.node, fence_size(pod), chosen.gpu_uuids))
            return self._refused(
                FENCE_REASON, f"node {args.node}: kubelet has not allocated an earlier pod of this size ({before})"
            )
        except Retryable as error:
            keep, problem = await self._outcome(pod, args, chosen.gpu_uuids, error)
            return problem
        except ApiError as error:
            return self._refused(error.reason or type(error).__name__, str(error))
        finally:
            if not keep:
                ledger.release(pod.uid)
        gpus = ",".join(chosen.gpu_uuids)
        _log.info("bound %s to %s on %s at %d%%", pod.key, args.node, gpus, decision.thread_percentage)
        return ""

    async def _outcome(
        self, pod: PodView, args: BindArgs, gpu_uuids: tuple[str, ...], error: Retryable
    ) -> tuple[bool, str]:
        """Return whether to keep the reservation, and the answer, after a request whose outcome is unknown."""
        try:
            seen = PodView.from_object(await self._api.get(PODS, pod.name, namespace=pod.namespace))
        except NotFound:
            return False, self._refused("PodChanged", f"pod {pod.key} is gone")
        except ApiError as unknown:
            # Kept until a watch shows the pod bound or gone, or kube-scheduler asks about it again.
            return True, self._refused("Unreachable", f"{error}; and then: {unknown}")
        if seen.uid == pod.uid and seen.node == args.node and seen.decision is not None:
            return seen.decision.gpu_uuids == gpu_uuids, ""
        return False, self._refused("Unreachable", str(error))

    async def _pod(self, args: BindArgs) -> PodView | str:
        """Return the pod from the watch, else from the API server."""
        pod = self._ledger.pods.get(args.pod_uid)
        if pod is not None:
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
