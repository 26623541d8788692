"""Events about GpuShares, written after the statuses that they are about."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from gpushare.kube import Api, EventType, Json, object_reference, record_event

_log = logging.getLogger(__name__)
_ACTION: Final = "Reconcile"
_MOST_WAITING: Final = 20_000  # about 20 MiB; at a start each GpuShare has one
_AT_THE_END: Final = 16  # written at once by a stop
_STOP_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class _Announcement:
    regarding: Json
    reason: str
    note: str
    at: datetime


class Announcements:
    """Events that wait to be written: one at a time, so that statuses go first (ADR 0192).

    At a start every GpuShare has one, and each is a request. Events carry the time at which they happened, so a
    reader sees no difference. Warnings do not wait.
    """

    def __init__(self, api: Api, controller: str, now: Callable[[], datetime]) -> None:
        self._api, self._controller, self._now = api, controller, now
        self._waiting: deque[_Announcement] = deque()
        self._added = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    async def add(self, share: Json, reason: str, note: str, *, warning: bool) -> None:
        """Write a warning at once; let anything else wait, unless too many do already."""
        announcement = _Announcement(object_reference(share), reason, note, self._now())
        if warning:
            await self._write(announcement, EventType.WARNING)
            return
        self._waiting.append(announcement)
        self._added.set()
        if len(self._waiting) > _MOST_WAITING:
            await self._write_next()

    async def run(self) -> None:
        """Write what waits, the oldest first, until cancelled; then write on for some seconds."""
        try:
            while True:
                await self.drain()
                self._added.clear()
                await self._added.wait()
        finally:
            await self._finish()

    async def drain(self) -> None:
        """Write all that waits."""
        while self._waiting:
            await self._write_next()

    async def _finish(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_STOP_SECONDS):
                await asyncio.gather(*(self.drain() for _ in range(_AT_THE_END)))
        if self._waiting:
            _log.warning("%d events are not written, as the operator stops", len(self._waiting))

    async def _write_next(self) -> None:
        announcement = self._waiting.popleft()
        try:
            await self._write(announcement, EventType.NORMAL)
        except Exception:  # noqa: BLE001 - one event must not stop all others
            _log.exception("event %s on %s not written", announcement.reason, announcement.regarding.get("name"))

    async def _write(self, one: _Announcement, event_type: EventType) -> None:
        await record_event(
            self._api,
            one.regarding,
            reason=one.reason,
            note=one.note,
            action=_ACTION,
            event_type=event_type,
            controller=self._controller,
            now=one.at,
        )
