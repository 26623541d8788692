"""Keep shared GPUs in compute mode EXCLUSIVE_PROCESS: the driver then refuses processes outside MPS.

A GPU's former mode is stored in its directory, so that after an agent was killed the next one can restore it.
"""

import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from gpushare.core.api import Condition, ConditionStatus
from gpushare.core.gpu import ComputeMode, Devices, DevicesError, mode_change
from gpushare.mps.layout import GpuDirectory, write_atomically
from gpushare_deviceplugin.state import NodeState

_log = logging.getLogger(__name__)
_KEY: Final = "own"


class _Problem(StrEnum):
    """Reason for which a GPU is not in its intended compute mode; the condition gives the first that applies."""

    CANNOT_RESET = "CannotReset"
    OTHER_MODE = "OtherMode"
    NOT_SET = "NotSet"


@dataclass(frozen=True, slots=True)
class _Trouble:
    problem: _Problem
    why: str


class ExclusiveMode:
    """Mode of each GPU; `keep` and `give_back` run in the devices' thread, the rest in the event loop.

    Args:
        directory: the node's gpushare directory.
        enabled: from the options. If not, only modes that an earlier agent set are restored.

    Attributes:
        is_ready: whether the node's pods are known. Before that, a GPU with running tenants would look unused.
    """

    def __init__(self, state: NodeState, directory: Path, *, enabled: bool) -> None:
        self._state = state
        self._directory = directory
        self._enabled = enabled
        self.is_ready = False
        self._trouble: dict[str, _Trouble] = {}
        self._kept: frozenset[str] = frozenset()

    def shared(self) -> frozenset[str] | None:
        """Return the GPUs that pods use through MPS, from the decision on; not those of pods with several.

        None before the node's pods are known. A round keeps to its own answer: the pods may become known while the
        driver answers, and GPUs with running tenants would be set back for one round.
        """
        if not self.is_ready:
            return None
        each = (self._state.gpus_of(pod) for pod in self._state.pods.values() if not pod.is_over)
        return frozenset(gpus[0] for gpus in each if len(gpus) == 1)

    def keep(self, devices: Devices, uuid: str, shared: Collection[str] | None) -> None:
        """Move one GPU a step towards its intended mode, by what `shared` returned; a problem is logged once."""
        if shared is not None:
            self._step(devices, uuid, is_wanted=self._enabled and uuid in shared)
            self._kept |= {uuid}

    def give_back(self, devices: Devices) -> None:
        """Restore every GPU's mode: this agent ends, and no other may follow."""
        for gpu in devices.list():
            self._step(devices, gpu.uuid, is_wanted=False)

    def conditions(self) -> tuple[Condition, ...]:
        """Return the GpuNode's condition on whether shared GPUs are exclusive; empty until it is known.

        With the option off it is empty, or Unknown if an earlier agent's change of a GPU cannot be undone.
        """
        trouble = dict(sorted(self._trouble.items()))
        if not trouble:
            looked_at = bool(self._kept) and (self.shared() or frozenset()) <= self._kept
            return (_condition(ConditionStatus.TRUE, "Set", ""),) if self._enabled and looked_at else ()
        problem = next(each for each in _Problem if any(each is one.problem for one in trouble.values()))
        status = ConditionStatus.FALSE if self._enabled else ConditionStatus.UNKNOWN
        others = "; ".join(f"GPU {uuid}: {one.why}" for uuid, one in trouble.items() if one.problem is not problem)
        message = _sentence(problem, {uuid: one.why for uuid, one in trouble.items() if one.problem is problem})
        return (_condition(status, problem.value, f"{message}; {others}" if others else message),)

    def _step(self, devices: Devices, uuid: str, *, is_wanted: bool) -> None:
        try:
            own = _remembered(self._path(uuid))
            if own is None and not is_wanted:
                self._note(uuid, None)
                return
            now = devices.compute_mode(uuid)
            change = mode_change(now, own, is_wanted=is_wanted)
            if change.remember is not None:
                write_atomically(self._path(uuid), {_KEY: change.remember.value})
            if change.set_to is not None:
                devices.set_compute_mode(uuid, change.set_to)
                _log.info("GPU %s is in compute mode %s", uuid, change.set_to.value, extra={"gpu": uuid})
            if change.forget:
                self._path(uuid).unlink(missing_ok=True)
        except (DevicesError, OSError) as error:
            self._note(uuid, _Trouble(_Problem.NOT_SET if is_wanted else _Problem.CANNOT_RESET, str(error)))
            return
        is_foreign = is_wanted and now is ComputeMode.PROHIBITED
        why = "somebody else set its compute mode to Prohibited, in which no pod can use it"
        self._note(uuid, _Trouble(_Problem.OTHER_MODE, why) if is_foreign else None)

    def _path(self, uuid: str) -> Path:
        return GpuDirectory.of(self._directory, uuid).compute_mode

    def _note(self, uuid: str, trouble: _Trouble | None) -> None:
        if self._trouble.get(uuid) == trouble:
            return
        if trouble is not None:
            _log.error("%s", _sentence(trouble.problem, {uuid: trouble.why}), extra={"gpu": uuid})
            self._trouble = {**self._trouble, uuid: trouble}  # another thread reads it
        else:
            self._trouble = {other: why for other, why in self._trouble.items() if other != uuid}


def _condition(status: ConditionStatus, reason: str, message: str) -> Condition:
    return Condition(type="ExclusiveWhileShared", status=status, reason=reason, message=message[:1024])


def _sentence(problem: _Problem, why: Mapping[str, str]) -> str:
    """Return one sentence about GPUs with the same problem, and what an administrator can do."""
    if problem is _Problem.CANNOT_RESET:
        gpus, error = ", ".join(why), next(iter(why.values()))
        return (
            f"the compute mode EXCLUSIVE_PROCESS that an agent set cannot be set back on {gpus}; run on the node, "
            f"for each of them: nvidia-smi -i UUID -c DEFAULT ({error})"
        )
    return "; ".join(f"GPU {uuid}: {each}" for uuid, each in why.items())


def _remembered(path: Path) -> ComputeMode | None:
    """Return a GPU's former mode; a file with invalid content counts as the default mode.

    Raises:
        OSError: the file exists but cannot be read.
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
