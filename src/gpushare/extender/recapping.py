"""Gives pods that run no process the cap that suits their GPU's present tenants; their next process gets it."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from gpushare.core.api import PodView, Rejection, names
from gpushare.core.backoff import Backoff
from gpushare.core.placement import NewCap, cap_anew
from gpushare.extender.explain import CONTROLLER
from gpushare.extender.ledger import ShareLedger
from gpushare.extender.metrics import ExtenderMetrics
from gpushare.kube import PODS, Api, ApiError, Conflict, Invalid, NotFound, PatchType, record_event
from gpushare.runtime.moments import unix_seconds

_log = logging.getLogger(__name__)

SETTLED_SECONDS: Final = 30.0
"""Least time between two decisions on a pod's cap, the first at its binding: a container starts its first process
meanwhile, and what led to the decision may still be coming in."""
MOST_EXAMINED: Final = 50  # in a round of a second, 0.3 ms each on busy cores; others wait for the next report
MOST_JUDGED: Final = 4  # of them by the model: 6 ms each at 5,000 nodes with 8 GPUs, 13 ms of one in ten
MOST_CHANGED: Final = 2  # in a round: 120 writes in a minute over the cluster
BACKOFF: Final = Backoff(first_seconds=2.0, longest_seconds=300.0)


class CapChanger:
    """Writes caps that were chosen anew.

    Every replica may do so, as all decide alike on the same state: a write is refused if the decision is no longer
    the one that it was made from.
    """

    def __init__(
        self, api: Api, ledger: ShareLedger, metrics: ExtenderMetrics, clock: Callable[[], float]
    ) -> None:
        self._api = api
        self._ledger = ledger
        self._metrics = metrics
        self._clock = clock
        self._tried_at: dict[str, float] = {}
        self._failures = 0
        self._pauses_until = float("-inf")
        ledger.on_cap = self._note

    def _note(self, pod_uid: str) -> None:
        """Record that a pod's cap has just been changed, perhaps by another replica."""
        self._tried_at[pod_uid] = self._clock()

    async def round(self) -> None:
        """Change the caps of some pods that run no process; call this about every second."""
        now = self._clock()
        self._tried_at = {uid: at for uid, at in self._tried_at.items() if now - at < SETTLED_SECONDS}
        judged = changed = 0
        for _ in range(MOST_EXAMINED):
            if now < self._pauses_until or judged == MOST_JUDGED or changed == MOST_CHANGED:
                return
            idle = self._ledger.idle.take()
            if idle is None:
                return
            uid, node = idle
            pod = self._ledger.pods.get(uid)
            if pod is None or pod.node != node or not self._is_settled(pod):
                continue
            request = self._ledger.request_of(pod)
            if isinstance(request, Rejection):
                continue
            judged += request.known is not None
            await asyncio.sleep(0)  # kube-scheduler's questions come first
            found = cap_anew(request, self._ledger.context)
            if found is not None:
                changed += 1
                self._tried_at[uid] = now
                await self._write(pod, found)

    def _is_settled(self, pod: PodView) -> bool:
        """Return whether the pod stays, and its decision is older than `SETTLED_SECONDS`."""
        if pod.decision is None or pod.leaving or pod.finished or pod.uid in self._tried_at:
            return False
        age_seconds = self._ledger.context.now - unix_seconds(pod.decision.decided_at)
        return not 0 <= age_seconds < SETTLED_SECONDS

    async def _write(self, pod: PodView, cap: NewCap) -> None:
        """Write one cap; after an error that others would meet too, none is tried for a while."""
        try:
            await self._api.patch(
                PODS, pod.name, cap_patch(pod, cap.after), namespace=pod.namespace, patch_type=PatchType.JSON
            )
        except (NotFound, Conflict, Invalid) as error:
            _log.info("the cap of pod %s stays, as the pod or its decision has changed: %s", pod.key, error)
            return
        except ApiError as error:
            self._failures += 1
            wait_seconds = BACKOFF.seconds(self._failures)
            self._pauses_until = self._clock() + wait_seconds
            _log.warning(
                "the cap of pod %s was not changed, no other is tried for %.0f s: %s", pod.key, wait_seconds, error
            )
            return
        self._failures = 0
        self._ledger.set_cap(pod.uid, cap.after)
        self._metrics.caps_changed.inc()
        where = beside(cap.others)
        _log.info(
            "pod %s runs no process, %s: its next one gets %d%% of the threads instead of %d%%",
            pod.key,
            where,
            cap.after,
            cap.before,
        )
        await record_event(
            self._api,
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": pod.name,
                "namespace": pod.namespace,
                "uid": pod.uid,
            },
            reason="CapChanged",
            note=f"{where}, it runs no process now: its next one gets at most {cap.after}% of the GPU's threads, "
            f"instead of {cap.before}%",
            action="Placing",
            controller=CONTROLLER,
        )


def beside(others: int) -> str:
    """Return in words beside how many other pods a pod is on its GPU."""
    if not others:
        return "alone on its GPU"
    return "beside 1 other pod" if others == 1 else f"beside {others} other pods"


def cap_patch(pod: PodView, thread_percentage: int) -> list[dict[str, Any]]:
    """Return a JSON patch that changes the cap if the pod still has the decision of `pod`."""
    assert pod.decision is not None, "only decided pods have a cap"

    def at(name: str) -> str:
        return "/metadata/annotations/" + name.replace("~", "~0").replace("/", "~1")

    decided = pod.decision.to_annotations()
    expected = {at(name): decided[name] for name in (names.GPU, names.THREAD_PERCENTAGE)}
    return [
        *(
            {"op": "test", "path": path, "value": text}
            for path, text in {"/metadata/uid": pod.uid, **expected}.items()
        ),
        {"op": "replace", "path": at(names.THREAD_PERCENTAGE), "value": str(thread_percentage)},
    ]
