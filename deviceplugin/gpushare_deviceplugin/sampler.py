"""Sampling loop: read devices in a thread of its own, conclude health, measure windows and tenants."""

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final

from gpushare.core.backoff import Backoff
from gpushare.core.gpu import Devices, DevicesError, GpuHealth, GpuInfo, GpuProcess, GpuSample, Health
from gpushare.mps.status import ClientStatus, GateStatus
from gpushare.runtime.tasks import is_asked_to_end
from gpushare_deviceplugin.exclusive import ExclusiveMode
from gpushare_deviceplugin.gates import GRACE_SECONDS, Gates, conclude_health
from gpushare_deviceplugin.measuring import Measurer, merge, threads_of
from gpushare_deviceplugin.state import AgentPart, NodeState
from gpushare_deviceplugin.status import GpuMeasure, tenants_of

_log = logging.getLogger(__name__)

GIVE_BACK_SECONDS: Final = 5.0
HUNG_SECONDS: Final = 10.0  # a driver call takes milliseconds; one that takes this long may never return
BACKOFF: Final = Backoff(first_seconds=2.0, longest_seconds=60.0)
NO_ANSWER: Final = "the driver does not answer"
NO_COUNTERS: Final = "neither GPM nor dcgm-exporter gives counters; progress and pipes stay unknown"
NO_SM_ACTIVITY: Final = (
    "dcgm-exporter gives counters without DCGM_FI_PROF_SM_ACTIVE, which its own list leaves out; nothing is "
    "learnt of workloads until its list names it (docs/guide/other-gpus.md)"
)
LONG_WINDOWS: Final = (
    "dcgm-exporter's windows are longer than pods may be stopped, so workloads are profiled only while they are "
    "alone (docs/guide/other-gpus.md)"
)
SETTLE_SECONDS: Final = 0.45  # queued work continues for 0.2 to 0.4 s after a pod was stopped (docs/facts.md 25)
# A gate looks once a second for clients that have ended, and its report is read once a second: signatures are
# learnt only from samples that are older than this and have the same clients since.
ENDING_SECONDS: Final = 2.5
# So many rounds in a row may be left out because the clients change: pods whose clients never stay the same for a
# round would blind the loop otherwise (docs/adr/0237).
MOST_CHANGES: Final = 3
WINDOWS: Final = 5  # samples merged into a window, unless shorter ones are requested
OnProcesses = Callable[[str, tuple[GpuProcess, ...] | None, GateStatus | None], None]
OnMeasure = Callable[[str, GateStatus | None, GpuMeasure], bool]
IsDue = Callable[[str, Sequence[GpuSample]], bool]


def _nobody_asks(uuid: str, processes: tuple[GpuProcess, ...] | None, gate: GateStatus | None) -> None:
    """Ignore processes, for use where nothing consumes them."""


def _nobody_watches(uuid: str, gate: GateStatus | None, measure: GpuMeasure) -> bool:  # noqa: ARG001 - an OnMeasure
    """Ignore measures, for use where nothing consumes them."""
    return False


def _when_long_enough(_: str, fresh: Sequence[GpuSample]) -> bool:
    return len(fresh) >= WINDOWS


@dataclass(frozen=True, slots=True)
class Reading:
    """Values read from one GPU in one round; None for those not available."""

    health: GpuHealth
    sample: GpuSample | None
    error: str = ""
    processes: tuple[GpuProcess, ...] | None = None

    @property
    def trouble(self) -> str:
        """Return why there are no counters; empty if there are, or if the GPU is unhealthy and needs none."""
        if self.error or self.health.health is Health.UNHEALTHY or self.sample is None:
            return self.error
        if not self.sample.counters.as_dict():
            return NO_COUNTERS
        return "" if self.sample.counters.sm_util is not None else NO_SM_ACTIVITY


@dataclass(slots=True)
class _OpenWindow:
    """Samples of one GPU since the last conclusion.

    Attributes:
        clients: those of each pod that had some at their beginning or since, as they were last.
        state: the tenants, and the pods with clients and their caps; a sample that spans a change of it describes
            neither state.
        changes: rounds in a row in which it changed; changed_at: when it was last seen to, but for the rounds that
            count all the same.
    """

    samples: list[GpuSample] = field(default_factory=list)
    clients: dict[str | None, tuple[ClientStatus, ...]] = field(default_factory=dict)
    state: object = None
    changes: int = 0
    changed_at: float = -math.inf

    def clear(self, gate: GateStatus | None) -> None:
        """Begin anew."""
        self.samples = []
        self.clients = dict(_clients_of(gate))


def _clients_of(gate: GateStatus | None) -> Mapping[str | None, tuple[ClientStatus, ...]]:
    """Return each pod's clients, by uid; None for processes in no pod."""
    clients = gate.clients if gate is not None else ()
    uids = dict.fromkeys(client.pod_uid for client in clients)
    return {uid: tuple(client for client in clients if client.pod_uid == uid) for uid in uids}


def _began_after(change_at: float, sample: GpuSample, now: float) -> bool:
    """Return whether a sample began after a change, as dcgm-exporter's windows may not (docs/adr/0225)."""
    return sample.reach_seconds is None or now - sample.reach_seconds >= change_at + SETTLE_SECONDS


@dataclass(slots=True)
class _Recent:
    """Samples of one GPU since the last change of its processes that nothing was learnt from yet.

    Attributes:
        samples: each with the time at which it was taken, monotonic seconds.
        gate: the gate's report beside the last of them.
    """

    samples: deque[tuple[float, GpuSample]] = field(default_factory=deque)
    gate: GateStatus | None = None


class Sampler:
    """Sampler of the devices; it never raises, and never makes up a value.

    Args:
        open_devices: opens the devices; raises DevicesError without a driver.
        on_processes: called with each GPU's processes in each round, and the gate's last report.
        pace: seconds until the next round is wanted, if less than a period.
        is_due: whether to conclude from a GPU's samples since the last conclusion.
        on_round: called after each round, with the seconds until the next one is expected to be over.
        on_measure: called with each new measure of a GPU; one without a sample only lists the tenants. Returns
            whether it changed something on the GPU, so that the next moments belong to neither state.
        exclusive: keeps the GPUs' compute mode, in each round and at the end.
        drained: why a GPU gets no new pods; empty if it may.

    Attributes:
        measures: the last measure of each GPU, by uuid; gates: the last report of each gate.
        beat_at: when the last round ended, monotonic seconds; an old one means that the loop hangs.
    """

    def __init__(
        self,
        state: NodeState,
        open_devices: Callable[[], Devices],
        gates: Gates,
        measurer: Measurer,
        *,
        clock: Callable[[], float],
        period_seconds: float,
        on_processes: OnProcesses = _nobody_asks,
        pace: Callable[[], float] = lambda: math.inf,
        is_due: IsDue = _when_long_enough,
        on_measure: OnMeasure = _nobody_watches,
        on_round: Callable[[float], None] = lambda _: None,
        exclusive: ExclusiveMode | None = None,
        drained: Callable[[str], str] = lambda _: "",
    ) -> None:
        self.measures: dict[str, GpuMeasure] = {}
        self.gates: dict[str, GateStatus | None] = {}
        self.driver_version: str | None = None
        self.beat_at = clock()
        self._state = state
        self._open = open_devices
        self._gates = gates
        self._measurer = measurer
        self._clock = clock
        self._period = period_seconds
        self._on_processes = on_processes
        self._pace = pace
        self._is_due = is_due
        self._on_measure = on_measure
        self._on_round = on_round
        self._exclusive = exclusive
        self._drained = drained
        self._unlisted: set[str] = set()
        self._devices: Devices | None = None  # set in the devices' thread only
        self._lost: Devices | None = None  # given up by the event loop; the thread's next read closes them
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="devices")
        self._windows: dict[str, _OpenWindow] = {}
        self._recent: dict[str, _Recent] = {}
        self._processes: dict[str, tuple[str, ...]] = {}
        self._unchanged_since: dict[str, float] = {}  # when a GPU's processes were seen to change last
        self._failures = 0
        self._settling: set[str] = set()
        self._paused: set[str] = set()

    async def run(self) -> None:
        """Sample once a period; without devices, retry to open them with back-off."""
        try:
            while True:
                started = self._clock()
                delay = await self.step()
                self.beat_at = self._clock()
                took = self.beat_at - started
                pause = max(0.05, delay - took)
                self._on_round(pause + took)
                await asyncio.sleep(pause)
        except asyncio.CancelledError as error:
            if is_asked_to_end(error):  # not after a failure: it is started again, and pods still run
                await self._give_back()
                self._thread.shutdown(wait=False)
            raise

    async def step(self) -> float:
        """Run one round; return how many seconds after its start the next one is due."""
        loop = asyncio.get_running_loop()
        shared = self._exclusive.shared() if self._exclusive is not None else None
        work = loop.run_in_executor(self._thread, self._read, shared)
        try:
            async with asyncio.timeout(HUNG_SECONDS):
                readings, left_out = await asyncio.shield(work)
        except DevicesError as error:
            self._without_devices(str(error))
            self._failures += 1
            return BACKOFF.seconds(self._failures)
        except TimeoutError:
            self._without_devices(NO_ANSWER, may_pass=True)
            await asyncio.wait([work], timeout=GRACE_SECONDS)
            if not work.done():
                self._devices_lost(NO_ANSWER)  # kubelet is told now
                await asyncio.wait([work])
            return self._period
        self._failures = 0
        if self._state.problem:
            _log.info("the devices answer again")
            self._state.problem = ""
            self._state.touch()
        self._state.set_left_out(left_out)
        self._take(readings)
        return min(self._period, SETTLE_SECONDS if self._settling else self._pace())

    def hold(self, uuid: str) -> None:
        """Leave a GPU's counters alone until `release`, because `readings` reads them."""
        self._paused.add(uuid)
        if uuid in self._windows:
            self._windows[uuid].clear(self.gates.get(uuid))
        self._recent.pop(uuid, None)

    def release(self, uuid: str) -> None:
        """Go on sampling a GPU."""
        self._paused.discard(uuid)

    async def sample_now(self, uuid: str) -> GpuSample | None:
        """Read a GPU's counters since the last reading of them; None where the driver gives none."""

        def sample() -> GpuSample | None:
            devices = self._answering()
            return devices.sample(uuid) if devices is not None else None

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, sample)
        except DevicesError:
            return None

    async def _give_back(self) -> None:
        """Restore the GPUs' settings, as far as the driver answers now."""
        devices = self._answering()
        if self._exclusive is None or devices is None:
            return
        work = asyncio.get_running_loop().run_in_executor(self._thread, self._exclusive.give_back, devices)
        try:
            async with asyncio.timeout(GIVE_BACK_SECONDS):
                await asyncio.shield(work)
        except (DevicesError, TimeoutError) as error:
            _log.error("the GPUs' compute mode may stay exclusive: %s", error)

    def _answering(self) -> Devices | None:
        """Return the open devices, unless they are lost."""
        return None if self._devices is self._lost else self._devices

    def _read(self, shared: frozenset[str] | None) -> tuple[list[tuple[GpuInfo, Reading]], Mapping[int, str]]:
        """Read everything for one round, and which GPUs cannot be read, in the devices' thread."""
        if self._devices is not None and self._devices is self._lost:
            self._close(self._devices)
        if self._devices is None:
            self._lost = None
            self._devices = self._open()
            self.driver_version = self._devices.driver_version()
        devices = self._devices
        try:
            listed = devices.list()
            if self._exclusive is not None:
                for gpu in listed:
                    self._exclusive.keep(devices, gpu.uuid, shared)
            return [(gpu, self._read_gpu(devices, gpu.uuid)) for gpu in listed], devices.left_out()
        except DevicesError:
            self._close(devices)
            raise

    def _close(self, devices: Devices) -> None:
        self._devices = None
        with contextlib.suppress(Exception):  # the driver is gone; close whatever can be closed
            devices.close()

    def _read_gpu(self, devices: Devices, uuid: str) -> Reading:
        health = devices.health(uuid)
        if health.health is Health.UNHEALTHY:
            return Reading(health, None)
        processes = self._list_processes(devices, uuid)
        try:
            sample = None if uuid in self._paused else devices.sample(uuid)
            return Reading(health, sample, processes=processes)
        except DevicesError as error:
            return Reading(health, None, str(error), processes)

    def _list_processes(self, devices: Devices, uuid: str) -> tuple[GpuProcess, ...] | None:
        try:
            processes = devices.processes(uuid)
        except DevicesError as error:
            if uuid not in self._unlisted:
                self._unlisted.add(uuid)
                _log.warning("processes outside MPS cannot be listed: %s", error, extra={"gpu": uuid})
            return None
        self._unlisted.discard(uuid)
        return processes

    def _take(self, readings: list[tuple[GpuInfo, Reading]]) -> None:
        self._state.set_gpus(tuple(gpu for gpu, _ in readings))
        listed = {gpu.uuid for gpu, _ in readings}
        for uuid in self._state.gpus.keys() - listed:
            self._conclude(uuid, GpuHealth(Health.UNHEALTHY, "the driver does not list this GPU any more"))
            self._state.set_unmeasured(uuid, "")  # its health reports it
            self.measures.pop(uuid, None)
            self._windows.pop(uuid, None)  # none may span its absence
            self._recent.pop(uuid, None)
        for gpu, reading in readings:
            self._conclude(gpu.uuid, reading.health)
            if reading.error:
                self._state.counts.error(AgentPart.SAMPLING)
            if reading.error or reading.sample is not None or reading.health.health is Health.UNHEALTHY:
                self._state.set_unmeasured(gpu.uuid, reading.trouble)
            if reading.sample is not None and reading.sample.counters.as_dict():
                is_exact = reading.sample.reach_seconds is None
                self._state.set_unreadable(gpu.uuid, "" if is_exact else LONG_WINDOWS)
            self._on_processes(gpu.uuid, reading.processes, self.gates.get(gpu.uuid))
            self._measure(gpu.uuid, reading)

    def _conclude(self, uuid: str, device: GpuHealth, *, may_pass: bool = False) -> None:
        gate = self._gates.read(uuid)
        self.gates[uuid] = gate
        health = conclude_health(device, gate, self._drained(uuid))
        self._state.set_health(uuid, health, may_pass=may_pass or device.health is Health.HEALTHY)

    def _measure(self, uuid: str, reading: Reading) -> None:
        """Take one round's sample.

        1. Signatures are learnt from samples in which the same processes ran.
        2. A window holds no sample in which the tenants changed, the pods that have clients, or their caps: one
           that spans a change describes neither state. A pod's new process alone is no such change.
        3. But where they change in every round, the samples count all the same: for all pods that had clients.
        """
        tenants = tenants_of(self._state, uuid)
        gate = self.gates.get(uuid)
        window = self._windows.setdefault(uuid, _OpenWindow())
        active = _clients_of(gate)
        processes = (
            *(pod.uid for pod, _ in tenants),
            *sorted(str(client.pid) for of_pod in active.values() for client in of_pod),
        )
        is_other_process = self._processes.get(uuid) != processes
        if is_other_process:
            self._processes[uuid] = processes
            self._unchanged_since[uuid] = self._clock()
            self._learn(uuid)
            self._recent.pop(uuid, None)
        caps = [(pod.uid, threads_of(gate, pod) if gate and pod.uid in active else 0) for pod, _ in tenants]
        is_other_state = window.state != (state := (caps, active.keys()))
        window.state = state
        window.changes = window.changes + 1 if is_other_state else 0
        if is_other_state and window.changes <= MOST_CHANGES:
            window.changed_at = self._clock()
            self._conclude_nothing(uuid, gate)
            return
        window.clients |= active
        if uuid in self._settling:
            self._settling.discard(uuid)
            return
        if reading.sample is None:
            if reading.error or reading.health.health is Health.UNHEALTHY:
                self._conclude_nothing(uuid, gate)
            return
        now = self._clock()
        if not _began_after(window.changed_at, reading.sample, now):
            return
        window.samples.append(reading.sample)
        if not is_other_process and _began_after(self._unchanged_since[uuid], reading.sample, now):
            recent = self._recent.setdefault(uuid, _Recent())
            recent.gate = gate
            recent.samples.append((now, reading.sample))
        is_first = uuid not in self.measures or self.measures[uuid].sample is None
        if is_first or self._is_due(uuid, window.samples):  # attribution costs more than reading counters
            self._learn(uuid)
            clients = tuple(client for of_pod in window.clients.values() for client in of_pod)
            seen = replace(gate, clients=clients) if gate is not None else None
            self.measures[uuid] = self._measurer.measure(uuid, seen, merge(window.samples))
            window.clear(gate)
            self._tell(uuid, gate)

    def _learn(self, uuid: str) -> None:
        """Learn from the samples since the last change of processes that are old enough."""
        recent = self._recent.get(uuid)
        if recent is None:
            return
        until = self._clock() - ENDING_SECONDS
        settled = []
        while recent.samples and recent.samples[0][0] <= until:
            settled.append(recent.samples.popleft()[1])
        self._measurer.learn(uuid, recent.gate, settled)

    def _conclude_nothing(self, uuid: str, gate: GateStatus | None) -> None:
        self._windows[uuid].clear(gate)
        self._recent.pop(uuid, None)
        self.measures[uuid] = self._measurer.measure(uuid, gate, None)
        self._tell(uuid, gate)

    def _tell(self, uuid: str, gate: GateStatus | None) -> None:
        if self._on_measure(uuid, gate, self.measures[uuid]):
            self._settling.add(uuid)

    def _without_devices(self, problem: str, *, may_pass: bool = False) -> None:
        self._state.counts.error(AgentPart.DEVICES)
        if self._state.problem != problem:
            _log.error("no devices: %s; retrying", problem)
            self._state.problem = problem
            self._state.touch()
        self._devices_lost(problem, may_pass=may_pass)

    def _devices_lost(self, problem: str, *, may_pass: bool = False) -> None:
        for uuid in self._state.gpus:
            self._conclude(uuid, GpuHealth(Health.UNHEALTHY, problem), may_pass=may_pass)
            self._state.set_unmeasured(uuid, "")
        self._windows.clear()
        self._recent.clear()
        self.measures.clear()
        self._lost = self._devices  # a call may hang in them; their own thread closes them
