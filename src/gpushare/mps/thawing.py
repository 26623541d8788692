"""The MPS host's guard against pods that stay frozen: it starts and watches the throttle, and thaws its pods.

What thaws the pods when a process is killed with -9:
- the agent: the throttle's process. No freeze lasts longer than 0.5 s (1.2 s for a reading), and after 5 s without
  a renewal every pod runs.
- a keeper, a daemon, a server: they are not involved in freezing.
- the MPS host: the throttle's process, whose pipe from the host closes.
- the throttle's process: the host, within milliseconds by the other pipe. While the process is silent, because it
  hangs or gets no CPU, the host thaws, and finally ends it (gpushare.mps.silence). The frozen pods are on record
  (gpushare.mps.frozen).
- both at once, or the whole container: the thawer, a container beside it (gpushare.mps.thawer). If that was killed
  as well, its successor, or the next host before it does anything else; kubelet decides how soon to start them
  (about a second the first time, 10 s and more if they had ended before). The MPS daemons, and with them the
  tenants' CUDA contexts, are gone then in any case.
- the throttle's process, beside a host that stands still: the thawer, after 1.5 s.
"""

import logging
import math
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final

from gpushare.core.backoff import Backoff
from gpushare.mps.alive import give_sign, sign_of
from gpushare.mps.asks import boottime
from gpushare.mps.freezer import CgroupFreezer
from gpushare.mps.frozen import recorded, thaw_recorded
from gpushare.mps.silence import KILL_SECONDS, Remedy, Silence

logger = logging.getLogger(__name__)

THAW_TRIES: Final = 100
THAW_AGAIN_SECONDS: Final = 0.02
BACKOFF: Final = Backoff(first_seconds=0.5, longest_seconds=30.0)
GOOD_RUN_SECONDS: Final = 60.0
TELL_EVERY_SECONDS: Final = 60.0  # silences are logged at most this often; on a busy node they are frequent
WORDS_BYTES: Final = 2**16  # as much as a pipe holds, so that the last heartbeat read is the latest


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
    """Keeps the throttle's process running; its own thread waits for its messages."""

    def __init__(self, directory: Path | str, cgroup_root: Path, *, kill_seconds: float = KILL_SECONDS) -> None:
        self._directory, self._cgroup_root, self._kill_seconds = directory, cgroup_root, kill_seconds
        self._freezer = CgroupFreezer(cgroup_root)
        self._stop = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep, name="throttle", daemon=True)
        self._sign: int | None = None
        self.restarts, self.silences = -1, 0
        self._told_at = -math.inf

    @property
    def pid(self) -> int | None:
        """Return the throttle's pid."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the process, and start it again whenever it ends."""
        self._thread.start()

    def stop(self) -> None:
        """End the process; every pod runs afterwards."""
        self._stop.set()
        process = self._process
        if process is not None and process.stdin is not None:
            process.terminate()
        if self._thread.ident is not None:  # it was started
            self._thread.join(10.0)
        thaw_ours(self._directory, self._cgroup_root)
        if self._sign is not None and not self._thread.is_alive():
            os.close(self._sign)
            self._sign = None

    def _keep(self) -> None:
        failures = 0
        while not self._stop.is_set():
            started_at = time.monotonic()
            try:
                if self._sign is None:
                    self._sign = give_sign(sign_of(self._directory))
                with self._start() as process:
                    self._process = process
                    self.restarts += 1
                    if self._stop.is_set():
                        process.terminate()
                    self._follow(process)
            except Exception as error:  # noqa: BLE001 - nobody else starts the throttle's process again
                logger.error("cannot start the throttle's process: %s", error)
            try:
                thaw_ours(self._directory, self._cgroup_root)
            except Exception as error:  # noqa: BLE001 - nobody else thaws
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
        """Watch the process until it has ended; while it is silent, thaw its pods and finally kill it."""
        assert process.stdout is not None
        silence = Silence(begun := boottime(), begun, self._kill_seconds)
        heartbeats = select.poll()  # select() takes no number of 1024 or more; the host has copies of connections
        heartbeats.register(process.stdout, select.POLLIN)
        while True:
            if heartbeats.poll(1000 * silence.wait_seconds(boottime())):
                words = process.stdout.read(WORDS_BYTES)
                if not words:
                    break
                silence.hear(words, boottime())
                continue
            was_long = silence.is_long
            answer = silence.look(boottime(), is_ending=self._stop.is_set())
            if answer is Remedy.KILL:
                logger.error("the throttle's process %d does not report; ending it", process.pid)
                process.kill()
                break
            if answer is Remedy.THAW:
                self.silences += not was_long
                if not was_long and boottime() >= self._told_at + TELL_EVERY_SECONDS:
                    self._told_at = boottime()
                    logger.warning(
                        "the throttle's process %d does not report (silence %d); its pods run until it does",
                        process.pid,
                        self.silences,
                    )
                self._thaw()
        # a killed process may not have ended: if it hangs in the kernel or gets no CPU, it may still finish a
        # write
        while process.poll() is None:
            self._thaw()
            time.sleep(THAW_AGAIN_SECONDS)
        if not self._stop.is_set():
            logger.error("the throttle's process ended; thawing the pods that it froze and starting another")

    def _thaw(self) -> None:
        """Thaw the pods of a process that may still freeze; they stay on record."""
        try:
            thaw_recorded(self._directory, self._freezer, keep=True)
        except OSError as error:
            logger.error("cannot read who is frozen: %s", error)
