"""A pod's request: its annotations, parsed and validated (docs/design.md 1)."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from fractions import Fraction
from typing import Final

from gpushare.core.api import names
from gpushare.core.api.rejection import Reason, Rejection, shown
from gpushare.core.api.slo import RateSlo, Slo, parse_slo

MAX_GPUS_PER_POD: Final = 16  # no vendor's node has more GPUs in one NVLink domain
AUTO: Final = "auto"

_MIB: Final = 2**20
MAX_MEMORY_MIB: Final = 2**20  # 1 TiB on one GPU, several times the largest GPU; bounds the arithmetic
_LONGEST_FRACTION: Final = 16  # as in the GpuShare's schema
_LONGEST_MEMORY: Final = 32

_FRACTION: Final = re.compile(r"[0-9]+(\.[0-9]+)?")
_QUANTITY: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(Ki|Mi|Gi|Ti|k|M|G|T|)")
_UNIT_BYTES: Final[dict[str, int]] = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
_PROCESSES: Final = re.compile(r"[1-9][0-9]?")
_WORKLOAD: Final = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


class JobClass(StrEnum):
    """Class of a tenant: it cares about throughput, or about latency."""

    THROUGHPUT = "throughput"
    LATENCY = "latency"


class FaultDomain(StrEnum):
    """Whether a tenant accepts neighbours whose faults can end it (docs/facts.md 4)."""

    SHARED = "shared"
    ISOLATED = "isolated"


@dataclass(frozen=True, slots=True)
class ShareRequest:
    """The annotations of one pod.

    Attributes:
        share_percent: percent of each of `gpu_count` GPUs, 1 to 100; None if the fraction is "auto".
        gpu_count: number of GPUs; above 1 only with share_percent 100.
        memory_mib: GPU memory per GPU; None means share x the GPU's memory.
        job_class: throughput or latency; None if the pod does not say (then the GpuShare or the default decides).
        workload: key that links pods of one kind; None means the pod's owner.
        container: name of the container that gets the GPU; None if the pod does not say.
        processes: CUDA processes that share the pod's cap evenly.
        slo: the pod's own target: of latency for class latency, a rate for class throughput.
    """

    share_percent: int | None
    gpu_count: int
    memory_mib: int | None
    job_class: JobClass | None
    workload: str | None
    container: str | None
    processes: int = 1
    slo: Slo | RateSlo | None = None

    @property
    def is_auto(self) -> bool:
        """Return whether the share is chosen from the profile."""
        return self.share_percent is None


def parse_fraction(text: str) -> tuple[int | None, int] | Rejection:
    """Parse `gpushare.io/fraction` into (share percent or None for auto, number of GPUs)."""

    def refuse(why: str) -> Rejection:
        return _invalid(
            names.FRACTION,
            text,
            why,
            'allowed are 0.01 to 1 in whole percents (such as "0.25"), '
            f'a whole number of GPUs up to {MAX_GPUS_PER_POD} (such as "2"), or "auto"',
        )

    if text == AUTO:
        return None, 1
    if len(text) > _LONGEST_FRACTION or not _FRACTION.fullmatch(text):
        return refuse("is not a plain positive number")
    value = Decimal(text)
    if value <= 0:
        return refuse("is not above zero")
    if value > 1:
        if value != value.to_integral_value():
            return refuse("asks for more than one GPU but not for whole GPUs")
        if value > MAX_GPUS_PER_POD:
            return refuse(f"asks for more than {MAX_GPUS_PER_POD} GPUs")
        return names.SHARES_PER_GPU, int(value)
    percent = value * names.SHARES_PER_GPU
    if percent != percent.to_integral_value():
        return refuse("is not a whole percent")
    return int(percent), 1


def parse_memory_mib(text: str) -> int | Rejection:
    """Parse `gpushare.io/memory`, a Kubernetes quantity, into whole MiB (rounded up)."""
    match = _QUANTITY.fullmatch(text) if len(text) <= _LONGEST_MEMORY else None
    if match is None:
        return refuse_memory(text, "is not an amount of memory")
    mib = math.ceil(Fraction(match[1]) * _UNIT_BYTES[match[2]] / _MIB)
    if mib <= 0:
        return refuse_memory(text, "is not above zero")
    if mib > MAX_MEMORY_MIB:
        return refuse_memory(text, "is more memory than any GPU has")
    return mib


def refuse_memory(text: str, why: str, allowed: str = 'a quantity such as "8Gi" or "500Mi"') -> Rejection:
    """Return the refusal of a memory annotation; `allowed` completes "allowed is"."""
    return _invalid(names.MEMORY, text, why, f"allowed is {allowed}")


def parse_class(text: str) -> JobClass | Rejection:
    """Parse `gpushare.io/class`."""
    try:
        return JobClass(text)
    except ValueError:
        return _invalid(names.CLASS, text, "is not a class", 'allowed are "throughput" and "latency"')


def parse_processes(text: str) -> int | Rejection:
    """Parse `gpushare.io/processes`."""
    if not _PROCESSES.fullmatch(text) or int(text) > names.MAX_CLIENTS_PER_GPU:
        allowed = f"allowed are 1 to {names.MAX_CLIENTS_PER_GPU}"
        return _invalid(names.PROCESSES, text, "is not a number of processes", allowed)
    return int(text)


def clients_of(share_percent: int) -> int:
    """Return how many of a GPU's MPS clients a share may have: proportional to the share, at least one."""
    return max(1, share_percent * names.MAX_CLIENTS_PER_GPU // names.SHARES_PER_GPU)


def percent_of_clients(processes: int) -> int:
    """Return the smallest share that may have this many MPS clients; 0 for one, which every pod may have."""
    return 0 if processes <= 1 else -(-names.SHARES_PER_GPU * processes // names.MAX_CLIENTS_PER_GPU)


def percent_of_parts(processes: int) -> int:
    """Return the smallest share whose cap can be divided among this many processes (ADR 0115)."""
    return min(names.LEAST_PROCESS_PERCENT * processes, names.SHARES_PER_GPU)


def refuse_parts(processes: int, share_percent: int) -> Rejection:
    """Return the refusal of more processes than the cap of this share can be divided among."""
    return _invalid(
        names.PROCESSES,
        str(processes),
        f"is too many for {share_percent}% of a GPU, as each process needs {names.LEAST_PROCESS_PERCENT}%, "
        "the least that MPS gives",
        f"at most {max(1, share_percent // names.LEAST_PROCESS_PERCENT)}, or a larger {names.FRACTION}",
    )


def refuse_processes(processes: int, most: int) -> Rejection:
    """Return the refusal of more processes than one pod may have on a GPU, although its share would cover them."""
    return _invalid(
        names.PROCESSES,
        str(processes),
        f"is more than the {most} MPS clients that one pod gets on a GPU at most",
        f"name at most {most}, or have the cluster's administrator raise the chart's value mps.maxClientsPerPod",
    )


def parse_request(annotations: Mapping[str, str]) -> ShareRequest | Rejection:
    """Parse a pod's annotations; return the first error as a sentence that says what to change."""
    fraction = annotations.get(names.FRACTION)
    if fraction is None:
        return Rejection(Reason.INVALID_ANNOTATION, f"annotation {names.FRACTION} is missing")
    parsed = parse_fraction(fraction)
    if isinstance(parsed, Rejection):
        return parsed
    share_percent, gpu_count = parsed

    memory_mib: int | None = None
    if (text := annotations.get(names.MEMORY)) is not None:
        memory = parse_memory_mib(text)
        if isinstance(memory, Rejection):
            return memory
        memory_mib = memory

    job_class: JobClass | None = None
    if (text := annotations.get(names.CLASS)) is not None:
        parsed_class = parse_class(text)
        if isinstance(parsed_class, Rejection):
            return parsed_class
        job_class = parsed_class

    workload = annotations.get(names.WORKLOAD)
    if workload is not None and not is_workload_key(workload):
        return _invalid(
            names.WORKLOAD,
            workload,
            "is not a workload key",
            "allowed are 1 to 63 letters, digits, '-', '_' or '.', with a letter or digit at both ends",
        )

    processes = 1
    if (text := annotations.get(names.PROCESSES)) is not None:
        parsed_processes = parse_processes(text)
        if isinstance(parsed_processes, Rejection):
            return parsed_processes
        processes = parsed_processes

    slo = parse_slo(annotations)
    if isinstance(slo, Rejection):
        return slo
    if slo is not None and job_class is not None and job_class is not class_of_target(slo):
        return refuse_slo(annotations, slo)

    container = annotations.get(names.CONTAINER)
    return ShareRequest(share_percent, gpu_count, memory_mib, job_class, workload, container, processes, slo)


def is_workload_key(text: str) -> bool:
    """Return whether a text may be the value of `gpushare.io/workload`."""
    return _WORKLOAD.fullmatch(text) is not None


def class_of_target(slo: Slo | RateSlo) -> JobClass:
    """Return the class that a target is for."""
    return JobClass.LATENCY if isinstance(slo, Slo) else JobClass.THROUGHPUT


def refuse_slo(annotations: Mapping[str, str], slo: Slo | RateSlo) -> Rejection:
    """Return the refusal of a target on a pod of the other class."""
    if isinstance(slo, Slo):
        why = "is for class latency, and this pod is of class throughput"
        what = f'set {names.CLASS} to "latency", name a rate such as "rate>20", or leave the target out'
    else:
        why = "is for class throughput, and this pod is of class latency"
        what = f'name a quantile and a time such as "p99<50ms", set {names.CLASS} to "throughput", or leave it out'
    return _invalid(names.SLO, annotations[names.SLO], why, what)


def _invalid(annotation: str, value: str, why: str, allowed: str) -> Rejection:
    return Rejection(Reason.INVALID_ANNOTATION, f"annotation {annotation}: {shown(value)} {why}; {allowed}")
