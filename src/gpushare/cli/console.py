"""The console for tables."""

import shutil
from typing import Final

from rich.console import Console

_WIDE: Final = 200  # columns; for files and pipes, which have no width, so that tables are not cut


# What is printed holds names of pods, programs and files: brackets and colons in them are theirs, never markup.


class _Output(Console):
    """A console that raises when its reader has closed the pipe (head), as exit status 1 means "no" with us."""

    def on_broken_pipe(self) -> None:
        """Leave it to the root command.

        Raises:
            BrokenPipeError: always.
        """
        raise BrokenPipeError


def out() -> Console:
    """Standard output, as wide as the terminal; wide enough for every table where there is none."""
    console = _Output(markup=False, emoji=False)
    if not console.is_terminal:
        return _Output(width=max(console.width, _WIDE), markup=False, emoji=False)
    if console.is_dumb_terminal:  # of which rich believes that it has 80 columns
        size = shutil.get_terminal_size()
        return _Output(width=size.columns, height=size.lines, markup=False, emoji=False)
    return console


def notes() -> Console:
    """Standard error, for notes and warnings, so that standard output holds the answer alone."""
    return Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)


def bars() -> Console:
    """Standard error, for bars of progress and what is said between them."""
    return Console(stderr=True, markup=False, emoji=False)
