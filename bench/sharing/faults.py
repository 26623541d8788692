"""Cause MPS faults during a run of pods, by pods that access an illegal address, and record the consequences.

Such a pod is decided like any other, beside the jobs. Every process of its MPS server ends with it, as MPS does.
Each fault's record has the jobs on that server, those that ended, those that got an event, and the time until the
GPU served again. A job that ended is created again once its pod got the event, or after a Job's first back-off.
One that fell without having been seen on the server is named apart: there should be none.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from bench.sharing.manifests import Json

BACK_BAR_SECONDS: Final = 5.0
PLACED_SECONDS: Final = 120.0  # after that a pod that was not placed is given up
FOLLOWED_SECONDS: Final = 45.0  # how long to wait for events and ends
BACKOFF_SECONDS: Final = 10.0  # of a Job's controller, the first time
SEEN_SECONDS: Final = 2.5  # a job that the agent saw this long before the fault counts as on the server
EARLY_SECONDS: Final = 2.0  # an event from this long before the fault counts as of it: clocks of whole seconds
TOLD: Final = "GpuFault"


@dataclass(frozen=True, slots=True)
class PodFault:
    """One fault: at which second of its run its pod comes, and what the pod is called."""

    at: float
    name: str


def moments(number: int, last_arrival: float) -> list[PodFault]:
    """Return faults spread evenly over the time in which jobs come."""
    return [
        PodFault(round(last_arrival * (each + 1) / (number + 1), 1), f"fault-{each}") for each in range(number)
    ]


@dataclass(frozen=True, slots=True)
class Gauge:
    """Values of the agent's metrics for the GPU: faults so far, whether it serves, pods with clients."""

    faults: float
    serves: bool
    clients: frozenset[str]


@dataclass(frozen=True)
class Hands:
    """Actions and queries of an injection; each may raise, and is retried at the next step."""

    create: Callable[[str], None]
    delete: Callable[[str], None]
    log: Callable[[str], str]
    gauge: Callable[[], Gauge]
    told: Callable[[], Mapping[str, Sequence[float]]]  # by pod uid, seconds of its events since the run began


@dataclass
class _Open:
    """The fault that is under way; times in seconds since the run began."""

    fault: PodFault
    created: float
    faults_before: float
    seen: list[tuple[float, frozenset[str]]] = field(default_factory=list)
    at: float | None = None
    healthy: float | None = None
    uids: dict[str, str] = field(default_factory=dict)  # of pods that ran when it came
    fell: dict[str, float] = field(default_factory=dict)
    told: dict[str, float] = field(default_factory=dict)
    error: str = ""


class FaultInjector:
    """Injector of faults, one after the other; `step` is called at every look at the pods.

    Args:
        wall: seconds since 1970 when the run began; pods tell by the wall clock when they fault.
    """

    def __init__(self, faults: Sequence[PodFault], hands: Hands, wall: float) -> None:
        self._coming, self._hands, self._wall = list(faults), hands, wall
        self._open: _Open | None = None
        self._felled: set[str] = set()  # uids
        self.records: list[dict[str, Any]] = []
        self.troubles = 0

    def step(self, now: float, pods: Mapping[str, Json], trouble: tuple[type[Exception], ...]) -> None:
        """Go on; what fails is counted and tried again at the next step.

        Args:
            now: seconds since the run began.
            pods: those of the run, by name.
            trouble: what hands raise.
        """
        try:
            if self._open is None:
                self._begin(now)
            elif self._open.at is None:
                self._until_it_faults(self._open, now, pods)
            else:
                self._follow(self._open, now, pods)
        except trouble as error:
            self.troubles += 1
            if self._open is not None:
                self._open.error = str(error)[:300]

    def has_felled(self, pod: Json) -> bool:
        """Return whether a fault ended this pod, which has failed."""
        return _uid(pod) in self._felled

    def may_restart(self, name: str, now: float) -> bool:
        """Return whether a fallen pod was reported, or has waited as long as a Job's would."""
        opened = self._open
        if opened is None or name not in opened.fell:
            return True
        return opened.uids.get(name) in opened.told or now - opened.fell[name] >= BACKOFF_SECONDS

    def close(self) -> None:
        """Keep a fault that the run's end cut off, and name those that did not come."""
        if self._open is not None:
            self._open.error = self._open.error or "the run ended before it was over"
            self._keep(self._open)
        for fault in self._coming:
            self.records.append({"fault": fault.name, "planned": fault.at, "at": None, "error": "never came"})
        self._coming = []

    def _begin(self, now: float) -> None:
        if not self._coming or now < self._coming[0].at:
            return
        before = self._hands.gauge().faults
        self._open = _Open(self._coming.pop(0), now, before)
        self._hands.create(self._open.fault.name)

    def _until_it_faults(self, opened: _Open, now: float, pods: Mapping[str, Json]) -> None:
        pod = pods.get(opened.fault.name)
        phase = "" if pod is None else pod["status"].get("phase", "")
        opened.uids.update({name: _uid(each) for name, each in pods.items() if _runs(each)})
        if pod is None:  # it could not be created, or was taken away
            self._hands.create(opened.fault.name)
        else:
            opened.uids[opened.fault.name] = _uid(pod)
        if phase in ("Running", "Succeeded", "Failed"):
            opened.at = _faulted(self._hands.log(opened.fault.name), self._wall)
        if opened.at is not None:
            self._follow(opened, now, pods)
        elif phase in ("Succeeded", "Failed"):
            self._give_up(opened, "it ended without a fault")
        elif now - opened.created > PLACED_SECONDS:
            self._give_up(opened, f"not placed, or not at work, within {PLACED_SECONDS:.0f} s")
        else:
            opened.seen.append((now, self._hands.gauge().clients))

    def _follow(self, opened: _Open, now: float, pods: Mapping[str, Json]) -> None:
        at = opened.at
        assert at is not None, "it faulted"
        for name, pod in pods.items():
            if name in opened.fell or not _fails(pod, at + self._wall):
                continue
            if opened.healthy is None:  # it came while the server went down
                opened.uids.setdefault(name, _uid(pod))
            if opened.uids.get(name) == _uid(pod):
                opened.fell[name] = now
                self._felled.add(_uid(pod))
        if opened.healthy is None:
            gauge = self._hands.gauge()
            if gauge.faults > opened.faults_before and gauge.serves:
                opened.healthy = now
            else:
                opened.seen.append((now, gauge.clients))
        told = self._hands.told()
        for uid in opened.uids.values():
            if since := [when for when in told.get(uid, ()) if when > at - EARLY_SECONDS]:
                opened.told[uid] = round(min(since) - at, 2)
        expected = (self._on_server(opened) & opened.uids.keys()) | {opened.fault.name}
        gone = {
            name for name in expected if name in opened.fell or not _is_live(pods.get(name), opened.uids.get(name))
        }
        is_over = opened.healthy is not None and gone == expected
        is_told = all(opened.uids.get(name) in opened.told for name in opened.fell)
        if (is_over and is_told) or now - at > FOLLOWED_SECONDS:
            self._keep(opened)
            self._hands.delete(opened.fault.name)

    def _give_up(self, opened: _Open, why: str) -> None:
        opened.error = why
        self._keep(opened)
        self._hands.delete(opened.fault.name)

    def _on_server(self, opened: _Open) -> set[str]:
        since = (opened.at or 0.0) - SEEN_SECONDS
        return {name for when, names in opened.seen if when >= since for name in names}

    def _keep(self, opened: _Open) -> None:
        fault, at = opened.fault, opened.at
        self._open = None
        line: dict[str, Any] = {
            "fault": fault.name,
            "planned": fault.at,
            "at": None if at is None else round(at, 2),
        }
        if at is not None:
            on_server = self._on_server(opened) - {fault.name}
            fell = opened.fell.keys() - {fault.name}
            line |= {
                "on_server": sorted(on_server),
                "fell": sorted(fell & on_server),
                "fell_unseen": sorted(fell - on_server),
                "beside": sorted(opened.uids.keys() - on_server - fell - {fault.name}),
                "told_after": {
                    name: opened.told.get(opened.uids[name]) for name in sorted(opened.fell) if name in opened.uids
                },
                "healthy_after": None if opened.healthy is None else round(opened.healthy - at, 2),
            }
        self.records.append({**line, "error": opened.error})


def _faulted(log: str, wall: float) -> float | None:
    for text in log.splitlines():
        if '"faulting"' in text:
            return float(json.loads(text)["t"]) - wall
    return None


def _runs(pod: Json) -> bool:
    return pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]


def _fails(pod: Json, at: float) -> bool:
    """Return whether a pod failed since a moment (seconds since 1970); kubelet reports ends in whole seconds."""
    if pod["status"].get("phase") != "Failed" or "deletionTimestamp" in pod["metadata"]:
        return False
    states = [each.get("state", {}) for each in pod["status"].get("containerStatuses", [])]
    ends = [state["terminated"]["finishedAt"] for state in states if "finishedAt" in state.get("terminated", {})]
    return all(datetime.fromisoformat(end).timestamp() >= at - 1.5 for end in ends)


def _uid(pod: Json) -> str:
    return str(pod["metadata"].get("uid", pod["metadata"]["name"]))


def _is_live(pod: Json | None, uid: str | None) -> bool:
    return pod is not None and _uid(pod) == uid and pod["status"].get("phase") in ("Pending", "Running")


def report(lines: Sequence[Mapping[str, Any]], ended: Mapping[tuple[str, str], float]) -> list[str]:
    """Return the faults of all runs as lines of Markdown; none where none was asked for.

    Args:
        ended: by run and job, when the job ended, in seconds of its run. The agent's metrics may still show the
            clients of a job that has ended, so such a job is counted neither on the server nor beside it.
    """
    if not lines:
        return []
    heads = ("run", "fault", "at, s", "on its server", "fell", "fell, not seen there", "unharmed beside")
    head = (*heads, "all told, s", f"GPU serves again, s (bar {BACK_BAR_SECONDS:g})", "trouble")
    rows = ["MPS faults injected during the trace:", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for line in lines:
        if line["at"] is None:
            rows.append(f"| {line['run']} | {line['fault']} | not recorded | | | | | | | {line['error']} |")
            continue
        told = line["told_after"]
        late = sorted(name for name, seconds in told.items() if seconds is None)
        latest = (
            f"not told: {', '.join(late)}" if late else f"{max(told.values(), default=0.0):.1f}" if told else ""
        )
        back = "not recorded" if line["healthy_after"] is None else f"{line['healthy_after']:.1f}"
        present = {each: _present(line, each, ended) for each in ("on_server", "beside")}
        cells = [line["run"], line["fault"], f"{line['at']:.1f}", str(len(present["on_server"]))]
        cells += [str(len(line["fell"])), str(len(line["fell_unseen"])), str(len(present["beside"]))]
        rows.append(f"| {' | '.join([*cells, latest, back, line['error']])} |")
    return rows


def _present(line: Mapping[str, Any], where: str, ended: Mapping[tuple[str, str], float]) -> list[str]:
    """Return those whom a fault's record names there and who had not ended before it."""
    return [name for name in line[where] if ended.get((line["run"], name), line["at"]) >= line["at"]]
