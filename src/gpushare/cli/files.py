"""Files that users name: read with one sentence on what is wrong, written whole or not at all."""

import os
import tempfile
from pathlib import Path

from gpushare.cli.errors import UsageError


def read_lines(path: Path) -> list[str]:
    """The lines of a text file.

    Raises:
        UsageError: it cannot be opened or is not UTF-8.
    """
    return read_text(path).splitlines()


def read_text(path: Path) -> str:
    """A whole text file, line ends as they are.

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
    """Write a file by way of a temporary one beside it, so that it is never half there.

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
