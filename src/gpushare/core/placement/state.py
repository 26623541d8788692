"""The state of a cluster's GPUs as arrays, the same for the live extender and for the simulator.

Layout: a node is a row of all arrays and keeps it while it exists; free rows are reused. Arrays by GPU have the
shape (width, rows), one line per GPU slot of the widest node, so that a test over all nodes is a few passes over
contiguous memory. A slot that a node does not have is `present == False` with nothing free.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpushare.core.api import MAX_GPUS_PER_POD, FaultDomain, JobClass
from gpushare.core.placement.caps import thread_percentage
from gpushare.core.placement.closed_gpus import ClosedGpu, ClosedGpus, ProbationTerm
from gpushare.core.placement.reservations import Journal, Reservation, Snapshot
from gpushare.core.placement.row_changes import RowChanges, RowTable
from gpushare.core.placement.shapes import (
    GPU_MILLI,
    MILLI_PER_PERCENT,
    GpuSpec,
    NodeSpec,
    Placement,
    PlacementRequest,
    Shape,
    Tenant,
    tenancy_kind,
    tolerated,
)

__all__ = [
    "AGENT_AWAY",
    "GPU_MILLI",
    "MILLI_PER_PERCENT",
    "UNLIMITED",
    "ClusterState",
    "GpuSpec",
    "NodeSpec",
    "Placement",
    "PlacementRequest",
    "Reservation",
    "Shape",
    "Snapshot",
    "Tenant",
]

UNLIMITED: Final = np.iinfo(np.int64).max // 4
"""Free CPU or memory of a node that does not report it, because kube-scheduler counts it."""
MOST_MODELS: Final = 64
"""Most names of GPU models that count apart: agents report them, and tables have a row for each."""
OTHER_MODELS: Final = ""
"""Name of all further models until a restart; no profile is known for it."""

AGENT_AWAY: Final = 1
"""Special value of `silent_seconds`: the agent does not run. Real silences count only when far longer."""

MAX_TABLES: Final = 1024
"""Most cached tables, of 8 bytes a node each: 40 MB at 5,000 nodes. The least recently used is dropped first."""

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]


class ClusterState:
    """GPUs, nodes and reservations.

    Arrays of shape (width, rows): `present`, `healthy` bool; `share_free_milli`, `memory_free_mib`,
    `memory_usable_mib`, `clients` int64; `latency` int64 (number of latency tenants); `isolated` bool (has an
    isolated tenant); `model_ids` int64 (-1 if absent).
    Arrays of shape (rows,): `alive` bool; `cpu_free_milli`, `node_memory_free_mib` int64 (UNLIMITED if not
    counted); `gpu_counts` int64; `silent_seconds` int64 (how long the node's agent has been silent at least, 0
    while it reports); `unreadable` bool (no workload can be profiled in place there).
    `kinds` int64 of shape (1 + MAX_GPUS_PER_POD, rows): number of pods by requested GPUs, fractions on line 0.
    Policies read the arrays; only the methods here write them.
    """

    def __init__(self, nodes: Iterable[NodeSpec] = (), *, gpu_memory_reserve_mib: int = 0) -> None:
        """Build the state; tenants never get `gpu_memory_reserve_mib` of a GPU (the MPS server's own context)."""
        self.gpu_memory_reserve_mib = gpu_memory_reserve_mib
        self.model_names: list[str] = []
        self.epoch = 0
        """Rises when rows or models are added; every cache by row is then invalid."""
        self.nodes_version = 0
        """Rises when a node comes or goes; rows must then be looked up by name again."""
        self.row_tables: OrderedDict[tuple[str, Shape], RowTable] = OrderedDict()
        """The cache of `gpushare.core.placement.node_cache`, least recently used first."""
        self.row_changes = RowChanges()
        self._model_ids: dict[str, int] = {}
        self._specs: dict[str, NodeSpec] = {}
        self._rows: dict[str, int] = {}
        self._free_rows: list[int] = []
        self._row_names: list[str] = []
        self._uuids: list[tuple[str, ...]] = []
        self._gpu_at: dict[str, tuple[int, int]] = {}
        self._unhealthy: set[str] = set()
        self._silent_seconds: dict[str, int] = {}
        self._reservations: dict[str, Reservation] = {}
        self.reserved_shapes: Counter[Shape] = Counter()
        """Number of reserved pods by shape of request."""
        self.known_tenants = 0
        """Number of reserved pods whose workload was known when they were placed."""
        self._tenants: dict[tuple[int, int], dict[str, int]] = {}
        self._waiting: dict[str, set[str]] = {}
        self._other_use: dict[str, tuple[int, int]] = {}
        self._order = 0
        self._journal = Journal()
        self.isolated_count = 0
        """Number of isolated tenants, counted per GPU; while it is 0, the check is skipped."""
        self.latency_count = 0
        """Number of tenants of class latency, counted per GPU."""
        self.closed_gpus = ClosedGpus()
        """GPUs that one pod has to itself while its workload is on probation."""
        self._unreadable: set[str] = set()
        self.tracks_memory = False
        """Whether any GPU's memory is known."""
        self.large_memory_count = 0
        """Number of tenants that hold more of a GPU's memory than their share of it, counted per GPU."""
        self._allocate(0, 0)
        for spec in nodes:
            self.add_node(spec)

    # -- nodes and GPUs -------------------------------------------------------------------------------------------

    def add_node(self, spec: NodeSpec) -> None:
        """Add a node, and count the pods that are already reserved on it by name.

        Raises:
            ValueError: the node is already known, or one of its GPUs is on another node.
        """
        if spec.name in self._rows:
            raise ValueError(f"node {spec.name} is there already")
        for gpu in spec.gpus:
            if gpu.uuid in self._gpu_at:
                raise ValueError(f"GPU {gpu.uuid} of {spec.name} is on another node already")
        self._refuse_in_snapshot()
        row = self._claim_row(len(spec.gpus))
        self.nodes_version += 1
        self._rows[spec.name] = row
        self._specs[spec.name] = spec
        self._row_names[row] = spec.name
        self._uuids[row] = tuple(gpu.uuid for gpu in spec.gpus)
        self.alive[row] = True
        self.gpu_counts[row] = len(spec.gpus)
        self.cpu_free_milli[row] = UNLIMITED if spec.cpu_milli is None else spec.cpu_milli
        self.node_memory_free_mib[row] = UNLIMITED if spec.memory_mib is None else spec.memory_mib
        other_cpu_milli, other_memory_mib = self._other_use.get(spec.name, (0, 0))
        self.cpu_free_milli[row] -= other_cpu_milli
        self.node_memory_free_mib[row] -= other_memory_mib
        self.silent_seconds[row] = self._silent_seconds.get(spec.name, 0)
        self.unreadable[row] = spec.name in self._unreadable
        for slot, gpu in enumerate(spec.gpus):
            self._gpu_at[gpu.uuid] = (row, slot)
            usable = max(0, (gpu.memory_mib or 0) - self.gpu_memory_reserve_mib)
            self.tracks_memory |= usable > 0
            self.present[slot, row] = True
            self.healthy[slot, row] = gpu.uuid not in self._unhealthy and not self.silent_seconds[row]
            self.share_free_milli[slot, row] = GPU_MILLI
            self.memory_usable_mib[slot, row] = self.memory_free_mib[slot, row] = usable
            self.model_ids[slot, row] = self._model_id(gpu.model)
        self._touch(row)
        for pod_uid in sorted(self._waiting.pop(spec.name, ()), key=lambda uid: self._reservations[uid].order):
            self._count(pod_uid, self._reservations[pod_uid])

    def update_node(self, spec: NodeSpec) -> None:
        """Replace a node's GPUs, CPU and memory; its tenants stay, without GPUs that it has lost."""
        if self._specs.get(spec.name) == spec:
            return
        if spec.name in self._rows:
            lost = set(self._uuids[self._rows[spec.name]]).difference(gpu.uuid for gpu in spec.gpus)
            self._take_out(spec.name)
            self._unhealthy -= lost
        self.add_node(spec)

    def remove_node(self, name: str) -> None:
        """Remove a node if it is known, and forget how it and its GPUs are.

        Its pods keep their reservations and count again if it returns.
        """
        if name not in self._rows:
            return
        self._unhealthy.difference_update(self._uuids[self._rows[name]])
        self._silent_seconds.pop(name, None)
        self._unreadable.discard(name)
        self._take_out(name)

    def _take_out(self, name: str) -> None:
        self._refuse_in_snapshot()
        self.nodes_version += 1
        row = self._rows[name]
        for pod_uid in [uid for uid, reservation in self._reservations.items() if reservation.row == row]:
            reservation = self._reservations[pod_uid]
            self._uncount(pod_uid, reservation)
            self._reservations[pod_uid] = Reservation(
                reservation.placement, reservation.request, reservation.order
            )
            self._waiting.setdefault(name, set()).add(pod_uid)
        for uuid in self._uuids[row]:
            del self._gpu_at[uuid]
        del self._rows[name], self._specs[name]
        self._clear_row(row)
        self._free_rows.append(row)
        self._touch(row)

    def set_health(self, uuid: str, *, healthy: bool) -> None:
        """Set whether a GPU may take new tenants; also remembered for a GPU that is not known yet."""
        if healthy:
            self._unhealthy.discard(uuid)
        else:
            self._unhealthy.add(uuid)
        if uuid in self._gpu_at:
            row, slot = self._gpu_at[uuid]
            takes_pods = healthy and not self.silent_seconds[row]
            if bool(self.healthy[slot, row]) != takes_pods:
                self.healthy[slot, row] = takes_pods
                self._touch(row)

    def set_silence(self, node: str, seconds: int) -> None:
        """Set how long a node's agent has been silent at least; its GPUs take no new tenants until it is 0.

        `AGENT_AWAY` means that the agent does not run. Also remembered for a node that is not known yet.
        """
        if seconds:
            self._silent_seconds[node] = seconds
        else:
            self._silent_seconds.pop(node, None)
        row = self._rows.get(node)
        if row is None or self.silent_seconds[row] == seconds:
            return
        self.silent_seconds[row] = seconds
        for slot, uuid in enumerate(self._uuids[row]):
            self.healthy[slot, row] = uuid not in self._unhealthy and not seconds
        self._touch(row)

    def set_reading(self, node: str, *, works: bool) -> None:
        """Set whether workloads can be profiled in place on a node; also remembered for an unknown node."""
        (self._unreadable.discard if works else self._unreadable.add)(node)
        row = self._rows.get(node)
        if row is not None and bool(self.unreadable[row]) == works:
            self.unreadable[row] = not works
            self._touch(row)

    def set_other_use(self, node: str, cpu_milli: int, memory_mib: int) -> None:
        """Set what pods without a reservation use of a node; also remembered for an unknown node."""
        cpu_before, memory_before = self._other_use.pop(node, (0, 0))
        if cpu_milli or memory_mib:
            self._other_use[node] = (cpu_milli, memory_mib)
        row = self._rows.get(node)
        if row is not None and (cpu_milli, memory_mib) != (cpu_before, memory_before):
            self.cpu_free_milli[row] -= cpu_milli - cpu_before
            self.node_memory_free_mib[row] -= memory_mib - memory_before
            self._touch(row)

    # -- pods -----------------------------------------------------------------------------------------------------

    def reserve(self, pod_uid: str, placement: Placement, request: PlacementRequest, since: float = 0.0) -> None:
        """Count a pod on the GPUs of `placement`, since a Unix time if given; else it is newer than all before.

        This records a fact and refuses nothing: a pod that already runs counts even where it does not fit. On an
        unknown node it counts once that is known; on a known one at once, with those of its GPUs that the node
        has, and with the others once they are back. Whether a pod fits is decided before.

        Raises:
            ValueError: the pod already has a reservation.
        """
        if pod_uid in self._reservations:
            raise ValueError(f"pod {pod_uid} holds a reservation already")
        self._order += 1
        self._restore(pod_uid, Reservation(placement, request, since or self._order))
        self._log(pod_uid, None)

    def release(self, pod_uid: str) -> Reservation | None:
        """Release a pod's reservation and return it; None if it has none."""
        reservation = self._reservations.get(pod_uid)
        if reservation is None:
            return None
        self._drop(pod_uid, reservation)
        self._log(pod_uid, reservation)
        return reservation

    def set_probation(self, pod_uid: str, term: ProbationTerm | None) -> None:
        """Set or end the term during which a reserved pod has its GPU to itself."""
        reservation = self._reservations[pod_uid]
        if reservation.placement.probation != term:
            reservation = replace(reservation, placement=replace(reservation.placement, probation=term))
            self._reservations[pod_uid] = reservation
            self.closed_gpus.drop(pod_uid)
            self._close(pod_uid, reservation)

    def set_cap(self, pod_uid: str, thread_percentage: int) -> None:
        """Set the cap of a reserved pod's next processes; it stays as old as it is among the tenants."""
        before = self._reservations[pod_uid]
        placement = replace(before.placement, thread_percentage=thread_percentage)
        self._reservations[pod_uid] = replace(before, placement=placement)
        if before.slots is not None:
            self._touch(before.row)

    def reservation(self, pod_uid: str) -> Reservation | None:
        """Return a pod's reservation, or None."""
        return self._reservations.get(pod_uid)

    @property
    def reservations(self) -> Mapping[str, Reservation]:
        """Return all reservations by pod uid, as a live view."""
        return self._reservations

    def tenants(self, gpu_uuid: str) -> tuple[Tenant, ...]:
        """Return the pods on a GPU, oldest first; empty for an unknown GPU."""
        at = self._gpu_at.get(gpu_uuid)
        if at is None:
            return ()
        found = []
        for pod_uid, memory_mib in self._tenants.get(at, {}).items():
            reservation = self._reservations[pod_uid]
            request = reservation.request
            found.append(
                Tenant(
                    pod_uid,
                    request.share_milli,
                    memory_mib,
                    request.job_class,
                    request.workload,
                    request.fault_domain,
                    reservation.order,
                    reservation.placement.thread_percentage
                    or thread_percentage(request.share_milli // MILLI_PER_PERCENT, request.job_class),
                    request.known,
                    tolerated(request, None),
                    request.is_auto,
                )
            )
        return tuple(sorted(found, key=lambda tenant: tenant.order))

    # -- hypothetical work ----------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Return a point to undo later reservations and releases to. Nodes must not change meanwhile."""
        self._journal.open_snapshots += 1
        return Snapshot(len(self._journal.entries), self._order)

    def undo(self, snapshot: Snapshot) -> None:
        """Return to a snapshot exactly, undoing the newest change first, and close it."""
        journal = self._journal
        while len(journal.entries) > snapshot.position:
            pod_uid, reservation = journal.entries.pop()
            if reservation is None:
                self._drop(pod_uid, self._reservations[pod_uid])
            else:
                self._restore(pod_uid, Reservation(reservation.placement, reservation.request, reservation.order))
        self._order = snapshot.order
        self.keep(snapshot)

    def keep(self, snapshot: Snapshot) -> None:
        """Close a snapshot and keep the changes since; an older open snapshot can still undo them."""
        del snapshot
        journal = self._journal
        journal.open_snapshots -= 1
        if journal.open_snapshots == 0:
            journal.entries.clear()

    # -- what changed ---------------------------------------------------------------------------------------------

    @property
    def change_count(self) -> int:
        """Return the number of row changes so far, for `changed_since`."""
        return self.row_changes.count

    def changed_since(self, count: int) -> IntArray | None:
        """Return the rows changed since `change_count` was `count`, each once; None if that is too long ago."""
        return self.row_changes.since(count)

    # -- reading --------------------------------------------------------------------------------------------------

    @property
    def node_names(self) -> tuple[str, ...]:
        """Return the names of the known nodes."""
        return tuple(self._rows)

    def row(self, node: str) -> int | None:
        """Return the row of a node, or None."""
        return self._rows.get(node)

    def rows(self, nodes: Iterable[str]) -> list[int | None]:
        """Return the rows of many nodes, None for unknown ones."""
        return list(map(self._rows.get, nodes))

    @property
    def row_names(self) -> Sequence[str]:
        """Return the node name of each row, "" for a free row."""
        return self._row_names

    def node_name(self, row: int) -> str:
        """Return the node name of a row."""
        return self._row_names[row]

    def node_names_of(self, rows: IntArray) -> list[str]:
        """Return the node names of many rows."""
        every = self._row_names
        return [every[row] for row in rows.tolist()]

    def spec(self, node: str) -> NodeSpec | None:
        """Return what a node reported, or None."""
        return self._specs.get(node)

    def uuids(self, row: int) -> tuple[str, ...]:
        """Return the GPU UUIDs of a row, by slot."""
        return self._uuids[row]

    def gpu_at(self, uuid: str) -> tuple[int, int] | None:
        """Return the row and slot of a GPU, or None."""
        return self._gpu_at.get(uuid)

    def gpu_node(self, uuid: str) -> str | None:
        """Return the name of the node that has a GPU, or None."""
        at = self._gpu_at.get(uuid)
        return None if at is None else self._row_names[at[0]]

    def accepted_model_ids(self, models: Iterable[str]) -> list[int]:
        """Return the ids of those of `models` that any GPU here has or had."""
        return sorted(self._model_ids[model] for model in models if model in self._model_ids)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _allocate(self, rows: int, width: int) -> None:
        self.present: BoolArray = np.zeros((width, rows), bool)
        self.healthy: BoolArray = np.zeros((width, rows), bool)
        self.isolated: BoolArray = np.zeros((width, rows), bool)
        self.share_free_milli: IntArray = np.zeros((width, rows), np.int64)
        self.memory_free_mib: IntArray = np.zeros((width, rows), np.int64)
        self.memory_usable_mib: IntArray = np.zeros((width, rows), np.int64)
        self.clients: IntArray = np.zeros((width, rows), np.int64)
        self.latency: IntArray = np.zeros((width, rows), np.int64)
        self.model_ids: IntArray = np.full((width, rows), -1, np.int64)
        self.alive: BoolArray = np.zeros(rows, bool)
        self.cpu_free_milli: IntArray = np.zeros(rows, np.int64)
        self.node_memory_free_mib: IntArray = np.zeros(rows, np.int64)
        self.gpu_counts: IntArray = np.zeros(rows, np.int64)
        self.silent_seconds: IntArray = np.zeros(rows, np.int64)
        self.unreadable: BoolArray = np.zeros(rows, bool)
        self.kinds: IntArray = np.zeros((1 + MAX_GPUS_PER_POD, rows), np.int64)

    _ARRAYS = (
        "present",
        "healthy",
        "isolated",
        "share_free_milli",
        "memory_free_mib",
        "memory_usable_mib",
        "clients",
        "latency",
        "model_ids",
        "kinds",
        "alive",
        "cpu_free_milli",
        "node_memory_free_mib",
        "gpu_counts",
        "silent_seconds",
        "unreadable",
    )

    def _claim_row(self, gpus: int) -> int:
        width, rows = self.present.shape
        if not self._free_rows:
            self._resize(max(16, rows * 2), max(width, gpus, 1))
            self._free_rows = list(range(self.present.shape[1] - 1, rows - 1, -1))
            self._row_names.extend([""] * (self.present.shape[1] - rows))
            self._uuids.extend([()] * (self.present.shape[1] - rows))
        elif gpus > width:
            self._resize(rows, gpus)
        return self._free_rows.pop()

    def _resize(self, rows: int, width: int) -> None:
        old = {name: getattr(self, name) for name in self._ARRAYS}
        self._allocate(rows, width)
        for name, array in old.items():
            getattr(self, name)[tuple(slice(size) for size in array.shape)] = array
        self.epoch += 1

    def _clear_row(self, row: int) -> None:
        for name in self._ARRAYS:
            getattr(self, name)[..., row] = -1 if name == "model_ids" else 0
        self._row_names[row] = ""
        self._uuids[row] = ()

    def _model_id(self, model: str) -> int:
        if model not in self._model_ids and len(self.model_names) >= MOST_MODELS:
            model = OTHER_MODELS
        if model not in self._model_ids:
            self._model_ids[model] = len(self.model_names)
            self.model_names.append(model)
            self.epoch += 1
        return self._model_ids[model]

    def _touch(self, row: int) -> None:
        self.row_changes.add(row, len(self._row_names))

    def _log(self, pod_uid: str, reservation: Reservation | None) -> None:
        if self._journal.open_snapshots:
            self._journal.entries.append((pod_uid, reservation))

    def _refuse_in_snapshot(self) -> None:
        if self._journal.open_snapshots:
            raise RuntimeError("nodes change only while no snapshot is open")

    def _restore(self, pod_uid: str, reservation: Reservation) -> None:
        self._reservations[pod_uid] = reservation
        self.reserved_shapes[reservation.request.shape] += 1
        self.known_tenants += _is_known(reservation)
        self._close(pod_uid, reservation)
        self._count(pod_uid, reservation)

    def _drop(self, pod_uid: str, reservation: Reservation) -> None:
        self._uncount(pod_uid, reservation)
        self.closed_gpus.drop(pod_uid)
        del self._reservations[pod_uid]
        self.reserved_shapes[reservation.request.shape] -= 1
        self.known_tenants -= _is_known(reservation)
        if not self.reserved_shapes[reservation.request.shape]:
            del self.reserved_shapes[reservation.request.shape]
        waiting = self._waiting.get(reservation.placement.node)
        if waiting is not None:
            waiting.discard(pod_uid)
            if not waiting:
                del self._waiting[reservation.placement.node]

    def _close(self, pod_uid: str, reservation: Reservation) -> None:
        placement = reservation.placement
        if placement.probation is not None:
            self.closed_gpus.put(ClosedGpu(pod_uid, placement.gpu_uuids[0], placement.probation))

    def _count(self, pod_uid: str, reservation: Reservation) -> None:
        placement, request = reservation.placement, reservation.request
        row = self._rows.get(placement.node)
        if row is None:
            self._waiting.setdefault(placement.node, set()).add(pod_uid)
            return
        places = [self._gpu_at.get(uuid) for uuid in placement.gpu_uuids]
        # A GPU that was lost under a pod comes back by `update_node`, which counts all pods of the node anew.
        slots = tuple(at[1] for at in places if at is not None and at[0] == row)
        isolated = request.fault_domain is FaultDomain.ISOLATED
        is_latency = request.job_class is JobClass.LATENCY
        self.latency_count += is_latency * len(slots)
        for slot in slots:
            self.share_free_milli[slot, row] -= request.share_milli
            self.memory_free_mib[slot, row] -= placement.memory_mib
            self.large_memory_count += self._is_large(reservation, slot, row)
            self.clients[slot, row] += request.clients
            self.latency[slot, row] += is_latency
            if isolated:
                self.isolated[slot, row] = True
                self.isolated_count += 1
            self._tenants.setdefault((row, slot), {})[pod_uid] = placement.memory_mib
        if slots:
            self.kinds[tenancy_kind(request.share_milli, request.gpu_count), row] += 1
        self.cpu_free_milli[row] -= request.cpu_milli
        self.node_memory_free_mib[row] -= request.node_memory_mib
        self._reservations[pod_uid] = Reservation(placement, request, reservation.order, row, slots)
        self._touch(row)

    def _uncount(self, pod_uid: str, reservation: Reservation) -> None:
        if reservation.slots is None:
            return
        request, row = reservation.request, reservation.row
        is_latency = request.job_class is JobClass.LATENCY
        self.latency_count -= is_latency * len(reservation.slots)
        for slot in reservation.slots:
            self.share_free_milli[slot, row] += request.share_milli
            self.memory_free_mib[slot, row] += reservation.placement.memory_mib
            self.large_memory_count -= self._is_large(reservation, slot, row)
            self.clients[slot, row] -= request.clients
            self.latency[slot, row] -= is_latency
            tenants = self._tenants[row, slot]
            del tenants[pod_uid]
            if request.fault_domain is FaultDomain.ISOLATED:
                self.isolated_count -= 1
                self.isolated[slot, row] = any(
                    self._reservations[uid].request.fault_domain is FaultDomain.ISOLATED for uid in tenants
                )
            if not tenants:
                del self._tenants[row, slot]
        if reservation.slots:
            self.kinds[tenancy_kind(request.share_milli, request.gpu_count), row] -= 1
        self.cpu_free_milli[row] += request.cpu_milli
        self.node_memory_free_mib[row] += request.node_memory_mib
        self._touch(row)

    def _is_large(self, reservation: Reservation, slot: int, row: int) -> bool:
        memory_mib = reservation.placement.memory_mib
        return (
            memory_mib > 0
            and memory_mib * GPU_MILLI > int(self.memory_usable_mib[slot, row]) * reservation.request.share_milli
        )


def _is_known(reservation: Reservation) -> bool:
    known = reservation.request.known
    return known is not None and known.matters
