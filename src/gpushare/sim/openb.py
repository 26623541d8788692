"""Cluster traces in the format of Alibaba's openb (github.com/hkust-adsl/kubernetes-scheduler-simulator).

Nodes: `sn, cpu_milli, memory_mib, gpu, model`; pods: `name, cpu_milli, memory_mib, num_gpu, gpu_milli` and
`gpu_spec, qos, pod_phase, creation_time, deletion_time, scheduled_time`, which may be left out; without
`gpu_spec` every pod runs on any model. An optional column of our own, `gpu_memory_mib` (of each GPU of a node;
asked by a pod on each GPU, empty for the default), lets a snapshot of a live cluster be written in this format.
"""

import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gpushare.core.admission import Defaults
from gpushare.core.placement import GPU_MILLI, GpuSpec, NodeSpec, Placement, PlacementRequest

NODE_COLUMNS: Final = ("sn", "cpu_milli", "memory_mib", "gpu", "model")
POD_COLUMNS: Final = ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli")
_NODE_OPTIONAL: Final = ("gpu_memory_mib",)
_POD_OPTIONAL: Final = (
    "gpu_spec",
    "qos",
    "pod_phase",
    "creation_time",
    "deletion_time",
    "scheduled_time",
    "gpu_memory_mib",
    "node",
    "gpu_index",
)
_LARGEST: Final = 2**40
MAX_GPUS_PER_NODE: Final = 64


class TraceError(ValueError):
    """A trace cannot be used; the message is one sentence that names file, line and column."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table, with its position for error messages."""

    source: str
    line: int
    values: dict[str, str]

    def error(self, column: str, why: str) -> TraceError:
        """Return the error for one field."""
        return TraceError(f"{self.source}, line {self.line}, column {column}: {self.values[column]!r} {why}")

    def whole(self, column: str, least: int = 0, most: int = _LARGEST) -> int:
        """Parse a whole number within bounds; "4.0" counts as 4."""
        text = self.values[column].strip()
        try:
            number = float(text)
        except ValueError:
            raise self.error(column, "is not a number") from None
        if not math.isfinite(number):
            raise self.error(column, "is not a finite number")
        if number != int(number):
            raise self.error(column, "is not a whole number")
        if not least <= number <= most:
            raise self.error(column, f"is not between {least} and {most}")
        return int(number)


def parse_nodes(text: str, source: str) -> list[NodeSpec]:
    """Parse the nodes of a trace; `source` is the file's name for messages.

    Raises:
        TraceError: the table is malformed, a number is out of range, a node is named twice, or none has a GPU.
    """
    nodes: dict[str, NodeSpec] = {}
    for row in _table(text, source, NODE_COLUMNS, _NODE_OPTIONAL):
        name = row.values["sn"].strip()
        if not name or name in nodes:
            raise row.error("sn", "is empty" if not name else "names a node a second time")
        count = row.whole("gpu", most=MAX_GPUS_PER_NODE)
        model = row.values["model"].strip()
        if count and not model:
            raise row.error("model", "is empty on a node with GPUs")
        memory = row.whole("gpu_memory_mib") if row.values.get("gpu_memory_mib") else None
        nodes[name] = NodeSpec(
            name,
            tuple(GpuSpec(f"{name}/{index}", model, memory) for index in range(count)),
            row.whole("cpu_milli"),
            row.whole("memory_mib"),
        )
    if not any(node.gpus for node in nodes.values()):
        raise TraceError(f"{source} describes an empty cluster: no node has a GPU (column gpu)")
    return list(nodes.values())


def parse_pods(text: str, source: str, defaults: Defaults | None = None) -> list[PlacementRequest]:
    """Parse the requests of a trace in its order, ignoring where they run.

    Args:
        defaults: class and tolerated slowdown, which the format lacks; default: the chart's.

    Raises:
        TraceError: the table is malformed, a number is out of range, a pod is named twice, or none asks for a GPU.
    """
    given = defaults or Defaults()
    job_class = given.job_class
    tolerated = given.max_slowdown_of(job_class)
    pods = [replace(pod, job_class=job_class, max_slowdown=tolerated) for _, pod in _pods(text, source)]
    if not any(pod.gpu_count for pod in pods):
        raise TraceError(f"{source} holds no GPU pods (column num_gpu)")
    return pods


def parse_placed_pods(
    text: str, source: str, nodes: Iterable[NodeSpec]
) -> list[tuple[PlacementRequest, Placement | None]]:
    """Parse the pods of a snapshot, with where each runs (columns `node`, `gpu_index`) or None.

    A pod names fewer GPUs than it asks for if its node has lost the others.

    Raises:
        TraceError: as `parse_pods`, or a pod is said to run on a node or GPU that is not among `nodes`.
    """
    known = {node.name: node for node in nodes}
    placed: list[tuple[PlacementRequest, Placement | None]] = []
    for row, pod in _pods(text, source):
        name = row.values.get("node", "").strip()
        if not name:
            placed.append((pod, None))
            continue
        if name not in known:
            raise row.error("node", "is not a node of the cluster")
        gpus = known[name].gpus
        if "gpu_index" not in row.values and pod.gpu_count:
            raise TraceError(f"{source}, line 1: column gpu_index is missing, node is there")
        chosen = [index for index in row.values.get("gpu_index", "").strip().split("|") if index]
        are_known = all(i.isdigit() and int(i) < len(gpus) for i in chosen)
        if not are_known or len(set(chosen)) < len(chosen) or len(chosen) > pod.gpu_count:
            raise row.error(
                "gpu_index", f"does not name at most {pod.gpu_count} of the {len(gpus)} GPUs of {name}"
            )
        uuids = tuple(gpus[int(index)].uuid for index in chosen)
        memory = pod.memory_mib
        if memory is None:
            usable = [gpus[int(index)].memory_mib or 0 for index in chosen]
            memory = min(usable, default=0) * pod.share_milli // GPU_MILLI
        placed.append((pod, Placement(name, uuids, memory)))
    return placed


def _pods(text: str, source: str) -> Iterator[tuple[Row, PlacementRequest]]:
    names: set[str] = set()
    for row in _table(text, source, POD_COLUMNS, _POD_OPTIONAL):
        name = row.values["name"].strip()
        if not name or name in names:
            raise row.error("name", "is empty" if not name else "names a pod a second time")
        names.add(name)
        count = row.whole("num_gpu", most=MAX_GPUS_PER_NODE)
        share = row.whole("gpu_milli", most=GPU_MILLI)
        if count and not share:
            raise row.error("gpu_milli", f"asks for nothing on {count} GPUs")
        if not count and share:
            raise row.error("gpu_milli", "asks for a share of no GPU (num_gpu is 0)")
        if count > 1 and share != GPU_MILLI:
            raise row.error("gpu_milli", "asks for parts of several GPUs; several GPUs come whole (1000)")
        yield (
            row,
            PlacementRequest(
                name,
                share,
                count,
                row.whole("gpu_memory_mib") if row.values.get("gpu_memory_mib") else None,
                row.whole("cpu_milli"),
                row.whole("memory_mib"),
                frozenset(model for model in row.values.get("gpu_spec", "").strip().split("|") if model),
            ),
        )


def fits_format(node: NodeSpec) -> bool:
    """Return whether one row can describe a node: its GPUs are equal, and it says its CPU and memory."""
    kinds = {(gpu.model, gpu.memory_mib) for gpu in node.gpus}
    return len(kinds) <= 1 and node.cpu_milli is not None and node.memory_mib is not None


def format_nodes(nodes: Iterable[NodeSpec]) -> str:
    """Write nodes as a table.

    Raises:
        ValueError: a node does not fit the format (`fits_format`).
    """
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(NODE_COLUMNS + _NODE_OPTIONAL)
    for node in nodes:
        if not fits_format(node) or node.cpu_milli is None or node.memory_mib is None:
            raise ValueError(f"node {node.name} does not fit the trace format")
        model, memory = (node.gpus[0].model, node.gpus[0].memory_mib) if node.gpus else ("", None)
        cpu_milli, memory_mib = max(node.cpu_milli, 0), max(node.memory_mib, 0)  # below 0 if too much is requested
        table.writerow([node.name, cpu_milli, memory_mib, len(node.gpus), model, memory or ""])
    return out.getvalue()


def format_pods(pods: Iterable[tuple[PlacementRequest, Placement | None]], nodes: Iterable[NodeSpec]) -> str:
    """Write requests as a table, with the place where each runs; a GPU that its node has lost has no index."""
    index = {node.name: {gpu.uuid: slot for slot, gpu in enumerate(node.gpus)} for node in nodes}
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow((*POD_COLUMNS, "gpu_spec", "gpu_memory_mib", "node", "gpu_index"))
    for pod, placed in pods:
        share = pod.share_milli if pod.gpu_count else 0
        memory = "" if pod.memory_mib is None else pod.memory_mib
        where = ["", ""]
        if placed is not None:
            slots = index.get(placed.node, {})
            where = [placed.node, "|".join(str(slots[uuid]) for uuid in placed.gpu_uuids if uuid in slots)]
        models = "|".join(sorted(pod.models))
        table.writerow(
            [pod.pod_uid, pod.cpu_milli, pod.node_memory_mib, pod.gpu_count, share, models, memory, *where]
        )
    return out.getvalue()


def _table(text: str, source: str, required: Sequence[str], optional: Sequence[str]) -> Iterator[Row]:
    """Read the rows of a CSV table and check its header; a last line without a line end is a truncated file."""
    reader = csv.reader(io.StringIO(text), strict=True)
    header = next(reader, None)
    if not header:
        raise TraceError(f"{source} is empty")
    header = [column.strip().removeprefix("\ufeff") for column in header]
    for column in required:
        if column not in header:
            raise TraceError(f"{source}, line 1: column {column} is missing")
    for column in header:
        if column not in required and column not in optional:
            known = ", ".join((*required, *optional))
            raise TraceError(f"{source}, line 1: column {column!r} is not known (known are {known})")
        if header.count(column) > 1:
            raise TraceError(f"{source}, line 1: column {column} appears twice")
    try:
        for fields in reader:
            if not fields:
                continue
            if len(fields) != len(header):
                at = header[min(len(fields), len(header)) - 1]
                raise TraceError(
                    f"{source}, line {reader.line_num}, column {at}: the line has {len(fields)} fields, "
                    f"the header {len(header)} (a truncated file?)"
                )
            yield Row(source, reader.line_num, dict(zip(header, fields, strict=True)))
    except csv.Error as error:
        raise TraceError(f"{source}, line {reader.line_num}: not a CSV table ({error})") from None
