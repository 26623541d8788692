"""The shipped table of ten programs, in two files: sets of different programs, and sets that hold one twice.

Both are of `gpushare.data`; the second is of two sessions. The figures that documents give of the first are of its
file alone.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files

from gpushare.data import H200_TABLE, H200_TABLE_TWICE
from gpushare.research.dataset import Dataset, parse


@cache
def different_programs() -> Dataset:
    """Return the first session: every set of up to four different programs."""
    return _read(H200_TABLE)


@cache
def complete_table() -> Dataset:
    """Return all sessions; the runs of the later ones say so, since progress is relative to a session's own."""
    return joined({"": different_programs(), H200_TABLE_TWICE: _read(H200_TABLE_TWICE)})


def joined(datasets: Mapping[str, Dataset]) -> Dataset:
    """Return one dataset of several sessions.

    Args:
        datasets: by the session of those of their runs that name none; the first one's driver is kept.

    Raises:
        ValueError: they are of different GPU models or mechanisms.
    """
    first, *others = datasets.values()
    for other in others:
        if (other.gpu_model, other.mechanism) != (first.gpu_model, first.mechanism):
            raise ValueError(f"{other.gpu_model} under {other.mechanism} is not {first.gpu_model} as before")
    runs = [
        replace(run, session=run.session or session) for session, data in datasets.items() for run in data.runs
    ]
    return replace(first, runs=tuple(runs))


def _read(name: str) -> Dataset:
    return parse((files("gpushare.data") / name).read_bytes().splitlines())
