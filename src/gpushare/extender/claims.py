"""Which node a GPU belongs to if GpuNodes contradict each other.

A GpuNode is written by its node's agent, and an agent may be compromised. Wrong data about its own node harms only
that node. But if it lists the UUID of another node's GPU, that GPU would be on two nodes and usable on neither. So
a GPU belongs to the node that listed it first, until that node or its GpuNode is gone, or it has neither listed
the GPU nor had a pod on it for `KEPT_SECONDS` (ADR 0208).
"""

import bisect
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Final

from gpushare.core.placement import in_order_of_claim
from gpushare.extender.reduce import GpuNodeView

KEPT_SECONDS: Final = 600.0
"""How long a GPU stays its owner's that the owner does not list; judged: a reset of the GPU takes less."""
LOOK_SECONDS: Final = 60.0  # a look at kept GPUs goes through every pod
MOST_KEPT: Final = 128  # per node, as many GPUs as a GpuNode can list; an agent may list others each time


@dataclass(frozen=True, slots=True)
class ContestedGpu:
    """A GPU that a node lists although it belongs to another node."""

    uuid: str
    owner: str
    node: str

    def __str__(self) -> str:
        return (
            f"GPU {self.uuid} belongs to node {self.owner}, which had it first; "
            f"what node {self.node} says of it is ignored"
        )


class GpuClaims:
    """Claims by GPU, the owner's first.

    Until `settle` is called at the end of the first lists, claims are ordered by the creation of the GpuNodes,
    because it is not known which of them listed a GPU first.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._views: dict[str, GpuNodeView] = {}
        self._claims: dict[str, list[str]] = {}
        self._kept: dict[str, dict[str, float]] = {}
        """By owner, the GPUs that it does not list now, and when it last listed them or had a pod on them."""
        self._look_at = 0.0
        self._settled = False
        self._contested: tuple[ContestedGpu, ...] | None = ()  # None: to be collected from all claims

    def settle(self, decided: Mapping[str, AbstractSet[str]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Put the nodes with pods on a GPU first among its claims, and from now on each further claim last.

        Args:
            decided: by GPU, the nodes with a pod whose decision names it.

        Returns:
            the nodes that lost a GPU by it, and those that got one.
        """
        self._settled = True
        self._contested = None
        losers: dict[str, None] = {}
        gainers: dict[str, None] = {}
        for uuid, nodes in decided.items():
            with_pods = nodes & self._views.keys()
            claims = self._claims.get(uuid, [])
            if not with_pods or (len(claims) == 1 and with_pods.issubset(claims)):
                continue
            for node in with_pods.difference(claims):  # not listed at the moment
                self._kept.setdefault(node, {})[uuid] = self._clock()
            claimants = with_pods.union(claims)
            created_at = {node: self._views[node].created_at for node in claimants}
            owner, *others = in_order_of_claim(claimants, with_pods, created_at)
            self._claims[uuid] = [owner, *(node for node in others if not self._let_go(node, uuid))]
            if claims and claims[0] != owner:
                losers[claims[0]] = gainers[owner] = None
        return tuple(losers), tuple(gainers)

    def put(self, view: GpuNodeView) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Record a node's GPUs; return the other nodes that lost a GPU by it, and those that got one."""
        before = self._views.get(view.name)
        self._views[view.name] = view
        if before is not None and before.gpus == view.gpus:
            return (), ()
        self._contested = None
        listed = {gpu.uuid for gpu in view.gpus}
        unlisted = {gpu.uuid for gpu in before.gpus} - listed if before else set()
        gainers = self._withdraw(view.name, [uuid for uuid in unlisted if not self._keep(view.name, uuid)])
        losers: dict[str, None] = {}
        for uuid in listed:
            self._let_go(view.name, uuid)
            claims = self._claims.setdefault(uuid, [])
            if view.name in claims:
                continue
            owner = claims[0] if claims else None
            if self._settled:
                claims.append(view.name)
            else:
                bisect.insort(claims, view.name, key=self._age)
            if owner is not None and claims[0] != owner:
                losers[owner] = None
        return tuple(losers), gainers

    def drop(self, node: str) -> tuple[str, ...]:
        """Forget a node that is gone; return the nodes that got a GPU by it."""
        self._contested = None
        view = self._views.pop(node, None)
        kept = self._kept.pop(node, {})
        return self._withdraw(node, {gpu.uuid for gpu in view.gpus} | kept.keys()) if view is not None else ()

    def end_kept(self, decided: Callable[[AbstractSet[str]], Mapping[str, AbstractSet[str]]]) -> tuple[str, ...]:
        """End claims to GPUs that were kept for long enough; return the nodes that got a GPU by it.

        Args:
            decided: returns, by GPU, which of some nodes have a pod whose decision names it; called once a minute
                at most, and only if a GPU is kept.
        """
        now = self._clock()
        if not self._kept or now < self._look_at:
            return ()
        self._look_at = now + LOOK_SECONDS
        nodes_of = decided(self._kept.keys())
        gainers: dict[str, None] = {}
        for node, kept in tuple(self._kept.items()):
            for uuid, since in tuple(kept.items()):
                if node in nodes_of.get(uuid, ()):
                    kept[uuid] = now
                elif now - since >= KEPT_SECONDS:
                    self._let_go(node, uuid)
                    gainers |= dict.fromkeys(self._withdraw(node, (uuid,)))
        if gainers:
            self._contested = None
        return tuple(gainers)

    def own(self, node: str) -> GpuNodeView:
        """Return a node's view without GPUs that belong to other nodes."""
        view = self._views[node]
        foreign = {gpu.uuid for gpu in view.gpus if self._claims[gpu.uuid][0] != node}
        if not foreign:
            return view
        allocated = {
            uid: kept
            for uid, uuids in view.allocated.items()
            if (kept := tuple(uuid for uuid in uuids if uuid not in foreign))
        }
        gpus = tuple(gpu for gpu in view.gpus if gpu.uuid not in foreign)
        return replace(view, gpus=gpus, unhealthy=view.unhealthy - foreign, allocated=allocated)

    def contested(self) -> tuple[ContestedGpu, ...]:
        """Return every claim that is not the owner's."""
        if self._contested is None:
            self._contested = tuple(
                ContestedGpu(uuid, claims[0], node)
                for uuid, claims in self._claims.items()
                if len(claims) > 1
                for node in claims[1:]
            )
        return self._contested

    def _age(self, node: str) -> tuple[str, str]:
        return self._views[node].created_at, node

    def _keep(self, node: str, uuid: str) -> bool:
        """Keep a GPU that a node does not list any more; return whether it was the owner and keeps few others."""
        is_owner = self._settled and self._claims[uuid][0] == node
        if not is_owner or len(self._kept.get(node, ())) >= MOST_KEPT:
            return False
        self._kept.setdefault(node, {})[uuid] = self._clock()
        return True

    def _let_go(self, node: str, uuid: str) -> bool:
        """Keep a GPU no longer; return whether it was kept."""
        kept = self._kept.get(node)
        if kept is None or kept.pop(uuid, None) is None:
            return False
        if not kept:
            del self._kept[node]
        return True

    def _withdraw(self, node: str, uuids: Iterable[str]) -> tuple[str, ...]:
        gainers: dict[str, None] = {}
        for uuid in uuids:
            claims = self._claims[uuid]
            was_owner = claims[0] == node
            claims.remove(node)
            if not claims:
                del self._claims[uuid]
            elif was_owner:
                gainers[claims[0]] = None
        return tuple(gainers)
