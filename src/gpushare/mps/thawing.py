"""The MPS host's guard against pods that stay frozen: it starts and watches the throttle, and thaws after it.

What thaws the pods when a process is killed with -9:
- the agent: the throttle's process. No freeze lasts longer than 0.5 s (1.2 s for a reading), and after 5 s without
  a renewal every pod runs.
- a keeper, a daemon, a server: they take no part in freezing.
- the MPS host: the throttle's process, whose pipe from the host closes.
- the throttle's process: the host, within milliseconds by the other pipe; one that hangs is killed after
  `SILENT_SECONDS`. The frozen pods are on record (gpushare.mps.frozen).
- both at once, or the whole container: the next host, before it does anything else. Kubelet decides how soon to
  start it (about a second the first time, 10 s and more when it had crashed before); the MPS daemons, and with
  them the tenants' CUDA contexts, are gone then in any case.
"""

import logging
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final

from gpushare.mps.freezer import CgroupFreezer
from gpushare.mps.frozen import recorded, thaw_recorded
from gpushare.runtime.backoff import Backoff

logger = logging.getLogger(__name__)

SILENT_SECONDS: Final = 1.4  # with the longest wait of a look, well below the promised 2 s
THAW_TRIES: Final = 100
THAW_AGAIN_SECONDS: Final = 0.02
BACKOFF: Final = Backoff(first_seconds=0.5, longest_seconds=30.0)
GOOD_RUN_SECONDS: Final = 60.0


def thaw_ours(directory: Path | str, cgroup_root: Path) -> None:
    """Thaw every pod in the record; retry for two seconds where a cgroup refuses."""
    freezer = CgroupFreezer(cgroup_root)
    for _ in range(THAW_TRIES):
        for uid in thaw_recorded(directory, freezer):
            logger.warning("thawed pod %s, which a throttle that ended left frozen", uid)
        if not recorded(directory):
            return
        time.sleep(THAW_AGAIN_SECONDS)


class ThrottleProcess:
    """Keeps the throttle's process running; a thread of its own waits for its messages."""

    def __init__(self, directory: Path | str, cgroup_root: Path) -> None:
        self._directory, self._cgroup_root = directory, cgroup_root
        self._stop = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep, name="throttle", daemon=True)
        self.restarts = -1

    @property
    def pid(self) -> int | None:
        """Return the throttle's pid."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the process, and again whenever it ends."""
        self._thread.start()

    def stop(self) -> None:
        """End the process; every pod runs afterwards."""
        self._stop.set()
        process = self._process
        if process is not None and process.stdin is not None:
            process.terminate()
        self._thread.join(10.0)
        thaw_ours(self._directory, self._cgroup_root)

    def _keep(self) -> None:
        failures = 0
        while not self._stop.is_set():
            started_at = time.monotonic()
            try:
                with self._start() as process:
                    self._process = process
                    self.restarts += 1
                    if self._stop.is_set():
                        process.terminate()
                    self._follow(process)
            except OSError as error:
                logger.error("cannot start the throttle's process: %s", error)
            try:
                thaw_ours(self._directory, self._cgroup_root)
            except OSError as error:
                logger.error("cannot thaw: %s", error)
            failures = 1 if time.monotonic() - started_at > GOOD_RUN_SECONDS else failures + 1
            self._stop.wait(BACKOFF.seconds(failures))

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "gpushare.mps.throttler",
                "--directory",
                str(self._directory),
                "--cgroup-root",
                str(self._cgroup_root),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )

    def _follow(self, process: subprocess.Popen[bytes]) -> None:
        """Watch it until it ends; end one that falls silent."""
        assert process.stdout is not None
        patience = 10 * SILENT_SECONDS  # while it starts no pod is frozen
        while True:
            readable, _, _ = select.select([process.stdout], [], [], patience)
            if not readable:
                logger.error("the throttle's process %d fell silent; ending it", process.pid)
                process.kill()
                break
            if not process.stdout.read(4096):
                break
            patience = SILENT_SECONDS
        if not self._stop.is_set():
            logger.error("the throttle's process ended; thawing the pods that it froze and starting another")
