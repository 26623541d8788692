"""Find a pod's owners through the API, up through ReplicaSets and Jobs; answers are cached."""

import logging
from collections.abc import Mapping
from typing import Any, Final

from cachetools import LRUCache

from gpushare.core import admission
from gpushare.core.api import OwnerReference
from gpushare.kube import Api, Forbidden, NotFound, Resource

_log = logging.getLogger(__name__)
_MOST_REMEMBERED: Final = 20_000
# A Deployment's pod has two, a CronJob's too. Whoever may write Jobs may let them own themselves or each other.
_MOST_OWNERS: Final = 8
_KINDS: Final = {
    "ReplicaSet": Resource("apps", "v1", "replicasets", "ReplicaSet", namespaced=True),
    "Job": Resource("batch", "v1", "jobs", "Job", namespaced=True),
}


class OwnerGoneError(Exception):
    """The pod's owner no longer exists, so the pod is about to be garbage-collected."""


class Owners:
    """Lookup of the controllers of ReplicaSets and Jobs."""

    def __init__(self, api: Api, most_remembered: int = _MOST_REMEMBERED) -> None:
        self._api = api
        self._above: LRUCache[str, OwnerReference | None] = LRUCache(most_remembered)
        self._forbidden: set[str] = set()

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
        above = self._above[owner.uid] = await self._ask(namespace, owner)
        return above

    async def _ask(self, namespace: str, owner: OwnerReference) -> OwnerReference | None:
        try:
            obj = await self._api.get(_KINDS[owner.kind], owner.name, namespace=namespace)
        except NotFound as error:
            raise OwnerGoneError(f"{owner.kind} {namespace}/{owner.name} is gone") from error
        except Forbidden as error:
            if owner.kind not in self._forbidden:
                _log.error(
                    "may not read owners of kind %s, so each counts as the top owner: %s", owner.kind, error
                )
            self._forbidden.add(owner.kind)
            return None
        if obj["metadata"]["uid"] != owner.uid:
            raise OwnerGoneError(f"{owner.kind} {namespace}/{owner.name} is another one by now")
        return admission.controller_of(obj)
