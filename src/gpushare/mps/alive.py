"""Signs of life of the processes that freeze pods or thaw them in time: a FIFO that each of them has open.

Throttle and host give one, and the throttle alone another. The kernel closes it when a process ends, however it
ends, and after its last write to a cgroup. So once no throttle has its own open, nobody freezes a pod any more,
and whoever is still on record (gpushare.mps.frozen) has to be thawed. To look takes nothing that the next process
would have to wait for, as a lock would.
"""

import contextlib
import os
import select
from pathlib import Path
from typing import Final

_READ_BYTES: Final = 4096


def sign_of(base: Path | str) -> Path:
    """Return the FIFO of throttle and host in the host directory."""
    return Path(base) / "throttle.alive"


def throttle_sign_of(base: Path | str) -> Path:
    """Return the FIFO of the throttle alone."""
    return Path(base) / "throttle.running"


def give_sign(sign: Path) -> int:
    """Return the descriptor that shows that we live for as long as it is open.

    Raises:
        OSError: the host directory cannot be written.
    """
    sign.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkfifo(sign, 0o600)
    # for reading, too, as nobody else may read now, and then opening it only for writing fails
    return os.open(sign, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


def is_sign_given(sign: Path, seconds: float = 0.0) -> bool:
    """Return whether a process gives the sign; while one does, wait for so long whether the last of them ends.

    Raises:
        OSError: it cannot be read.
    """
    try:
        reader = os.open(sign, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        if not os.read(reader, _READ_BYTES):
            return False
    except BlockingIOError:
        poll = select.poll()
        poll.register(reader, 0)  # the end of the last writer is reported in any case
        return not poll.poll(1000 * seconds)
    finally:
        os.close(reader)
    return True
