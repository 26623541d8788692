"""gpushare's parts: which pods they are, and by what words their processes are known."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from chaosrun.node import Process

RELEASE_NAMESPACE: Final = "gpushare-system"


class Part(StrEnum):
    """A part of gpushare: the label app.kubernetes.io/component of its pods."""

    OPERATOR = "operator"
    ADMISSION = "admission"
    SCHEDULER = "scheduler"
    AGENT = "agent"
    MPS = "mps"


@dataclass(frozen=True, slots=True)
class Role:
    """A kind of process of a part: words of its command line, and how many run at least; `per_gpu` or per pod."""

    part: Part
    words: str
    per_gpu: bool = False
    is_ours: bool = True


ROLES: Final[Mapping[str, Role]] = {
    "operator": Role(Part.OPERATOR, "gpushare_operator"),
    "admission": Role(Part.ADMISSION, "gpushare_operator.admission"),
    "extender": Role(Part.SCHEDULER, "gpushare.extender"),
    "kube-scheduler": Role(Part.SCHEDULER, "scheduler.yaml", is_ours=False),
    "agent": Role(Part.AGENT, "gpushare_deviceplugin"),
    "host": Role(Part.MPS, "gpushare.mps.host"),
    "gate": Role(Part.MPS, "gpushare.mps.keeper", per_gpu=True),
    "throttle": Role(Part.MPS, "gpushare.mps.throttler"),
    "daemon": Role(Part.MPS, "gpushare.twin.mps.daemon", per_gpu=True, is_ours=False),
}


def processes_of(role: Role, parts: Mapping[str, Part], found: Iterable[Process]) -> list[Process]:
    """Return the live processes of a role, by pid; `parts` is which part each pod uid is of."""
    return sorted(
        (one for one in found if parts.get(one.pod_uid) is role.part and role.words in one.command),
        key=lambda one: one.pid,
    )


def missing_roles(parts: Mapping[str, Part], found: Iterable[Process], gpus: int) -> list[str]:
    """Return the roles of which fewer processes run than should."""
    processes = tuple(found)
    missing = []
    for name, role in ROLES.items():
        wanted = gpus if role.per_gpu else sum(part is role.part for part in parts.values())
        running = len(processes_of(role, parts, processes))
        if running < wanted:
            missing.append(f"{running} of {wanted} processes of {name} run")
    return missing
