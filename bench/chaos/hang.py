"""Make the simulated driver of one GPU hang: every caller waits, as for NVML calls that do not return.

The simulated driver is the state file that the twin writes. A pipe in its place without a writer blocks every
reader in `open`; the twin replaces it every second, and this puts it back at once.
"""

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Final

STATE: Final = "twin.json"
PIPE, LINK = ".chaos-pipe", ".chaos-link"
AGAIN_SECONDS: Final = 0.02
WAKE_TIMES: Final = 25


class HungDriver:
    """The hang of one GPU's simulated driver; `gpu` is its directory on the node."""

    def __init__(self, gpu: Path) -> None:
        self._gpu = gpu
        self._pipe = gpu / PIPE
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._hold, name="hung-driver", daemon=True)

    def start(self) -> None:
        """Let every call from now on hang without an answer."""
        self._pipe.unlink(missing_ok=True)
        os.mkfifo(self._pipe, 0o600)
        self._put()
        self._thread.start()

    def stop(self) -> None:
        """Let everyone go on."""
        self._end.set()
        self._thread.join()
        self.release()

    def release(self) -> None:
        """Let go whoever waits, and remove what is left; also after a crash of this program."""
        state = self._gpu / STATE
        if state.is_fifo():
            state.unlink(missing_ok=True)  # the twin writes another within a second
        # Each open of the other end wakes those who wait now; they read nothing, which is no state. Repeated
        # for those who had found the pipe but did not wait yet.
        for _ in range(WAKE_TIMES):
            with contextlib.suppress(OSError):
                os.close(os.open(self._pipe, os.O_WRONLY | os.O_NONBLOCK))
            if not self._pipe.exists():
                break
            time.sleep(AGAIN_SECONDS)
        self._pipe.unlink(missing_ok=True)
        (self._gpu / LINK).unlink(missing_ok=True)

    def _put(self) -> None:
        link = self._gpu / LINK
        with contextlib.suppress(OSError):
            link.unlink(missing_ok=True)
            os.link(self._pipe, link)
            link.replace(self._gpu / STATE)

    def _hold(self) -> None:
        while not self._end.wait(AGAIN_SECONDS):
            if not (self._gpu / STATE).is_fifo():
                self._put()
