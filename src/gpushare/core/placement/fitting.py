"""Which GPUs a request fits, and why it does not fit a node, computed for all nodes at once."""

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from gpushare.core.api import FaultDomain, Reason, Rejection, names
from gpushare.core.placement.node_cache import kept_by_row
from gpushare.core.placement.reservations import Reservation
from gpushare.core.placement.shapes import GPU_MILLI, MILLI_PER_PERCENT, Shape
from gpushare.core.placement.state import AGENT_AWAY, BoolArray, ClusterState, IntArray

_MAX: Final = names.MAX_CLIENTS_PER_GPU
_FIGURE_BITS: Final = 44  # enough for MiB of a node or thousandths of a CPU; the bits above hold the stage
_FIGURE_MASK: Final = (1 << _FIGURE_BITS) - 1


class Usable(NamedTuple):
    """GPUs that pass each test and all tests before it; every array has the shape (width, rows)."""

    present: BoolArray
    heard: BoolArray
    healthy: BoolArray
    model: BoolArray
    domain: BoolArray
    share: BoolArray
    clients: BoolArray
    memory: BoolArray


def usable_gpus(state: ClusterState, shape: Shape, rows: IntArray) -> Usable:
    """Test the GPUs of `rows` for one tenant of this shape; tests that cannot fail are skipped."""
    present = state.present.take(rows, 1)
    silent = state.silent_seconds.take(rows) > 0
    heard = present & ~silent if silent.any() else present
    healthy = state.healthy.take(rows, 1)
    model = healthy
    if shape.models:
        model = healthy & np.isin(state.model_ids.take(rows, 1), state.accepted_model_ids(shape.models))
    domain = model
    if shape.fault_domain is FaultDomain.ISOLATED:
        domain = model & (state.clients.take(rows, 1) == 0)
    elif state.isolated_count:
        domain = model & ~state.isolated.take(rows, 1)
    share = domain & (state.share_free_milli.take(rows, 1) >= shape.share_milli)
    clients = share & (state.clients.take(rows, 1) <= _MAX - shape.clients)
    memory = clients
    if state.tracks_memory or shape.memory_mib:
        memory = clients & (state.memory_free_mib.take(rows, 1) >= memory_need_mib(state, shape, rows))
    return Usable(present, heard, healthy, model, domain, share, clients, memory)


def fitting_gpus(state: ClusterState, shape: Shape, rows: IntArray) -> BoolArray:
    """Return which GPUs of `rows` pass every test of `usable_gpus`, (width, rows), without the single tests."""
    fits: BoolArray = state.share_free_milli.take(rows, 1) >= shape.share_milli
    fits &= state.healthy.take(rows, 1)
    fits &= state.clients.take(rows, 1) <= _most_clients(shape)
    if shape.models:
        fits &= np.isin(state.model_ids.take(rows, 1), state.accepted_model_ids(shape.models))
    if state.isolated_count:
        fits &= ~state.isolated.take(rows, 1)
    if memory_matters(state, shape):
        fits &= state.memory_free_mib.take(rows, 1) >= memory_need_mib(state, shape, rows)
    return fits


def usable_slots(state: ClusterState, shape: Shape, row: int) -> list[int]:
    """Return `fitting_gpus` of one node as a list of slots; for one node plain numbers are faster than arrays."""
    free, healthy = state.share_free_milli[:, row].tolist(), state.healthy[:, row].tolist()
    clients = state.clients[:, row].tolist()
    most = _most_clients(shape)
    slots = [
        slot
        for slot, part in enumerate(free)
        if part >= shape.share_milli and healthy[slot] and clients[slot] <= most
    ]
    if shape.models:
        accepted, models = state.accepted_model_ids(shape.models), state.model_ids[:, row].tolist()
        slots = [slot for slot in slots if models[slot] in accepted]
    if state.isolated_count:
        isolated = state.isolated[:, row].tolist()
        slots = [slot for slot in slots if not isolated[slot]]
    if memory_matters(state, shape):
        memory, usable = state.memory_free_mib[:, row].tolist(), state.memory_usable_mib[:, row].tolist()
        asked, share = shape.memory_mib, shape.share_milli
        slots = [
            slot
            for slot in slots
            if memory[slot] >= (usable[slot] * share // GPU_MILLI if asked is None else asked)
        ]
    return slots


def lost_place(state: ClusterState, reservation: Reservation) -> str:
    """Return a sentence on why a pod can no longer start where it was placed; empty if it still can."""
    node, row = reservation.placement.node, reservation.row
    if reservation.slots is None:
        return f"node {node} has no GPUs any more"
    if seconds := int(state.silent_seconds[row]):
        return f"node {node}: {_silent(seconds)}"
    if len(reservation.slots) < len(reservation.placement.gpu_uuids):
        return f"node {node} has lost one of its GPUs"
    for slot in reservation.slots:
        gpu = f"GPU {state.uuids(row)[slot]}"
        if not state.healthy[slot, row]:
            return f"{gpu} has become unhealthy"
        is_overfull = state.share_free_milli[slot, row] < 0 or state.memory_free_mib[slot, row] < 0
        if is_overfull or state.clients[slot, row] > _MAX:
            return f"{gpu} has been filled by others meanwhile"
    return ""


def _most_clients(shape: Shape) -> int:
    """Return the most clients that a GPU may already have for this tenant to fit; below 0 it fits nowhere."""
    most = _MAX - shape.clients
    return min(most, 0) if shape.fault_domain is FaultDomain.ISOLATED else most


def memory_matters(state: ClusterState, shape: Shape) -> bool:
    """Return whether GPU memory can refuse a tenant; if no tenant holds more than its share of it, it cannot."""
    return bool(shape.memory_mib) or state.large_memory_count > 0


def memory_need_mib(state: ClusterState, shape: Shape, rows: IntArray) -> IntArray | int:
    """Return the memory that a tenant takes on each GPU: what it requests, else its share of the usable memory."""
    if shape.memory_mib is not None:
        return shape.memory_mib
    need: IntArray = state.memory_usable_mib.take(rows, 1) * shape.share_milli // GPU_MILLI
    return need


def refusals(state: ClusterState, shape: Shape, rows: IntArray) -> list[Rejection]:
    """Return one refusal for each of `rows`, none of which fits."""
    different, groups = grouped_refusals(state, shape, rows)
    return [different[group] for group in groups.tolist()]


def grouped_refusals(state: ClusterState, shape: Shape, rows: IntArray) -> tuple[list[Rejection], IntArray]:
    """Return the distinct refusals of `rows`, none of which fits, and each row's index into them."""
    codes, inverse = np.unique(_codes(state, shape).take(rows), return_inverse=True)
    return [_rejection_of(shape, code) for code in codes.tolist()], inverse


def summarize(
    state: ClusterState, shape: Shape, nodes: int | None = None, rows: IntArray | None = None
) -> Rejection:
    """Return one refusal for a request that fits no node: the reason of the nodes that come closest.

    Args:
        nodes: number of nodes to speak of; default: all of the state.
        rows: those among which the closest are found; default: all.
    """
    codes = _codes(state, shape)
    nodes = int(state.alive.sum()) if nodes is None else nodes
    if not nodes:
        return Rejection(Reason.NO_GPUS, "the cluster has no nodes with GPUs that gpushare manages")
    codes = codes if rows is None else codes.take(rows)
    closest = int(codes.max())
    as_close = int(((codes >> _FIGURE_BITS) == closest >> _FIGURE_BITS).sum())
    best = _rejection_of(shape, closest)
    return Rejection(best.reason, f"fits on none of {nodes} nodes; on the {as_close} closest: {best.detail}")


def _codes(state: ClusterState, shape: Shape) -> IntArray:
    """Return for each row the first test that it fails and its figure, packed; -1 for rows without a node."""
    return kept_by_row(state, "refusal", shape, None, lambda rows: _code(state, shape, rows))


def _code(state: ClusterState, shape: Shape, rows: IntArray) -> IntArray:
    cpu_free, memory_free = state.cpu_free_milli.take(rows), state.node_memory_free_mib.take(rows)
    fits_cpu = cpu_free >= shape.cpu_milli
    if not shape.cpu_milli:  # then CPU does not matter, even on an overcommitted node
        fits_cpu = np.ones_like(fits_cpu)
    stage = np.where(fits_cpu, _NODE_MEMORY, _CPU)
    figure = np.maximum(np.where(fits_cpu, memory_free, cpu_free), 0)
    if shape.gpu_count:
        usable = usable_gpus(state, shape, rows)
        for test in range(len(usable) - 1, -1, -1):
            if test and usable[test] is usable[test - 1]:
                continue  # this test was skipped; the one before has the same result
            passing = usable[test].sum(axis=0)
            fails = passing < shape.gpu_count
            if not fails.any():
                continue
            if test == _HEARD:
                passing = state.silent_seconds.take(rows)
            elif test == _SHARE and shape.gpu_count == 1:
                passing = np.where(usable.domain, state.share_free_milli.take(rows, 1), 0).max(axis=0, initial=0)
            elif test == _GPU_MEMORY:
                passing = np.where(usable.clients, state.memory_free_mib.take(rows, 1), 0).max(axis=0, initial=0)
            stage[fails] = test
            figure[fails] = passing[fails]
    code: IntArray = (stage << _FIGURE_BITS) | np.minimum(figure, _FIGURE_MASK)
    code[~state.alive.take(rows)] = -1
    return code


def _percent(share_milli: int) -> str:
    return f"{share_milli / MILLI_PER_PERCENT:g}%"


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _models(shape: Shape) -> str:
    return " or ".join(sorted(shape.models)) or "any model"


def _share(shape: Shape, figure: int) -> str:
    if shape.gpu_count > 1:
        return f"needs {shape.gpu_count} whole GPUs, has {figure} free"
    return f"needs {_percent(shape.share_milli)} of one GPU, the freest has {_percent(figure)} free"


def _memory(shape: Shape, figure: int) -> str:
    wanted = "its share of the memory" if shape.memory_mib is None else f"{shape.memory_mib} MiB"
    return f"needs {wanted} on {_gpus(shape.gpu_count)}, the freest with enough share has {figure} MiB free"


def _silent(seconds: int) -> str:
    if seconds == AGENT_AWAY:
        return "the node's agent is not running, so kubelet has no shares to give there now"
    return f"the node's agent has not reported for more than {seconds} s"


def _domain(shape: Shape) -> str:
    return "an isolated" if shape.fault_domain is FaultDomain.ISOLATED else f"a {shape.fault_domain}"


_STAGES: Final[tuple[tuple[Reason, Callable[[Shape, int], str]], ...]] = (
    (Reason.NO_GPUS, lambda s, n: f"needs {_gpus(s.gpu_count)}, has {n} that gpushare manages"),
    (Reason.AGENT_SILENT, lambda _, n: _silent(n)),
    (Reason.GPU_UNHEALTHY, lambda s, n: f"needs {_gpus(s.gpu_count)}, has {n} healthy"),
    (Reason.GPU_MODEL, lambda s, n: f"needs {_gpus(s.gpu_count)} of {_models(s)}, has {n} healthy"),
    (Reason.FAULT_DOMAIN, lambda s, n: f"needs {_gpus(s.gpu_count)} in {_domain(s)} fault domain, has {n}"),
    (Reason.SHARE, _share),
    (
        Reason.CLIENTS,
        lambda s, n: f"needs {_gpus(s.gpu_count)} with {s.clients} of {_MAX} MPS clients free, has {n}",
    ),
    (Reason.GPU_MEMORY, _memory),
    (Reason.CPU, lambda s, n: f"needs {s.cpu_milli}m of CPU, has {n}m free"),
    (Reason.NODE_MEMORY, lambda s, n: f"needs {s.node_memory_mib} MiB of memory, has {n} MiB free"),
)
_HEARD, _SHARE, _GPU_MEMORY, _CPU, _NODE_MEMORY = 1, 5, 7, 8, 9


def _rejection_of(shape: Shape, code: int) -> Rejection:
    reason, sentence = _STAGES[code >> _FIGURE_BITS]
    return Rejection(reason, sentence(shape, code & _FIGURE_MASK))
