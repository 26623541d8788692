"""Write each GPU's decisions file from the pods, replacing it atomically; the gate enforces it."""

import asyncio
import logging
import math
from pathlib import Path
from typing import Final

from gpushare.core.api import SHARES_PER_GPU, clients_of
from gpushare.mps.layout import Decisions, GpuDirectory, PodDecision, decisions_reader, write_decisions
from gpushare_deviceplugin.pods import ManagedPod
from gpushare_deviceplugin.shares import Terms, TermsOf
from gpushare_deviceplugin.state import AgentPart, NodeState

_log = logging.getLogger(__name__)
RETRY_SECONDS: Final = 5.0  # after a full disk; meanwhile the file on disk stays in force


def class_of_annotation(pod: ManagedPod) -> Terms:
    """Return the terms of a pod from its own annotations alone."""
    return Terms(pod.job_class, math.inf)


def decide(state: NodeState, terms: TermsOf = class_of_annotation) -> dict[str, Decisions]:
    """Return each GPU's decisions: one for every managed pod that runs, or may start, or still ends on it."""
    by_gpu: dict[str, dict[str, PodDecision]] = {uuid: {} for uuid in state.gpus}
    for pod in sorted([*state.pods.values(), *state.forgotten()], key=lambda each: each.uid):
        if pod.is_over or pod.decision is None:
            continue
        ceilings = PodDecision(
            pod.decision.thread_percentage,
            pod.decision.memory_limit_mib,
            terms(pod).job_class,
            ends_at=pod.ends_at,
            processes=pod.processes,
            clients=clients_of(min(pod.share_units, SHARES_PER_GPU)),
        )
        for uuid in state.gpus_of(pod):
            if uuid in by_gpu:
                by_gpu[uuid][pod.uid] = ceilings
    return {uuid: Decisions(pods) for uuid, pods in by_gpu.items()}


class DecisionWriter:
    """Writer of the files by `decide`; start it only once the pods are known, since others must wait."""

    def __init__(self, state: NodeState, directory: Path, terms: TermsOf = class_of_annotation) -> None:
        self._state = state
        self._directory = directory
        self._terms = terms
        self._written: dict[str, Decisions] = {}
        self._failing = False

    async def run(self) -> None:
        """Write at every change, until cancelled."""
        changed = self._state.subscribe()
        try:
            while True:
                changed.clear()
                if self.write():
                    await changed.wait()
                else:
                    await asyncio.sleep(RETRY_SECONDS)
        finally:
            self._state.unsubscribe(changed)

    def write(self) -> bool:
        """Write the files that differ; return False when something could not be written."""
        whole = True
        for uuid, decisions in decide(self._state, self._terms).items():
            gpu = GpuDirectory.of(self._directory, uuid)
            if uuid not in self._written and gpu.decisions.exists():
                self._written[uuid] = decisions_reader(gpu).read()
            # an MPS host that ends removes empty directories
            is_on_disk = not decisions.pods or gpu.decisions.exists()
            if is_on_disk and self._written.get(uuid) == decisions:
                continue
            try:
                gpu.create()
                write_decisions(gpu, decisions)
            except OSError as error:
                whole = False
                self._state.counts.error(AgentPart.DECISIONS)
                if not self._failing:
                    _log.error("decisions of GPU %s not written, the old ones stay in force: %s", uuid, error)
                self._failing = True
            else:
                self._written[uuid] = decisions
        if whole:
            self._failing = False
        return whole
