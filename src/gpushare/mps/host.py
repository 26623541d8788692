"""The MPS host of a node: for each GPU a keeper (daemon and gate) as a child process, supervised.

    python -m gpushare.mps.host --directory /run/gpushare [--simulated H200:2 --node-name NAME]

This process owns the listening sockets and a copy of every held connection (gpushare.mps.store). So while a killed
keeper is replaced, processes wait instead of being turned away, which would let them run uncapped. On SIGTERM
keepers end and daemons with tenants stay. When the container ends, all of its processes are killed, its daemons
included; hence the DaemonSet's update strategy OnDelete (docs/design.md 2.4).
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from gpushare.core.api import HOST_DIRECTORY, MAX_CLIENTS_PER_GPU, MAX_CLIENTS_PER_POD
from gpushare.core.backoff import Backoff
from gpushare.mps.freezer import CGROUP_ROOT
from gpushare.mps.identity import PROC
from gpushare.mps.layout import GpuDirectory
from gpushare.mps.observe import routes
from gpushare.mps.removal import remove_unused
from gpushare.mps.simulated import simulated_gpus
from gpushare.mps.smi import GpuLists, real_gpus
from gpushare.mps.store import ConnectionStore
from gpushare.mps.thawing import ThrottleProcess, thaw_ours
from gpushare.runtime.http import MetricsAndProbes
from gpushare.runtime.logs import log_level_of, set_up_logging
from gpushare.runtime.options import options_of

logger = logging.getLogger(__name__)

KEEPER_BACKOFF: Final = Backoff(first_seconds=0.1, longest_seconds=10.0)
LOOK_SECONDS: Final = 0.1  # between two looks at the keepers
GOOD_RUN_SECONDS: Final = 5.0  # a keeper that ran this long did not fail at its start, which takes a second
DRIVER_BACKOFF: Final = Backoff(first_seconds=1.0, longest_seconds=60.0)
BACKLOG: Final = 4096
DEFAULT_PORT: Final = 9432
MAX_DESCRIPTORS: Final = 2**20  # with more, programs that close all possible descriptors take minutes


def listen(gpu: GpuDirectory) -> socket.socket:
    """Create the gate's socket anew in the tenant directory, where existing mounts see it (docs/facts.md 17)."""
    gpu.create()
    new = gpu.path / ".control.new"
    new.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(new))
    new.chmod(0o666)
    listener.listen(BACKLOG)
    new.replace(gpu.control)
    return listener


class KeeperProcess:
    """One GPU's keeper, restarted whenever it ends."""

    def __init__(self, gpu: GpuDirectory, arguments: Sequence[str]) -> None:
        self.gpu, self._arguments = gpu, arguments
        self._listener = listen(gpu)
        self._store = ConnectionStore()
        self._copies = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # gpushare.mps.handover_copies
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._not_before = 0.0
        self._failures = 0
        self.restarts = -1

    def keep(self, now: float) -> None:
        """Start the keeper if it is not running and its back-off is over."""
        if self._process is not None and self._process.poll() is not None:
            logger.error(
                "keeper of %s ended with status %s; starting another", self.gpu.uuid, self._process.returncode
            )
            self._failures = 1 if now - self._started_at > GOOD_RUN_SECONDS else self._failures + 1
            self._not_before = now + KEEPER_BACKOFF.seconds(self._failures)
            self._process = None
        if self._process is None and now >= self._not_before:
            descriptor = self._listener.fileno()
            into, out = (end.fileno() for end in self._copies)
            with self._store.attach() as store:
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "gpushare.mps.keeper",
                        "--listener",
                        str(descriptor),
                        "--store",
                        str(store.fileno()),
                        "--copies-into",
                        str(into),
                        "--copies-out",
                        str(out),
                        *self._arguments,
                    ],
                    pass_fds=[descriptor, store.fileno(), into, out],
                    stdin=subprocess.DEVNULL,
                )
            self._started_at = now
            self.restarts += 1

    @property
    def is_running(self) -> bool:
        """Return whether the keeper runs now."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """Return the keeper's pid."""
        return self._process.pid if self._process else None

    def stop(self, timeout_seconds: float = 5.0) -> None:
        """End the keeper; the daemon stays."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def raise_descriptor_limit(nr_open: Path = PROC / "sys/fs/nr_open") -> int:
    """Raise our limit of descriptors as far as the kernel allows, and return it; keepers inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < MAX_DESCRIPTORS:
        with contextlib.suppress(OSError, ValueError):  # only CAP_SYS_RESOURCE may raise the hard limit
            more = min(MAX_DESCRIPTORS, int(nr_open.read_text()))
            if more > hard:
                resource.setrlimit(resource.RLIMIT_NOFILE, (more, more))
                return more
    soft = MAX_DESCRIPTORS if hard < 0 else min(hard, MAX_DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


def _keeper(options: argparse.Namespace, uuid: str, *extra: str) -> KeeperProcess:
    common = ["--proc", str(options.proc), "--max-clients-per-pod", str(options.max_clients_per_pod)]
    if options.keep_strangers:
        common.append("--keep-strangers")
    if options.admit_unproven:
        common.append("--admit-unproven")
    gpu = GpuDirectory.of(options.directory, uuid)
    return KeeperProcess(gpu, ["--directory", options.directory, "--uuid", uuid, *extra, *common])


def _keepers(options: argparse.Namespace) -> list[KeeperProcess]:
    if options.simulated:
        infos = simulated_gpus(options.simulated, options.node_name)
        return [_keeper(options, info.uuid, "--twin", json.dumps(dataclasses.asdict(info))) for info in infos]
    return [_keeper(options, uuid) for uuid in (options.gpu or real_gpus())]


def add_new(keepers: list[KeeperProcess], uuids: Sequence[str], keeper_of: Callable[[str], KeeperProcess]) -> None:
    """Add keepers for the GPUs that have none yet. One that cannot be made now is tried at the next list."""
    known = {keeper.gpu.uuid for keeper in keepers}
    for uuid in uuids:
        if uuid in known:
            continue
        try:
            keepers.append(keeper_of(uuid))
        except OSError as error:
            logger.error("GPU %s has appeared, but no gate can listen yet: %s", uuid, error)
        else:
            logger.info("GPU %s has appeared and gets a keeper", uuid)


def keep_all(keepers: Sequence[KeeperProcess], now: float) -> None:
    """Start each keeper that does not run. One that cannot be started now is tried again at the next call.

    A node whose processes or threads are used up, which a tenant can cause, must not end the host: every daemon of
    the node ends with it.
    """
    for keeper in keepers:
        try:
            keeper.keep(now)
        except (OSError, RuntimeError) as error:
            logger.error("cannot start the keeper of %s: %s", keeper.gpu.uuid, error)


class StopSignal:
    """Whether the host was asked to end; for the main thread and its signal handlers only.

    `set` takes no lock, as a signal may come at any line of `wait`. With threading.Event it would wait for itself,
    if the main thread had the event's lock.
    """

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        """Record that the host was asked to end."""
        self._is_set = True

    def is_set(self) -> bool:
        """Return whether the host was asked to end."""
        return self._is_set

    def wait(self, seconds: float) -> None:
        """Wait until the host is asked to end, which is noticed within `LOOK_SECONDS`, or the time is over."""
        until = time.monotonic() + seconds
        while not self._is_set and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, LOOK_SECONDS))


def start_patiently(name: str, start: Callable[[], None], stop: StopSignal) -> None:
    """Start a thread of the host, and try again while the node has none left."""
    failures = 0
    while not stop.is_set():
        try:
            start()
        except RuntimeError as error:
            failures += 1
            pause = DRIVER_BACKOFF.seconds(failures)
            logger.error("cannot start the thread of %s, trying again in %g s: %s", name, pause, error)
            stop.wait(pause)
        else:
            return


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpushare-mps-host", description=__doc__, allow_abbrev=False)
    add = options_of(parser, None)
    add("directory", HOST_DIRECTORY, "one directory per GPU is made here")
    add("simulated", None, "simulated GPUs instead of the node's, such as H200:2")
    add("node-name", os.environ.get("NODE_NAME") or socket.gethostname(), "name of this node")
    add("gpu", None, "UUID of a GPU to keep; default: all of the node", action="append")
    add("proc", PROC, "where the node's /proc is", type=Path)
    add("keep-strangers", False, "report clients past the gate, do not end them", action="store_true")
    add(
        "max-clients-per-pod",
        MAX_CLIENTS_PER_POD,
        f"MPS clients that one pod may have on a GPU, of {MAX_CLIENTS_PER_GPU}",
        type=int,
        choices=range(1, MAX_CLIENTS_PER_GPU + 1),
        metavar="COUNT",
    )
    add(
        "admit-unproven",
        False,
        "let tenants in though the self-test did not prove that ceilings bind",
        action="store_true",
    )
    add("no-throttle", False, "freeze no pod, whatever the agent asks", action="store_true")
    add("cgroup-root", CGROUP_ROOT, "where the node's cgroups are, writable", type=Path)
    add("listen", "", "address of /metrics and /healthz; default: all")
    add("port", DEFAULT_PORT, "0 for none", type=int)
    add("probe-port", 0, "a second port that serves the probes alone; 0 for none", type=int)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Keep every GPU's keeper running until SIGTERM."""
    options = _parse(arguments)
    set_up_logging(log_level_of())
    raise_descriptor_limit()
    stop = StopSignal()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    # First of all, as a killed host may have left pods frozen.
    thaw_ours(options.directory, options.cgroup_root)
    throttle = None if options.no_throttle else ThrottleProcess(options.directory, options.cgroup_root)
    if throttle is not None:
        start_patiently("the throttle", throttle.start, stop)
    keepers: list[KeeperProcess] = []
    failures = 0
    while not keepers and not stop.is_set():
        try:
            keepers = _keepers(options)
        except ValueError as error:
            logger.error("%s", error)
            if throttle is not None:
                throttle.stop()
            return 2
        except (RuntimeError, OSError) as error:
            # The node's driver may still be being installed: keep asking instead of crashing.
            failures += 1
            pause = DRIVER_BACKOFF.seconds(failures)
            logger.error("no GPU to keep yet, trying again in %g s: %s", pause, error)
            stop.wait(pause)
    server: MetricsAndProbes | None = None
    if keepers:
        server = MetricsAndProbes(
            routes(keepers), options.port, options.probe_port, os.environ, address=options.listen
        )
        start_patiently("the metrics", server.start, stop)
    is_listed = not options.simulated and not options.gpu
    lists = GpuLists(time.monotonic()) if is_listed else None
    while not stop.is_set():
        now = time.monotonic()
        if lists is not None:
            add_new(keepers, lists.take(now), functools.partial(_keeper, options))
        keep_all(keepers, now)
        stop.wait(LOOK_SECONDS)
    if throttle is not None:
        throttle.stop()
    for keeper in keepers:
        keeper.stop()
    if server is not None:
        server.close()
    remove_unused(keeper.gpu for keeper in keepers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
