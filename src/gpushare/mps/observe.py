"""The MPS host's own /metrics, /healthz and /readyz, made from the status files of its GPUs."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gpushare.mps.layout import Fresh, GpuDirectory, LastGood, status_reader
from gpushare.mps.status import (
    GateState,
    GateStatus,
    HoldReason,
    RefuseReason,
    SelfTestResult,
    ThrottleRefusal,
    ThrottleStatus,
)
from gpushare.runtime.http import HttpAnswer, Route, metrics_route, probe_route, registry_of

STALE_SECONDS: Final = 10.0  # the keeper writes once a second
_NO_GATE: Final = "NoGate"
# Counters start at 0, otherwise the first refusal would not show as an increase.
_NO_REFUSALS: Final[dict[str, int]] = dict.fromkeys(RefuseReason, 0)
_NO_THROTTLE_REFUSALS: Final[dict[str, int]] = dict.fromkeys(set(ThrottleRefusal) - {ThrottleRefusal.OTHER}, 0)


class KeptGpu(Protocol):
    """A GPU that this host manages."""

    gpu: GpuDirectory
    restarts: int

    @property
    def is_running(self) -> bool:
        """Return whether its keeper runs."""
        ...


class GateCollector(Collector):
    """Metric families over all GPUs of this host."""

    def __init__(
        self,
        kept: Sequence[KeptGpu],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._kept, self._clock, self._wall = kept, clock, wall
        self._files: dict[str, tuple[LastGood[GateStatus | None], Fresh[GateStatus]]] = {}
        for keeper in kept:
            self._files_of(keeper.gpu)

    def statuses(self) -> Iterator[tuple[KeptGpu, GateStatus | None, GateState | None]]:
        """Yield each GPU with its last status and that status's state; None if its gate is silent."""
        for keeper in tuple(self._kept):  # the host adds GPUs that appear later
            file, fresh = self._files_of(keeper.gpu)
            now = fresh.read()
            yield keeper, file.read(), now.state if now is not None and keeper.is_running else None

    def _files_of(self, gpu: GpuDirectory) -> tuple[LastGood[GateStatus | None], Fresh[GateStatus]]:
        if gpu.uuid not in self._files:
            file = status_reader(gpu)
            self._files[gpu.uuid] = file, Fresh(file, self._clock, STALE_SECONDS, self._wall)
        return self._files[gpu.uuid]

    def collect(self) -> Iterable[Metric]:
        """Read the status files and yield the metrics."""
        state = GaugeMetricFamily(
            "gpushare_gate_state", "1 for the state that a GPU's MPS is in", labels=["gpu_uuid", "state"]
        )
        clients = GaugeMetricFamily("gpushare_gate_clients", "MPS clients connected", labels=["gpu_uuid"])
        connections = GaugeMetricFamily(
            "gpushare_gate_connections", "Sockets open at the gate", labels=["gpu_uuid"]
        )
        waiting = GaugeMetricFamily(
            "gpushare_gate_held", "Processes held at the gate, by reason", labels=["gpu_uuid", "reason"]
        )
        refused = CounterMetricFamily(
            "gpushare_gate_refused", "Connections closed by the gate, by reason", labels=["gpu_uuid", "reason"]
        )
        mismatches = GaugeMetricFamily(
            "gpushare_gate_mismatches",
            "Latest clients that ran otherwise than decided, by kind",
            labels=["gpu_uuid", "kind"],
        )
        turns = CounterMetricFamily("gpushare_gate_turns", "Processes passed on", labels=["gpu_uuid"])
        timeouts = CounterMetricFamily(
            "gpushare_gate_turn_timeouts", "Turns that led to no client", labels=["gpu_uuid"]
        )
        durations = CounterMetricFamily(
            "gpushare_gate_turn_seconds", "Time that turns took, sum", labels=["gpu_uuid"]
        )
        waits = CounterMetricFamily(
            "gpushare_gate_wait_seconds", "Time that processes waited, sum", labels=["gpu_uuid"]
        )
        restarts = CounterMetricFamily(
            "gpushare_gate_daemon_restarts", "Times the daemon was restarted", labels=["gpu_uuid"]
        )
        servers = CounterMetricFamily(
            "gpushare_gate_server_restarts", "Times a server that had ended was restarted", labels=["gpu_uuid"]
        )
        faults = CounterMetricFamily("gpushare_gate_faults", "Server faults seen", labels=["gpu_uuid"])
        keepers = CounterMetricFamily(
            "gpushare_gate_keeper_restarts", "Times the gate's process was restarted", labels=["gpu_uuid"]
        )
        test = GaugeMetricFamily(
            "gpushare_gate_self_test_passed", "1 if ceilings were proven to bind here", labels=["gpu_uuid"]
        )
        unread = GaugeMetricFamily(
            "gpushare_gate_unread_connections",
            "Sockets held because their pod connects too fast",
            labels=["gpu_uuid"],
        )
        unknown = GaugeMetricFamily(
            "gpushare_gate_unknown_decision_values",
            "What a later agent decided that this gate does not know",
            labels=["gpu_uuid"],
        )
        throttle = _ThrottleFamilies()
        for keeper, status, spoken in self.statuses():
            gpu = [keeper.gpu.uuid]
            keepers.add_metric(gpu, max(0, keeper.restarts))
            if status is None:
                continue
            for value in GateState:
                state.add_metric([*gpu, value], float(value is (spoken or GateState.DOWN)))
            clients.add_metric(gpu, len(status.clients))
            connections.add_metric(gpu, status.connections)
            unread.add_metric(gpu, status.unread)
            unknown.add_metric(gpu, status.unknown_decision_values)
            for reason in HoldReason:
                waiting.add_metric([*gpu, reason], sum(h.reason is reason for h in status.waiting_connections))
            for name, count in (_NO_REFUSALS | dict(status.refused)).items():
                refused.add_metric([*gpu, name], count)
            for kind in {m.kind for m in status.mismatches}:
                mismatches.add_metric([*gpu, kind], sum(m.kind is kind for m in status.mismatches))
            turns.add_metric(gpu, status.turns.count)
            timeouts.add_metric(gpu, status.turns.timeouts)
            durations.add_metric(gpu, status.turns.durations_seconds_sum)
            waits.add_metric(gpu, status.turns.waits_seconds_sum)
            restarts.add_metric(gpu, status.daemon_restarts)
            servers.add_metric(gpu, status.server_restarts)
            faults.add_metric(gpu, status.faults)
            throttle.add(gpu, status.throttle)
            test.add_metric(gpu, float(status.self_test.result is SelfTestResult.PASSED))
        return (
            state,
            clients,
            connections,
            waiting,
            refused,
            mismatches,
            turns,
            timeouts,
            durations,
            waits,
            restarts,
            servers,
            faults,
            keepers,
            test,
            unread,
            unknown,
            *throttle.families,
        )

    def describe(self) -> Iterable[Metric]:
        """Return no descriptions, so that registering does not run `collect` to check for duplicates."""
        return ()


class _ThrottleFamilies:
    def __init__(self) -> None:
        self._available = GaugeMetricFamily(
            "gpushare_gate_throttle_available", "1 where pods can be frozen", labels=["gpu_uuid"]
        )
        self._pods = GaugeMetricFamily(
            "gpushare_gate_throttled_pods", "Pods held to a share of time", labels=["gpu_uuid"]
        )
        self._refused = CounterMetricFamily(
            "gpushare_gate_throttle_refused",
            "Asks to throttle a pod that were refused",
            labels=["gpu_uuid", "reason"],
        )
        self._freezes = CounterMetricFamily(
            "gpushare_gate_throttle_freezes", "Times that a pod was frozen", labels=["gpu_uuid"]
        )
        self.families: tuple[Metric, ...] = (self._available, self._pods, self._refused, self._freezes)

    def add(self, gpu: Sequence[str], status: ThrottleStatus) -> None:
        self._available.add_metric(gpu, float(not status.problem))
        self._pods.add_metric(gpu, len(status.pods))
        self._freezes.add_metric(gpu, status.freezes)
        none_yet = _NO_THROTTLE_REFUSALS if status.beat else {}  # the counts of a silent throttle do not fall to 0
        for reason, count in (none_yet | dict(status.refusals)).items():
            self._refused.add_metric([*gpu, reason], count)


def routes(kept: Sequence[KeptGpu]) -> dict[str, Route]:
    """Return the HTTP routes of the host.

    /readyz is 503 if a GPU takes no client, with a sentence for each. /healthz is always 200: a restart of the
    host ends every tenant of the node, so nothing may cause one.
    """
    collector = GateCollector(kept)

    def healthz() -> HttpAnswer:
        states = {keeper.gpu.uuid: state or _NO_GATE for keeper, _, state in collector.statuses()}
        return HttpAnswer(json.dumps(states).encode(), "application/json")

    readyz = probe_route(lambda: "\n".join(_trouble(collector)))
    return {"/metrics": metrics_route(registry_of(collector)), "/healthz": healthz, "/readyz": readyz}


_TROUBLE: Final = {
    GateState.STARTING: "MPS is starting",
    GateState.SELF_TEST: "the self-test has not proven that ceilings bind, so clients wait",
    GateState.FAULT: "the MPS server is in FAULT and clients wait",
    GateState.DOWN: "the MPS daemon is down and clients wait",
}


def _trouble(collector: GateCollector) -> Iterator[str]:
    """Yield a sentence for each GPU that accepts no client now."""
    for keeper, status, state in collector.statuses():
        if state is None:
            yield f"GPU {keeper.gpu.uuid}: its gate does not report"
        elif state in _TROUBLE:
            detail = f": {status.detail}" if status is not None and status.detail else ""
            yield f"GPU {keeper.gpu.uuid}: {_TROUBLE[state]}{detail}"
