"""Put the API's pods and GpuShares into the ClusterView; the newest state of each object wins."""

from collections.abc import Hashable
from typing import Final

from cachetools import LRUCache

from gpushare.core.admission import ShareKey
from gpushare.core.api import GpuShare, PodView
from gpushare.kube import GPUSHARES, PODS, BadObjects, Json
from gpushare_operator.world import ClusterView

_MOST_REMEMBERED: Final = 20_000  # an older state arrives within moments of the newer one


class _Versions:
    """The newest known version of each object of one kind."""

    def __init__(self) -> None:
        self.newest = 0
        self._of: LRUCache[Hashable, int] = LRUCache(_MOST_REMEMBERED)

    def is_news(self, key: Hashable, version: int, *, deleted: bool) -> bool:
        """Return whether neither this nor a newer version of `key` is known; if so, remember this one.

        Each state comes twice or more: Kopf reports what its list had, and the watch repeats the answers to our
        writes. A deletion counts though its version is known, and so does an object without a version (0).
        """
        known = self._of.get(key, 0)
        if version < known or (version == known and version and not deleted):
            return False
        self._of[key] = version
        self.newest = max(self.newest, version)
        return True

    def drop(self, key: Hashable) -> None:
        """Forget an object's version, so that any state of it counts as new."""
        self._of.pop(key, None)

    def forget(self) -> None:
        """Forget every version."""
        self.newest = 0
        self._of.clear()


class Intake:
    """Accepts events, lists and the answers to our own writes, in any order.

    Kopf handles each object (by uid) in a task of its own, lists overlap with watches, and answers to writes come
    independently of both, so the last state to arrive need not be the newest. The resourceVersion decides. It
    is remembered for deleted objects too, so that a late event does not bring one back.

    Attributes:
        bad_objects: objects that could not be understood, by kind.
    """

    def __init__(self, world: ClusterView) -> None:
        self.bad_objects = {kind: BadObjects(kind) for kind in (GPUSHARES.kind, PODS.kind)}
        self._world = world
        self._versions = {kind: _Versions() for kind in self.bad_objects}

    def share(self, obj: Json, *, deleted: bool = False) -> None:
        """Record a GpuShare's state, or its deletion."""
        key, uid, bad = _share_key(obj), str(obj["metadata"].get("uid", "")), self.bad_objects[GPUSHARES.kind]
        if deleted:
            bad.clear(uid)
        if not self._versions[GPUSHARES.kind].is_news(key, _version(obj), deleted=deleted):
            return
        try:
            if deleted:
                self._world.drop_share(key.namespace, key.name)
            else:
                self._world.put_share(GpuShare.from_object(obj))
                bad.clear(uid)
        except Exception as error:  # noqa: BLE001 - one bad object must not hide the others
            bad.add(f"{key.namespace}/{key.name}", error, uid)

    def pod(self, obj: Json, *, deleted: bool = False) -> None:
        """Record a managed pod's state, or its deletion."""
        metadata, bad = obj["metadata"], self.bad_objects[PODS.kind]
        uid = metadata["uid"]
        if deleted:
            bad.clear(uid)
        if not self._versions[PODS.kind].is_news(uid, _version(obj), deleted=deleted):
            return
        try:
            if deleted:
                self._world.drop_pod(uid)
            else:
                self._world.put_pod(PodView.from_object(obj))
                bad.clear(uid)
        except Exception as error:  # noqa: BLE001 - one bad object must not hide the others
            bad.add(f"{metadata.get('namespace')}/{metadata.get('name')}", error, uid)

    def share_uids(self, namespace: str | None) -> set[str]:
        """Return the uids of the known GpuShares of a namespace, bad ones included; of all namespaces for None."""
        known = {share.uid for key, share in self._world.shares.items() if namespace in {None, key.namespace}}
        return known | self._bad_uids(GPUSHARES.kind, namespace)

    def pod_uids(self, namespace: str | None) -> set[str]:
        """Return the uids of the known pods of a namespace, bad ones included; of all namespaces for None."""
        known = {uid for uid, pod in self._world.pods.items() if namespace in {None, pod.namespace}}
        return known | self._bad_uids(PODS.kind, namespace)

    def _bad_uids(self, kind: str, namespace: str | None) -> set[str]:
        bad = self.bad_objects[kind].present
        return {uid for uid, key in bad.items() if namespace in {None, key.partition("/")[0]}}

    def forget_shares(self, uids: set[str], version: int | None) -> int:
        """Forget these GpuShares as deleted at `version`; return how many were still known.

        None: they may still exist, and a list may bring them back as they were.
        """
        for uid in uids:
            self.bad_objects[GPUSHARES.kind].clear(uid)
        gone = [key for key, share in self._world.shares.items() if share.uid in uids]
        for key in gone:
            self._end_of(GPUSHARES.kind, key, version)
            self._world.drop_share(key.namespace, key.name)
        return len(gone)

    def forget_pods(self, uids: set[str], version: int | None) -> int:
        """Forget these pods as `forget_shares` does GpuShares; return how many were still known."""
        for uid in uids:
            self.bad_objects[PODS.kind].clear(uid)
        gone = uids & self._world.pods.keys()
        for uid in gone:
            self._end_of(PODS.kind, uid, version)
            self._world.drop_pod(uid)
        return len(gone)

    def _end_of(self, kind: str, key: Hashable, version: int | None) -> None:
        if version is None:
            self._versions[kind].drop(key)
        else:
            self._versions[kind].is_news(key, version, deleted=True)

    def newest(self, kind: str) -> int:
        """Return the newest version known of any object of a kind."""
        return self._versions[kind].newest

    def start_over(self, kind: str) -> None:
        """Forget all versions of a kind, so that older ones count as new: etcd was restored from a backup."""
        self._versions[kind].forget()


def _share_key(obj: Json) -> ShareKey:
    metadata = obj["metadata"]
    return ShareKey(str(metadata.get("namespace", "")), str(metadata.get("name", "")))


def _version(obj: Json) -> int:
    """Return the resourceVersion: a number that grows with every write to a resource type (KEP-5504)."""
    return int(obj["metadata"].get("resourceVersion") or 0)
