"""The GPUs of the node as nvidia-smi lists them: when the host starts, and again each minute."""

import logging
import subprocess
from typing import Final

logger = logging.getLogger(__name__)

COMMAND: Final = ("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader")
LONGEST_SECONDS: Final = 60.0
# A list takes 20 ms of a core with one GPU (H200, driver 580.159.04, which the agent keeps open): 0.03% of one.
LIST_SECONDS: Final = 60.0


def real_gpus() -> tuple[str, ...]:
    """Return the UUIDs of the node's GPUs that nvidia-smi lists.

    Raises:
        RuntimeError: no driver, no permission or no GPU; the message says which.
    """
    try:
        done = subprocess.run(
            COMMAND,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=LONGEST_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"cannot list the GPUs: {error}") from None
    uuids, trouble = _read(done.stdout, done.returncode)
    if not uuids:
        raise RuntimeError(f"nvidia-smi lists no GPU: {trouble}")
    if trouble:
        logger.warning("GPUs that nvidia-smi listed are used nevertheless: %s", trouble)
    return uuids


def _read(output: str, status: int) -> tuple[tuple[str, ...], str]:
    """Return the UUIDs that were printed, and what else; the status is that of the worst GPU, or a warning."""
    lines = [line.strip() for line in output.splitlines()]
    uuids = tuple(line for line in lines if line.startswith("GPU-"))
    rest = " ".join(line for line in lines if line not in uuids)[:300]
    return uuids, f"status {status}: {rest}" if status or not uuids else ""


class GpuLists:
    """Lists the GPUs again, without waiting: nvidia-smi can hang at a broken GPU.

    A GPU may appear later than the host: it was lost, or its driver was still starting.

    Args:
        now: when the host listed them itself, as in `take`.
    """

    def __init__(self, now: float) -> None:
        self._due = now + LIST_SECONDS
        self._process: subprocess.Popen[str] | None = None
        self._trouble = ""

    def take(self, now: float) -> tuple[str, ...]:
        """Return the UUIDs of a list that has ended since the last call; begin one when it is time.

        Args:
            now: monotonic seconds.
        """
        if self._process is None:
            if now >= self._due:
                self._due = now + LIST_SECONDS
                self._begin()
            return ()
        if self._process.poll() is None:
            if now >= self._due:
                self._due = now + LIST_SECONDS
                self._process.kill()  # and wait at the next calls: a process within the driver may not end
                self._log("it does not end")
            return ()
        with self._process as done:
            output = done.stdout.read() if done.stdout else ""
        self._process = None
        uuids, trouble = _read(output, done.returncode)
        self._log(trouble)
        return uuids

    def _begin(self) -> None:
        try:
            self._process = subprocess.Popen(
                COMMAND,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                stdin=subprocess.DEVNULL,
            )
        except OSError as error:
            self._log(str(error))

    def _log(self, trouble: str) -> None:
        """Log what nvidia-smi complains of when it changes."""
        if trouble != self._trouble:
            logger.warning("the list of GPUs by nvidia-smi: %s", trouble or "no complaint any more")
        self._trouble = trouble
