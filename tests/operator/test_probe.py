"""The operator's probe: what it tells about the event loop, its tasks and the reconciler, and who can delay it."""

import asyncio
import http.client
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import kopf
import pytest

from gpushare.core.api import names
from gpushare.kube import ApiError
from gpushare.kube.fake import FakeApi
from gpushare_operator import handlers, running
from gpushare_operator.running import Environment, Operator

MOST_CONNECTIONS = 64
PATIENCE_SECONDS = 60.0
BUSY_SECONDS = 30.0  # without a heartbeat, 30 times what was measured of a busy loop


def served() -> FakeApi:
    """An API of no objects, but with our types."""
    api = FakeApi()
    api.store.served = {names.GROUP: (names.VERSION,)}
    return api


class Clock:
    """A clock that the test turns."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Probed:
    """An operator that runs in the test's event loop, on an API of no objects; `ask` stops this loop meanwhile."""

    operator: Operator
    clock: Clock
    metrics_port: int
    probe_port: int

    def ask(self, path: str = "/healthz", port: int | None = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", port or self.probe_port, timeout=PATIENCE_SECONDS)
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    async def syncs(self) -> None:
        """Let Kopf's lists come, and wait until the reconciler works."""
        self.clock.now += 1
        for each in self.operator._listings:
            self.operator.begins(each.path)
            self.operator.page(each.path, {"metadata": {"resourceVersion": "1"}, "items": []})
        reconciler = self.operator._reconciler
        assert reconciler is not None
        async with asyncio.timeout(PATIENCE_SECONDS):
            while reconciler.beat != self.clock.now:  # noqa: ASYNC110 - a time is no event
                await asyncio.sleep(0)

    async def beats(self) -> None:
        """Let the event loop run until its heartbeat is the clock's."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while self.operator._beat_at != self.clock.now:  # noqa: ASYNC110 - a time is no event
                await asyncio.sleep(0)


@pytest.fixture
async def probed(monkeypatch: pytest.MonkeyPatch, free_ports: Callable[[], int]) -> AsyncIterator[Probed]:
    monkeypatch.setattr(running, "connect", lambda **_: nullcontext(served()))
    monkeypatch.setattr(running, "_BEAT_SECONDS", 0.0)
    clock, ports = Clock(), (free_ports(), free_ports())
    variables = {"GPUSHARE_METRICS_PORT": str(ports[0]), "GPUSHARE_PROBE_PORT": str(ports[1])}
    operator = Operator(Environment.read(variables), clock=clock)
    await operator.start()
    yield Probed(operator, clock, *ports)
    await operator.stop()


async def test_a_started_operator_is_well_before_and_after_its_first_lists(probed: Probed) -> None:
    assert probed.ask() == (200, "ok\n")
    await probed.syncs()
    assert probed.ask() == (200, "ok\n")


async def test_the_probe_port_serves_the_probe_alone_and_the_metrics_port_both(probed: Probed) -> None:
    assert probed.ask("/metrics") == (404, "/healthz\n")
    assert probed.ask(port=probed.metrics_port) == (200, "ok\n")
    status, text = probed.ask("/metrics", probed.metrics_port)
    assert (status, "# TYPE gpushare_operator_queue_length gauge" in text) == (200, True)


async def test_the_metrics_port_tells_how_late_the_event_loop_is(probed: Probed) -> None:
    await probed.beats()
    _, text = probed.ask("/metrics", probed.metrics_port)
    assert 'gpushare_event_loop_lag_seconds_count{part="operator"}' in text


async def test_the_probe_fails_while_the_event_loop_is_stuck_and_not_while_it_is_busy(probed: Probed) -> None:
    """Asking stops this loop, as a handler that hangs would: the answer comes from another thread."""
    await probed.beats()
    probed.clock.now += BUSY_SECONDS
    assert probed.ask() == (200, "ok\n")
    probed.clock.now += 31
    assert probed.ask() == (503, "the event loop has been stuck for 61 s\n")
    await probed.beats()
    assert probed.ask() == (200, "ok\n")


async def test_the_probe_fails_while_the_reconciler_is_stuck_in_a_loop_that_runs(probed: Probed) -> None:
    await probed.syncs()
    probed.clock.now += 300
    await probed.beats()
    assert probed.ask() == (200, "ok\n")
    probed.clock.now += 1
    await probed.beats()
    assert probed.ask() == (503, "the reconciler has been stuck for 301 s\n")


async def test_the_probe_fails_once_kopf_does_not_ask_for_a_list(probed: Probed) -> None:
    """As for a type whose definition came in the moment after Kopf looked for it."""
    probed.clock.now += 120
    await probed.beats()
    assert probed.ask() == (200, "ok\n")
    probed.clock.now += 1
    await probed.beats()
    path = "/apis/gpushare.io/v1alpha1/gpushares"
    assert probed.ask() == (503, f"Kopf has not asked for {path} in 121 s\n")
    await probed.syncs()
    assert probed.ask() == (200, "ok\n")


async def test_it_does_not_start_before_gpushares_are_served(
    monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    monkeypatch.setattr(running, "connect", lambda **_: nullcontext(FakeApi()))
    operator = Operator(Environment.read({"GPUSHARE_METRICS_PORT": str(free_port)}))
    with pytest.raises(ApiError, match="does not serve gpushare"):
        await operator.start()
    assert operator.trouble() == "the operator is not started"


@pytest.mark.parametrize("name", ["heartbeat", "loop-lag", "reconciler"])
async def test_the_probe_fails_once_a_task_has_ended(probed: Probed, name: str) -> None:
    (task,) = (each for each in probed.operator._tasks if each.get_name() == name)
    task.cancel()
    await asyncio.wait([task])
    assert probed.ask() == (503, f"ended: {name}\n")


async def test_mute_connections_to_both_ports_keep_no_probe_waiting(probed: Probed) -> None:
    async with AsyncExitStack() as stack:
        for port in (probed.metrics_port, probed.probe_port):
            for _ in range(3 * MOST_CONNECTIONS):
                mute = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS)
                stack.enter_context(mute)
        for _ in range(3):
            assert probed.ask() == (200, "ok\n")


async def test_a_stopped_operator_answers_no_probe(probed: Probed) -> None:
    await probed.operator.stop()
    with pytest.raises(ConnectionRefusedError):
        probed.ask()


def test_without_a_port_of_its_own_the_probe_is_on_the_metrics_port_as_an_older_chart_has_none() -> None:
    operator = Operator(Environment.read({}))
    assert Environment.read({}).probe_port == 0
    assert set(operator.routes()) == {"/metrics", "/healthz"}
    answer = operator.routes()["/healthz"]()
    assert (answer.status, answer.body) == (503, b"the operator is not started\n")


async def test_kopfs_own_probe_which_an_older_chart_asks_tells_the_same(probed: Probed) -> None:
    memo: Any = kopf.Memo(operator=probed.operator)
    await probed.beats()
    assert await handlers.reconciler(memo=memo) == "running"
    probed.clock.now += 61
    with pytest.raises(kopf.PermanentError, match="stuck for 61 s"):
        await handlers.reconciler(memo=memo)


async def test_the_probe_fails_while_kopf_ends(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    """One of Kopf's own tasks returns, and Kopf ends: until its cleanup the event loop and our tasks still run."""
    monkeypatch.setattr(running, "connect", lambda **_: nullcontext(served()))
    operator = Operator(Environment.read({"GPUSHARE_METRICS_PORT": str(free_port)}))
    told: list[str] = []
    ends = asyncio.Event()

    async def start(**_: Any) -> None:
        await operator.start()
        await asyncio.sleep(0)
        told.append(operator.trouble())

    async def login(**_: Any) -> None:
        ends.set()
        await asyncio.Event().wait()

    async def stop(**_: Any) -> None:
        told.append(operator.trouble())
        await operator.stop()

    registry = kopf.OperatorRegistry()
    kopf.on.startup(registry=registry)(start)
    kopf.on.login(registry=registry)(login)
    kopf.on.cleanup(registry=registry)(stop)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await kopf.operator(registry=registry, standalone=True, clusterwide=True, stop_flag=ends)
    assert told == ["", "Kopf is ending"]
