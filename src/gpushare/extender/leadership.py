"""Which kube-scheduler leads: what another has bound is read before the next decision (ADR 0201).

While another leads, the one beside this process is refused: if it stood still, it goes on for up to ten seconds
after it has lost its lease (its renew deadline), and two that bind at once give the same room away twice.
"""

import asyncio
import logging
import math
import socket
from collections.abc import Callable
from typing import Final

from gpushare.kube import LEASES, Api, ApiError, NotFound

_log = logging.getLogger(__name__)
SURE_SECONDS: Final = 2.0
"""Questions of the leader within it are of one term: it cannot lose its lease and get it back meanwhile."""
ANSWER_SECONDS: Final = 1.0  # a question does not wait longer for the lease

LeaderTerm = tuple[str, int]
"""Holder of the lease, and how often it has changed hands."""


class Leadership:
    """Which kube-scheduler leads, as its Lease says; it is read only after a pause between questions.

    Args:
        name: of the Lease; empty if kube-scheduler is not elected, and nothing is ever read.
        namespace: of the Lease.
        clock: monotonic seconds.
        host: the host name, which kube-scheduler in the same pod has too.
    """

    def __init__(
        self, api: Api, name: str, namespace: str, clock: Callable[[], float], host: str | None = None
    ) -> None:
        self._api, self._name, self._namespace, self._clock = api, name, namespace, clock
        self._host = host or socket.gethostname()
        self._known: LeaderTerm | None = None
        self._sure_until = -math.inf
        self._is_told = False

    async def note(self) -> None:
        """Remember who leads; to be called before the pods are read for the first time."""
        self._known = await self._read()

    async def has_changed(self) -> bool:
        """Return whether another has led since the last call or `note`; False if that cannot be found out.

        To be called at every question of the kube-scheduler beside this process.
        """
        now = self._clock()
        changed = False
        if now > self._sure_until:
            term = await self._read()
            if term is None:
                return False
            changed, self._known = term != self._known, term
        if self._known is not None and self._is_ours(self._known[0]):
            self._sure_until = now + SURE_SECONDS
        return changed

    async def is_here(self) -> bool:
        """Return whether the kube-scheduler beside this process leads; False if that cannot be found out."""
        if not self._name:
            return True
        term = await self._read()
        return term is not None and self._is_ours(term[0])

    @property
    def is_elsewhere(self) -> bool:
        """Return whether another kube-scheduler led when this was last found out; False if that is not known."""
        return self._known is not None and bool(self._known[0]) and not self._is_ours(self._known[0])

    def _is_ours(self, holder: str) -> bool:
        return holder.startswith(f"{self._host}_")  # followed by a uid

    async def _read(self) -> LeaderTerm | None:
        if not self._name:
            return None
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                lease = await self._api.get(LEASES, self._name, namespace=self._namespace)
        except NotFound:  # before its first leader
            return "", 0
        except (ApiError, TimeoutError) as error:
            if not self._is_told:
                _log.warning("lease %s/%s is not read: %s", self._namespace, self._name, error or "no answer")
            self._is_told = True
            return None
        self._is_told = False
        spec = lease.get("spec") or {}
        return str(spec.get("holderIdentity") or ""), int(spec.get("leaseTransitions") or 0)
