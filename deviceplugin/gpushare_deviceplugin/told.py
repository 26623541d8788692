"""How far each gate's news was told, kept on the node: an agent tells what came while none ran."""

import json
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from gpushare.mps.layout import GpuDirectory, write_atomically
from gpushare.mps.status import GateStatus

_log = logging.getLogger(__name__)
NEWS_SECONDS: Final = 600.0  # what came while no agent ran for longer is no news; the pods on the GPU are others
AGAIN_SECONDS: Final = 60.0  # between two records of counts that stay
_COUNTS: Final = ("faults", "daemon_restarts", "server_restarts")
_NOTED: Final = (*_COUNTS, "counts_since")


@dataclass(slots=True)
class ToldNews:
    """The counts of each GPU's gate that were told.

    Attributes:
        directory: the host's directory of GPUs.
    """

    directory: Path
    _kept: dict[str, dict[str, Any]] = field(default_factory=dict)
    _fails: bool = False

    def former(self, uuid: str, status: GateStatus) -> GateStatus | None:
        """Return a gate's report with the counts that the former agent told; None if they are unknown or too old.

        Both times are the gate's, so they are as far apart as its own clock says.
        """
        try:
            kept = json.loads(GpuDirectory.of(self.directory, uuid).told.read_text())
            faults, daemon_restarts, server_restarts = (int(kept[name]) for name in _COUNTS)
            counts_since = float(kept.get("counts_since", status.counts_since))  # a former agent may not say
            is_news = 0.0 <= status.written_at - float(kept["at"]) <= NEWS_SECONDS
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if not is_news:
            return None
        return replace(
            status,
            faults=faults,
            daemon_restarts=daemon_restarts,
            server_restarts=server_restarts,
            counts_since=counts_since,
            waiting_connections=(),
        )

    def note(self, uuid: str, status: GateStatus) -> None:
        """Record that a gate's report was told; log once if that fails."""
        counts = {name: getattr(status, name) for name in _NOTED}
        kept = self._kept.get(uuid, {"at": 0.0})
        is_same = kept == {**counts, "at": kept["at"]}
        if is_same and 0.0 <= status.written_at - kept["at"] < AGAIN_SECONDS:
            return
        record = self._kept[uuid] = {**counts, "at": status.written_at}
        try:
            write_atomically(GpuDirectory.of(self.directory, uuid).told, record)
        except OSError as error:
            if not self._fails:
                _log.warning("the next agent cannot tell what happens while none runs: %s", error)
            self._fails = True
        else:
            self._fails = False
