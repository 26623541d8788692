"""Start the cluster's processes, record their pids, and end only those."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from devcluster.progress import Failed


def start_time(pid: int) -> int | None:
    """Return the process's start in clock ticks since boot; None if it does not exist or is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """A process that was started; pid and start time together identify it, even when the pid is reused."""

    pid: int
    started: int
    boot: str
    argv: list[str]
    env: dict[str, str]


class Processes:
    """The long-running processes of one cluster, one record file each below `directory`."""

    def __init__(self, directory: Path, logs: Path) -> None:
        self._directory = directory
        self._logs = logs

    def names(self) -> list[str]:
        return sorted(p.stem for p in self._directory.glob("*.json"))

    def pid(self, name: str) -> int | None:
        """Return the pid if that very process still runs."""
        record = self._record(name)
        if record is None or record.boot != _boot():
            return None
        return record.pid if start_time(record.pid) == record.started else None

    def log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def ensure(self, name: str, argv: Sequence[object], env: Mapping[str, str] | None = None) -> None:
        """Start the process unless it runs."""
        if self.pid(name) is None:
            self._start(name, [str(part) for part in argv], dict(env or {}))

    def restart(self, name: str) -> None:
        """Kill the process with kill -9 and start it again with the same command, as after a crash."""
        record = self._record(name)
        if record is None:
            raise Failed(f"no component {name}; there are: {', '.join(self.names())}")
        self.stop(name, signal.SIGKILL)
        self._start(name, record.argv, record.env)

    def stop(self, name: str, first: signal.Signals = signal.SIGTERM, patience_seconds: float = 10) -> None:
        """Stop the process, by force when it takes too long; keep the record so that it can be started again."""
        pid = self.pid(name)
        if pid is None:
            return
        os.kill(pid, first)
        deadline = time.monotonic() + patience_seconds
        while self.pid(name) is not None:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                deadline += 10
            time.sleep(0.05)
        # A killed leader is a zombie while its other threads still end; its ports stay taken until they have.
        while _threads(pid) > 1 and time.monotonic() < deadline + 30:
            time.sleep(0.05)

    def start_again(self, name: str) -> None:
        """Start a stopped process again with the same command."""
        record = self._record(name)
        if record is None:
            raise Failed(f"no component {name}; there are: {', '.join(self.names())}")
        self.ensure(name, record.argv, record.env)

    def tail(self, name: str, lines: int = 15) -> str:
        try:
            return "\n".join(self.log(name).read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return "(no log)"

    def _start(self, name: str, argv: list[str], env: dict[str, str]) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._logs.mkdir(parents=True, exist_ok=True)
        with self.log(name).open("ab") as log:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd="/",
                env={**os.environ, **env},
            )
        record = ProcessRecord(process.pid, start_time(process.pid) or 0, _boot(), argv, env)
        place = self._directory / f"{name}.json"
        temporary = place.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(record)))
        temporary.rename(place)

    def _record(self, name: str) -> ProcessRecord | None:
        try:
            return ProcessRecord(**json.loads((self._directory / f"{name}.json").read_text()))
        except (OSError, ValueError, TypeError):
            return None


def _threads(pid: int) -> int:
    """Return how many threads of a process have not ended, a zombie leader included; 0 when it is gone."""
    try:
        return len(list(Path(f"/proc/{pid}/task").iterdir()))
    except OSError:
        return 0


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
