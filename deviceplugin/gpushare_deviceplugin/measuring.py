"""Measure a GPU's tenants in a window: clients and memory from the gate, progress and pipes by attribution."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

from gpushare.core.control import (
    ASLEEP_RATIO,
    DriftWatch,
    Question,
    SharingTenant,
    SoloSignature,
    inferred,
    is_asleep,
)
from gpushare.core.gpu import Counters, GpuSample, mean_counters
from gpushare.core.progress import BAD_FIT, PhasedAttribution, PhaseSearch, Prior
from gpushare.mps.status import GateStatus
from gpushare_deviceplugin.node_signatures import Signatures
from gpushare_deviceplugin.pods import ManagedPod
from gpushare_deviceplugin.state import NodeState
from gpushare_deviceplugin.status import GpuMeasure, TenantMeasure, tenants_of

_log = logging.getLogger(__name__)

FREE_BATCHES: Final = 4  # without a throttle, until no sample was taken under it: samples come late, by 2.5 s


def merge(samples: Iterable[GpuSample]) -> GpuSample:
    """Merge windows, at least one, into one: counters and clock averaged over time, memory as of the last."""
    listed = list(samples)
    clocks = [(s.sm_clock_mhz, s.window_seconds) for s in listed if s.sm_clock_mhz is not None]
    busy = [s.gpu_utilization_ratio for s in listed if s.gpu_utilization_ratio is not None]
    return GpuSample(
        counters=mean_counters((s.counters for s in listed), [s.window_seconds for s in listed]),
        window_seconds=sum(s.window_seconds for s in listed),
        memory_used_mib=listed[-1].memory_used_mib,
        gpu_utilization_ratio=sum(busy) / len(busy) if busy else None,
        sm_clock_mhz=sum(mhz * s for mhz, s in clocks) / sum(s for _, s in clocks) if clocks else None,
    )


# Interference model's predictions for the tenants of one GPU (by uuid); None for a tenant without one.
Expected = Callable[[str, Question], Sequence[Prior | None]]


def nothing_expected(_: str, question: Question) -> Sequence[Prior | None]:
    """Predict nothing, for use without an interference model."""
    return (None,) * len(question.loads)


# Key of a search for phases: tenants with their caps, and the signatures of each.
_SearchKey = tuple[tuple[tuple[str, int], ...], tuple[tuple[Counters | None, ...], ...]]


class Measurer:
    """Measurer of a GPU's tenants, and of signatures of those that run alone."""

    def __init__(self, state: NodeState, signatures: Signatures, expected: Expected = nothing_expected) -> None:
        self._state = state
        self._signatures = signatures
        self._expected_of = expected
        self._drifts: dict[str, DriftWatch] = {}
        self._searches: dict[str, tuple[_SearchKey, PhaseSearch]] = {}
        self._since_throttle: dict[str, int] = {}  # calls of `learn` since a pod of the GPU was throttled

    def learn(self, uuid: str, gate: GateStatus | None, samples: Sequence[GpuSample]) -> None:
        """Add samples to the signature of a GPU's only active tenant; do nothing if there are several.

        While a throttle freezes it, or did until these samples began, they show less than its program draws.

        Args:
            samples: taken while exactly these clients ran. One that a client's end falls into shows less than its
                program draws: `measure` may have it, this may not.
        """
        since_throttle = self._since_throttle.get(uuid, FREE_BATCHES) + 1
        self._since_throttle[uuid] = 0 if gate is not None and gate.throttle.pods else since_throttle
        if not samples or gate is None or self._since_throttle[uuid] <= FREE_BATCHES:
            return
        only = _only_active([pod for pod, _ in tenants_of(self._state, uuid)], gate)
        if only is not None and only.own_percentage is None:
            self._signatures.learn(only, self._state.gpus[uuid].model, merge(samples), threads_of(gate, only))

    def measure(self, uuid: str, gate: GateStatus | None, window: GpuSample | None) -> GpuMeasure:
        """Return the measures of a GPU and its tenants.

        Args:
            window: merged samples to measure; None: no figures.
        """
        pods = [pod for pod, _ in tenants_of(self._state, uuid)]
        # One of whole GPUs runs outside MPS (ADR 0030): the gate sees none of its processes, not that it has none.
        tenants = {pod.uid: _by_gate(None if self._has_whole_gpus(pod) else gate, pod) for pod in pods}
        if gate is None or window is None:
            return GpuMeasure(window, tenants)
        active = [pod for pod in pods if tenants[pod.uid].clients]
        strangers = any(client.pod_uid not in tenants for client in gate.clients)
        if (only := _only_active(pods, gate)) is not None:
            tenants |= self._alone(uuid, only, gate, tenants[only.uid], window)
        elif len(pods) == 1 and not gate.clients and self._has_whole_gpus(pods[0]):
            # The GPU's counters are its own.
            tenants[pods[0].uid] = replace(tenants[pods[0].uid], pipes=window.counters.pipes())
        elif active:
            tenants |= self._together(uuid, gate, active, tenants, window, has_strangers=strangers)
        model = self._state.gpus[uuid].model
        for pod in pods:
            self._signatures.used(pod, model, tenants[pod.uid].memory_used_mib or 0)
        news = {pod.uid: self._signatures.news(pod, model) for pod in pods}
        return GpuMeasure(window, {uid: replace(each, profile=news[uid]) for uid, each in tenants.items()})

    def _alone(
        self, uuid: str, pod: ManagedPod, gate: GateStatus, measured: TenantMeasure, window: GpuSample
    ) -> dict[str, TenantMeasure]:
        """Measure a GPU's only active tenant: the counters are its own, and it may still be throttled."""
        model, threads = self._state.gpus[uuid].model, threads_of(gate, pod)
        duty = _duties(gate).get(pod.uid, 1.0)
        measured = replace(measured, pipes=window.counters.pipes())
        if threads == 100 and duty >= 1.0:
            return {pod.uid: replace(measured, progress_ratio=1.0, progress_error_ratio=0.0)}
        signature = self._signatures.of(pod, model)
        [found] = inferred(window, [SharingTenant(self._phases(pod, model, signature), threads, duty=duty)]).found
        return {
            pod.uid: replace(
                measured,
                progress_ratio=found.progress_ratio,
                progress_error_ratio=found.error_ratio,
                alone_ratio=signature.alone_ratio(threads) if signature is not None else None,
                is_asleep=is_asleep(found, None),
            )
        }

    def _together(
        self,
        uuid: str,
        gate: GateStatus,
        active: Sequence[ManagedPod],
        tenants: dict[str, TenantMeasure],
        window: GpuSample,
        *,
        has_strangers: bool,
    ) -> dict[str, TenantMeasure]:
        model = self._state.gpus[uuid].model
        threads = [threads_of(gate, pod) for pod in active]
        throttles = _duties(gate)
        duties = tuple(throttles.get(pod.uid, 1.0) for pod in active)
        signatures = [self._signatures.of(pod, model) for pod in active]
        known = [signature for signature in signatures if signature is not None]
        priors: Sequence[Prior | None] = [None] * len(active)
        if len(known) == len(active) and not has_strangers:
            priors = self._expected(uuid, active, known, threads, duties)
        sharing = [
            SharingTenant(self._phases(pod, model, signature), cap, prior, duty)
            for pod, signature, cap, prior, duty in zip(active, signatures, threads, priors, duties, strict=True)
        ]
        phased = self._attributed(uuid, active, sharing, window, has_strangers=has_strangers)
        self._watch_drift(uuid, active, phased, window.window_seconds)
        if phased.misfit is not None and phased.misfit <= BAD_FIT:
            for pod, phase, each in zip(active, phased.phases, phased.found, strict=False):
                if each.progress_ratio is not None and each.progress_ratio >= ASLEEP_RATIO:
                    self._signatures.saw(pod, model, phase, window.window_seconds)
        return {
            pod.uid: replace(
                tenants[pod.uid],
                progress_ratio=each.progress_ratio,
                progress_error_ratio=each.error_ratio,
                pipes=each.pipes,
                alone_ratio=signature.alone_ratio(cap) if signature is not None else None,
                is_asleep=is_asleep(each, prior),
                predicted_progress_ratio=prior.mean if prior is not None else None,
                predicted_error_ratio=prior.error if prior is not None else None,
                phase=phase if each.progress_ratio is not None else None,
            )
            for pod, signature, cap, prior, each, phase in zip(
                active,
                signatures,
                threads,
                priors,
                phased.found[: len(active)],
                phased.phases[: len(active)],
                strict=True,
            )
        }

    def _expected(
        self,
        uuid: str,
        active: Sequence[ManagedPod],
        signatures: Sequence[SoloSignature],
        threads: Sequence[int],
        duties: tuple[float, ...],
    ) -> Sequence[Prior | None]:
        """Return the model's predictions for these tenants under the throttles in force."""
        loads = [s.load(cap) for s, cap in zip(signatures, threads, strict=True)]
        uids = tuple(pod.uid for pod in active)
        return self._expected_of(uuid, Question(self._state.gpus[uuid].model, uids, tuple(loads), duties))

    def _attributed(
        self,
        uuid: str,
        active: Sequence[ManagedPod],
        sharing: Sequence[SharingTenant],
        window: GpuSample,
        *,
        has_strangers: bool,
    ) -> PhasedAttribution:
        """Attribute a window, continuing the phase search for the same tenants, caps and signatures."""
        whom = tuple((pod.uid, each.threads) for pod, each in zip(active, sharing, strict=True))
        phases = [*(each.phases for each in sharing), *([(None,)] if has_strangers else [])]
        key = whom, tuple(tuple(one.counters if one is not None else None for one in each) for each in phases)
        before, search = self._searches.get(uuid, (None, PhaseSearch()))
        if before != key:
            search = PhaseSearch()
        phased = inferred(window, sharing, search, has_strangers=has_strangers)
        self._searches[uuid] = key, phased.search
        return phased

    def _phases(
        self, pod: ManagedPod, model: str, signature: SoloSignature | None
    ) -> Sequence[SoloSignature | None]:
        return self._signatures.phases(pod, model) or (signature,)

    def _watch_drift(
        self, uuid: str, active: Sequence[ManagedPod], phased: PhasedAttribution, seconds: float
    ) -> None:
        """Mark all tenants' signatures as doubtful if they no longer explain the GPU's use: any may be wrong."""
        before = self._drifts.get(uuid, DriftWatch())
        drift = self._drifts[uuid] = before.after([pod.uid for pod in active], phased.misfit, seconds)
        if not drift.is_suspected:
            return
        names = ", ".join(pod.key for pod in active)
        _log.info("GPU %s is not used as the signatures of %s say: they are measured again", uuid, names)
        for pod in active:
            self._signatures.doubt(pod, self._state.gpus[uuid].model)

    def _has_whole_gpus(self, pod: ManagedPod) -> bool:
        return len(self._state.allocated(pod) or {}) > 1


def _duties(gate: GateStatus) -> dict[str, float]:
    """Return the part of the time that each throttled pod runs, by uid."""
    return {throttle.pod_uid: throttle.duty_ratio for throttle in gate.throttle.pods}


def threads_of(gate: GateStatus, pod: ManagedPod) -> int:
    """Return the cap in force: the sum of its contexts' caps at their connection, or of their own lower ones.

    A new decision does not change it (docs/facts.md 5), and an environment may lower it (docs/facts.md 11).
    """
    of_pod = (each for c in gate.clients if c.pod_uid == pod.uid for each in c.context_percentages)
    caps = [each for each in of_pod if each is not None]
    ceilings = caps or [pod.decision.thread_percentage if pod.decision else 100]
    return min(100, sum(min(ceiling, pod.own_percentage or 100) for ceiling in ceilings))


def _only_active(pods: Sequence[ManagedPod], gate: GateStatus) -> ManagedPod | None:
    """Return the only one of a GPU's pods that has clients; None if there are several, or clients of others."""
    clients = {client.pod_uid for client in gate.clients}
    active = [pod for pod in pods if pod.uid in clients]
    return active[0] if len(active) == 1 and clients == {active[0].uid} else None


def _by_gate(gate: GateStatus | None, pod: ManagedPod) -> TenantMeasure:
    if gate is None:
        return TenantMeasure()
    own = [client for client in gate.clients if client.pod_uid == pod.uid]
    known = [client.memory_used_mib for client in own if client.memory_used_mib is not None]
    knows_caps = bool(own) and all(None not in client.context_percentages for client in own)
    return TenantMeasure(
        clients=len(own),
        memory_used_mib=sum(known) if len(known) == len(own) else None,
        threads_in_force=threads_of(gate, pod) if knows_caps else None,
    )
