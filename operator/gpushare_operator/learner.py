"""Learn from the agents' windows how workloads affect each other; core computes, the ClusterView keeps the result.

A window is an agent's report on a GPU whose tenants and caps have not changed since the last report. At most one
window a minute is used for each GPU: consecutive windows of one set say nearly the same.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from gpushare.core import control
from gpushare.core.admission import ShareKey
from gpushare.core.api import LearnedEffect
from gpushare.core.control import SeenTenant
from gpushare.core.interference import Forecast, Profile, as_profile
from gpushare.data import default_model
from gpushare_operator.metrics import OperatorMetrics
from gpushare_operator.reports import ReportedSet
from gpushare_operator.world import ClusterView

_log = logging.getLogger(__name__)

STEP_SECONDS: Final = 5.0
PAUSE_SECONDS: Final = 60.0
# An agent's figures are of windows before its report; a set unchanged for this long was the same in those windows.
SETTLED_SECONDS: Final = 20.0
_FORGOTTEN_SECONDS: Final = 3600.0  # since a GPU was last shared
_AT_ONCE: Final = 50  # sets in a step: 1 ms each
_ERRORS_IN_INTERVAL: Final = 2 * 1.645

CappedProfiles = Sequence[tuple[Profile, int]]


@dataclass(slots=True)
class _ReportedGpu:
    """State of one GPU: its set, since when it has it undisturbed, and when a window of it was last used.

    Attributes:
        reported: None once a report was disturbed.
    """

    reported: ReportedSet | None
    since: float
    taught: float = float("-inf")
    is_new: bool = False


class Learner:
    """Learner of effects: it accepts reports at once, and learns from them in steps.

    Args:
        clock: monotonic seconds.
    """

    def __init__(
        self, world: ClusterView, metrics: OperatorMetrics, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._world, self._metrics, self._clock = world, metrics, clock
        self._gpus: dict[str, dict[str, _ReportedGpu]] = {}  # by node and uuid

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            try:
                await self.step()
            except Exception:  # noqa: BLE001 - one bad window must not end learning for good
                _log.exception("learning: a step failed")
            await asyncio.sleep(STEP_SECONDS)

    def node_changed(self, node: str, sets: Iterable[ReportedSet]) -> None:
        """Record the undisturbed sets of a node agent's report; only pods of that node count.

        A set that comes back after a disturbance counts as a new one: its first figures are of the windows before.
        """
        now = self._clock()
        undisturbed = {each.gpu: each for each in sets if self._is_of(node, each)}
        gpus = self._gpus.setdefault(node, {})
        for uuid in gpus.keys() - undisturbed.keys():
            gpus[uuid].reported, gpus[uuid].is_new = None, False
        for uuid, reported in undisturbed.items():
            known = gpus.get(uuid)
            if known is None or known.reported is None or known.reported.members != reported.members:
                taught = known.taught if known is not None else float("-inf")
                gpus[uuid] = _ReportedGpu(reported, now, taught)
            elif known.reported != reported:
                known.reported, known.is_new = reported, True

    def _is_of(self, node: str, reported: ReportedSet) -> bool:
        pods = (self._world.pods.get(tenant.pod_uid) for tenant in reported.tenants)
        return all(pod is not None and pod.node == node for pod in pods)

    async def step(self) -> None:
        """Learn from the windows that are due."""
        now = self._clock()
        due = [
            (gpu, gpu.reported)
            for gpus in self._gpus.values()
            for gpu in gpus.values()
            if gpu.reported is not None
            and gpu.is_new
            and now - gpu.since >= SETTLED_SECONDS
            and now - gpu.taught >= PAUSE_SECONDS
        ][:_AT_ONCE]
        known = [(reported, found) for _, reported in due if (found := self._known(reported)) is not None]
        for gpu, _ in due:
            gpu.is_new, gpu.taught = False, now
        for gpus in self._gpus.values():
            for uuid, gpu in list(gpus.items()):
                if not gpu.is_new and now - max(gpu.since, gpu.taught) >= _FORGOTTEN_SECONDS:
                    del gpus[uuid]
        self._gpus = {node: gpus for node, gpus in self._gpus.items() if gpus}
        if not known:
            return
        forecasts = await asyncio.to_thread(
            _predicted, [(reported.gpu_model, tenants) for reported, (_, tenants) in known]
        )
        for (reported, (keys, _)), each in zip(known, forecasts, strict=True):
            self._learn(reported, keys, each)

    def _known(self, reported: ReportedSet) -> tuple[tuple[ShareKey, ...], CappedProfiles] | None:
        """Return GpuShares and profiles of a set's tenants; None where one has no profile on this GPU model."""
        keys, tenants = [], []
        for tenant in reported.tenants:
            key = self._world.share_of_pod(tenant.pod_uid)
            share = self._world.shares.get(key) if key is not None else None
            signature = share.status.profile if share is not None else None
            if key is None or signature is None or signature.gpu_model != reported.gpu_model:
                return None
            profile = as_profile(signature, self._world.learned_of(key))
            if profile is None:
                return None
            keys.append(key)
            tenants.append((profile, tenant.thread_percentage))
        return tuple(keys), tenants

    def _learn(self, reported: ReportedSet, keys: Sequence[ShareKey], forecasts: Sequence[Forecast]) -> None:
        names = [self._world.joined.name_of(key.namespace, key.name) or str(key) for key in keys]
        window = [
            SeenTenant(
                name,
                tenant.thread_percentage,
                tenant.progress,
                tenant.error,
                forecast.progress,
                (forecast.upper - forecast.lower) / _ERRORS_IN_INTERVAL,
            )
            for name, tenant, forecast in zip(names, reported.tenants, forecasts, strict=True)
        ]
        if not control.is_decided_by_counters(window):
            return
        by_name = dict(zip(names, keys, strict=True))
        before: dict[str, LearnedEffect] = {
            name: effect
            for name, key in by_name.items()
            for effect in self._world.learned_of(key)
            if effect.gpu_model == reported.gpu_model
        }
        for name, effect in control.learnt(window, before, reported.gpu_model).items():
            self._world.learn(by_name[name], effect)
        self._metrics.windows_learnt.inc()


def _predicted(sets: Iterable[tuple[str, CappedProfiles]]) -> list[tuple[Forecast, ...]]:
    return [default_model().for_gpu(gpu_model).predict(tenants) for gpu_model, tenants in sets]
