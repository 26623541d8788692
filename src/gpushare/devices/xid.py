"""XID errors: the driver's reports that a GPU has failed, and what it needs to recover."""

import contextlib
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pynvml

from gpushare.core.gpu import GpuHealth, Health
from gpushare.devices.driver import explain

_log = logging.getLogger(__name__)

# XIDs that an application causes and that do not harm the GPU (NVIDIA, XID errors; the device plugin's list).
APPLICATION_XIDS: Final = frozenset({13, 31, 43, 45, 68, 109})
QUIET_SECONDS: Final = 60.0  # how long no further XID may come before the driver's "no action needed" is trusted
# Between two questions what a GPU needs. An answer takes 0.1 ms of a core (H200, driver 580.159.04): with 8 GPUs
# 0.01% of one.
ACTION_SECONDS: Final = 10.0
MOST_EVENTS: Final = 256  # taken at once; the others at the next look, a second later
_NEEDS: Final = {  # as in nvml.h; 5 to 7 have no name in older versions of pynvml
    pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET: "the GPU needs a reset",
    pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT: "the node needs a reboot",
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_P2P: "the GPU's peer-to-peer traffic must end",
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET: "the GPU must be drained and reset",
    5: "the GPU's IMEX domain must be recovered",
    6: "the GPU needs a reset of its bus",
    7: "the node needs a reboot",
}


@dataclass(frozen=True, slots=True)
class XidReport:
    """A critical XID that counts for a GPU.

    Attributes:
        at: when it came, on the clock.
    """

    number: int
    at: float


class XidWatch:
    """Collects XID events of the GPUs, without waiting for any.

    A GPU with a critical XID, also one before this process started, is unhealthy until the driver reports that no
    recovery action is needed any more.
    With drivers that cannot report this (before r555) a GPU stays unhealthy until it was lost and is found again
    or the agent, and with it NVML, restarts.

    Each GPU has an event set of its own, which gets that GPU's events alone (seen with XID 31 on an H200, driver
    580.159.04; a wait takes 2 us). A wait may fail with GPU_IS_LOST for as long as a GPU of its set is lost, and
    an event of a GPU that fell off the bus does not tell its UUID.

    Attributes:
        last: by GPU, the last critical XID.
    """

    def __init__(
        self,
        handles: Mapping[str, Any],
        clock: Callable[[], float],
        last: Mapping[str, XidReport] | None = None,
    ) -> None:
        self._clock = clock
        self.last: dict[str, XidReport] = dict(last or {})
        self._actions: dict[str, tuple[float, int | None]] = {}  # by GPU, when we asked and what it needs
        self._events: dict[str, Any] = {}  # by GPU, its event set
        self._unwatched: set[str] = set()  # GPUs whose last wait failed
        for uuid, handle in handles.items():
            try:
                self._events[uuid] = pynvml.nvmlEventSetCreate()
                pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, self._events[uuid])
            except pynvml.NVMLError as error:
                _log.warning("XID errors of GPU %s cannot be watched: %s", uuid, explain(error))

    def health(self, uuid: str, handle: Any) -> GpuHealth:
        """Return a GPU's health, judged by its XIDs and by the recovery action that the driver asks for."""
        self.collect(uuid)
        last = self.last.get(uuid)
        if last is None:
            need = _need(self._action(uuid, handle, ACTION_SECONDS))
            return (
                GpuHealth(Health.UNHEALTHY, f"the driver reports: {need}") if need else GpuHealth(Health.HEALTHY)
            )
        is_quiet = self._clock() - last.at >= QUIET_SECONDS
        action = self._action(uuid, handle, 0.0 if is_quiet else ACTION_SECONDS)
        if is_quiet and action == pynvml.NVML_GPU_RECOVERY_ACTION_NONE:
            del self.last[uuid]
            _log.info("GPU %s recovered from XID %d", uuid, last.number, extra={"gpu": uuid, "xid": last.number})
            return GpuHealth(Health.HEALTHY)
        need = _need(action) or "the GPU may need a reset"
        return GpuHealth(Health.UNHEALTHY, f"XID {last.number}: see NVIDIA's list of XID errors; {need}")

    def _action(self, uuid: str, handle: Any, max_age_seconds: float) -> int | None:
        """Return the recovery action that a GPU needs; None if the driver cannot report it."""
        now = self._clock()
        asked_at, action = self._actions.get(uuid, (-math.inf, None))
        if now - asked_at >= max_age_seconds:
            answer = _recovery_action(handle)
            if answer is not None or not _need(action):  # a call that fails heals nothing
                action = answer
            self._actions[uuid] = now, action
        return action

    def found_again(self, uuid: str, handle: Any) -> None:
        """Forget the XID of a GPU that was lost, where the driver cannot report whether it recovered.

        Only a reset makes a GPU answer again in a new session that did not answer in the one before.
        """
        if uuid in self.last and self._action(uuid, handle, 0.0) is None:
            xid = self.last.pop(uuid).number
            _log.info("GPU %s was found again after XID %d", uuid, xid, extra={"gpu": uuid, "xid": xid})

    def close(self) -> None:
        """Free the event sets."""
        for events in self._events.values():
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(events)
        self._events.clear()

    def collect(self, uuid: str) -> None:
        """Take up to `MOST_EVENTS` of a GPU's events: a driver that always has another must not hold the loop.

        A wait that fails, such as with GPU_IS_LOST, is not repeated before the next call, as it may fail again.
        """
        for _ in range(MOST_EVENTS if uuid in self._events else 0):
            try:
                event = pynvml.nvmlEventSetWait(self._events[uuid], 0)
            except pynvml.NVMLError_Timeout:  # nothing happened
                self._unwatched.discard(uuid)
                return
            except pynvml.NVMLError as error:
                if uuid not in self._unwatched:
                    self._unwatched.add(uuid)
                    _log.warning("XID errors of GPU %s cannot be watched now: %s", uuid, explain(error))
                return
            xid = int(event.eventData)
            if xid not in APPLICATION_XIDS:
                _log.error("GPU %s reports XID %d", uuid, xid, extra={"gpu": uuid, "xid": xid})
                self.last[uuid] = XidReport(xid, self._clock())


def _recovery_action(handle: Any) -> int | None:
    try:
        [value] = pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    except pynvml.NVMLError:
        return None
    return int(value.value.uiVal) if value.nvmlReturn == pynvml.NVML_SUCCESS else None


def _need(action: int | None) -> str:
    """Return what a recovery action means, in words; empty if none is needed or it is not known."""
    if action is None or action == pynvml.NVML_GPU_RECOVERY_ACTION_NONE:
        return ""
    return _NEEDS.get(action, f"the GPU needs recovery action {action} of NVML")
