"""Which pods that should leave their GPUs are the last tries of their Jobs: eviction would end those for good."""

import logging
import math
from collections.abc import Callable, Iterable
from typing import Final

from gpushare.core.api import PodView
from gpushare.core.control import fails_with_next
from gpushare.kube import PODS, Api, ApiError, Forbidden, NotFound
from gpushare_operator.owners import JOBS

_log = logging.getLogger(__name__)
AGAIN_SECONDS: Final = 30.0  # a Job may lose its last retry meanwhile
RETRY_SECONDS: Final = 5.0  # after a Job could not be read
COUNTED_SECONDS: Final = 10.0  # after which a Job's status counts a pod that was evicted
_INDEX_FAILURES: Final = "batch.kubernetes.io/job-index-failure-count"
_MOST_DIGITS: Final = 10  # of what fits into the 32 bits that it has


class LastTries:
    """The API server's last answers about the Jobs of the pods that are looked at.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, api: Api, clock: Callable[[], float]) -> None:
        self._api, self._clock = api, clock
        self._known: dict[str, bool] = {}  # by pod uid, whether its Job would fail with it
        self._tried_at: dict[str, float] = {}
        self._evicted_at: dict[tuple[str, str], float] = {}  # by namespace and name of its Job, when a pod was

    async def look(self, pods: Iterable[PodView]) -> None:
        """Read the Jobs of these pods, those that were read lately excepted; forget all other pods.

        What was known of a Job is forgotten once a pod of it is evicted.
        """
        now = self._clock()
        self._evicted_at = {job: at for job, at in self._evicted_at.items() if now - at < COUNTED_SECONDS}
        of_jobs = {pod.uid: pod for pod in pods if _is_of_job(pod) and _job_of(pod) not in self._evicted_at}
        self._known = {uid: known for uid, known in self._known.items() if uid in of_jobs}
        self._tried_at = {uid: self._tried_at.get(uid, -math.inf) for uid in of_jobs}
        for uid in sorted(of_jobs, key=self._tried_at.__getitem__):
            pause = AGAIN_SECONDS if uid in self._known else RETRY_SECONDS
            if self._clock() - self._tried_at[uid] < pause:
                continue
            self._tried_at[uid] = self._clock()
            try:
                self._known[uid] = await self._would_fail(of_jobs[uid])
            except ApiError as error:
                _log.warning("the Job of pod %s is not read, tried again: %s", of_jobs[uid].key, error)
                return  # others may take as long; they have their turn before this one

    def evicted(self, pod: PodView) -> None:
        """Record that a pod has just been evicted: to its Job that is another failure."""
        if _is_of_job(pod):
            self._evicted_at[_job_of(pod)] = self._clock()

    def is_known(self, pod: PodView) -> bool:
        """Return whether it is known what becomes of a pod's Job; of a pod of no Job it always is."""
        return pod.uid in self._known or not _is_of_job(pod)

    def has(self, pod_uid: str) -> bool:
        """Return whether a pod's Job would fail with it, as far as that is known."""
        return self._known.get(pod_uid, False)

    async def _would_fail(self, pod: PodView) -> bool:
        assert pod.controller is not None
        try:
            job = await self._api.get(JOBS, pod.controller[1], namespace=pod.namespace)
        except (NotFound, Forbidden):  # another API's Job, or a role of an older chart
            return False
        if job["metadata"]["uid"] not in pod.owner_uids:
            return False
        has_limit_per_index = (job.get("spec") or {}).get("backoffLimitPerIndex") is not None
        return fails_with_next(job, await self._index_failures(pod) if has_limit_per_index else 0)

    async def _index_failures(self, pod: PodView) -> int:
        """Return how often the pod's index of its Job has failed, which only the pod says."""
        try:
            present = await self._api.get(PODS, pod.name, namespace=pod.namespace)
        except NotFound:
            return 0
        metadata = present["metadata"]
        count = (metadata.get("annotations") or {}).get(_INDEX_FAILURES) or ""
        is_number = count.isascii() and count.isdigit() and len(count) <= _MOST_DIGITS
        return int(count) if metadata["uid"] == pod.uid and is_number else 0  # as the Job's controller reads it


def _job_of(pod: PodView) -> tuple[str, str]:
    assert pod.controller is not None
    return pod.namespace, pod.controller[1]


def _is_of_job(pod: PodView) -> bool:
    return pod.controller is not None and pod.controller[0] == JOBS.kind
