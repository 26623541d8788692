"""Trouble of pods on a node: found in windows, told once, published, and by policy a GPU gets no new pods."""

import asyncio
from dataclasses import replace

import pytest
from tests.deviceplugin.fakes import GPU_A, Clock, make_pod

from gpushare.core.api import ConditionStatus, JobClass, TroubleKind
from gpushare.core.control import HygieneAction, HygieneSettings
from gpushare.core.gpu import Counters, GpuHealth, GpuSample, Health, OutsideProcess, OutsideWatch
from gpushare.mps.status import (
    ClientStatus,
    GateState,
    GateStatus,
    RefusedThrottle,
    ThrottleRefusal,
    ThrottleStatus,
)
from gpushare_deviceplugin.gates import Notice, conclude_health
from gpushare_deviceplugin.hygiene import Hygiene
from gpushare_deviceplugin.shares import Terms
from gpushare_deviceplugin.state import NodeState
from gpushare_deviceplugin.status import (
    GpuMeasure,
    Keeping,
    TenantMeasure,
    build_status,
    conditions_of,
    urgent_part,
)

ASLEEP, BUSY = TenantMeasure(clients=1, is_asleep=True), TenantMeasure(clients=1)
LONG = 601.0


class Gpu:
    """One GPU with two tenants, as the sampler shows it."""

    def __init__(self, state: NodeState, clock: Clock, **hygiene: HygieneAction) -> None:
        self.state, self.clock = state, clock
        self.outside: dict[str, OutsideWatch] = {}
        self.told: list[Notice] = []
        self.heard = asyncio.Event()
        self.terms = Terms(JobClass.THROUGHPUT, 1.5)
        self.gate = GateStatus(GPU_A, GateState.ACTIVE, 0.0)
        for name in ("a", "b"):
            state.put_pod(make_pod(name, phase="Running"))
        state.set_allocations({"uid-a": {GPU_A: 25}, "uid-b": {GPU_A: 25}})
        self.hygiene = Hygiene(
            state,
            lambda _: self.terms,
            self.outside,
            tell=self.tell,
            clock=clock,
            settings=HygieneSettings(stalled_seconds=600.0, **hygiene),
        )

    async def tell(self, notice: Notice) -> None:
        self.told.append(notice)
        self.heard.set()

    def window(self, *, sm_util: float | None = 0.5, seconds: float = 5.0, **tenants: TenantMeasure) -> None:
        self.clock.now += seconds
        measured = {f"uid-{name}": measure for name, measure in tenants.items()}
        gate = replace(self.gate, clients=tuple(ClientStatus(1, uid) for uid, m in measured.items() if m.clients))
        sample = GpuSample(Counters(sm_util=sm_util), seconds, 900, 0.9)
        self.hygiene.take(GPU_A, gate, GpuMeasure(sample, measured))

    def kind(self, name: str) -> TroubleKind | None:
        found = self.hygiene.of(GPU_A, f"uid-{name}")
        return found.kind if found is not None else None

    async def notices(self, number: int) -> list[tuple[str | None, str]]:
        telling = asyncio.create_task(self.hygiene.run())
        async with asyncio.timeout(30):
            while len(self.told) < number:
                self.heard.clear()
                await self.heard.wait()
        telling.cancel()
        return [(notice.pod_uid, notice.reason) for notice in self.told]


async def test_a_pod_that_does_nothing_for_ten_minutes_is_stalled_and_told_once(
    state: NodeState, clock: Clock
) -> None:
    gpu = Gpu(state, clock)
    gpu.window(a=ASLEEP, b=BUSY)
    gpu.window(seconds=LONG, a=ASLEEP, b=BUSY)
    gpu.window(a=ASLEEP, b=BUSY)
    assert (gpu.kind("a"), gpu.kind("b")) == (TroubleKind.STALLED, None)
    trouble = gpu.hygiene.of(GPU_A, "uid-a")
    assert trouble is not None
    assert trouble.message == f"its processes have done nothing on GPU {GPU_A} for 10 minutes"
    assert gpu.hygiene.drained(GPU_A) == ""
    gpu.window(a=BUSY, b=BUSY)
    assert gpu.kind("a") is None
    assert await gpu.notices(2) == [("uid-a", "PodStalled"), ("uid-a", "PodWorksAgain")]


def test_half_an_hour_without_counters_stalls_nobody(state: NodeState, clock: Clock) -> None:
    gpu = Gpu(state, clock, stalled=HygieneAction.REPLACE)
    gpu.window(a=ASLEEP, b=BUSY)
    for _ in range(360):
        clock.now += 5.0
        gpu.hygiene.take(GPU_A, gpu.gate, GpuMeasure(None, {"uid-a": ASLEEP, "uid-b": BUSY}))
    assert gpu.kind("a") is None
    gpu.window(a=ASLEEP, b=BUSY)
    assert gpu.kind("a") is None


def test_an_idle_gpu_tells_of_workloads_without_a_profile_too(state: NodeState, clock: Clock) -> None:
    gpu = Gpu(state, clock)
    gpu.window(sm_util=0.0, a=BUSY, b=TenantMeasure(clients=0))
    gpu.window(seconds=LONG, sm_util=0.0, a=BUSY, b=TenantMeasure(clients=0))
    assert (gpu.kind("a"), gpu.kind("b")) == (TroubleKind.STALLED, None), "one without a process waits elsewhere"


@pytest.mark.parametrize("sm_util", [None, 0.02])
def test_what_is_not_known_or_little_is_not_nothing(state: NodeState, clock: Clock, sm_util: float | None) -> None:
    gpu = Gpu(state, clock)
    gpu.window(sm_util=sm_util, a=BUSY)
    gpu.window(seconds=LONG, sm_util=sm_util, a=BUSY)
    assert gpu.kind("a") is None


@pytest.mark.parametrize(
    "terms", [Terms(JobClass.LATENCY, 1.1), Terms(JobClass.THROUGHPUT, 1.5, is_certain=False)]
)
def test_a_pod_that_waits_for_requests_is_not_stalled(state: NodeState, clock: Clock, terms: Terms) -> None:
    gpu = Gpu(state, clock)
    gpu.terms = terms
    gpu.window(a=ASLEEP)
    gpu.window(seconds=LONG, a=ASLEEP)
    assert gpu.kind("a") is None


def test_a_pod_that_somebody_else_froze_is_said_to_be(state: NodeState, clock: Clock) -> None:
    gpu = Gpu(state, clock)
    refused = (RefusedThrottle("uid-a", ThrottleRefusal.FROZEN_BY_OTHERS),)
    gpu.gate = replace(gpu.gate, throttle=ThrottleStatus(0.0, refused=refused))
    gpu.window(a=ASLEEP)
    gpu.window(seconds=LONG, a=ASLEEP)
    trouble = gpu.hygiene.of(GPU_A, "uid-a")
    assert trouble is not None
    assert trouble.message.endswith("; somebody other than gpushare has frozen it")


def test_a_pod_outside_mps_is_in_trouble_while_its_process_is_there(state: NodeState, clock: Clock) -> None:
    gpu = Gpu(state, clock, outside_mps=HygieneAction.DRAIN)
    process = OutsideProcess(7, 1, "uid-a")
    gpu.outside[GPU_A] = OutsideWatch({process: 2, OutsideProcess(8, 1, None): 1})
    gpu.window(a=BUSY, b=BUSY)
    assert gpu.kind("a") is TroubleKind.OUTSIDE_MPS
    assert gpu.hygiene.drained(GPU_A) == "1 process uses it outside MPS (policy.hygiene.outsideMps is drain)"
    gpu.outside[GPU_A] = OutsideWatch({process: 2, OutsideProcess(8, 1, "uid-a"): 2})
    assert gpu.hygiene.drained(GPU_A) == "2 processes use it outside MPS (policy.hygiene.outsideMps is drain)"
    gpu.outside[GPU_A] = OutsideWatch({})
    gpu.window(a=BUSY, b=BUSY)
    assert gpu.kind("a") is None
    assert gpu.hygiene.drained(GPU_A) == ""


def test_a_process_of_no_pod_drains_the_gpu_too(state: NodeState, clock: Clock) -> None:
    gpu = Gpu(state, clock, outside_mps=HygieneAction.DRAIN)
    gpu.outside[GPU_A] = OutsideWatch({OutsideProcess(8, 1, None): 5})
    assert "outside MPS" in gpu.hygiene.drained(GPU_A)


def test_a_pod_that_did_not_come_back_after_a_fault(state: NodeState, clock: Clock) -> None:
    gpu = Gpu(state, clock, fault=HygieneAction.DRAIN)
    gpu.window(a=BUSY, b=BUSY)
    gpu.gate = replace(gpu.gate, faults=1, last_fault_pods=("uid-a", "uid-b"))
    gpu.window()
    assert gpu.hygiene.drained(GPU_A) == "its MPS server had a fault moments ago (policy.hygiene.fault is drain)"
    gpu.window(b=BUSY)
    clock.now += 150.0
    gpu.window(b=BUSY)
    assert (gpu.kind("a"), gpu.kind("b")) == (TroubleKind.GPU_FAULT, None)
    gpu.window(a=BUSY, b=BUSY)
    clock.now += 600.0
    assert gpu.kind("a") is None
    assert gpu.hygiene.drained(GPU_A) == ""


async def test_an_agent_that_starts_after_a_fault_tells_who_did_not_come_back(
    state: NodeState, clock: Clock
) -> None:
    """Before: never, so no event, no condition of the GpuShare, and no replacement or drain by policy."""
    gpu = Gpu(state, clock, fault=HygieneAction.DRAIN)
    gpu.gate = replace(gpu.gate, faults=1, last_fault_pods=("uid-a", "uid-b"), lost_pods=("uid-a",))
    gpu.gate = replace(gpu.gate, written_at=60.0, last_fault_at=30.0)
    gpu.window()
    assert gpu.hygiene.drained(GPU_A) == "its MPS server had a fault moments ago (policy.hygiene.fault is drain)"
    clock.now += 150.0
    gpu.window(b=BUSY)
    assert (gpu.kind("a"), gpu.kind("b")) == (TroubleKind.GPU_FAULT, None)
    assert await gpu.notices(1) == [("uid-a", "PodLostInFault")]


def test_a_drained_gpu_is_unhealthy_while_its_device_and_mps_are_well(state: NodeState) -> None:
    well, gate = GpuHealth(Health.HEALTHY), GateStatus(GPU_A, GateState.ACTIVE, 0.0)
    assert conclude_health(well, gate, "why") == GpuHealth(Health.UNHEALTHY, "why")
    assert conclude_health(well, gate) == well
    bad = GpuHealth(Health.UNHEALTHY, "Xid 79")
    assert conclude_health(bad, gate, "why") == bad


def test_trouble_is_published_at_once(state: NodeState, clock: Clock) -> None:
    gpu = Gpu(state, clock)

    def published() -> object:
        def keeping(uuid: str, pod: object, share: int) -> Keeping:
            return Keeping(trouble=gpu.hygiene.of(uuid, pod.uid))  # type: ignore[attr-defined]

        return build_status(state, {GPU_A: gpu.gate}, {}, keeping=keeping)

    gpu.window(a=ASLEEP)
    before = published()
    gpu.window(seconds=LONG, a=ASLEEP)
    after = published()
    assert urgent_part(after) != urgent_part(before)  # type: ignore[arg-type]
    [of_a] = [tenant for tenant in after.gpus[0].tenants if tenant.pod == "a"]  # type: ignore[attr-defined]
    assert of_a.trouble.kind is TroubleKind.STALLED


def test_a_freezer_that_cannot_be_written_is_a_condition_of_the_gpunode(state: NodeState) -> None:
    def condition(gate: GateStatus | None) -> tuple[ConditionStatus, str, str] | None:
        found = [one for one in conditions_of(state, {GPU_A: gate}) if one.type == "ThrottleReady"]
        return (found[0].status, found[0].reason, found[0].message) if found else None

    well = GateStatus(GPU_A, GateState.ACTIVE, 0.0, throttle=ThrottleStatus(0.0))
    assert condition(well) == (ConditionStatus.TRUE, "Writable", "")
    bad = replace(well, throttle=ThrottleStatus(0.0, "/sys/fs/cgroup is mounted read-only"))
    words = "/sys/fs/cgroup is mounted read-only"
    assert condition(bad) == (ConditionStatus.FALSE, "FreezerUnavailable", words)
    assert condition(None) is None, "who does not report is told by its GPU's health"
