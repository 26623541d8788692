"""Store measurements as JSON lines in one file; `record` in each line names its kind.

| record | what |
|---|---|
| settings | of the trace, and the jobs; the first line, and the same for all sessions |
| session | one call of `run`: machine, GPU, launcher, when |
| rate | what a serving program answers alone, one request after the other; from the first session |
| alone | a program alone on the GPU, in every session: rate, and each request's milliseconds |
| signature | what the node agent published of a program alone, for our own policy |
| run | one policy in one repetition: seconds, energy; `state` is complete, cut or failed |
| job | one job of a run: when it came, started and ended, and its progress log |
| refusal | of a run of pods: what kube-scheduler said of a job that waited, when first and last, how often |
| fault | of such a run with faults: who was on the server, fell, was told, and when the GPU served again |
| watch | of a run under gpushare: how often the agent was looked at, and how often in vain |
| placed | of such a run: jobs placed or at work together from then on, caps, and what the model predicts of them |
| seen | of such a run: one job's samples of the agent's metrics: promise, inferred progress and more |

Times of a job are seconds since its run began. A run that was cut says in `cut_by` by what: by the session's
budget, and then another session does it again, or by its own patience: that is a result, a makespan of at least
`makespan_over`. A job that was taken away has `restarts`, and in `first_started` when it first ran.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

FILE: Final = "sharing.jsonl"
COMPLETE: Final = "complete"
CUT: Final = "cut"
FAILED: Final = "failed"
PATIENCE: Final = "patience"
BUDGET: Final = "budget"

Record = dict[str, Any]


@dataclass
class Records:
    """The file of one benchmark; adds whole lines, so that a session that is cut off leaves what it had."""

    directory: Path
    lines: list[Record] = field(default_factory=list)
    name: str = FILE

    @classmethod
    def open(cls, directory: Path, name: str = FILE) -> "Records":
        """Read what earlier sessions left; a last line that was cut off is left out."""
        directory.mkdir(parents=True, exist_ok=True)
        found = cls(directory, name=name)
        if found.path.exists():
            text = found.path.read_bytes()
            whole = text[: text.rfind(b"\n") + 1]
            if len(whole) < len(text):
                found.path.write_bytes(whole)
            found.lines = [json.loads(line) for line in whole.splitlines()]
        return found

    @property
    def path(self) -> Path:
        """Return the file."""
        return self.directory / self.name

    def add(self, record: str, **values: Any) -> Record:
        """Write one line."""
        line = {"record": record, **values}
        self.lines.append(line)
        with self.path.open("a") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return line

    def of(self, record: str, **values: Any) -> Iterator[Record]:
        """Yield the lines of one kind with these values."""
        for line in self.lines:
            if line["record"] == record and all(line.get(key) == value for key, value in values.items()):
                yield line

    def first(self, record: str, **values: Any) -> Record | None:
        """Return the first matching record, if any."""
        return next(self.of(record, **values), None)

    def is_settled(self, policy: str, repetition: int) -> bool:
        """Return whether a policy's run of a repetition is there: complete, or cut by its own patience."""
        wanted = {"policy": policy, "repetition": repetition}
        return any(self.first("run", **wanted, **end) for end in ({"state": COMPLETE}, {"cut_by": PATIENCE}))
