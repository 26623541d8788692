"""`gpushare profile show`: what gpushare has learnt about the workloads of a cluster."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from gpushare.cli.access import (
    AllOption,
    ContextOption,
    KubeconfigOption,
    NamespaceOption,
    Seen,
    Where,
    ask,
    see,
)
from gpushare.cli.columns import Column, gibibytes, percent, ratio, show
from gpushare.cli.console import notes, out
from gpushare.cli.errors import AbsentError
from gpushare.cli.records import Format, FormatOption, emit
from gpushare.core.api import GpuShare, PhaseReading, to_json

_SHOWN: Final = 0.01  # use of a pipe below which no figure is shown


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """The knowledge about one GpuShare's workload."""

    share: GpuShare

    @property
    def name(self) -> str:
        """Return "namespace/name"."""
        return f"{self.share.namespace}/{self.share.name}"

    def pipe(self, name: str) -> float | None:
        """Return the use of a pipe when alone."""
        profile = self.share.status.profile
        return profile.as_counters().pipes().get(name) if profile is not None else None

    @property
    def sm(self) -> float | None:
        """Return the part of the time that the SMs are busy when alone."""
        profile = self.share.status.profile
        return profile.as_counters().sm_util if profile is not None else None

    @property
    def gpu_model(self) -> str | None:
        """Return the GPU model that the profile was taken on."""
        return self.share.status.profile.gpu_model if self.share.status.profile is not None else None

    @property
    def taken_at(self) -> str | None:
        """Return when the profile was taken."""
        return self.share.status.profile.taken_at if self.share.status.profile is not None else None

    def as_record(self) -> dict[str, Any]:
        """Return one object for programs, with the field names of the GpuShare."""
        status = to_json(self.share.status)
        kept = ("phase", "class", "profile", "recommendedFraction", "promise", "learned")
        return {
            "namespace": self.share.namespace,
            "name": self.share.name,
            **{key: status[key] for key in kept if key in status},
        }


COLUMNS: Final[tuple[Column[ProfileRow], ...]] = (
    Column("GPUSHARE", lambda row: row.name),
    Column("PHASE", lambda row: row.share.status.phase.value, rank=5),
    Column(
        "GPU MODEL", lambda row: row.share.status.profile.gpu_model if row.share.status.profile else None, rank=7
    ),
    Column("SM", lambda row: percent(row.sm), rank=1, is_right=True),
    Column("FP16", lambda row: percent(row.pipe("fp16")), rank=2, is_right=True),
    Column("FP32", lambda row: percent(row.pipe("fp32")), rank=3, is_right=True),
    Column("FP64", lambda row: percent(row.pipe("fp64")), rank=6, is_right=True),
    Column("DRAM", lambda row: percent(row.pipe("dram")), rank=4, is_right=True),
    Column(
        "MEM PEAK",
        lambda row: gibibytes(row.share.status.profile.memory_peak_mib) if row.share.status.profile else None,
        rank=8,
        is_right=True,
    ),
    Column("AUTO", lambda row: row.share.status.recommended_fraction, is_right=True),
    Column("PROMISE", lambda row: ratio(row.share.status.promise_ratio), rank=9, is_right=True),
    Column("TAKEN", lambda row: row.taken_at, wide_only=True, rank=10),
    Column("LEARNED", lambda row: _learned(row.share), wide_only=True, rank=10),
)


def _learned(share: GpuShare) -> str | None:
    """Return what was observed beside others, relative to the model's predictions."""
    return (
        "; ".join(
            f"{each.gpu_model}: suffers {-each.sensitivity:+.0%}, hurts {-each.pressure:+.0%} more than predicted"
            for each in share.status.learned
        )
        or None
    )


def phase_lines(row: ProfileRow) -> list[str]:
    """Return one line for each kind of other work that a workload does."""
    profile = row.share.status.profile
    lines = []
    for phase in profile.phases if profile is not None else ():
        counters = phase.as_signature("").as_counters()
        uses = {"SM": counters.sm_util, **{name.upper(): value for name, value in counters.pipes().items()}}
        drawn = ", ".join(f"{name} {percent(value)}" for name, value in uses.items() if value and value >= _SHOWN)
        part = f" for {phase.time_ratio:.0%} of its time" if phase.time_ratio is not None else ""
        how = "alone" if phase.reading is PhaseReading.ALONE else "in place"
        cap = f" under {phase.thread_percentage}% of the threads" if phase.thread_percentage is not None else ""
        lines.append(f"{row.name} does other work{part}: {drawn or 'next to nothing'} (read {how}{cap})")
    return lines


def profile_rows(seen: Seen, name: str | None) -> list[ProfileRow]:
    """Return all GpuShares, or those with this name or with a pod of this name.

    Raises:
        AbsentError: there is none.
    """
    found = sorted(seen.shares, key=lambda share: (share.namespace, share.name))
    if name is None:
        return [ProfileRow(share) for share in found]
    named = [share for share in found if name in _names_of(share)]
    if not named:
        raise AbsentError(f'no GpuShare, and no pod of one, is named {name}: "gpushare profile show" lists them')
    return [ProfileRow(share) for share in named]


def _names_of(share: GpuShare) -> Iterable[str]:
    for name in (share.name, *(each.pod for each in share.status.placements)):
        yield from (name, f"{share.namespace}/{name}")


def show_profiles(
    name: Annotated[str | None, typer.Argument(help="a GpuShare or a pod; default: all")] = None,
    namespace: NamespaceOption = None,
    every: AllOption = False,
    output: FormatOption = Format.TABLE,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
) -> None:
    """Show what gpushare has learnt about workloads: pipes, memory, what "auto" means for each."""
    where = Where(None if every else namespace, kubeconfig, context)
    seen = ask(where, lambda api: see(api, where))
    for note in seen.notes:
        notes().print(note)
    found = profile_rows(seen, name)
    if output.is_data:
        emit([row.as_record() for row in found], output)
    elif found:
        show(out(), COLUMNS, found, wide=output is Format.WIDE)
        for row in found:
            for line in phase_lines(row):
                out().print(line)
    else:
        out().print("there is no GpuShare yet: gpushare makes one for each owner of annotated pods")
