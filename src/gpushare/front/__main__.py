"""Start the agent, keep its registration at kubelet, and start it again when it ends.

    python -m gpushare.front [COMMAND...]

COMMAND starts the agent, by default `python -m gpushare_deviceplugin`; it finds our folder in
$GPUSHARE_PLUGINS_DIRECTORY. Kubelet's directory is $GPUSHARE_KUBELET_DIRECTORY.

Of several fronts that share a folder one is at work, the others wait for its end: the next one takes over what it
kept, before kubelet has noticed more than a broken connection, and starts an agent of its own.

The front runs as long as it has a list to keep. If an agent ends before its first list, or no new agent succeeds
before the list is given up, the front exits with the agent's status, which ends the container.
"""

import contextlib
import fcntl
import logging
import os
import signal
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

from gpushare.core.backoff import Backoff
from gpushare.front.place import FrontPlace
from gpushare.runtime.logs import log_level_of, set_up_logging

_log = logging.getLogger("gpushare.front")
AGENT: Final = (sys.executable, "-m", "gpushare_deviceplugin")
DIRECTORY_VARIABLE: Final = "GPUSHARE_PLUGINS_DIRECTORY"
BACKOFF: Final = Backoff(first_seconds=0.1, longest_seconds=5.0)
GOOD_RUN_SECONDS: Final = 5.0  # an agent that ran this long did not fail at its start
# An agent's start takes a core for half a second, and kubelet rejects pods until we have registered.
AGENT_WAITS_SECONDS: Final = 0.5
LOOK_SECONDS: Final = 30.0  # interval of checks of our children, although the kernel reports their end
_STACK_BYTES: Final = 256 * 1024  # stack of a thread; small, so that no page of it is huge
_ENDING: Final = frozenset({signal.SIGTERM, signal.SIGINT})
_SIGNALS: Final = _ENDING | {signal.SIGCHLD}


class AgentProcess:
    """The agent as our child process. Only the main thread starts and reaps it; any thread may signal it."""

    def __init__(self, command: tuple[str, ...], environment: dict[str, str]) -> None:
        self._command, self._environment = command, environment
        self._lock = threading.Lock()
        self._pid: int | None = None
        self.started_at = 0.0

    @property
    def is_running(self) -> bool:
        """Return whether the agent was started and has not been reaped."""
        return self._pid is not None

    def start(self) -> None:
        """Start the agent, with the signal settings that we were started with."""
        ignored = [signal.SIGPIPE, signal.SIGXFSZ]  # ignored by Python itself
        with self._lock:
            self._pid = os.posix_spawnp(
                self._command[0], self._command, self._environment, setsigmask=[], setsigdef=ignored
            )
        self.started_at = time.monotonic()

    def send(self, number: int) -> None:
        """Send the agent a signal, if it is running."""
        with self._lock:
            if self._pid is not None:
                os.kill(self._pid, number)

    def reap(self) -> int | None:
        """Reap every child that has ended; return the agent's exit status (negative for a signal), or None."""
        found = None
        while True:
            with self._lock:
                try:
                    pid, status = os.waitpid(-1, os.WNOHANG)
                except ChildProcessError:
                    return found
                if pid == 0:
                    return found
                if pid == self._pid:
                    self._pid, found = None, os.waitstatus_to_exitcode(status)


def own_directory(environment: dict[str, str]) -> Path:
    """Return our folder, created if missing and owned only by us.

    Raises:
        OSError: the folder belongs to somebody else.
    """
    folder = Path(environment.get("TMPDIR") or "/tmp") / "gpushare-front"  # noqa: S108 - its owner is looked at below
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{folder} is not a folder of ours")
    folder.chmod(0o700)
    return folder


def wait_for_place(own: Path) -> int:
    """Return the open file that makes us the front at work, once no other front of the folder is.

    The kernel frees the place when its holder ends, however it ends.

    Raises:
        OSError: the folder cannot have the file.
        SystemExit: SIGTERM or SIGINT came first.
    """
    descriptor = os.open(own / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _log.info("another front is at work; this one takes over when it ends")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        _log.warning("the front at work has ended: this one takes over")
    return descriptor


def _end_waiting(*_: Any) -> None:
    raise SystemExit(0)


def run(command: tuple[str, ...], environment: dict[str, str]) -> int:
    """Keep the registration until SIGTERM, or until there is no list to keep; return the exit status."""
    own = own_directory(environment)
    for number in _ENDING:
        signal.signal(number, _end_waiting)
    wait_for_place(own)
    plugins = Path(environment.get("GPUSHARE_KUBELET_DIRECTORY") or "/var/lib/kubelet") / "device-plugins"
    threading.stack_size(_STACK_BYTES)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # before any thread starts: only the main one gets signals
    agent = AgentProcess(command, {**environment, DIRECTORY_VARIABLE: str(own)})
    place = FrontPlace(plugins, own, lambda: agent.send(signal.SIGKILL))
    place.open()
    threading.Thread(target=place.run, name="place", daemon=True).start()
    place.wait_until_registered(AGENT_WAITS_SECONDS)
    try:
        return _supervise(agent, place)
    finally:
        place.stop()


def _supervise(agent: AgentProcess, place: FrontPlace) -> int:
    is_stopping = False
    failures = 0
    start_at = time.monotonic()
    while True:
        now = time.monotonic()
        if not agent.is_running and now >= start_at:
            try:
                agent.start()
            except OSError as error:  # the node has no process left, say
                if not place.is_held:
                    raise
                failures += 1
                delay = BACKOFF.seconds(failures)
                start_at = now + delay
                _log.error("the agent cannot be started, again in %.1f s: %s", delay, error)
        got = signal.sigtimedwait(_SIGNALS, LOOK_SECONDS if agent.is_running else start_at - now)
        if got is not None and got.si_signo in _ENDING:
            is_stopping = True
            agent.send(got.si_signo)
        status = agent.reap()
        if is_stopping and not agent.is_running:
            return _exit_status(status or 0)
        if status is None:
            continue
        if not place.is_held:
            _log.error("the agent ended with status %d, and there is no list to hold for the next one", status)
            return _exit_status(status)
        ran = time.monotonic() - agent.started_at
        failures = 1 if ran >= GOOD_RUN_SECONDS else failures + 1
        delay = BACKOFF.seconds(failures)
        start_at = time.monotonic() + delay
        _log.error("the agent ended with status %d after %.0f s; another in %.1f s", status, ran, delay)


def _exit_status(status: int) -> int:
    return 128 - status if status < 0 else status


def main() -> int:
    """Run the front by the command line and the environment."""
    set_up_logging(log_level_of())
    return run(tuple(sys.argv[1:]) or AGENT, dict(os.environ))


if __name__ == "__main__":
    sys.exit(main())
