"""The acts of the story: what comes, and what has to be seen until the next one.

The programs and their shares are such that the twin, whose tenants run as the interference model says, breaks a
promise: a training and a service share a GPU well, until a program comes that draws 91% of the memory bandwidth,
and has no profile yet (docs/adr/0144).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gpushare.cli.pod_rows import TopRow
from story.moment import Moment
from story.sentences import all_of, fares, gpu_of, summed_progress

FIRST: Final = ("train", "recommend")
ETL, BACKUP, RANK = "etl", "backup", "rank"


@dataclass(frozen=True, slots=True)
class Act:
    """One step.

    Attributes:
        says: what happens now, and why; empty where the act before has said it.
        until: return the sentence, with its figures, once it has happened; "" where events have told it.
        what: it, for when it does not happen in time.
        applies: the manifest in hack/demo that is applied first.
        removes: the label of the pods that are deleted at the end.
        seconds: patience.
    """

    says: str
    until: Callable[[Moment], str | None]
    what: str
    applies: str = ""
    removes: str = ""
    seconds: float = 90.0


def _is_kept(row: TopRow | None) -> bool:
    return row is not None and row.slack_ratio is not None and row.slack_ratio >= 0


def _have_run_alone(moment: Moment) -> str | None:
    names = {f"alone-{program}" for program in FIRST}
    return "" if names <= moment.ended else None


def _are_packed(moment: Moment) -> str | None:
    rows = [moment.row(program) for program in FIRST]
    if any(row is None or row.gpu is None or not _is_kept(row) for row in rows):
        return None
    gpus = {gpu_of(row) for row in rows if row is not None}
    if len(gpus) > 1:
        return None
    sum_of_both = f"{summed_progress(moment, FIRST):.2f} of what one GPU makes without sharing"
    return f"Packed: {all_of(FIRST)} share {gpus.pop()}. {fares(moment, FIRST)}: together {sum_of_both}."


def _is_beside(program: str) -> Callable[[Moment], str | None]:
    def until(moment: Moment) -> str | None:
        row, first = moment.row(program), moment.row(FIRST[0])
        if row is None or first is None or row.state != "Running" or row.gpu is None:
            return None
        if row.gpu != first.gpu:
            return None
        cap = f"{row.thread_percentage}% of its threads"
        return f"Placed: {program} starts on {gpu_of(row)} at once, under its share as its cap ({cap})."

    return until


def _is_profiled(program: str) -> Callable[[Moment], str | None]:
    def until(moment: Moment) -> str | None:
        share, row = moment.share(program), moment.row(program)
        profile = share.status.profile if share is not None else None
        if profile is None or row is None or row.promise_ratio is None:
            return None
        dram = profile.as_counters().dram_bw_util or 0.0
        return (
            f"Profiled in place: with all threads {program} would draw {dram:.0%} of the memory bandwidth. "
            f"It is promised {row.promise_ratio:.2f} of its speed alone."
        )

    return until


def _was_told(program: str, reason: str) -> Callable[[Moment], str | None]:
    return lambda moment: (
        "" if any((each.about, each.reason) == (program, reason) for each in moment.told) else None
    )


def _went_elsewhere(moment: Moment) -> str | None:
    row, first, share = moment.row(ETL), moment.row(FIRST[0]), moment.share(ETL)
    records = [each for each in share.status.retractions if each.until] if share is not None else []
    if not records or row is None or first is None or row.state != "Running" or row.gpu in {None, first.gpu}:
        return None
    until = (records[-1].until or "")[11:16]
    return (
        f"Placed elsewhere: {ETL} starts again on {gpu_of(row)}. Until {until} UTC it is not put beside "
        f"{all_of(FIRST)} again."
    )


def _keep_their_promises(moment: Moment) -> str | None:
    if moment.is_leaving(ETL):  # its share is taken until it has ended, where backup is to go
        return None
    if not all(_is_kept(moment.row(program)) for program in FIRST):
        return None
    return f"Kept again: {fares(moment, FIRST)}."


def _is_throttled_and_all_kept(moment: Moment) -> str | None:
    row = moment.row(BACKUP)
    if row is None or not row.throttle_ratio or not all(_is_kept(moment.row(each)) for each in (*FIRST, BACKUP)):
        return None
    all_three = (*FIRST, BACKUP)
    return (
        f"Kept by a throttle: {BACKUP} stands still {row.throttle_ratio:.0%} of the time and stays. "
        f"{fares(moment, all_three)}: together {summed_progress(moment, all_three):.2f} of one GPU."
    )


def _shares_the_rest(moment: Moment) -> str | None:
    both = (ETL, RANK)
    rows = [moment.row(program) for program in both]
    if not all(_is_kept(row) for row in rows) or len({row.gpu for row in rows if row is not None}) > 1:
        return None
    where = gpu_of(rows[0]) if rows[0] is not None else ""
    joint = summed_progress(moment, both)
    return f"Packed: {all_of(both)} share {where}. {fares(moment, both)}: together {joint:.2f}."


ACTS: Final = (
    Act(
        f"The programs of {all_of(FIRST)} run alone for fifteen seconds, each on a GPU: that is their profile.",
        _have_run_alone,
        "two programs that ran alone to their end",
        applies="alone.yaml",
        removes="gpushare-demo=alone",
        seconds=120,
    ),
    Act(
        "train asks for 39% of a GPU, recommend for 30%.",
        _are_packed,
        "two pods on one GPU that keep their promises",
        applies="packed.yaml",
        seconds=120,
    ),
    Act(
        "etl comes and asks for 30%. Nothing is known of it, and there is just enough room beside them.",
        _is_beside(ETL),
        "etl on the same GPU",
        applies="etl.yaml",
    ),
    Act(
        "To know it, the others are stopped for about a second, twice, and the GPU's counters are read.",
        _is_profiled(ETL),
        "a profile of etl",
    ),
    Act("", _was_told(ETL, "RetractionAsked"), "a promise that no throttle keeps"),
    Act("", _went_elsewhere, "etl on another GPU"),
    Act("", _keep_their_promises, "promises that are kept again"),
    Act(
        "backup comes, just as hungry. Its owner lets it take ten times as long (maxSlowdown: 10).",
        _is_beside(BACKUP),
        "backup on the same GPU",
        applies="backup.yaml",
    ),
    Act(
        "rank, a service like recommend, asks for 35%: there is room beside etl.",
        _shares_the_rest,
        "rank beside etl, both with their promises kept",
        applies="rank.yaml",
    ),
    Act("", _is_throttled_and_all_kept, "every promise kept by a throttle", seconds=120),
)
