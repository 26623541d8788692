"""The loop on a whole node but for the silicon and kubelet: real agent, host, throttle and freezer."""

import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp.test_utils import TestServer
from busy import is_busy
from tests.deviceplugin.fakes import FakeKubelet, NodeApi
from tests.deviceplugin.live import MEASURED, LiveNode, LivePod, bad_pair, kept_after, until

from gpushare.mps.asks import LEASE_SECONDS
from gpushare.mps.layout import throttle_reader
from gpushare.mps.starvation import starved_seconds
from gpushare.twin.table import table

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
async def node(short_path: Path, kubelet: FakeKubelet) -> AsyncIterator[LiveNode]:
    api = NodeApi()
    app = api.app
    async with TestServer(app) as server:
        made = LiveNode(short_path, api, str(server.make_url("")).rstrip("/"), kubelet)
        try:
            yield made
        finally:
            made.close()
            print(made.log.read_text() if made.log.exists() else "no agent")


PROMISE = 1 / 1.5
KEPT_AGAIN_SECONDS = 6.0  # from the first second below a promise
STARVED_SECONDS = 1.0  # as long as one of the loop's windows


def is_starved(node: LiveNode, before: dict[str, float]) -> bool:
    """Return whether the machine was too busy since then to hold the node's processes to times."""
    seconds = starved_seconds(before, node.run_delays())
    print(f"a thread of the node waited for a CPU for {seconds:.1f} s")
    return seconds > STARVED_SECONDS or is_busy()


def assert_soon_kept(
    node: LiveNode, victim: LivePod, promise: float, since: float, delays: dict[str, float]
) -> None:
    """Fail where it took too long until the promise was kept again, unless the machine is too busy."""
    seconds = kept_after(victim, promise, since)
    assert seconds is not None
    if seconds > KEPT_AGAIN_SECONDS:
        ticks = [f"{at - since:.1f} s: {progress}" for at, progress in victim.look() if at >= since]
        print(f"kept again after {seconds:.1f} s: {ticks}, by these steps:\n{node.steps()}")
    assert seconds <= KEPT_AGAIN_SECONDS or is_starved(node, delays), f"kept again after {seconds:.1f} s"


async def test_a_bad_neighbour_is_throttled_and_after_a_kill_of_the_agent_again(node: LiveNode) -> None:
    victim, bad = bad_pair(node, is_known=True)
    await node.start()
    node.begin(victim)
    await until("its progress alone", lambda: (t := node.tenant(victim)) and t.progress_ratio)
    told = node.tenant(victim)
    assert told is not None
    promise = told.promise_ratio
    assert promise == pytest.approx(PROMISE, abs=0.05), (
        "what it draws under its cap says that this costs it little"
    )
    began, delays = time.monotonic(), node.run_delays()
    node.begin(bad)
    await until("the promise broken and kept", lambda: kept_after(victim, promise, began) is not None)
    assert_soon_kept(node, victim, promise, began, delays)
    await until("told of the throttle", lambda: (t := node.tenant(bad)) and t.throttle_ratio)
    await until("events", lambda: node.events("PromiseBroken") and node.events("Throttled"))

    # A killed agent's word holds for its lease; then everyone runs, until another one has seen enough.
    assert node.agent is not None
    node.agent.send_signal(signal.SIGKILL)
    node.agent.wait(30)
    asks = throttle_reader(node.gpu)
    assert asks.read().pods[bad.uid].duty_ratio < 1
    killed = time.monotonic()
    await until("free again", lambda: [p for at, p in victim.look() if at > killed + LEASE_SECONDS and p < 0.4])
    node.start_agent()
    restarted = time.monotonic()
    await until("kept again", lambda: kept_after(victim, promise, restarted) is not None)


async def test_a_promise_that_a_measured_neighbour_broke_is_kept_again(node: LiveNode) -> None:
    """No model says what these programs make beside each other: the table was measured on an H200."""
    victim, bad = bad_pair(node, is_known=True, programs=MEASURED)
    await node.start()
    node.begin(victim)
    await until("its progress alone", lambda: (t := node.tenant(victim)) and t.progress_ratio)
    await until("its own word on that", victim.look)  # a tick a second, which may come after the agent's figure
    alone = victim.look()[-1][1]
    assert alone == pytest.approx(table().alone(victim.workload, 40), abs=0.01)
    told = node.tenant(victim)
    assert told is not None
    began, delays = time.monotonic(), node.run_delays()
    node.begin(bad)
    await until("the promise broken and kept", lambda: kept_after(victim, told.promise_ratio, began) is not None)
    assert_soon_kept(node, victim, told.promise_ratio, began, delays)
    beside = table().under([victim.workload, bad.workload], [[40, 100]])[0, 0]
    # A second's mean, soon with the throttle.
    lowest = min(progress for at, progress in victim.look() if at > began)
    assert beside - 0.01 < lowest < told.promise_ratio
    await until("told of the throttle", lambda: (t := node.tenant(bad)) and t.throttle_ratio)


async def test_unknown_workloads_are_read_in_place_and_then_kept_apart(node: LiveNode) -> None:
    victim, bad = bad_pair(node, is_known=False)
    await node.start()
    node.begin(victim)
    node.begin(bad)
    await until("both connected", lambda: all("connected after" in p.log.read_text() for p in (victim, bad)))
    for pod in (victim, bad):
        await until(f"a profile of {pod.name}", lambda pod=pod: (t := node.tenant(pod)) and t.profile)
        told = node.tenant(pod)
        assert told is not None
        assert told.profile is not None
        assert told.profile.cap == (40 if pod is victim else 100)
    assert "profiled in place in" in node.log.read_text()
    await until("a throttle", lambda: (t := node.tenant(bad)) and t.throttle_ratio)
    await until("kept", lambda: kept_after(victim, PROMISE, 0.0) is not None)
    began, delays = time.monotonic(), node.run_delays()
    await until("ten seconds more", lambda: len([1 for at, _ in victim.look() if at > began]) >= 10)
    later = [progress for at, progress in victim.look() if at > began]
    assert sum(later) / len(later) >= 0.4 or is_starved(node, delays), "0.15 without a throttle"
