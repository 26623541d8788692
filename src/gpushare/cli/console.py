"""The console for tables."""

from typing import Final

from rich.console import Console

_WIDE: Final = 200  # columns; for files and pipes, which have no width, so that tables are not cut


class _Output(Console):
    """A console that tells of a reader who has gone, such as head, instead of ending with status 1, our "no"."""

    def on_broken_pipe(self) -> None:
        """Leave it to the root command.

        Raises:
            BrokenPipeError: always.
        """
        raise BrokenPipeError


def out() -> Console:
    """Standard output, as wide as the terminal; wide enough for every table where there is none."""
    console = _Output()
    return console if console.is_terminal else _Output(width=max(console.width, _WIDE))


def notes() -> Console:
    """Standard error, for what stands beside the answer."""
    return Console(stderr=True, highlight=False, soft_wrap=True)
