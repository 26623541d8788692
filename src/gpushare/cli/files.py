"""Files that users name: reading with a clear error, writing atomically."""

import os
import tempfile
from pathlib import Path

from gpushare.cli.errors import UsageError


def read_lines(path: Path) -> list[str]:
    """Read the lines of a text file.

    Raises:
        UsageError: it cannot be opened or is not UTF-8.
    """
    return read_text(path).splitlines()


def read_text(path: Path) -> str:
    """Read a whole text file, line ends unchanged.

    Raises:
        UsageError: it cannot be opened or is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically, by a temporary one beside it.

    Raises:
        UsageError: the folder is absent or not writable, or the disk is full.
    """
    temporary = ""
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as handle:
            temporary = handle.name
            handle.write(text)
        Path(temporary).chmod(0o666 & ~_umask())
        Path(temporary).replace(path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
