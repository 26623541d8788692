"""Workloads that the administrator joins over namespaces: which GpuShares are one workload's, and what they know.

A GpuShare's profile and what was learnt of its workload hold within its namespace. The setting
`policy.joinedWorkloads` names keys (`gpushare.io/workload`) that mean one workload in several namespaces
(docs/adr/0249).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from gpushare.core.api import (
    GpuShare,
    LearnedEffect,
    PhaseReading,
    ProfileMode,
    ProfileSpec,
    WorkloadSignature,
    is_workload_key,
)

_NAMESPACE: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_FEWEST_NAMESPACES: Final = 2
_NOTHING: Final[Mapping[str, "JointKnowledge"]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class JoinedWorkload:
    """An entry of the setting: in these namespaces this key means one workload."""

    workload: str
    namespaces: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.workload}={','.join(self.namespaces)}"


def parse_joined(text: str) -> tuple[JoinedWorkload, ...]:
    """Parse entries such as "resnet50=team-a,team-b", with spaces between them; empty for none.

    Raises:
        ValueError: an entry is invalid, or a namespace is in two entries of one key; a sentence says which.
    """
    entries = []
    taken: set[tuple[str, str]] = set()
    for each in text.split():
        workload, _, listed = each.partition("=")
        namespaces = tuple(listed.split(","))
        if not is_workload_key(workload):
            raise ValueError(f'"{each}" does not begin with a workload key and "="')
        if not all(map(_NAMESPACE.fullmatch, namespaces)):
            raise ValueError(f'"{each}" names something that is not a namespace')
        if len(set(namespaces)) < max(_FEWEST_NAMESPACES, len(namespaces)):
            raise ValueError(f'"{each}" does not name two or more different namespaces')
        pairs = {(workload, namespace) for namespace in namespaces}
        if twice := sorted(namespace for _, namespace in pairs & taken):
            raise ValueError(f"workload {workload} of namespace {twice[0]} is in two entries")
        taken |= pairs
        entries.append(JoinedWorkload(workload, namespaces))
    return tuple(entries)


@dataclass(frozen=True, slots=True)
class JointKnowledge:
    """Knowledge about a joined workload on one GPU model: the profile, and the effects learnt with it."""

    profile: WorkloadSignature
    learned: tuple[LearnedEffect, ...] = ()

    def suits(self, spec: ProfileSpec | None) -> bool:
        """Return whether a GpuShare with these settings of profiling takes it.

        Not with mode Off, nor if it asks for a longer measurement alone; one in place has no such length.
        """
        if spec is None:
            return True
        is_long = (self.profile.window_seconds or 0.0) >= (spec.window_seconds or 0)
        return spec.mode is not ProfileMode.OFF and (is_long or self.profile.reading is PhaseReading.IN_PLACE)


_At = tuple[str, str]  # a GpuShare's namespace and name


@dataclass(frozen=True, slots=True)
class _JoinedMember:
    """A GpuShare of a joined workload.

    Attributes:
        source: the parts of the GpuShare that it was made of.
        profile: None if it has none that can be used.
        usual: identifies the profile's usual work, with its cap curve.
        rank: orders profiles of which none gives way to another one.
    """

    source: tuple[object, ...]
    profile: WorkloadSignature | None = None
    learned: tuple[LearnedEffect, ...] = ()
    usual: tuple[object, ...] = ()
    rank: tuple[int, int, int, float, str, str] = (0, 0, 0, 0.0, "", "")

    def windows(self, gpu_model: str) -> int:
        """Return the number of windows that it learnt from on a GPU model."""
        return next((each.windows for each in self.learned if each.gpu_model == gpu_model), 0)


class JoinedShares:
    """GpuShares of joined workloads, and what is known of each of these workloads on each GPU model.

    False if no workload is joined: then it keeps nothing and knows nothing.

    Attributes:
        version: grows with each change of what is known.
    """

    def __init__(self, joined: Iterable[JoinedWorkload] = ()) -> None:
        self._entries: dict[tuple[str | None, str], JoinedWorkload] = {
            (each.workload, namespace): each for each in joined for namespace in each.namespaces
        }
        self._entry_of: dict[_At, JoinedWorkload] = {}
        self._members: dict[JoinedWorkload, dict[_At, _JoinedMember]] = {}
        self._known: dict[JoinedWorkload, Mapping[str, JointKnowledge]] = {}
        self.version = 0

    def __bool__(self) -> bool:
        return bool(self._entries)

    def joins(self, namespace: str, workload: str | None) -> bool:
        """Return whether this key of this namespace is joined with that of another one."""
        return (workload, namespace) in self._entries

    def put(self, share: GpuShare) -> None:
        """Record a GpuShare that came or changed."""
        if not self._entries:
            return
        at = (share.namespace, share.name)
        entry = self._entries.get((share.status.workload, share.namespace))
        if self._entry_of.get(at) != entry:
            self.drop(*at)
        if entry is None:
            return
        members = self._members.setdefault(entry, {})
        before = members.get(at)
        source = (share.status.profile, share.status.learned, share.spec.profile)
        if before is None or before.source != source:
            self._entry_of[at] = entry
            members[at] = _member_of(source, share)
            self._changed(entry)

    def drop(self, namespace: str, name: str) -> None:
        """Forget a GpuShare that is gone."""
        entry = self._entry_of.pop((namespace, name), None)
        if entry is not None:
            del self._members[entry][namespace, name]
            self._changed(entry)

    def of(self, namespace: str, workload: str | None) -> Mapping[str, JointKnowledge]:
        """Return what the GpuShares of a pod's workload know, by GPU model; empty if it is not joined.

        It is one GpuShare's profile (`_leading`), and the effects that were learnt from most windows with it.
        """
        entry = self._entries.get((workload, namespace))
        if entry is None:
            return _NOTHING
        if entry not in self._known:
            self._known[entry] = _knowledge(self._members.get(entry, {}).values())
        return self._known[entry]

    def beside(self, namespace: str, name: str) -> Sequence[tuple[str, str]]:
        """Return namespace and name of the other GpuShares of a GpuShare's joined workload."""
        at = (namespace, name)
        entry = self._entry_of.get(at)
        return () if entry is None else [each for each in self._members[entry] if each != at]

    def name_of(self, namespace: str, name: str) -> str | None:
        """Return a name for the joined workload of a GpuShare, which no GpuShare has; None if it is not joined."""
        entry = self._entry_of.get((namespace, name))
        return None if entry is None else f"{entry.namespaces[0]}/{joint_name(entry.workload)}"

    def _changed(self, entry: JoinedWorkload) -> None:
        self._known.pop(entry, None)
        self.version += 1


def joint_name(workload: str) -> str:
    """Return a name for a joined workload in place of a GpuShare's, which has no slash."""
    return f"workload/{workload}"


def _member_of(source: tuple[object, ...], share: GpuShare) -> _JoinedMember:
    profile, spec = share.status.profile, share.spec.profile
    if profile is None or not profile.is_usable() or (spec is not None and spec.mode is ProfileMode.OFF):
        return _JoinedMember(source)
    counters = tuple(sorted(profile.counters.items()))
    usual = (counters, repr(replace(profile, counters={}, phases=(), memory_peak_mib=None)))
    rank = (
        len(profile.cap_curve),
        len(profile.phases),
        profile.memory_peak_mib or 0,
        profile.window_seconds or 0.0,
        profile.taken_at or "",
        f"{usual}{profile.phases}",
    )
    return _JoinedMember(source, profile, share.status.learned, usual, rank)


def _knowledge(members: Iterable[_JoinedMember]) -> dict[str, JointKnowledge]:
    models: dict[str, list[_JoinedMember]] = {}
    for member in members:
        if member.profile is not None:
            models.setdefault(member.profile.gpu_model, []).append(member)
    found = {}
    for gpu_model, listed in models.items():
        leader = _leading(listed)
        assert leader.profile is not None
        alike = [member for member in listed if member.usual == leader.usual]
        most = max(member.windows(gpu_model) for member in alike)
        learned = max((each.learned for each in alike if each.windows(gpu_model) == most), key=repr)
        found[gpu_model] = JointKnowledge(leader.profile, learned)
    return found


def _leading(members: Iterable[_JoinedMember]) -> _JoinedMember:
    """Return the GpuShare whose profile stands for all on this GPU model; the same in every process.

    What gives way to another profile within one GpuShare (`WorkloadSignature.gives_way`: an earlier revision, far
    less active, taken under fewer threads, much shorter) does so here. Of the others the one with most points in
    its cap curve leads, then most phases, the highest peak of memory, the longest window, the latest time.
    """
    distinct = {member.rank: member for member in members}
    leader, *others = (distinct[rank] for rank in sorted(distinct, reverse=True))
    for other in others:
        assert leader.profile is not None
        assert other.profile is not None
        if leader.profile.gives_way(other.profile) and not other.profile.gives_way(leader.profile):
            leader = other
    return leader
