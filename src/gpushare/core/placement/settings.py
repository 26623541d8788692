"""Settings of an installation for decisions: rendered once by the chart, read by everything that decides."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from gpushare.core.admission import (
    AUTO_FRACTION,
    DEFAULT_GPU_MEMORY_RESERVE_MIB,
    Defaults,
    JoinedWorkload,
    parse_joined,
)
from gpushare.core.api import Rejection, parse_class, parse_fraction
from gpushare.core.placement.policies import NAMES
from gpushare.core.placement.probation import MOST_SECONDS, ProbationSettings

DEFAULT_RESERVE_AFTER_SECONDS: Final = 1800.0
"""Seconds after which a GPU is kept for a waiting pod (docs/measurements/jobs.md)."""
MOST_HEADROOM: Final = 0.9

POLICY: Final = "GPUSHARE_POLICY"
DEFAULT_CLASS: Final = "GPUSHARE_DEFAULT_CLASS"
DEFAULT_FRACTION: Final = "GPUSHARE_DEFAULT_FRACTION"
MAX_SLOWDOWN: Final = "GPUSHARE_MAX_SLOWDOWN"
LATENCY_MAX_SLOWDOWN: Final = "GPUSHARE_LATENCY_MAX_SLOWDOWN"
GPU_MEMORY_RESERVE: Final = "GPUSHARE_GPU_MEMORY_RESERVE"
CHARGE_MEMORY: Final = "GPUSHARE_CHARGE_MEMORY"
CHARGE_THREADS: Final = "GPUSHARE_CHARGE_THREADS"
PROBATION_SECONDS: Final = "GPUSHARE_PROBATION_SECONDS"
MOST_PROBATIONS: Final = "GPUSHARE_MOST_PROBATIONS"
LONGEST_PROBATION: Final = "GPUSHARE_LONGEST_PROBATION_SECONDS"
FREEZES: Final = "GPUSHARE_FREEZES"
RESERVE_AFTER: Final = "GPUSHARE_RESERVE_AFTER_SECONDS"
SLOWDOWN_HEADROOM: Final = "GPUSHARE_SLOWDOWN_HEADROOM"
TAINTS: Final = "GPUSHARE_TAINTS"
JOINED_WORKLOADS: Final = "GPUSHARE_JOINED_WORKLOADS"


class SettingsError(ValueError):
    """A setting cannot be used; the message is one sentence that names it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one installation.

    Attributes:
        policy: name of the placement policy.
        defaults: values that neither a pod nor its GpuShare sets, such as the tolerated slowdown.
        gpu_memory_reserve_mib: memory of each GPU that tenants never get.
        probation: when an unknown workload gets a GPU to itself for a while.
        reserve_after_seconds: a GPU is kept for a pod that has waited longer than this; 0 turns it off.
        joined: workload keys that mean one workload in several namespaces.
        slowdown_headroom_ratio: part of a throughput tenant's tolerated slowdown that placement leaves for what
            predictions miss, 0 to `MOST_HEADROOM` (docs/adr/0257).
    """

    policy: str = "gpushare"
    defaults: Defaults = field(default_factory=Defaults)
    gpu_memory_reserve_mib: int = DEFAULT_GPU_MEMORY_RESERVE_MIB
    probation: ProbationSettings = field(default_factory=ProbationSettings)
    reserve_after_seconds: float = DEFAULT_RESERVE_AFTER_SECONDS
    joined: tuple[JoinedWorkload, ...] = ()
    slowdown_headroom_ratio: float = 0.0

    def to_mapping(self) -> dict[str, str]:
        """Return the settings as the chart renders them: environment variables and their values."""
        return {
            POLICY: self.policy,
            DEFAULT_CLASS: self.defaults.job_class.value,
            DEFAULT_FRACTION: self.defaults.auto_fraction,
            MAX_SLOWDOWN: f"{self.defaults.max_slowdown_ratio:g}",
            LATENCY_MAX_SLOWDOWN: f"{self.defaults.latency_max_slowdown_ratio:g}",
            GPU_MEMORY_RESERVE: str(self.gpu_memory_reserve_mib),
            CHARGE_MEMORY: "true" if self.defaults.charge_memory else "false",
            CHARGE_THREADS: "true" if self.defaults.charge_threads else "false",
            PROBATION_SECONDS: f"{self.probation.seconds:g}",
            MOST_PROBATIONS: str(self.probation.most),
            LONGEST_PROBATION: f"{self.probation.longest_seconds:g}",
            FREEZES: "true" if self.probation.freezes else "false",
            RESERVE_AFTER: f"{self.reserve_after_seconds:g}",
            SLOWDOWN_HEADROOM: f"{self.slowdown_headroom_ratio:g}",
            TAINTS: ",".join(self.defaults.taints),
            JOINED_WORKLOADS: " ".join(map(str, self.joined)),
        }


def parse_settings(values: Mapping[str, str]) -> Settings:
    """Read settings by the names of their environment variables; a missing one has its default.

    Raises:
        SettingsError: a value is invalid.
    """
    standard = Settings().to_mapping()
    read = {name: values.get(name) or default for name, default in standard.items()}
    taints = values.get(TAINTS, standard[TAINTS])  # empty means none

    def refused(name: str, wanted: str) -> SettingsError:
        return SettingsError(f'{name}: "{read[name]}" is not {wanted}')

    if read[POLICY] not in NAMES:
        raise refused(POLICY, "one of " + ", ".join(NAMES))
    job_class = parse_class(read[DEFAULT_CLASS])
    if isinstance(job_class, Rejection):
        raise refused(DEFAULT_CLASS, "throughput or latency")
    fraction = parse_fraction(read[DEFAULT_FRACTION])
    if isinstance(fraction, Rejection) or fraction[0] is None:
        raise refused(DEFAULT_FRACTION, f"a fraction such as {AUTO_FRACTION}")

    def slowdown(name: str) -> float:
        try:
            ratio = float(read[name])
        except ValueError:
            raise refused(name, "a number") from None
        if not 1 <= ratio < float("inf"):
            raise refused(name, "1 or more")
        return ratio

    try:
        reserve_after_seconds = float(read[RESERVE_AFTER])
    except ValueError:
        raise refused(RESERVE_AFTER, "a number of seconds") from None
    if not 0 <= reserve_after_seconds < float("inf"):
        raise refused(RESERVE_AFTER, "0 or more seconds")
    try:
        headroom_ratio = float(read[SLOWDOWN_HEADROOM])
    except ValueError:
        raise refused(SLOWDOWN_HEADROOM, "a number") from None
    if not 0 <= headroom_ratio <= MOST_HEADROOM:
        raise refused(SLOWDOWN_HEADROOM, f"0 to {MOST_HEADROOM:g}")
    if not read[GPU_MEMORY_RESERVE].isdecimal():
        raise refused(GPU_MEMORY_RESERVE, "a number of MiB")
    for name in (CHARGE_MEMORY, CHARGE_THREADS, FREEZES):
        if read[name] not in ("true", "false"):
            raise refused(name, "true or false")
    for name in (PROBATION_SECONDS, LONGEST_PROBATION):
        if not read[name].isdecimal() or int(read[name]) > MOST_SECONDS:
            raise refused(name, f"a whole number of seconds, 0 to {MOST_SECONDS:g}")
    if not read[MOST_PROBATIONS].isdecimal() or int(read[MOST_PROBATIONS]) < 1:
        raise refused(MOST_PROBATIONS, "a whole number from 1")
    try:
        joined = parse_joined(read[JOINED_WORKLOADS])
    except ValueError as error:
        raise SettingsError(f"{JOINED_WORKLOADS}: {error}") from error
    return Settings(
        read[POLICY],
        Defaults(
            read[DEFAULT_FRACTION],
            job_class,
            slowdown(MAX_SLOWDOWN),
            latency_max_slowdown_ratio=slowdown(LATENCY_MAX_SLOWDOWN),
            charge_memory=read[CHARGE_MEMORY] == "true",
            charge_threads=read[CHARGE_THREADS] == "true",
            taints=tuple(taints.replace(",", " ").split()),
        ),
        int(read[GPU_MEMORY_RESERVE]),
        ProbationSettings(
            float(read[PROBATION_SECONDS]),
            int(read[MOST_PROBATIONS]),
            freezes=read[FREEZES] == "true",
            longest_seconds=float(read[LONGEST_PROBATION]),
        ),
        reserve_after_seconds,
        joined,
        headroom_ratio,
    )
