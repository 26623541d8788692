"""XID errors: the driver's reports that a GPU has failed, and whether it has recovered."""

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import pynvml

from gpushare.core.gpu import GpuHealth, Health
from gpushare.devices.driver import explain

_log = logging.getLogger(__name__)

# XIDs that an application causes and that do not harm the GPU (NVIDIA, XID errors; the device plugin's list).
APPLICATION_XIDS: Final = frozenset({13, 31, 43, 45, 68, 109})
QUIET_SECONDS: Final = 60.0  # how long no further XID may come before the driver's "no action needed" is trusted


class XidWatch:
    """Collects XID events of the GPUs, without waiting for any.

    A GPU with a critical XID is unhealthy until the driver reports that no recovery action is needed any more.
    With drivers that cannot report this (before r555) it stays unhealthy until the agent, and with it NVML,
    restarts.

    Attributes:
        last: by GPU, the last critical XID and when it came, on the clock.
    """

    def __init__(
        self,
        handles: Mapping[str, Any],
        clock: Callable[[], float],
        last: Mapping[str, tuple[int, float]] | None = None,
    ) -> None:
        self._clock = clock
        self.last: dict[str, tuple[int, float]] = dict(last or {})
        self._events: Any = None
        self._uuids = tuple(handles)
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
        """Return a GPU's health, judged by its XIDs."""
        self._collect()
        last = self.last.get(uuid)
        if last is None:
            return GpuHealth(Health.HEALTHY)
        xid, at = last
        if self._clock() - at >= QUIET_SECONDS and _is_recovered(handle):
            del self.last[uuid]
            _log.info("GPU %s recovered from XID %d", uuid, xid, extra={"gpu": uuid, "xid": xid})
            return GpuHealth(Health.HEALTHY)
        return GpuHealth(Health.UNHEALTHY, f"XID {xid}: see NVIDIA's list of XID errors; the GPU may need a reset")

    def close(self) -> None:
        """Free the event set."""
        if self._events is not None:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(self._events)
            self._events = None

    def _collect(self) -> None:
        while self._events is not None:
            try:
                event = pynvml.nvmlEventSetWait(self._events, 0)
            except pynvml.NVMLError:  # a timeout (nothing happened), or a lost GPU, which the memory query reports
                return
            xid = int(event.eventData)
            if xid in APPLICATION_XIDS:
                continue
            for uuid in self._named(event):
                _log.error("GPU %s reports XID %d", uuid, xid, extra={"gpu": uuid, "xid": xid})
                self.last[uuid] = (xid, self._clock())

    def _named(self, event: Any) -> tuple[str, ...]:
        """Return the GPU of an event, or all GPUs if it is unknown, as the event concerns one of them."""
        try:
            return (str(pynvml.nvmlDeviceGetUUID(event.device)),)
        except pynvml.NVMLError:
            return self._uuids


def _is_recovered(handle: Any) -> bool:
    try:
        [value] = pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    except pynvml.NVMLError:
        return False
    is_read = value.nvmlReturn == pynvml.NVML_SUCCESS
    return bool(is_read and value.value.uiVal == pynvml.NVML_GPU_RECOVERY_ACTION_NONE)
