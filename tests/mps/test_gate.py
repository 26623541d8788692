"""The gate before a real twin daemon, with real tenant processes; pods are told apart by pid instead of cgroup."""

import itertools
import os
import signal
import time

import pytest

from gpushare.mps import commands
from gpushare.mps import gate as gating
from gpushare.mps.faultlog import FaultLog
from gpushare.mps.gate import Backend
from gpushare.mps.identity import is_alive
from gpushare.mps.status import GateState, HoldReason

from .conftest import decide, eventually

pytestmark = pytest.mark.slow  # real processes throughout: part of `make test`


async def test_each_pod_gets_its_own_ceilings_whatever_its_environment_asks(stage, tenants):
    decide(stage.gpu, a=(20, 4096), b=(60, 8192))
    greedy = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "95", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=100G"}
    a = tenants(stage.gpu.tenant, "--workload", "stream", "--memory-mib", "100", env=greedy)
    b = tenants(stage.gpu.tenant, "--workload", "stream", "--memory-mib", "100", env=greedy)
    stage.pods |= {a.pid: "a", b.pid: "b"}
    for tenant, sms, limit in ((a, "26", "4096"), (b, "78", "8192")):
        await eventually(tenant.is_connected, "connected")
        assert (tenant.value("sms"), tenant.value("memory_limit_mib")) == (sms, limit)
    await eventually(lambda: stage.gate.turns.count == 2, "both turns over")
    assert {c.pod_uid for c in stage.ledger.clients()} == {"a", "b"}
    assert stage.gate.turns.timeouts == 0


async def test_a_pod_without_a_decision_waits_and_goes_on_when_it_gets_one(stage, tenants):
    tenant = tenants(stage.gpu.tenant, "--workload", "stream")
    stage.pods[tenant.pid] = "a"
    await eventually(lambda: stage.reasons().get(tenant.pid) is HoldReason.NO_DECISION, "held")
    decide(stage.gpu, a=(20, 20000))
    await eventually(tenant.is_connected, "connected")
    assert tenant.value("sms") == "26"


async def test_a_process_of_no_pod_waits_for_ever(stage, tenants):
    tenant = tenants(stage.gpu.tenant, "--workload", "stream")
    await eventually(lambda: stage.reasons().get(tenant.pid) is HoldReason.UNKNOWN_POD, "held")
    assert not tenant.is_connected()


async def test_a_pod_decided_for_another_gpu_is_caught_at_its_first_connect(stage, tenants):
    other = type(stage.gpu)(stage.gpu.path.parent / "GPU-other")
    other.create()
    decide(other, a=(20, 4096))
    tenant = tenants(stage.gpu.tenant, "--workload", "stream")
    stage.pods[tenant.pid] = "a"
    await eventually(lambda: stage.reasons().get(tenant.pid) is HoldReason.WRONG_GPU, "held")


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (GateState.DOWN, HoldReason.DAEMON_DOWN),
        (GateState.FAULT, HoldReason.FAULT),
        (GateState.STARTING, HoldReason.DAEMON_DOWN),
        (GateState.SELF_TEST, HoldReason.SELF_TEST),
    ],
)
async def test_while_mps_is_not_active_processes_wait_and_then_go_on_under_mps(stage, tenants, state, reason):
    decide(stage.gpu, a=(20, 20000))
    stage.gate.set_backend(Backend(state))
    tenant = tenants(stage.gpu.tenant, "--workload", "stream")
    stage.pods[tenant.pid] = "a"
    await eventually(lambda: stage.reasons().get(tenant.pid) is reason, "held")
    assert "without MPS" not in tenant.text()
    stage.gate.set_backend(Backend(GateState.ACTIVE, stage.server_pid))
    await eventually(tenant.is_connected, "connected")
    assert tenant.value("sms") == "26"


async def test_nobody_is_passed_on_to_a_server_that_has_logged_a_fault(stage, tenants):
    """Before: until the keeper's next look, within a second; on an H200 a job that came in between failed."""
    decide(stage.gpu, a=(20, 20000))
    faults = FaultLog(stage.gpu.log / "server.log")
    stage.gate._has_fault = faults.has_fault
    with (stage.gpu.log / "server.log").open("a") as server:
        server.write("[2026-11-26 13:30:25.724 Server  2480] Server is handling a fatal GPU error.\n")
    tenant = tenants(stage.gpu.tenant, "--workload", "stream")
    stage.pods[tenant.pid] = "a"
    await eventually(lambda: len(stage.trouble) > 2, "the keeper is asked to look")
    assert {str(each) for each in stage.trouble} == {"the server has logged a fault"}
    assert not tenant.is_connected()
    assert faults.read() is not None  # as the keeper does, which then waits until the server is active
    await eventually(tenant.is_connected, "connected")
    assert tenant.value("sms") == "26"


def between_two_connections(monkeypatch, act) -> None:
    """Have something happen in a process's turn, when its second connection is about to be passed on."""
    real, calls = gating.relay, itertools.count(1)

    async def relay(*arguments, **options):
        if next(calls) == 2:
            await act()
        return await real(*arguments, **options)

    monkeypatch.setattr(gating, "relay", relay)


async def test_a_turn_goes_no_further_once_its_server_is_in_fault(stage, tenants, monkeypatch):
    """Before: the keeper had read the fault in the log, so the rest of the turn was passed on, and turned away."""
    decide(stage.gpu, a=(20, 20000))

    async def fault() -> None:
        stage.gate.set_backend(Backend(GateState.FAULT, stage.server_pid))

    between_two_connections(monkeypatch, fault)
    tenant = tenants(stage.gpu.tenant, "--workload", "stream")
    stage.pods[tenant.pid] = "a"
    await eventually(lambda: stage.reasons().get(tenant.pid) is HoldReason.FAULT, "held")
    assert not tenant.is_connected()
    stage.gate.set_backend(Backend(GateState.ACTIVE, stage.server_pid))
    await eventually(tenant.is_connected, "connected")
    assert tenant.value("sms") == "26"


async def test_a_fault_that_is_noticed_before_the_daemon_answers_leaves_the_process_waiting(
    stage, tenants, monkeypatch
):
    """What the daemon has handed out is taken back, so the server does not wait for a first message."""
    decide(stage.gpu, a=(20, 20000))
    real, calls = gating.Handover.of, itertools.count(1)

    async def answered(*arguments):
        if next(calls) == 2:
            stage.gate.set_backend(Backend(GateState.FAULT, stage.server_pid))
        return await real(*arguments)

    monkeypatch.setattr(gating.Handover, "of", answered)
    tenant = tenants(stage.gpu.tenant, "--workload", "stream")
    stage.pods[tenant.pid] = "a"
    await eventually(lambda: stage.reasons().get(tenant.pid) is HoldReason.FAULT, "held")
    assert await stage.look() == (), "the server answers"
    stage.gate.set_backend(Backend(GateState.ACTIVE, stage.server_pid))
    await eventually(tenant.is_connected, "connected")
    assert tenant.value("sms") == "26"


@pytest.mark.parametrize("keeper_knows", [True, False])
async def test_a_server_that_is_replaced_in_a_turn_serves_nobody_without_ceilings(
    stage, tenants, monkeypatch, keeper_knows
):
    """Before: the process got the whole GPU of the next server, and was ended for it as a stranger."""
    decide(stage.gpu, a=(20, 20000))

    async def up_again() -> None:
        (stage.server_pid,) = await stage.control.servers()
        stage.gate.set_backend(Backend(GateState.ACTIVE, stage.server_pid))

    async def replace() -> None:
        os.kill(stage.server_pid, signal.SIGKILL)
        await eventually(lambda: not is_alive(stage.server_pid), "its end")
        if keeper_knows:
            await stage.control.run(commands.start_server(0))
            await up_again()

    between_two_connections(monkeypatch, replace)
    tenant = tenants(stage.gpu.tenant, "--workload", "stream")
    stage.pods[tenant.pid] = "a"
    if not keeper_knows:  # the daemon starts another server for the next connection
        await eventually(lambda: stage.trouble, "noticed")
        await stage.control.run(commands.start_server(0))
        await up_again()
    await eventually(tenant.is_connected, "connected")
    assert tenant.value("sms") == "26"


async def test_five_processes_of_a_pod_never_have_more_than_its_cap(stage, tenants):
    """Before: each had the pod's 20% for itself, together the whole GPU (docs/facts.md 29)."""
    decide(stage.gpu, a=(20, 20000))
    five = [tenants(stage.gpu.tenant, "--workload", "stream", "--memory-mib", "100") for _ in range(5)]
    stage.pods |= {tenant.pid: "a" for tenant in five}
    await eventually(lambda: any(t.is_connected() for t in five), "one is in")
    await eventually(
        lambda: list(stage.reasons().values()) == [HoldReason.POD_CAP] * 4, "the others wait, and it is told why"
    )
    (first,) = [tenant for tenant in five if tenant.is_connected()]
    assert first.value("sms") == "26"
    first.end()
    await stage.look()
    await eventually(lambda: sum(t.is_connected() for t in five) == 2, "the next one is in")
    (second,) = [t for t in five if t is not first and t.is_connected()]
    assert second.value("sms") == "26"


async def test_a_keepers_older_list_of_clients_gives_no_second_process_its_pods_cap(stage, tenants):
    """Before: a list that was asked for before a client came, and read after it, gave the next one the cap too."""
    decide(stage.gpu, a=(20, 20000))
    stage.default_pod = "a"
    asked_at = time.monotonic()
    older = await stage.control.run(commands.client_list(stage.server_pid))
    first = tenants(stage.gpu.tenant, "--workload", "stream", "--memory-mib", "100")
    await eventually(lambda: stage.gate.turns.count == 1, "its turn is over")
    stage.ledger.note_clients(older, asked_at=asked_at)
    second = tenants(stage.gpu.tenant, "--workload", "stream", "--memory-mib", "100")
    cap = HoldReason.POD_CAP
    await eventually(lambda: stage.reasons().get(second.pid) is cap or second.is_connected(), "it came")
    assert (first.value("sms"), second.is_connected()) == ("26", False)


async def test_a_pod_that_names_its_processes_has_its_cap_divided_among_them(stage, tenants):
    decide(stage.gpu, processes=4, a=(50, 20000))
    six = [tenants(stage.gpu.tenant, "--workload", "stream", "--memory-mib", "100") for _ in range(6)]
    stage.pods |= {tenant.pid: "a" for tenant in six}
    await eventually(lambda: sum(t.is_connected() for t in six) == 4, "four are in", 200)
    await eventually(lambda: list(stage.reasons().values()) == [HoldReason.POD_CAP] * 2, "two wait")
    # 13, 13, 12 and 12% of 132 SMs, which MPS rounds down to pairs
    assert sorted(t.value("sms") for t in six if t.is_connected()) == ["14", "14", "16", "16"]
    await stage.look()
    assert sum(client.thread_percentage for client in stage.ledger.clients()) == 50


async def test_an_uncapped_pod_may_have_processes_without_naming_them(stage, tenants):
    decide(stage.gpu, a=(100, 20000))
    pair = [tenants(stage.gpu.tenant, "--workload", "stream", "--memory-mib", "100") for _ in range(2)]
    stage.pods |= {tenant.pid: "a" for tenant in pair}
    for tenant in pair:
        await eventually(tenant.is_connected, "connected")
        assert tenant.value("sms") == "132"


async def test_a_new_decision_binds_the_next_process_and_leaves_the_running_one(stage, tenants):
    decide(stage.gpu, a=(20, 8192))
    first = tenants(stage.gpu.tenant, "--workload", "stream", "--memory-mib", "1000")
    stage.pods[first.pid] = "a"
    await eventually(first.is_connected, "connected")
    decide(stage.gpu, a=(60, 20000))
    second = tenants(stage.gpu.tenant, "--workload", "stream", "--memory-mib", "1000")
    stage.pods[second.pid] = "a"
    await eventually(second.is_connected, "connected")
    assert (first.value("sms"), second.value("sms")) == ("26", "52"), "the second has what the first one leaves"
    assert first.process.poll() is None


async def test_a_daemon_that_dies_in_a_turn_leaves_the_process_waiting(stage, tenants, twin):
    decide(stage.gpu, a=(20, 20000))
    twin.stop(1.0)
    tenant = tenants(stage.gpu.tenant, "--workload", "stream")
    stage.pods[tenant.pid] = "a"
    await eventually(lambda: stage.trouble, "the keeper hears of it")
    await eventually(lambda: tenant.pid in stage.reasons(), "it waits")
    assert "without MPS" not in tenant.text()
    stage.gate.set_backend(Backend(GateState.DOWN))
    twin.start()
    twin.run(commands.start_server(0))
    stage.server_pid = twin.servers()[0]
    stage.gate.set_backend(Backend(GateState.ACTIVE, stage.server_pid))
    await eventually(tenant.is_connected, "connected after all")
    assert tenant.value("sms") == "26"


async def test_24_processes_of_8_pods_at_once_each_get_exactly_their_own(stage, tenants):
    parts = (6, 8, 10, 12, 15, 20, 25, 30)
    caps = {f"p{i}": (3 * part, 4096 + 512 * i) for i, part in enumerate(parts)}
    sms = dict(zip(caps, ("8", "10", "12", "14", "18", "26", "32", "38"), strict=True))
    decide(stage.gpu, processes=3, **caps)
    started = []
    for pod in itertools.chain.from_iterable(itertools.repeat(list(caps), 3)):
        tenant = tenants(stage.gpu.tenant, "--workload", "latency-probe", "--memory-mib", "600")
        stage.pods[tenant.pid] = pod
        started.append((pod, tenant))
    for pod, tenant in started:
        await eventually(lambda tenant=tenant: "iterations/s" in tenant.text(), f"a process of {pod} runs", 200)
        assert tenant.value("sms") == sms[pod]
    await stage.look()
    for pod, (_, limit_mib) in caps.items():
        used = sum(c.memory_used_mib or 0 for c in stage.ledger.clients() if c.pod_uid == pod)
        granted = [c.memory_limit_mib or 0 for c in stage.ledger.clients() if c.pod_uid == pod]
        assert used == 3 * (600 + 125) <= limit_mib
        assert sorted(granted, reverse=True) == [limit_mib - taken for taken in (0, 725, 1450)]


async def test_the_49th_client_waits_until_one_leaves(stage, tenants):
    decide(stage.gpu, **{f"p{i}": (2, 2048) for i in range(49)})
    many = [tenants(stage.gpu.tenant, "--workload", "latency-probe", "--memory-mib", "16") for _ in range(49)]
    stage.pods |= {tenant.pid: f"p{i}" for i, tenant in enumerate(many)}
    await eventually(lambda: sum(t.is_connected() for t in many) == 48, "48 run", 200)
    (waiting,) = [tenant for tenant in many if not tenant.is_connected()]
    await eventually(lambda: stage.reasons().get(waiting.pid) is HoldReason.CLIENTS, "the 49th waits")
    next(tenant for tenant in many if tenant is not waiting).end()
    await stage.look()
    await eventually(waiting.is_connected, "the 49th got in")
