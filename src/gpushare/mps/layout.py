"""The files on the node for each GPU: paths, the agent's decisions file and the gate's status file.

/run/gpushare/<gpu-uuid>/tenant/control   the gate's socket; the directory is mounted read-only into pods
                         pipe/, log/      the daemon's own, invisible to tenants
                         decisions.json   written by the agent, read by the gate
                         gate.json        written by the MPS host, read by the agent
                         throttle.json    written by the agent: each throttled pod's share of time (mps.asks)
                         throttled.json   written by the throttle's process, read by the gate for gate.json
"""

import contextlib
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

from gpushare.core.api import JobClass
from gpushare.mps.asks import ThrottleAsks
from gpushare.mps.status import GateStatus, ThrottleStatus

logger = logging.getLogger(__name__)

T = TypeVar("T")


class _Dated(Protocol):
    @property
    def written_at(self) -> float: ...


W = TypeVar("W", bound=_Dated)

DECISIONS_VERSION: Final = 1
TEMPORARY_SECONDS: Final = 60.0  # far longer than any write takes
THROTTLED_STALE_SECONDS: Final = 5.0  # the file is written every second
MAX_FILE_BYTES: Final = 4 * 2**20  # thousands of pods fit; we never write a larger file


@dataclass(frozen=True, slots=True)
class GpuDirectory:
    """The directory of one GPU on the node."""

    path: Path

    @classmethod
    def of(cls, base: Path | str, gpu_uuid: str) -> "GpuDirectory":
        """Return the directory of a GPU under the host directory."""
        return cls(Path(base) / gpu_uuid)

    @property
    def uuid(self) -> str:
        """Return the GPU's UUID."""
        return self.path.name

    @property
    def tenant(self) -> Path:
        """Return the directory that pods mount, read-only."""
        return self.path / "tenant"

    @property
    def control(self) -> Path:
        """Return the gate's listening socket."""
        return self.tenant / "control"

    @property
    def pipe(self) -> Path:
        """Return the daemon's CUDA_MPS_PIPE_DIRECTORY."""
        return self.path / "pipe"

    @property
    def log(self) -> Path:
        """Return the daemon's CUDA_MPS_LOG_DIRECTORY."""
        return self.path / "log"

    @property
    def decisions(self) -> Path:
        """Return the agent's decisions file for this GPU."""
        return self.path / "decisions.json"

    @property
    def status(self) -> Path:
        """Return the gate's status file for this GPU."""
        return self.path / "gate.json"

    @property
    def throttle(self) -> Path:
        """Return the file of the agent's throttle requests."""
        return self.path / "throttle.json"

    @property
    def throttled(self) -> Path:
        """Return the throttle's status file."""
        return self.path / "throttled.json"

    @property
    def compute_mode(self) -> Path:
        """Return the agent's record of the compute mode from before it made the GPU exclusive."""
        return self.path / "compute-mode.json"

    @property
    def told(self) -> Path:
        """Return the agent's record of how far it has told the gate's news."""
        return self.path / "told.json"

    @property
    def endings(self) -> Path:
        """Return the gate's record of clients that it has stopped and will kill."""
        return self.path / "endings.json"

    @property
    def twin_state(self) -> Path:
        """Return the twin's state file of a simulated GPU; real GPUs have none."""
        return self.path / "twin.json"

    def create(self) -> None:
        """Create the directories: the tenants' one accessible to all uids, the rest only to root."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o755)
        self.tenant.mkdir(exist_ok=True)
        self.tenant.chmod(0o755)
        for private in (self.pipe, self.log):
            private.mkdir(exist_ok=True)
            private.chmod(0o700)
        self.remove_left_behind()

    def remove_left_behind(self, now: float | None = None) -> None:
        """Remove temporary files of writers that were killed while writing; `now` is Unix time."""
        before = (time.time() if now is None else now) - TEMPORARY_SECONDS
        for path in self.path.glob(".*.json.*"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < before:
                    path.unlink()


def gpu_directories(base: Path | str) -> tuple[GpuDirectory, ...]:
    """Return all GPU directories under the host directory, by UUID."""
    try:
        return tuple(GpuDirectory(path) for path in sorted(Path(base).iterdir()) if (path / "tenant").is_dir())
    except OSError:
        return ()


@dataclass(frozen=True, slots=True)
class PodDecision:
    """The ceilings of one pod on one GPU.

    Attributes:
        thread_percentage: 1 to 100.
        memory_mib: limit of all of its processes together.
        is_class_known: False if a later agent named a class that is unknown here; such a pod is not frozen.
        ends_at: Unix time from which its clients are ended and no new one is admitted; None while it stays.
        processes: number of processes that share its thread percentage.
        clients: number of MPS clients that it may have; None if an earlier agent did not say.
    """

    thread_percentage: int
    memory_mib: int
    job_class: JobClass = JobClass.THROUGHPUT
    is_class_known: bool = True
    ends_at: float | None = None
    processes: int = 1
    clients: int | None = None


@dataclass(frozen=True, slots=True)
class Decisions:
    """Pods that may use one GPU, by uid.

    Attributes:
        unknown: number of fields and classes of a later version, which were ignored.
    """

    pods: Mapping[str, PodDecision] = field(default_factory=dict)
    unknown: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the file's JSON object."""
        return {
            "version": DECISIONS_VERSION,
            "pods": {
                uid: {
                    "thread_percentage": d.thread_percentage,
                    "memory_mib": d.memory_mib,
                    "job_class": d.job_class,
                }
                | ({} if d.ends_at is None else {"ends_at": d.ends_at})
                | ({} if d.processes == 1 else {"processes": d.processes})
                | ({} if d.clients is None else {"clients": d.clients})
                for uid, d in self.pods.items()
            },
        }

    @classmethod
    def from_json(cls, data: Any) -> "Decisions":
        """Read the file's object; fields and classes of later versions are ignored and counted.

        Raises:
            ValueError: another version, a missing or impossible value; the message names it.
        """
        if not isinstance(data, dict) or data.get("version") != DECISIONS_VERSION:
            raise ValueError(f"not a decisions file of version {DECISIONS_VERSION}")
        pods = data.get("pods")
        if not isinstance(pods, dict):
            raise ValueError('"pods" is not an object')
        read = {str(uid): _pod_decision(str(uid), value) for uid, value in pods.items()}
        unknown = sum(number for _, number in read.values()) + len(data.keys() - {"version", "pods"})
        return cls({uid: decision for uid, (decision, _) in read.items()}, unknown)


_POD_FIELDS: Final = frozenset({"thread_percentage", "memory_mib", "job_class", "ends_at", "processes", "clients"})


def _pod_decision(uid: str, value: Any) -> tuple[PodDecision, int]:
    """Return one pod's ceilings, and the number of its fields and classes of a later version."""
    if not isinstance(value, dict):
        raise ValueError(f"pod {uid}: not an object")
    threads, memory = value.get("thread_percentage"), value.get("memory_mib")
    if type(threads) is not int or not 1 <= threads <= 100:
        raise ValueError(f"pod {uid}: thread_percentage {threads!r} is not 1 to 100")
    if type(memory) is not int or memory <= 0:
        raise ValueError(f"pod {uid}: memory_mib {memory!r} is not a positive integer")
    ends_at = value.get("ends_at")
    if ends_at is not None and (type(ends_at) not in {int, float} or not math.isfinite(ends_at)):
        raise ValueError(f"pod {uid}: ends_at {ends_at!r} is not a time")
    processes, clients = value.get("processes", 1), value.get("clients")
    if type(processes) is not int or processes <= 0:
        raise ValueError(f"pod {uid}: processes {processes!r} is not a positive integer")
    if clients is not None and (type(clients) is not int or clients <= 0):
        raise ValueError(f"pod {uid}: clients {clients!r} is not a positive integer")
    job_class = value.get("job_class", JobClass.THROUGHPUT)
    if not isinstance(job_class, str):
        raise ValueError(f"pod {uid}: job_class {job_class!r} is not a string")
    # The class only decides about priority, which is best effort, and freezing; the ceilings apply in any case.
    is_known = job_class in set(JobClass)
    decision = PodDecision(
        threads,
        memory,
        JobClass(job_class) if is_known else JobClass.THROUGHPUT,
        is_class_known=is_known,
        ends_at=ends_at,
        processes=processes,
        clients=clients,
    )
    return decision, len(value.keys() - _POD_FIELDS) + (not is_known)


def write_atomically(path: Path, data: Any) -> None:
    """Replace a JSON file so that a reader sees the old or the new content, never a part.

    Raises:
        OSError: the disk is full or the directory is gone; the old file stays.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(json.dumps(data, separators=(",", ":")))  # json.dump would encode in Python
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_decisions(gpu: GpuDirectory, decisions: Decisions) -> None:
    """Replace a GPU's decisions (the agent's side)."""
    write_atomically(gpu.decisions, decisions.to_json())


def write_status(gpu: GpuDirectory, status: GateStatus) -> None:
    """Replace a GPU's status (the gate's side)."""
    write_atomically(gpu.status, status.to_json())


def write_throttle(gpu: GpuDirectory, asks: ThrottleAsks) -> None:
    """Replace the throttle requests for a GPU (the agent's side, every second or two, as they are a lease).

    Raises:
        OSError: the disk is full or the directory is gone; then every pod runs once the lease is over.
    """
    write_atomically(gpu.throttle, asks.to_json())


def write_throttled(gpu: GpuDirectory, status: ThrottleStatus) -> None:
    """Replace the status of a GPU's throttle (its process's side)."""
    write_atomically(gpu.throttled, status.to_json())


class LastGood(Generic[T]):
    """A file that another process replaces; a bad value is logged once, and the last good one is kept.

    `read()` costs one stat while the file is unchanged. A file that cannot be read now is tried again each time.
    """

    def __init__(self, path: Path, parse: Callable[[Any], T], default: T) -> None:
        self._path = path
        self._parse = parse
        self._value = default
        self._seen: tuple[int, int, int] | None = None
        self._is_unreadable = False
        self.bad_reads = 0

    def read(self) -> T:
        """Return the last good value (the default before the first); it stays if the file is removed."""
        try:
            stat = self._path.stat()
            key = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
            if key == self._seen:
                return self._value
            self._seen = key
            if stat.st_size > MAX_FILE_BYTES:
                raise ValueError(f"{stat.st_size} bytes is too large")
            self._value = self._parse(json.loads(self._path.read_bytes()))
        except FileNotFoundError:
            pass
        except OSError as error:
            self._seen = None
            if not self._is_unreadable:
                self._note(error)
            self._is_unreadable = True
            return self._value
        except (ValueError, KeyError, TypeError) as error:
            self._note(error)
        self._is_unreadable = False
        return self._value

    def _note(self, error: Exception) -> None:
        self.bad_reads += 1
        logger.error("cannot read %s, keeping its previous content: %s", self._path, error)


class Fresh(Generic[W]):
    """A file that its writer keeps renewing; its value is None when it stays the same for too long.

    Its time stamp is only compared with the previous one, and its age is measured by our own monotonic clock, so a
    jump of the wall clock changes nothing.

    Args:
        wall: Unix time, used once at the first look to ignore a file that was written long ago. If the wall clock
            jumps just then, the file counts from its next renewal. None accepts any file.
    """

    def __init__(
        self,
        file: LastGood[W | None],
        clock: Callable[[], float],
        stale_seconds: float,
        wall: Callable[[], float] | None = None,
    ) -> None:
        self._file = file
        self._clock = clock
        self._stale_seconds = stale_seconds
        self._wall = wall
        self._seen: tuple[float, float] | None = None

    def read(self) -> W | None:
        """Return the last value; None if the writer never wrote or fell silent."""
        value = self._file.read()
        if value is None:
            return None
        now = self._clock()
        if self._seen is None and self._wall is not None and self._is_left_behind(self._wall(), value):
            self._seen = (value.written_at, float("-inf"))
        if self._seen is None or self._seen[0] != value.written_at:
            self._seen = (value.written_at, now)
        return value if now - self._seen[1] <= self._stale_seconds else None

    def _is_left_behind(self, now: float, value: W) -> bool:
        return not -1.0 <= now - value.written_at <= self._stale_seconds


def decisions_reader(gpu: GpuDirectory) -> LastGood[Decisions]:
    """Return the reader of a GPU's decisions; empty until the agent wrote some."""
    return LastGood(gpu.decisions, Decisions.from_json, Decisions())


def status_reader(gpu: GpuDirectory) -> LastGood[GateStatus | None]:
    """Return the reader of a GPU's status; None until the gate wrote one."""
    return LastGood[GateStatus | None](gpu.status, GateStatus.from_json, None)


def throttle_reader(gpu: GpuDirectory) -> LastGood[ThrottleAsks]:
    """Return the reader of a GPU's throttle requests; empty until the agent has written some."""
    return LastGood(gpu.throttle, ThrottleAsks.from_json, ThrottleAsks())


def throttled_reader(gpu: GpuDirectory) -> LastGood[ThrottleStatus]:
    """Return the reader of a GPU's throttle status."""
    return LastGood(gpu.throttled, ThrottleStatus.from_json, ThrottleStatus())


def throttle_in_force(file: LastGood[ThrottleStatus], now: float) -> ThrottleStatus:
    """Return the present status of a GPU's throttle at a CLOCK_BOOTTIME; a silent throttle counts as idle."""
    status = file.read()
    if status.beat and -1.0 <= now - status.beat <= THROTTLED_STALE_SECONDS:
        return status
    return ThrottleStatus(problem="the throttle does not run")
