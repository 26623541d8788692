"""Limit the size of the daemon's logs, which grow with every command and client and are in memory (/run)."""

import contextlib
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

LIMIT_BYTES: Final = 8 * 2**20  # the gate sends a command twice a second, and each adds lines to control.log
KEPT_BYTES: Final = 2**20
_BLOCK: Final = 512  # unit of stat's st_blocks


def trim(paths: Iterable[Path], limit_bytes: int = LIMIT_BYTES) -> None:
    """Empty each log that takes more space than this, keeping its end as `<name>.1` if there is room.

    The daemon keeps its log open, so the file is emptied in place. A writer that does not append continues at its
    old offset, so the space taken is checked, not the length.
    """
    for path in paths:
        try:
            stat = path.stat()
            if stat.st_blocks * _BLOCK <= limit_bytes:
                continue
            with path.open("r+b") as file:
                file.seek(max(0, stat.st_size - KEPT_BYTES))
                with contextlib.suppress(OSError):  # the disk is full, so emptying is even more urgent
                    path.with_name(f"{path.name}.1").write_bytes(file.read(KEPT_BYTES))
                file.truncate(0)
        except FileNotFoundError:
            continue
        except OSError as error:
            logger.error("cannot shorten %s: %s", path, error)
        else:
            logger.info("%s took %d MiB: emptied, its end is in %s.1", path, stat.st_size // 2**20, path.name)
