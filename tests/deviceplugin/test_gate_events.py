"""Events about what pods do at the gate, which a tenant can cause as often as it likes."""

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from tests.deviceplugin.fakes import GPU_A, Clock, gate

from gpushare.mps.layout import GpuDirectory
from gpushare.mps.status import GateStatus, HeldStatus, HoldReason, Mismatch, MismatchKind, TurnedAway
from gpushare_deviceplugin.agent import Agent
from gpushare_deviceplugin.gates import SELDOM_SECONDS, Notice
from gpushare_deviceplugin.options import parse_options
from gpushare_deviceplugin.told import NEWS_SECONDS

TENANT, OTHER = "u1", "u2"


class Told:
    """An agent whose gate reports what the test says, and the events that follow."""

    def __init__(self, directory: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        options = parse_options(["--node-name", "n1", "--directory", str(directory)], {})
        self.agent = Agent(options, cast("Any", None), cast("Any", None), clock)
        self.notices: list[Notice] = []
        self.clock = clock

        async def tell(notice: Notice) -> None:
            self.notices.append(notice)

        async def sleep(_: float) -> None:
            await asyncio.sleep(0)

        monkeypatch.setattr(self.agent.cluster, "tell", tell)
        monkeypatch.setattr(self.agent._wakeups, "sleep", sleep)

    async def look(self, status: GateStatus) -> None:
        """Let the agent see a report, one second after the one before."""
        self.clock.now += 1.0
        self.agent.sampler.gates[GPU_A] = status
        for _ in range(4):
            await asyncio.sleep(0)

    def counts(self) -> Counter[tuple[str | None, str]]:
        return Counter((notice.pod_uid, notice.reason) for notice in self.notices)


@pytest.fixture
def told(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Told:
    return Told(tmp_path, clock, monkeypatch)


def waits(uid: str, reason: HoldReason) -> HeldStatus:
    return HeldStatus(7, uid, reason, 1.0)


async def test_a_pod_that_waits_and_leaves_again_and_again_has_one_event_a_minute(told: Told) -> None:
    """Before: one each time, so that a pod wrote an event into the API server every two seconds, without end."""
    running = asyncio.create_task(told.agent._tell_events())
    for second in range(int(SELDOM_SECONDS)):
        mine = (waits(TENANT, HoldReason.RATE), waits(TENANT, HoldReason.POD_CAP)) if second % 2 else ()
        theirs = (waits(OTHER, HoldReason.POD_CAP),) if second > 30 else ()
        await told.look(gate(at=float(second), waiting_connections=mine + theirs))
    assert told.counts() == {
        (TENANT, "HeldTooManyConnections"): 1,
        (TENANT, "HeldPodCapInUse"): 1,
        (OTHER, "HeldPodCapInUse"): 1,
    }
    told.notices.clear()
    await told.look(gate(at=1000.0))
    await told.look(gate(at=1001.0, waiting_connections=(waits(TENANT, HoldReason.RATE),)))
    assert told.counts() == {(TENANT, "HeldTooManyConnections"): 1}
    running.cancel()


async def test_clients_without_a_turn_are_told_of_once_a_minute_and_faults_each_time(told: Told) -> None:
    running = asyncio.create_task(told.agent._tell_events())
    past: tuple[Mismatch, ...] = ()
    for second in range(20):
        past = (*past, Mismatch(MismatchKind.STALE_CEILING, TENANT, second, f"process {second}"))
        await told.look(gate(at=float(second), mismatches=past, faults=second, last_fault_pods=(OTHER,)))
    assert told.counts() == {(TENANT, "MismatchStaleCeiling"): 1, (OTHER, "GpuFault"): 19, (None, "GpuFault"): 19}
    running.cancel()


async def test_an_agent_that_starts_tells_who_waits_now_and_not_what_clients_did_before(told: Told) -> None:
    """Before: each start told anew of up to fifty clients of days ago, also on the node, as of something new."""
    past = Mismatch(MismatchKind.UNKNOWN_CLIENT, None, 7, "process 7 of no pod connected past the gate")
    running = asyncio.create_task(told.agent._tell_events())
    await told.look(gate(at=1.0, mismatches=(past,), waiting_connections=(waits(TENANT, HoldReason.POD_CAP),)))
    assert told.counts() == {(TENANT, "HeldPodCapInUse"): 1}
    now = Mismatch(MismatchKind.UNKNOWN_CLIENT, None, 8, "process 8 of no pod connected past the gate")
    await told.look(gate(at=2.0, mismatches=(past, now)))
    assert told.notices[1:] == [Notice(None, "MismatchUnknownClient", now.detail, is_at_will=True)]
    running.cancel()


async def test_a_pod_whose_process_the_server_turned_away_is_told_once_a_minute(told: Told) -> None:
    """Before: the gate's log alone had it. A process may answer by an error as often as it likes."""
    former = TurnedAway(6, OTHER, 808, 0.5)
    running = asyncio.create_task(told.agent._tell_events())
    await told.look(gate(at=1.0, turned_away=(former,)))
    assert not told.notices, "an agent that starts does not tell what is old"
    past: tuple[TurnedAway, ...] = (former,)
    for second in range(20):
        past = (*past, TurnedAway(7, TENANT, 809 if second else 999, float(second)))
        await told.look(gate(at=2.0 + second, turned_away=past))
    assert told.counts() == {(TENANT, "MpsTurnedAway"): 1}
    assert told.notices[0].note.endswith("did not take process 7: CUDA error 999")
    told.clock.now += SELDOM_SECONDS
    await told.look(gate(at=100.0, turned_away=(*past, TurnedAway(7, TENANT, 809, 99.0))))
    assert told.notices[1].note.endswith("CUDA error 809, it has as many connections as it takes")
    running.cancel()


@pytest.mark.parametrize("away_seconds", [5.0, 3600.0])
async def test_an_agent_that_starts_tells_what_ended_processes_since_the_former_one(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, away_seconds: float
) -> None:
    """Before: a fault that came while the agent was replaced was told to nobody."""
    GpuDirectory.of(tmp_path, GPU_A).create()
    former = Told(tmp_path, clock, monkeypatch)
    running = asyncio.create_task(former.agent._tell_events())
    await former.look(gate(at=1.0, faults=3, server_restarts=2))
    running.cancel()
    assert not former.notices, "the first of all takes what it finds for old"
    told = Told(tmp_path, clock, monkeypatch)
    running = asyncio.create_task(told.agent._tell_events())
    now = gate(at=1.0 + away_seconds, last_fault_pods=(OTHER,), faults=4, server_restarts=3)
    await told.look(now)
    kinds = Counter(notice.reason for notice in told.notices)
    assert kinds == ({"GpuFault": 2, "MpsRestarted": 1} if away_seconds < NEWS_SECONDS else {}), "while it is news"
    running.cancel()
    told.notices.clear()
    again = Told(tmp_path, clock, monkeypatch)
    running = asyncio.create_task(again.agent._tell_events())
    await again.look(replace(now, written_at=2.0 + away_seconds))
    assert not again.notices, "once"
    running.cancel()


@pytest.mark.parametrize("faults", [1, 3, 5])
async def test_faults_of_a_host_that_counts_anew_are_told_however_many_its_predecessor_counted(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, faults: int
) -> None:
    """Before: up to as many as the former host had counted were told to nobody."""
    GpuDirectory.of(tmp_path, GPU_A).create()
    former = Told(tmp_path, clock, monkeypatch)
    running = asyncio.create_task(former.agent._tell_events())
    await former.look(gate(at=1.0, faults=3, server_restarts=2, counts_since=0.5))
    running.cancel()
    told = Told(tmp_path, clock, monkeypatch)
    running = asyncio.create_task(told.agent._tell_events())
    anew = gate(at=9.0, last_fault_pods=(OTHER,), faults=faults, server_restarts=1, counts_since=4.0)
    await told.look(anew)
    assert told.counts() == {
        (OTHER, "GpuFault"): 1,
        (None, "GpuFault"): 1,
        (None, "MpsRestarted"): 1,
    }
    await told.look(replace(anew, written_at=10.0))
    assert len(told.notices) == 3, "once"
    await told.look(gate(at=20.0, counts_since=15.0))
    assert len(told.notices) == 3, "another host, without a fault"
    running.cancel()


async def test_a_record_of_before_counts_as_of_the_same_host(tmp_path: Path, told: Told) -> None:
    directory = GpuDirectory.of(tmp_path, GPU_A)
    directory.create()
    directory.told.write_text('{"at": 1.0, "faults": 3, "daemon_restarts": 0, "server_restarts": 0}')
    running = asyncio.create_task(told.agent._tell_events())
    await told.look(gate(at=2.0, faults=3, counts_since=0.5))
    assert not told.notices
    running.cancel()


async def test_a_record_that_cannot_be_read_or_written_changes_nothing(
    tmp_path: Path, told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    directory = GpuDirectory.of(tmp_path, GPU_A)
    directory.create()
    directory.told.write_text('{"at": "x", "faults": []}')
    running = asyncio.create_task(told.agent._tell_events())
    await told.look(gate(at=1.0, faults=1))
    assert not told.notices
    directory.told.unlink()
    directory.told.mkdir()
    for second in range(3):
        await told.look(gate(at=2.0 + second, faults=2 + second, last_fault_pods=(OTHER,)))
    assert told.counts() == {(OTHER, "GpuFault"): 3, (None, "GpuFault"): 3}
    assert caplog.text.count("the next agent cannot tell") == 1
    running.cancel()
