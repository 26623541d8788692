"""Tables that fit the terminal: on a narrow one, the least important columns are left out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from rich.console import Console
from rich.text import Text

Row = TypeVar("Row")
_GAP: Final = 2
_LEAST: Final = 8  # a truncated column keeps this many characters
UNKNOWN: Final = "-"


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """One column of a table.

    Attributes:
        shown: returns the cell of a row; None is shown as a dash.
        rank: columns of the highest rank are left out first on a narrow terminal; 0 is never left out.
        is_right: align at the right, for numbers.
        wide_only: shown only with -o wide.
        where_known: shown only where a row has a value.
    """

    title: str
    shown: Callable[[Row], str | None]
    rank: int = 0
    is_right: bool = False
    wide_only: bool = False
    where_known: bool = False


def lay_out(
    columns: Sequence[Column[Row]], rows: Sequence[Row], width: int | None, *, wide: bool = False
) -> list[str]:
    """Return the title line and one line per row, of at most `width` characters each; None for any width."""
    kept = [column for column in columns if wide or not column.wide_only]
    values = {column.title: [column.shown(row) for row in rows] for column in kept}
    kept = [column for column in kept if not column.where_known or any(values[column.title])]
    cells = {column.title: [value or UNKNOWN for value in values[column.title]] for column in kept}
    needs = {title: max(map(len, (title, *shown))) for title, shown in cells.items()}
    if width is not None:
        while _sum(kept, needs) > width and any(column.rank for column in kept):
            kept.remove(max(reversed(kept), key=lambda column: column.rank))
        over = _sum(kept, needs) - width
        for column in kept:  # truncate columns that may not be left out, the first one first
            cut = min(max(over, 0), max(needs[column.title] - _LEAST, 0))
            needs[column.title] -= cut
            over -= cut
    lines = []
    for at in range(-1, len(rows)):
        texts = [(column, column.title if at < 0 else cells[column.title][at]) for column in kept]
        line = (" " * _GAP).join(_fitted(text, needs[column.title], column.is_right) for column, text in texts)
        lines.append(line.rstrip()[:width])
    return lines


def show(
    console: Console,
    columns: Sequence[Column[Row]],
    rows: Sequence[Row],
    *,
    wide: bool = False,
    style: Callable[[Row], str] | None = None,
) -> None:
    """Print a table, as wide as the terminal, or complete without a terminal.

    Args:
        style: returns rich's style of a row; no effect without colour.
    """
    lines = lay_out(columns, rows, console.width if console.is_terminal else None, wide=wide)
    for at, line in enumerate(lines):
        text = Text(line, "bold" if not at else style(rows[at - 1]) if style else "")
        console.print(text, no_wrap=True, overflow="ignore", crop=False)


def _sum(columns: Sequence[Column[Any]], needs: dict[str, int]) -> int:
    return sum(needs[column.title] for column in columns) + _GAP * (len(columns) - 1)


def _fitted(text: str, width: int, is_right: bool) -> str:
    if len(text) > width:
        head = (width - 1) // 2
        text = f"{text[:head]}~{text[len(text) - (width - 1 - head) :]}"  # pod names differ at both ends
    return text.rjust(width) if is_right else text.ljust(width)


def percent(value: float | None) -> str | None:
    """Return a ratio as whole percents."""
    return None if value is None else f"{value:.0%}"


def whole_percent(value: int | None) -> str | None:
    """Return a number of percents with its sign."""
    return None if value is None else f"{value}%"


def ratio(value: float | None) -> str | None:
    """Return a ratio with two digits."""
    return None if value is None else f"{value:.2f}"


def gibibytes(mib: int | None) -> str | None:
    """Return an amount of memory in MiB in a readable unit."""
    if mib is None:
        return None
    return f"{mib}Mi" if mib < 1024 else f"{mib / 1024:.3g}Gi" if mib < 100 * 1024 else f"{mib / 1024:.0f}Gi"
