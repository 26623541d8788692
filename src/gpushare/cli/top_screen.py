"""The live table of `gpushare top`: the screen's content, the keys, and the loop that shows it."""

import asyncio
import contextlib
import os
import shutil
import sys
import termios
import time
import tty
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from rich.console import Console
from rich.control import Control
from rich.text import Text

from gpushare.cli.access import Seen, cluster_error
from gpushare.cli.columns import lay_out
from gpushare.cli.console import out
from gpushare.cli.pod_rows import COLUMNS, SortKey, TopRow, ordered, rows, style_of
from gpushare.core.control import Gain, gain_of
from gpushare.kube import ApiError

REFRESH_SECONDS: Final = 2.0
_SORTS: Final = {
    "g": SortKey.GPU,
    "n": SortKey.NAME,
    "p": SortKey.PROGRESS,
    "s": SortKey.SHARE,
    "m": SortKey.MEMORY,
    "b": SortKey.BROKEN,
}
_HELP: Final = (
    "q quit  sort by g gpu n name p progress s share m memory b broken  r reverse  space hold  j k scroll"
)
_CHROME: Final = 3  # lines besides the pods: the summary, the titles, the last line


class Quit(Enum):
    """The user wants to quit."""

    QUIT = "quit"


@dataclass(frozen=True, slots=True)
class View:
    """The user's choice of view.

    Attributes:
        top: index of the first row shown.
        is_held: whether the table is kept as it is.
    """

    sort: SortKey = SortKey.GPU
    is_reversed: bool = False
    top: int = 0
    is_held: bool = False


@dataclass(frozen=True, slots=True)
class ScreenLine:
    """One line of the screen with its style."""

    text: str
    style: str = ""


def pressed(view: View, key: str) -> View | Quit:
    """Return the view after a key; unknown keys change nothing."""
    if key in {"q", "Q", "\x03", "\x04", "\x1b"}:
        return Quit.QUIT
    if key in _SORTS:
        return replace(view, sort=_SORTS[key], top=0)
    match key:
        case "r":
            return replace(view, is_reversed=not view.is_reversed, top=0)
        case " ":
            return replace(view, is_held=not view.is_held)
        case "j" | "\x1b[B":
            return replace(view, top=view.top + 1)
        case "k" | "\x1b[A":
            return replace(view, top=max(0, view.top - 1))
    return view


def screen(
    seen: Seen, view: View, width: int, height: int, *, trouble: str = "", wide: bool = False
) -> list[ScreenLine]:
    """Return the lines of the whole screen: at most `height` of at most `width` characters.

    Args:
        trouble: why the table is outdated; shown instead of the keys.
    """
    found = ordered(rows(seen.pods, seen.nodes, seen.shares), view.sort, is_reversed=view.is_reversed)
    lines = lay_out(COLUMNS, found, width, wide=wide)
    room = max(height - _CHROME, 1)
    first = min(view.top, max(len(found) - room, 0))
    shown = [ScreenLine(lines[0][:width], "bold")] if found else [ScreenLine("no pod shares a GPU yet"[:width])]
    shown += [
        ScreenLine(line, style_of(row))
        for line, row in zip(lines[1 + first :], found[first : first + room], strict=False)
    ]
    summary = ScreenLine(_summary(gain_of(seen.nodes), found, width))
    blanks = [ScreenLine("")] * max(height - 2 - len(shown), 0)
    return [summary, *shown, *blanks, _last(seen, view, len(found), room, trouble, width)]


def _summary(gain: Gain, found: Sequence[TopRow], width: int) -> str:
    waiting = sum(row.gpu is None for row in found)
    parts = [f"{len(found)} pods"]
    if gain.gpus:
        parts.append(f"{gain.used_gpus} of {gain.gpus} GPUs")
    if waiting:
        parts.append(f"{waiting} waiting")
    if gain.broken:
        parts.append(f"{gain.broken} below promise")
    if gain.throttled:
        parts.append(f"{gain.throttled} throttled")
    if gain.per_gpu is not None:
        parts.append(f"{gain.per_gpu:.2f} progress a GPU")
    text = parts[0]
    for part in parts[1:]:
        if len(text) + len(part) + 2 <= width:
            text += f", {part}"
    return text


def _last(seen: Seen, view: View, count: int, room: int, trouble: str, width: int) -> ScreenLine:
    if trouble:
        return ScreenLine(trouble[:width], "red")
    if view.is_held:
        return ScreenLine("held: space goes on"[:width], "yellow")
    if seen.notes:
        return ScreenLine(seen.notes[0][:width], "yellow")
    more = f"{count - room} more  " if count > room else ""
    return ScreenLine((more + _HELP)[:width].rstrip(), "dim")


async def watch(
    read: Callable[[], Awaitable[Seen]],
    first: Seen,
    view: View,
    *,
    wide: bool = False,
    every_seconds: float = REFRESH_SECONDS,
) -> None:
    """Show the screen and read keys until the user quits; if the cluster fails, say so and ask again."""
    console, keys = out(), asyncio.Queue[str]()
    with _keys_of_terminal(keys), console.screen(hide_cursor=True):
        seen, trouble, as_of = first, "", time.monotonic()
        due = as_of + every_seconds
        while True:
            size = shutil.get_terminal_size()
            draw(console, screen(seen, view, size.columns, size.lines, trouble=trouble, wide=wide))
            patience = None if view.is_held else max(due - time.monotonic(), 0.05)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    key = await keys.get()
                after = pressed(view, key)
                if isinstance(after, Quit):
                    return
                view = after
            if time.monotonic() < due or view.is_held:
                continue
            try:
                seen, trouble, as_of = await read(), "", time.monotonic()
            except ApiError as error:
                trouble = f"{time.monotonic() - as_of:.0f} s old: {cluster_error(error)}"
            due = time.monotonic() + every_seconds


def draw(console: Console, lines: Sequence[ScreenLine]) -> None:
    """Write lines to the screen from its first line on, overwriting it."""
    console.control(Control.home())
    for at, line in enumerate(lines):
        text = Text(line.text.ljust(console.width)[: console.width], line.style)
        console.print(text, end="" if at == len(lines) - 1 else "\n", no_wrap=True, overflow="crop")


@contextlib.contextmanager
def _keys_of_terminal(keys: "asyncio.Queue[str]") -> Iterator[None]:
    """Put keys into the queue as they are pressed; without a terminal there are none."""
    if not sys.stdin.isatty():
        yield
        return
    descriptor, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(descriptor)

    def read() -> None:
        text = os.read(descriptor, 64).decode(errors="replace")
        arrows = text.startswith("\x1b[")
        for key in [text[:3]] if arrows else text or "\x04":  # end of input counts as ctrl-d
            keys.put_nowait(key)

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
