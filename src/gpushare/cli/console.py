"""The console for tables."""

from typing import Final

from rich.console import Console

_WIDE: Final = 200  # columns; for files and pipes, which have no width, so that tables are not cut


def out() -> Console:
    """Standard output, as wide as the terminal; wide enough for every table where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, _WIDE))


def notes() -> Console:
    """Standard error, for what stands beside the answer."""
    return Console(stderr=True, highlight=False, soft_wrap=True)
