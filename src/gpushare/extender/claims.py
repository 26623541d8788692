"""Which node a GPU belongs to if GpuNodes contradict each other.

A GpuNode is written by its node's agent, and an agent may be compromised. Wrong data about its own node harms only
that node. But if it lists the UUID of another node's GPU, that GPU would be on two nodes and usable on neither. So
a GPU belongs to the node that listed it first, until that node is gone or no longer lists it.
"""

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, replace

from gpushare.extender.reduce import GpuNodeView


@dataclass(frozen=True, slots=True)
class ContestedGpu:
    """A GPU that a node lists although it belongs to another node."""

    uuid: str
    owner: str
    node: str

    def __str__(self) -> str:
        return (
            f"GPU {self.uuid} belongs to node {self.owner}, which listed it first; "
            f"what node {self.node} says of it is ignored"
        )


class GpuClaims:
    """Claims by GPU, the owner's first.

    Until `settle` is called at the end of the first list, claims are ordered by the creation of the GpuNodes,
    because it is not known which of them listed a GPU first.
    """

    def __init__(self) -> None:
        self._views: dict[str, GpuNodeView] = {}
        self._claims: dict[str, list[str]] = {}
        self._settled = False
        self._contested: tuple[ContestedGpu, ...] | None = ()  # None: to be collected from all claims

    def settle(self) -> None:
        """Put each further claim behind the existing ones from now on."""
        self._settled = True

    def put(self, view: GpuNodeView) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Record a node's GPUs; return the other nodes that lost a GPU by it, and those that got one."""
        before = self._views.get(view.name)
        self._views[view.name] = view
        if before is not None and before.gpus == view.gpus:
            return (), ()
        self._contested = None
        listed = {gpu.uuid for gpu in view.gpus}
        gainers = self._withdraw(view.name, {gpu.uuid for gpu in before.gpus} - listed if before else ())
        losers: dict[str, None] = {}
        for uuid in listed:
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
        return self._withdraw(node, {gpu.uuid for gpu in view.gpus}) if view is not None else ()

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
