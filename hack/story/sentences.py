"""One plain sentence, with its figures, for each thing that happens in the story."""

from collections.abc import Iterable, Mapping
from typing import Final

from gpushare.cli.pod_rows import TopRow
from story.moment import Moment, StoryEvent

# Reasons of events that are reported, with the text before the event's own sentence.
OPENINGS: Final[Mapping[str, str]] = {
    "PromiseBroken": "Broken promise",
    "Throttled": "Throttle",
    "LetGo": "Throttle let go",
    "RetractionAsked": "Asked to leave",
    "RetractionDropped": "May stay",
    "Retracted": "Retraction",
    "PromiseKept": "Promise kept",
}
_FIGURES: Final = " of its progress alone"


def of_event(told: StoryEvent) -> str | None:
    """Return an event of gpushare's own as the story tells it; None for events of others."""
    opening = OPENINGS.get(told.reason)
    if opening is None:
        return None
    note = told.note
    if told.reason in {"Throttled", "LetGo"}:
        note = "; ".join(part for part in note.split("; ") if not part.startswith("it makes"))
    if told.reason == "RetractionAsked":
        note = note.replace("is the newest tenant that can leave", "came last")
    if told.reason == "Retracted":
        note = f"is {note}"
    return f"{opening}: {told.about} {note.replace(_FIGURES, ' of its speed alone')}."


def gpu_of(row: TopRow) -> str:
    """Return where a pod is, as people say it."""
    return "no GPU" if row.gpu is None else f"GPU {row.gpu.rpartition('/')[2]}"


def all_of(names: Iterable[str]) -> str:
    """Join names as people do."""
    listed = list(names)
    return " and ".join([", ".join(listed[:-1]), listed[-1]] if len(listed) > 1 else listed)


def fares(moment: Moment, programs: Iterable[str]) -> str:
    """Say what each of some programs makes, and what it was promised."""
    parts = []
    for program in programs:
        row = moment.row(program)
        if row is not None and row.progress_ratio is not None and row.promise_ratio is not None:
            parts.append(f"{program} makes {row.progress_ratio:.2f} ({row.promise_ratio:.2f} promised)")
    return all_of(parts)


def summed_progress(moment: Moment, programs: Iterable[str]) -> float:
    """Return the summed progress of some programs; one GPU without sharing makes 1."""
    found = [moment.row(program) for program in programs]
    return sum(row.progress_ratio or 0.0 for row in found if row is not None)
