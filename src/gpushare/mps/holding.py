"""Why a process waits at the gate, for all processes at one moment; facts about a pod are computed once."""

from collections import Counter
from typing import Final

from gpushare.mps.grants import grant_mib, grant_percentage
from gpushare.mps.ledger import ClientLedger
from gpushare.mps.policy import CeilingPolicy
from gpushare.mps.room import Connection
from gpushare.mps.status import GateState, HoldReason
from gpushare.mps.turns import TurnAccounts

_OPEN: Final = frozenset({GateState.ACTIVE, GateState.SELF_TEST})


class Holds:
    """The reasons at one moment; create a new object for the next look."""

    def __init__(
        self,
        *,
        state: GateState,
        server_pid: int | None,
        policy: CeilingPolicy,
        ledger: ClientLedger,
        accounts: TurnAccounts,
        now: float,
    ) -> None:
        self._state, self._server_pid, self._now = state, server_pid, now
        self._policy, self._ledger, self._accounts = policy, ledger, accounts
        self._clients: Counter[str | None] | None = None
        self._of_pod: dict[str, HoldReason | None] = {}
        self._no_client: dict[str, HoldReason | None] = {}
        self._settling: dict[str, bool] = {}
        self._cap_in_use: dict[str, bool] = {}

    def why(self, connection: Connection) -> HoldReason | None:
        """Return why a connection cannot have a turn now; None if it can."""
        pid, pod_uid = connection.pid, connection.pod_uid
        if self._policy.is_probe(pid):
            return None if self._state in _OPEN else HoldReason.DAEMON_DOWN
        if pod_uid is None:
            return HoldReason.UNKNOWN_POD
        if pod_uid not in self._of_pod:
            self._of_pod[pod_uid] = self._why_pod(pod_uid)
        if (reason := self._of_pod[pod_uid]) is not None:
            return reason
        if not self._ledger.is_client(pid) and (reason := self._why_no_client(pod_uid)) is not None:
            return reason
        if self._is_cap_in_use(pid, pod_uid):
            return HoldReason.POD_CAP
        return HoldReason.MEMORY_SETTLING if self._is_settling(pid, pod_uid) else None

    def _why_pod(self, pod_uid: str) -> HoldReason | None:
        decision, reason = self._policy.decide(pod_uid)
        if decision is None:
            return reason
        if self._state is not GateState.ACTIVE or self._server_pid is None:
            if self._state is GateState.FAULT:
                return HoldReason.FAULT
            return HoldReason.SELF_TEST if self._state is GateState.SELF_TEST else HoldReason.DAEMON_DOWN
        return HoldReason.BACK_OFF if self._accounts.is_backing_off(pod_uid, self._now) else None

    def _why_no_client(self, pod_uid: str) -> HoldReason | None:
        if pod_uid not in self._no_client:
            if self._clients is None:
                self._clients = self._ledger.clients_by_pod()
            self._no_client[pod_uid] = self._policy.why_no_client(pod_uid, self._clients)
        return self._no_client[pod_uid]

    def _is_cap_in_use(self, pid: int, pod_uid: str) -> bool:
        decision = self._policy.ceiling(pid, pod_uid)
        if decision is None:
            return False
        if pod_uid in self._cap_in_use and not self._ledger.has_admission(pid):
            return self._cap_in_use[pod_uid]
        others = self._ledger.percentages(pod_uid, pid)
        in_use = grant_percentage(decision.thread_percentage, decision.processes, others) is None
        if not self._ledger.has_admission(pid):
            self._cap_in_use[pod_uid] = in_use
        return in_use

    def _is_settling(self, pid: int, pod_uid: str) -> bool:
        decision = self._policy.ceiling(pid, pod_uid)
        if decision is None:
            return False
        if self._ledger.has_admission(pid):
            return grant_mib(decision.memory_mib, self._ledger.siblings(pod_uid, pid), self._now) is None
        if pod_uid not in self._settling:
            siblings = self._ledger.siblings(pod_uid, pid)
            self._settling[pod_uid] = grant_mib(decision.memory_mib, siblings, self._now) is None
        return self._settling[pod_uid]
