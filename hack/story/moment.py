"""The cluster's state at one moment of the story: pods, their data, and the events so far."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpushare.cli.access import Seen
from gpushare.cli.pod_rows import TopRow, rows
from gpushare.core.api import GpuShare
from gpushare.core.control import Gain, gain_of

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StoryEvent:
    """One event that gpushare wrote about a pod.

    Attributes:
        key: names the event itself; about: the pod's program, as the story calls it.
    """

    key: str
    at: str
    reason: str
    about: str
    note: str


@dataclass(frozen=True, slots=True)
class Moment:
    """One look at the cluster.

    Attributes:
        rows: the table of `gpushare top`.
        programs: by name of a pod, past ones too, its program (the label app).
        uids: by program, the uid of its pod that is not leaving.
        ended: programs whose pod has run to its end.
    """

    rows: tuple[TopRow, ...]
    programs: Mapping[str, str]
    uids: Mapping[str, str]
    ended: frozenset[str]
    shares: Mapping[str, GpuShare]
    told: tuple[StoryEvent, ...]
    gain: Gain = field(default_factory=lambda: gain_of(()))

    def row(self, program: str) -> TopRow | None:
        """Return the row of a program's pod; of one that leaves only where there is no other."""
        found = [row for row in self.rows if self.programs.get(row.pod) == program]
        return min(found, key=lambda row: row.state == "Terminating", default=None)

    def is_leaving(self, program: str) -> bool:
        """Return whether a pod of a program is leaving and has not ended yet."""
        return any(row.state == "Terminating" for row in self.rows if self.programs.get(row.pod) == program)

    def share(self, program: str) -> GpuShare | None:
        """Return the GpuShare of a program: its own, or the one that was made for its Deployment."""
        return self.shares.get(program) or self.shares.get(f"deployment-{program}")


def look(seen: Seen, events: Iterable[Json], known: Mapping[str, str], namespace: str) -> Moment:
    """Join what the API says.

    Args:
        known: the programs of pods that were seen before.
    """
    programs = {**known, **{pod["metadata"]["name"]: _program(pod) for pod in seen.pods}}
    return Moment(
        rows=tuple(rows(seen.pods, seen.nodes, seen.shares)),
        programs=programs,
        uids={
            _program(pod): pod["metadata"]["uid"]
            for pod in seen.pods
            if not pod["metadata"].get("deletionTimestamp")
        },
        ended=frozenset(_program(pod) for pod in seen.pods if pod.get("status", {}).get("phase") == "Succeeded"),
        shares={share.name: share for share in seen.shares},
        told=tuple(sorted(_told(events, programs), key=lambda each: (each.at, each.key))),
        gain=gain_of(seen.nodes, namespace),
    )


def _told(events: Iterable[Json], programs: Mapping[str, str]) -> Iterable[StoryEvent]:
    for event in events:
        regarding = event.get("regarding") or {}
        if regarding.get("kind") == "Pod" and regarding.get("name") in programs:
            yield StoryEvent(
                key=event["metadata"]["name"],
                at=str(event.get("eventTime") or event.get("deprecatedLastTimestamp") or ""),
                reason=str(event.get("reason") or ""),
                about=programs[regarding["name"]],
                note=_named(str(event.get("note") or ""), programs),
            )


def _named(note: str, programs: Mapping[str, str]) -> str:
    """Return a sentence with programs for the names of their pods."""
    for pod, program in programs.items():
        note = note.replace(f"pod {pod}", program).replace(pod, program)
    return note


def _program(pod: Json) -> str:
    metadata = pod["metadata"]
    return str((metadata.get("labels") or {}).get("app") or metadata["name"])
