"""Files that users name: reading with a clear error, writing atomically."""

import errno
import os
import tempfile
from pathlib import Path
from typing import Final

import typer

from gpushare.cli.errors import UsageError

_STANDARD_OUTPUT: Final = Path("-")


def read_lines(path: Path) -> list[str]:
    """Read the lines of a text file.

    Raises:
        UsageError: it cannot be opened or is not UTF-8.
    """
    return read_text(path).splitlines()


def read_text(path: Path) -> str:
    """Read a whole text file, line ends unchanged, without a byte order mark.

    Raises:
        UsageError: it cannot be opened or is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error


def is_standard_output(path: Path) -> bool:
    """Return whether a file's name is a dash, which stands for standard output."""
    return path == _STANDARD_OUTPUT


def check_named(path: Path, what: str) -> None:
    """Refuse standard output for something that has to stay after the command.

    Args:
        what: "a dataset", for example.

    Raises:
        UsageError: the name is a dash.
    """
    if is_standard_output(path):
        raise UsageError(
            f"{what} has to have a name and cannot be written to standard output: name another than -"
        )


def check_writable(path: Path, *, as_json: bool = False) -> None:
    """Check early that a file can be written, before minutes of work; write nothing.

    Args:
        as_json: whether the command prints JSON to standard output beside it.

    Raises:
        UsageError: its folder is missing or not writable, or it is a folder itself; or it is standard output,
            where JSON is to go.
    """
    if is_standard_output(path):
        if as_json:
            raise UsageError("- and --json would both write to standard output: give the file a name")
        return
    try:  # the questions themselves fail in a folder that may not be entered
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if _is_written_through(path):
            return
        if not path.parent.is_dir():
            raise UsageError(f"{path}: cannot be written: there is no folder {path.parent}")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from error


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically, through a temporary one beside it; devices, pipes and links are written in place.

    A dash is standard output.

    Raises:
        UsageError: the folder is missing or not writable, or the disk is full.
    """
    if is_standard_output(path):
        typer.echo(text.encode(), nl=False)
        return
    temporary = ""
    try:
        if _is_written_through(path):
            path.write_text(text, encoding="utf-8")
            return
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as handle:
            temporary = handle.name
            handle.write(text)
        Path(temporary).chmod(0o666 & ~_umask())
        Path(temporary).replace(path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from error


def _is_written_through(path: Path) -> bool:
    """Return whether a path, such as /dev/stdout or /dev/null, is not a regular file of its own."""
    return path.is_symlink() or (path.exists() and not path.is_file() and not path.is_dir())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
