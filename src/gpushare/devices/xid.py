"""XID errors: the driver's reports that a GPU has failed, and what it needs to recover."""

import contextlib
import ctypes
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
_OF_ANY: Final = " of one of this node's GPUs, it is not known which"
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
        is_named: whether the driver said which GPU it is of; else it counts for all of the node.
    """

    number: int
    at: float
    is_named: bool = True

    @property
    def summary(self) -> str:
        """Return the number, with the doubt if it may be another GPU's."""
        return f"XID {self.number}{'' if self.is_named else _OF_ANY}"


class XidWatch:
    """Collects XID events of the GPUs, without waiting for any.

    A GPU with a critical XID, also one before this process started, is unhealthy until the driver reports that no
    recovery action is needed any more.
    With drivers that cannot report this (before r555) a GPU stays unhealthy until it was lost and is found again
    or the agent, and with it NVML, restarts.

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
        self._events: Any = None
        self._uuids = {_address(handle): uuid for uuid, handle in handles.items()}
        try:
            self._events = pynvml.nvmlEventSetCreate()
        except pynvml.NVMLError as error:
            _log.warning("XID errors cannot be watched: %s", explain(error))
            return
        for uuid, handle in handles.items():
            try:
                pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, self._events)
            except pynvml.NVMLError as error:
                _log.warning("XID errors of GPU %s cannot be watched: %s", uuid, explain(error))

    def health(self, uuid: str, handle: Any) -> GpuHealth:
        """Return a GPU's health, judged by its XIDs and by the recovery action that the driver asks for."""
        self._collect()
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
        return GpuHealth(Health.UNHEALTHY, f"{last.summary}: see NVIDIA's list of XID errors; {need}")

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
        """Free the event set."""
        if self._events is not None:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(self._events)
            self._events = None

    def _collect(self) -> None:
        """Take what has come, no more than `MOST_EVENTS`: a driver that always has another must not hold the loop.

        A wait that fails, such as with GPU_IS_LOST, is not repeated before the next call, as it may fail again.
        """
        for _ in range(MOST_EVENTS):
            if self._events is None:
                return
            try:
                event = pynvml.nvmlEventSetWait(self._events, 0)
            except pynvml.NVMLError:  # a timeout (nothing happened), or a lost GPU, which the memory query reports
                return
            xid = int(event.eventData)
            if xid in APPLICATION_XIDS:
                continue
            uuid = self._named(event)
            if uuid is not None:
                _log.error("GPU %s reports XID %d", uuid, xid, extra={"gpu": uuid, "xid": xid})
                self.last[uuid] = XidReport(xid, self._clock())
                continue
            _log.error(
                "XID %d of a GPU that the driver does not name: no GPU of this node gets new pods",
                xid,
                extra={"xid": xid},
            )
            now = self._clock()
            for each in self._uuids.values():
                self.last[each] = replace(self.last.get(each, XidReport(xid, now, is_named=False)), at=now)

    def _named(self, event: Any) -> str | None:
        """Return the GPU of an event; None if the driver does not say.

        By its handle: an event has the one by which we registered the GPU (seen with XID 31 on an H200, driver
        580.159.04), and one that fell off the bus does not tell its UUID any more.
        """
        known = self._uuids.get(_address(event.device))
        if known is not None:
            return known
        try:
            return str(pynvml.nvmlDeviceGetUUID(event.device))
        except pynvml.NVMLError:
            return None


def _address(handle: Any) -> int | None:
    """Return what a handle points to, which is the same for each handle of a GPU until NVML is closed."""
    return ctypes.cast(handle, ctypes.c_void_p).value


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
