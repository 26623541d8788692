"""gpushare's components: their pods, and the words that identify their processes."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from bench.chaos.node import RunningProcess

RELEASE_NAMESPACE: Final = "gpushare-system"


class Component(StrEnum):
    """A part of gpushare: the label app.kubernetes.io/component of its pods."""

    OPERATOR = "operator"
    ADMISSION = "admission"
    SCHEDULER = "scheduler"
    AGENT = "agent"
    MPS = "mps"


@dataclass(frozen=True, slots=True)
class Role:
    """A kind of process of a part: words of its command line, and how many run at least; `per_gpu` or per pod.

    Attributes:
        container: the container that runs it, where pods of an earlier release, which no upgrade replaces, run
            without it.
    """

    part: Component
    words: str
    per_gpu: bool = False
    is_ours: bool = True
    container: str = ""


ROLES: Final[Mapping[str, Role]] = {
    "operator": Role(Component.OPERATOR, "gpushare_operator"),
    "admission": Role(Component.ADMISSION, "gpushare_operator.admission"),
    "extender": Role(Component.SCHEDULER, "gpushare.extender"),
    "kube-scheduler": Role(Component.SCHEDULER, "scheduler.yaml", is_ours=False),
    "agent": Role(Component.AGENT, "gpushare_deviceplugin"),
    "front": Role(Component.AGENT, "gpushare.front"),
    "host": Role(Component.MPS, "gpushare.mps.host"),
    "gate": Role(Component.MPS, "gpushare.mps.keeper", per_gpu=True),
    "throttle": Role(Component.MPS, "gpushare.mps.throttler"),
    "thawer": Role(Component.MPS, "gpushare.mps.thawer", container="thawer"),
    "daemon": Role(Component.MPS, "gpushare.twin.mps.daemon", per_gpu=True, is_ours=False),
}


def processes_of(
    role: Role, parts: Mapping[str, Component], found: Iterable[RunningProcess]
) -> list[RunningProcess]:
    """Return the live processes of a role, by pid; `parts` is which part each pod uid is of."""
    return sorted(
        (one for one in found if parts.get(one.pod_uid) is role.part and role.words in one.command),
        key=lambda one: one.pid,
    )


def missing_roles(
    parts: Mapping[str, Component],
    found: Iterable[RunningProcess],
    gpus: int,
    containers: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> list[str]:
    """Return the roles of which fewer processes run than should.

    Args:
        containers: names of the containers that each pod has, by uid.
    """
    processes = tuple(found)
    missing = []
    for name, role in ROLES.items():
        pods = [uid for uid, part in parts.items() if part is role.part]
        if role.container:
            pods = [uid for uid in pods if role.container in containers.get(uid, ())]
        wanted = gpus if role.per_gpu else len(pods)
        running = len(processes_of(role, parts, processes))
        if running < wanted:
            missing.append(f"{running} of {wanted} processes of {name} run")
    return missing
