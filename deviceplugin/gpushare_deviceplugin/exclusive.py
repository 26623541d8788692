"""GPUs in compute mode EXCLUSIVE_PROCESS while they are shared: the driver then refuses who is not under MPS.

What a GPU had before lies in its directory, so an agent that comes after a killed one sets it back.
"""

import json
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from gpushare.core.api import Condition, ConditionStatus
from gpushare.core.gpu import ComputeMode, Devices, DevicesError, mode_change
from gpushare.mps.layout import GpuDirectory, write_atomically
from gpushare_deviceplugin.state import NodeState

_log = logging.getLogger(__name__)
_KEY: Final = "own"


class ExclusiveMode:
    """Keeps the mode of each GPU; `keep` and `give_back` run in the devices' thread, the rest in the event loop.

    Args:
        directory: the node's gpushare directory.
        enabled: by the options. Otherwise only what an earlier agent left is set back.

    Attributes:
        is_ready: the node's pods are known. Before, a GPU whose tenants run would look given up.
    """

    def __init__(self, state: NodeState, directory: Path, *, enabled: bool) -> None:
        self._state = state
        self._directory = directory
        self._enabled = enabled
        self.is_ready = False
        self._trouble: dict[str, str] = {}

    def shared(self) -> frozenset[str]:
        """Return the GPUs that pods use through MPS, from their decision on; pods of several whole GPUs do not."""
        each = (self._state.gpus_of(pod) for pod in self._state.pods.values() if not pod.is_over)
        return frozenset(gpus[0] for gpus in each if len(gpus) == 1)

    def keep(self, devices: Devices, uuid: str, shared: Collection[str]) -> None:
        """Take one GPU a step to the mode that it should have; trouble is logged once."""
        if self.is_ready:
            self._step(devices, uuid, is_wanted=self._enabled and uuid in shared)

    def give_back(self, devices: Devices) -> None:
        """Set every GPU back: this agent ends, and may be the last one."""
        for gpu in devices.list():
            self._step(devices, gpu.uuid, is_wanted=False)

    def conditions(self) -> tuple[Condition, ...]:
        """Return what a GpuNode says of it: whether shared GPUs are exclusive; nothing where nobody asked."""
        trouble = "; ".join(f"GPU {uuid}: {why}" for uuid, why in sorted(self._trouble.items()))
        if not (self._enabled or trouble):
            return ()
        status = ConditionStatus.FALSE if trouble else ConditionStatus.TRUE
        reason = "NotSet" if trouble else "Set"
        return (Condition(type="ExclusiveWhileShared", status=status, reason=reason, message=trouble[:1024]),)

    def _step(self, devices: Devices, uuid: str, *, is_wanted: bool) -> None:
        try:
            own = _remembered(self._path(uuid))
            if own is None and not is_wanted:
                self._said(uuid, "")
                return
            change = mode_change(devices.compute_mode(uuid), own, is_wanted=is_wanted)
            if change.remember is not None:
                write_atomically(self._path(uuid), {_KEY: change.remember.value})
            if change.set_to is not None:
                devices.set_compute_mode(uuid, change.set_to)
                _log.info("GPU %s is in compute mode %s", uuid, change.set_to.value, extra={"gpu": uuid})
            if change.forget:
                self._path(uuid).unlink(missing_ok=True)
        except (DevicesError, OSError) as error:
            self._said(uuid, f"its compute mode is not as it should be: {error}")
            return
        self._said(uuid, "")

    def _path(self, uuid: str) -> Path:
        return GpuDirectory.of(self._directory, uuid).compute_mode

    def _said(self, uuid: str, trouble: str) -> None:
        if self._trouble.get(uuid, "") == trouble:
            return
        if trouble:
            _log.error("GPU %s: %s", uuid, trouble, extra={"gpu": uuid})
            self._trouble = {**self._trouble, uuid: trouble}  # another thread reads it
        else:
            self._trouble = {other: why for other, why in self._trouble.items() if other != uuid}


def _remembered(path: Path) -> ComputeMode | None:
    """Return the mode that a GPU had before; a file that nobody can read counts as the default mode.

    Raises:
        OSError: it is there and cannot be read.
    """
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        return ComputeMode.DEFAULT
    value = data.get(_KEY) if isinstance(data, Mapping) else None
    known = {mode.value: mode for mode in ComputeMode}
    return known.get(value, ComputeMode.DEFAULT) if isinstance(value, str) else ComputeMode.DEFAULT
