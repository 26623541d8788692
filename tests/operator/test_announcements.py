"""Events follow the statuses: normal ones wait their turn, warnings do not, and none is lost by a stop."""

import asyncio
import logging
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gpushare.kube import EVENTS, Resource
from gpushare.kube.fake import FakeApi
from gpushare_operator import announcements
from gpushare_operator.announcements import Announcements

Json = dict[str, Any]
START = datetime(2026, 11, 25, tzinfo=UTC)


def share(name: str = "s") -> Json:
    metadata = {"name": name, "namespace": "shop", "uid": f"uid-{name}", "labels": {"a": "b"}}
    return {"apiVersion": "gpushare.io/v1alpha1", "kind": "GpuShare", "metadata": metadata, "status": {"x": 1}}


class SlowApi(FakeApi):
    """The fake; while `closed`, no event is written."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.unforeseen = asyncio.Event(), 0
        self.open.set()
        self.at_once = self.most_at_once = 0

    async def create(self, resource: Resource, body: Mapping[str, Any], **more: Any) -> Json:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(0)
            await self.open.wait()
            if self.unforeseen:
                self.unforeseen -= 1
                raise ValueError("unforeseen")
            return await super().create(resource, body, **more)
        finally:
            self.at_once -= 1

    def written(self) -> list[Json]:
        return sorted(self.store.objects(EVENTS).values(), key=lambda event: event["eventTime"])


class Bench:
    def __init__(self) -> None:
        self.api, self.now = SlowApi(), START
        self.announcements = Announcements(self.api, "gpushare.io/operator", self._tick)

    def _tick(self) -> datetime:
        self.now += timedelta(seconds=1)
        return self.now

    async def add(self, name: str, *, warning: bool = False) -> None:
        await self.announcements.add(share(name), "Sharing", f"about {name}", warning=warning)

    async def idle(self) -> None:
        for _ in range(50):
            await asyncio.sleep(0)


async def test_they_are_written_one_at_a_time_with_the_moment_at_which_they_happened() -> None:
    bench = Bench()
    running = asyncio.create_task(bench.announcements.run())
    for name in ("a", "b", "c"):
        await bench.add(name)
    assert (len(bench.announcements), bench.api.written()) == (3, [])
    await bench.idle()
    written = bench.api.written()
    assert [event["note"] for event in written] == ["about a", "about b", "about c"]
    assert [event["eventTime"][17:19] for event in written] == ["01", "02", "03"]
    assert written[0]["regarding"] == {
        "name": "a",
        "namespace": "shop",
        "uid": "uid-a",
        "apiVersion": "gpushare.io/v1alpha1",
        "kind": "GpuShare",
    }
    assert {event["type"] for event in written} == {"Normal"}
    assert (len(bench.announcements), bench.api.most_at_once) == (0, 1)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_warning_does_not_wait() -> None:
    bench = Bench()
    await bench.add("a")
    await bench.add("b", warning=True)
    assert [(event["type"], event["note"]) for event in bench.api.written()] == [("Warning", "about b")]
    assert len(bench.announcements) == 1


async def test_a_stop_writes_what_waits() -> None:
    bench = Bench()
    running = asyncio.create_task(bench.announcements.run())
    await bench.idle()
    for number in range(40):
        await bench.add(f"n{number}")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert len(bench.api.written()) == 40
    assert bench.api.most_at_once > 1, "there is no time to do it one by one"


async def test_a_stop_does_not_wait_for_a_server_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(announcements, "_STOP_SECONDS", 0.0)
    bench = Bench()
    running = asyncio.create_task(bench.announcements.run())
    await bench.idle()
    bench.api.open.clear()
    for number in range(40):
        await bench.add(f"n{number}")
    running.cancel()
    with caplog.at_level(logging.WARNING):
        done, _ = await asyncio.wait({running}, timeout=30)
    assert done == {running}
    assert "events are not written, as the operator stops" in caplog.text


async def test_too_many_are_written_by_whoever_adds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcements, "_MOST_WAITING", 2)
    bench = Bench()
    for name in ("a", "b", "c", "d"):
        await bench.add(name)
    assert [event["note"] for event in bench.api.written()] == ["about a", "about b"]
    assert len(bench.announcements) == 2


async def test_an_unforeseen_error_loses_one_event_only(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.api.unforeseen = 1
    await bench.add("a")
    await bench.add("b")
    await bench.announcements.drain()
    assert [event["note"] for event in bench.api.written()] == ["about b"]
    assert "event Sharing on a not written" in caplog.text
