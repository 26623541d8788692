"""Find a pod's owners through the API, up through ReplicaSets and Jobs; answers are cached, refusals briefly."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from cachetools import LRUCache

from gpushare.core import admission
from gpushare.core.api import OwnerReference
from gpushare.kube import Api, Forbidden, NotFound, Resource

_log = logging.getLogger(__name__)
_MOST_REMEMBERED: Final = 20_000
FORBIDDEN_SECONDS: Final = 60.0
"""How long a kind that may not be read is not asked for: a role may be mended, and each new pod would ask."""
# A Deployment's pod has two, a CronJob's too. Whoever may write Jobs may let them own themselves or each other.
_MOST_OWNERS: Final = 8
JOBS: Final = Resource("batch", "v1", "jobs", "Job", namespaced=True)
_KINDS: Final = {
    "ReplicaSet": Resource("apps", "v1", "replicasets", "ReplicaSet", namespaced=True),
    JOBS.kind: JOBS,
}


class OwnerGoneError(Exception):
    """The pod's owner no longer exists, so the pod is about to be garbage-collected."""


class Owners:
    """Lookup of the controllers of ReplicaSets and Jobs.

    Args:
        clock: monotonic seconds.
    """

    def __init__(
        self, api: Api, most_remembered: int = _MOST_REMEMBERED, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._api, self._clock = api, clock
        self._above: LRUCache[str, OwnerReference | None] = LRUCache(most_remembered)
        self._forbidden_at: dict[str, float] = {}
        """By kind, when it last could not be read."""

    async def chain(self, namespace: str, pod: Mapping[str, Any]) -> tuple[OwnerReference, ...]:
        """Return the pod's owners, from its controller to the object that a user created; a bare pod owns itself.

        Objects that own each other in a circle count once each, and no more than eight owners count.

        Raises:
            OwnerGoneError: an owner no longer exists.
            ApiError: the API server cannot be asked now.
        """
        owner = admission.controller_of(pod)
        if owner is None:
            return (admission.pod_as_owner(pod),)
        found = {owner.uid: owner}
        while len(found) < _MOST_OWNERS and admission.may_have_owner(owner):
            above = await self._controller(namespace, owner)
            if above is None or above.uid in found:
                break
            found[above.uid] = owner = above
        return tuple(found.values())

    async def _controller(self, namespace: str, owner: OwnerReference) -> OwnerReference | None:
        if owner.uid in self._above:
            return self._above[owner.uid]
        forbidden_at = self._forbidden_at.get(owner.kind)
        if forbidden_at is not None and self._clock() - forbidden_at < FORBIDDEN_SECONDS:
            return None
        try:
            above = await self._ask(namespace, owner)
        except Forbidden as error:
            if forbidden_at is None:
                _log.error(
                    "may not read owners of kind %s, so each counts as the top owner: %s", owner.kind, error
                )
            self._forbidden_at[owner.kind] = self._clock()
            return None
        if self._forbidden_at.pop(owner.kind, None) is not None:
            _log.info("owners of kind %s can be read again", owner.kind)
        self._above[owner.uid] = above
        return above

    async def _ask(self, namespace: str, owner: OwnerReference) -> OwnerReference | None:
        try:
            obj = await self._api.get(_KINDS[owner.kind], owner.name, namespace=namespace)
        except NotFound as error:
            raise OwnerGoneError(f"{owner.kind} {namespace}/{owner.name} is gone") from error
        if obj["metadata"]["uid"] != owner.uid:
            raise OwnerGoneError(f"{owner.kind} {namespace}/{owner.name} is another one by now")
        return admission.controller_of(obj)
