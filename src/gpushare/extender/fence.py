"""The bind fence: equal pods are bound to a node one by one, as Allocate names no pod (docs/design.md 2.2).

Two pods of the same size that are bound to one node but decided for different GPUs could swap GPUs, because
kubelet tells the device plugin only how many units it wants. So the second is bound only after the first has been
allocated. Likewise where their memory limits differ, else neither container could be told its own (docs/adr/0250).
Pods of the same limit for the same GPU, of other sizes, or on other nodes do not wait. Those that wait go in the
order in which they came. Others that need not wait may pass them for a while only: a stream of these, each bound
before the one before it is allocated, would keep the fence closed.
"""

import asyncio
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

FENCE_TIMEOUT_SECONDS: Final = 10.0  # kubelet usually allocates within a few hundred ms (docs/design.md 2.2)
ANNOUNCED_SECONDS: Final = 1.0  # kube-scheduler binds some ms after filter, or not at all
PASSING_SECONDS: Final = 3.0  # others pass a waiter for so long: more than a burst takes, less than its time-out


@dataclass(frozen=True, slots=True)
class _Announced:
    """A pod for which filter returned a single node; kube-scheduler's bind has not come yet."""

    node: str
    size: int
    until: float


@dataclass(frozen=True, slots=True)
class _PendingAllocation:
    """A pod that is bound or being bound, and not known to be allocated."""

    node: str
    size: int
    gpu_uuids: tuple[str, ...]
    memory_mib: int

    def blocks(self, size: int, gpu_uuids: Sequence[str], memory_mib: int) -> bool:
        """Return whether an Allocate call for another such pod of its node could be taken for its own."""
        is_alike = set(self.gpu_uuids) == set(gpu_uuids) and self.memory_mib == memory_mib
        return self.size == size and not is_alike


@dataclass(slots=True)
class _PendingEntry:
    """A pod at the fence.

    Attributes:
        since: when it came, by the event loop's clock.
    """

    allocation: _PendingAllocation
    since: float
    woken: asyncio.Future[None]


class Fence:
    """The pods that are bound and not yet allocated, by node."""

    def __init__(self, timeout_seconds: float = FENCE_TIMEOUT_SECONDS) -> None:
        self.timeout_seconds = timeout_seconds
        self._expected: dict[str, _PendingAllocation] = {}
        self._by_node: dict[str, set[str]] = {}
        self._announced: dict[str, _Announced] = {}
        self._allocated: set[str] = set()
        self._waiters: dict[str, dict[str, _PendingEntry]] = {}
        """By node and pod uid, in the order in which they came."""

    def announce(self, pod_uid: str, node: str, size: int, now: float) -> None:
        """Record that kube-scheduler will soon bind the pod to the node, so that others can avoid it."""
        while self._announced:  # in the order in which they expire
            first = next(iter(self._announced))
            if self._announced[first].until > now:
                break
            del self._announced[first]
        self._announced.pop(pod_uid, None)
        self._announced[pod_uid] = _Announced(node, size, now + ANNOUNCED_SECONDS)

    def announced(self, pod_uid: str, size: int, now: float) -> set[str]:
        """Return the nodes that other pods of this size will soon be bound to."""
        return {
            one.node
            for uid, one in self._announced.items()
            if one.size == size and one.until > now and uid != pod_uid
        }

    def expect(self, pod_uid: str, node: str, size: int, gpu_uuids: Sequence[str], memory_mib: int = 0) -> None:
        """Record that kubelet will allocate a bound pod, unless it has allocated it already.

        Args:
            memory_mib: its memory limit.
        """
        self._announced.pop(pod_uid, None)
        if pod_uid in self._allocated:
            return
        known = self._expected.get(pod_uid)
        if known is not None and known.node != node:
            self._remove(pod_uid)
        self._expected[pod_uid] = _PendingAllocation(node, size, tuple(gpu_uuids), memory_mib)
        self._by_node.setdefault(node, set()).add(pod_uid)

    def allocated(self, pod_uid: str) -> None:
        """Record that kubelet has allocated a pod's devices; this is final until `gone` is called for it."""
        self._allocated.add(pod_uid)
        self._remove(pod_uid)

    @property
    def settled(self) -> AbstractSet[str]:
        """Return the pods known to be allocated, each until it is gone."""
        return self._allocated

    def gone(self, pod_uid: str) -> None:
        """Forget a pod that has ended, or was not bound after all."""
        self._announced.pop(pod_uid, None)
        self._allocated.discard(pod_uid)
        self._remove(pod_uid)

    def blockers(
        self, pod_uid: str, node: str, size: int, gpu_uuids: Sequence[str], memory_mib: int = 0
    ) -> list[str]:
        """Return the uids of the pods that must be allocated before this one may be bound."""
        return sorted(
            uid
            for uid, other in (*self._expected_on(node), *self._long_before(pod_uid, node))
            if uid != pod_uid and other.blocks(size, gpu_uuids, memory_mib)
        )

    def _expected_on(self, node: str) -> Iterator[tuple[str, _PendingAllocation]]:
        return ((uid, self._expected[uid]) for uid in self._by_node.get(node, ()))

    def _long_before(self, pod_uid: str, node: str) -> Iterator[tuple[str, _PendingAllocation]]:
        """Yield the pods that came to the fence before this one and may be passed no longer.

        None for a pod that is bound anew because its first request was not answered: they may wait for it.
        """
        for uid, waiter in self._waiters.get(node, {}).items() if pod_uid not in self._expected else ():
            if uid == pod_uid or asyncio.get_running_loop().time() - waiter.since < PASSING_SECONDS:
                break
            yield uid, waiter.allocation

    def busy(self, size: int) -> dict[str, tuple[str, ...] | None]:
        """Return the nodes where pods of this size await allocation, with their GPUs; None if the GPUs differ."""
        found: dict[str, tuple[str, ...] | None] = {}
        for expected in self._expected.values():
            if expected.size == size:
                before = found.setdefault(expected.node, expected.gpu_uuids)
                if before != expected.gpu_uuids:
                    found[expected.node] = None
        return found

    async def enter(
        self, pod_uid: str, node: str, size: int, gpu_uuids: Sequence[str], memory_mib: int = 0
    ) -> None:
        """Wait until no pod blocks this one, then expect its own allocation.

        Raises:
            TimeoutError: pods before it were not allocated in time.
        """
        loop, wanted = asyncio.get_running_loop(), _PendingAllocation(node, size, tuple(gpu_uuids), memory_mib)
        came_at = loop.time()
        try:
            async with asyncio.timeout(self.timeout_seconds):
                while self.blockers(pod_uid, node, size, gpu_uuids, memory_mib):
                    waiter = _PendingEntry(wanted, came_at, loop.create_future())
                    self._waiters.setdefault(node, {})[pod_uid] = waiter  # it keeps its place
                    await waiter.woken
                self.expect(pod_uid, node, size, gpu_uuids, memory_mib)
        finally:
            if self._waiters.get(node, {}).pop(pod_uid, None) is not None:
                self._wake(node)  # those that did not pass it

    def _remove(self, pod_uid: str) -> None:
        known = self._expected.pop(pod_uid, None)
        if known is None:
            return
        uids = self._by_node[known.node]
        uids.discard(pod_uid)
        if not uids:
            del self._by_node[known.node]
        self._wake(known.node)

    def _wake(self, node: str) -> None:
        """Let those that wait on a node look again, in the order in which they came."""
        waiters = self._waiters.get(node, {})
        for waiter in waiters.values():
            if not waiter.woken.done():
                waiter.woken.set_result(None)
        if not waiters:
            self._waiters.pop(node, None)
