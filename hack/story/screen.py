"""Output of the story: on a terminal a live table below the sentences, elsewhere lines only."""

import time
from types import TracebackType
from typing import Final, Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from gpushare.cli.columns import lay_out
from gpushare.cli.pod_rows import COLUMNS, TopRow, style_of
from story.moment import Moment

WIDEST: Final = 110
_SHOWN: Final = frozenset({"POD", "STATE", "GPU", "SHARE", "CAP", "PROMISE", "PROGRESS", "STOPPED"})
_COLUMNS: Final = tuple(column for column in COLUMNS if column.title in _SHOWN)
_STYLES: Final = {
    "Broken promise": "bold red",
    "Asked to leave": "bold red",
    "Retraction": "bold magenta",
    "Throttle": "bold yellow",
    "Throttle let go": "bold green",
    "Kept by a throttle": "bold green",
    "Kept again": "bold green",
    "Promise kept": "bold green",
    "Packed": "bold cyan",
    "Placed": "bold cyan",
    "Placed elsewhere": "bold cyan",
    "Profiled in place": "bold cyan",
}


class Screen:
    """Output that prints sentences as they come, and shows the table."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._width = min(console.width, WIDEST)
        self._begun = time.monotonic()
        self._live: Live | None = None
        self._lines: list[Text] = []
        self._printed: list[Text] = []

    @property
    def width(self) -> int:
        """Return how many columns it uses."""
        return self._width

    @property
    def lines(self) -> list[Text]:
        """Return all that was said, and the table as it is now."""
        return [*self._printed, Text(""), *self._lines]

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        elif kind is None:
            self._console.print(Group(*self._lines))

    def say(self, sentence: str) -> None:
        """Tell one sentence, with the time since the story began."""
        opening, colon, rest = sentence.partition(": ")
        style = _STYLES.get(opening) if colon else None
        text = Text(sentence) if style is None else Text.assemble((f"{opening}:", style), f" {rest}")
        stamp = f"{time.monotonic() - self._begun:4.0f} s  "
        first, *others = text.wrap(self._console, max(self._width - len(stamp), 30))
        printed = [Text.assemble((stamp, "dim"), first), *(Text(" " * len(stamp)) + line for line in others)]
        for line in printed:
            line.rstrip()
        self._printed += printed
        for line in printed:
            self._console.print(line, soft_wrap=True, highlight=False)

    def show(self, moment: Moment) -> None:
        """Show the table as it is now; on a terminal at once, otherwise at the end."""
        lines = table(moment.rows, self._width)
        if lines == self._lines:
            return
        self._lines = lines
        if self._live is not None:
            self._live.update(Group(Text(""), *lines), refresh=True)


def table(rows: tuple[TopRow, ...], width: int) -> list[Text]:
    """Return the table's lines; pods that leave are in it until they are gone."""
    lines = lay_out(_COLUMNS, rows, width)
    styles = ["bold", *(style_of(row) for row in rows)]
    return [Text(line, style, no_wrap=True) for line, style in zip(lines, styles, strict=True)]
