"""The consoles for tables, notes and progress bars."""

import shutil
from pathlib import Path
from typing import Final

from rich.console import Console

from gpushare.cli.files import is_standard_output

_WIDE: Final = 200  # columns; for files and pipes, which have no width, so that tables are not truncated


# The output contains names of pods, programs and files; brackets and colons in them are never markup.


class _Output(Console):
    """A console that raises if its reader has closed the pipe (head), because exit status 1 means "no" here."""

    def on_broken_pipe(self) -> None:
        """Leave the error to the root command.

        Raises:
            BrokenPipeError: always.
        """
        raise BrokenPipeError


def out() -> Console:
    """Return standard output, as wide as the terminal, or wide enough for every table without one."""
    console = _Output(markup=False, emoji=False)
    if not console.is_terminal:
        return _Output(width=max(console.width, _WIDE), markup=False, emoji=False)
    if console.is_dumb_terminal:  # rich assumes 80 columns for it
        size = shutil.get_terminal_size()
        return _Output(width=size.columns, height=size.lines, markup=False, emoji=False)
    return console


def beside(file: Path) -> Console:
    """Return where to print what a command says beside a file: not standard output if that is the file."""
    return notes() if is_standard_output(file) else out()


def notes() -> Console:
    """Return standard error, for notes and warnings, so that standard output contains only the answer."""
    return Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)


def bars() -> Console:
    """Return standard error, for progress bars and messages between them."""
    return Console(stderr=True, markup=False, emoji=False)
