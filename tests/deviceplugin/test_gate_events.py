"""Events about what pods do at the gate, which a tenant can cause as often as it likes."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
from tests.deviceplugin.fakes import GPU_A, Clock, gate

from gpushare.mps.status import GateStatus, HeldStatus, HoldReason, Mismatch, MismatchKind
from gpushare_deviceplugin.agent import Agent
from gpushare_deviceplugin.gates import SELDOM_SECONDS, Notice
from gpushare_deviceplugin.options import parse_options

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
