"""Pods that run no process now, from their agents' reports, each report used only while it is fresh."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

FRESH_SECONDS: Final = 3.0
"""For how long a report is used: meanwhile a process may connect under the present cap. With the age of the
agent's own figures (about 2 s) this bounds how long a process may have run when its pod's cap is changed."""


@dataclass(slots=True)
class IdlePods:
    """Uids of pods without a process, by node, of reports that were not used yet.

    Args:
        clock: returns monotonic seconds.
    """

    clock: Callable[[], float] = time.monotonic
    _reports: dict[str, tuple[float, list[str]]] = field(default_factory=dict)

    def heard(self, node: str, pod_uids: frozenset[str]) -> None:
        """Record a new report of a node's agent; it replaces the node's earlier one."""
        self.drop(node)
        if pod_uids:
            self._reports[node] = self.clock(), sorted(pod_uids)

    def drop(self, node: str) -> None:
        """Forget a node's report."""
        self._reports.pop(node, None)

    def take(self) -> tuple[str, str] | None:
        """Return the next pod and its node, each once for a report; None if no fresh report has another."""
        now = self.clock()
        while self._reports:
            node, (heard_at, uids) = next(iter(self._reports.items()))
            if now - heard_at > FRESH_SECONDS or not uids:
                self.drop(node)
                continue
            return uids.pop(0), node
        return None
