"""Where tables for people go."""

from typing import Final

from rich.console import Console

_WIDE: Final = 200  # columns: a file or a pipe has no width, and a table cut to 80 there is of no use


def out() -> Console:
    """Standard output, as wide as the terminal; wide enough for every table where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, _WIDE))
