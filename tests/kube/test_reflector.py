"""The reflector survives what an API server and bad data do to it."""

import asyncio
import contextlib
import random

import orjson
import pytest

from gpushare.kube import PODS, Change, Reflector
from gpushare.kube.reflector import BACKOFF

SOON = 60.0


def pod(name, version, **extra):
    return {"metadata": {"name": name, "namespace": "n", "resourceVersion": str(version)}, **extra}


def event(kind, obj):
    return orjson.dumps({"type": kind, "object": obj}) + b"\n"


class Pauses:
    """Stands in for asyncio.sleep: returns at once, keeps the delays."""

    def __init__(self):
        self.delays = []

    async def __call__(self, delay):
        self.delays.append(delay)
        await asyncio.sleep(0)


@pytest.fixture
def changes():
    return asyncio.Queue()


@pytest.fixture
async def reflector(api, server, changes):
    def reduce(obj):
        return obj["x"]

    def on_change(change, key, value):
        changes.put_nowait((change, key, value))

    async with Reflector(api, PODS, reduce, on_change=on_change, sleep=Pauses()) as running:
        yield running


@contextlib.asynccontextmanager
async def next_watch(server):
    await asyncio.wait_for(server.watch_started.wait(), SOON)
    server.watch_started.clear()
    yield server.watches[-1]


async def take(changes, count):
    return [await asyncio.wait_for(changes.get(), SOON) for _ in range(count)]


async def test_a_cancellation_that_nobody_asked_for_does_not_end_the_watch(api, server, changes):
    """Before, the task was over, its objects stayed as they were, and nobody was told."""
    refused = []

    def reduce(obj):
        if not refused:
            refused.append(obj)
            raise asyncio.CancelledError
        return obj["x"]

    server.objects = [pod("a", 1, x=1)]
    seen = lambda change, key, value: changes.put_nowait((change, key, value))  # noqa: E731
    async with Reflector(api, PODS, reduce, on_change=seen, sleep=Pauses()) as running:
        assert await take(changes, 1) == [(Change.ADDED, "n/a", 1)]
        assert (len(refused), running.restarts) == (1, 1)


class LongestPauses(random.Random):
    """Draws no jitter."""

    def random(self):
        return 1.0

    def getrandbits(self, k):  # else randint draws by `random` and never ends
        return super().getrandbits(k)


async def test_the_first_pause_is_as_short_after_any_failure(api, server, changes):
    """Before: twice as long after one that is not the API's, which was counted before the pause was computed."""
    pauses = Pauses()

    def reduce(obj):
        if not pauses.delays:
            raise asyncio.CancelledError
        return obj["x"]

    server.objects = [pod("a", 1, x=1)]
    seen = lambda change, key, value: changes.put_nowait((change, key, value))  # noqa: E731
    async with Reflector(api, PODS, reduce, on_change=seen, rng=LongestPauses(), sleep=pauses):
        await take(changes, 1)
    assert pauses.delays[0] == BACKOFF.first_seconds


async def test_list_then_watch(reflector, server, changes):
    server.objects = [pod("a", 1, x=1), pod("b", 2, x=2)]
    async with next_watch(server) as watch:
        assert reflector.synced.is_set()
        watch.put_nowait(event("ADDED", pod("c", 101, x=3)))
        watch.put_nowait(event("MODIFIED", pod("a", 102, x=9)) + event("MODIFIED", pod("b", 103, x=2)))
        line = event("DELETED", pod("b", 104, x=2))
        watch.put_nowait(line[:10])
        watch.put_nowait(line[10:])
        assert await take(changes, 5) == [
            (Change.ADDED, "n/a", 1),
            (Change.ADDED, "n/b", 2),
            (Change.ADDED, "n/c", 3),
            (Change.MODIFIED, "n/a", 9),
            (Change.DELETED, "n/b", 2),
        ]
        watch.put_nowait(event("BOOKMARK", {"metadata": {"resourceVersion": "200"}}))
        watch.put_nowait(None)
    async with next_watch(server):
        assert server.requests[-1][2]["resourceVersion"] == "200"
        assert dict(reflector.items) == {"n/a": 9, "n/c": 3}
        assert reflector.restarts == 0


async def test_a_list_and_each_event_are_answers_bookmarks_included_and_failures_are_none(api, server, changes):
    answers = asyncio.Queue()
    server.objects = [pod("a", 1, x=1), pod("b", 2, x=2)]
    async with Reflector(
        api, PODS, lambda obj: obj["x"], on_answer=lambda: answers.put_nowait(None), sleep=Pauses()
    ) as running:
        async with next_watch(server) as watch:
            await take(answers, 1)
            watch.put_nowait(event("ADDED", pod("c", 101, x=3)))
            watch.put_nowait(event("BOOKMARK", {"metadata": {"resourceVersion": "200"}}))
            await take(answers, 2)
            server.failures = [(500, {}, {})] * 3
            watch.put_nowait(None)
        async with next_watch(server):
            assert (answers.empty(), running.restarts) == (True, 3)


@pytest.mark.parametrize("as_status", [True, False])
async def test_gone_lists_anew_and_tells_the_difference(reflector, server, changes, as_status):
    server.objects = [pod("a", 1, x=1), pod("b", 2, x=2)]
    async with next_watch(server) as watch:
        await take(changes, 2)
        server.objects = [pod("b", 5, x=7), pod("c", 6, x=3)]
        if as_status:
            server.failures = [(410, {"reason": "Expired"}, {})]
        else:
            watch.put_nowait(event("ERROR", {"kind": "Status", "code": 410, "reason": "Expired"}))
        watch.put_nowait(None)
    assert await take(changes, 3) == [
        (Change.DELETED, "n/a", 1),
        (Change.MODIFIED, "n/b", 7),
        (Change.ADDED, "n/c", 3),
    ]
    assert reflector.restarts == 1


async def test_failures_back_off_and_the_version_is_kept(reflector, server, changes):
    async with next_watch(server) as watch:
        server.failures = [(500, {}, {})] * 6
        watch.put_nowait(event("ADDED", pod("a", 150, x=1)))
        watch.put_nowait(None)
    async with next_watch(server):
        delays = reflector._sleep.delays
    assert server.requests[-1][2]["resourceVersion"] == "150"
    assert reflector.restarts == 6
    assert all(0 < delay <= 8 for delay in delays)
    assert delays[-1] > 2 > delays[0]


async def test_bad_data_is_logged_once_counted_and_survived(reflector, server, changes, caplog):
    server.objects = [pod("a", 1, x=1)]
    async with next_watch(server) as watch:
        for version in (101, 102, 103):
            watch.put_nowait(event("MODIFIED", pod("a", version, y="no x")))
        watch.put_nowait(event("ADDED", pod("bad", 104, y="no x")))
        watch.put_nowait(event("ADDED", pod("c", 105, x=3)))
        assert await take(changes, 2) == [(Change.ADDED, "n/a", 1), (Change.ADDED, "n/c", 3)]
    assert reflector.bad_objects == 4
    assert reflector.present_bad_objects == 2
    assert caplog.text.count("cannot understand Pod n/a") == 1
    assert reflector.items["n/a"] == 1


async def test_an_object_is_bad_until_it_is_understood_or_gone(reflector, server, changes):
    server.objects = [pod("a", 1, y="no x"), pod("b", 2, y="no x"), pod("c", 3, y="no x"), pod("d", 4, x=4)]
    async with next_watch(server) as watch:
        assert await take(changes, 1) == [(Change.ADDED, "n/d", 4)]
        assert reflector.present_bad_objects == 3
        for version in (101, 102):
            watch.put_nowait(event("MODIFIED", pod("a", version, y="no x")))
        watch.put_nowait(event("MODIFIED", pod("b", 103, x=2)))
        watch.put_nowait(event("DELETED", pod("c", 104, y="no x")))
        watch.put_nowait(event("MODIFIED", pod("d", 105, x=5)))
        assert await take(changes, 2) == [(Change.ADDED, "n/b", 2), (Change.MODIFIED, "n/d", 5)]
    assert (reflector.present_bad_objects, reflector.bad_objects) == (1, 6)
    server.objects = [pod("d", 106, x=6)]  # a and b went while no watch was open
    reflector.relist()
    async with next_watch(server):
        assert set(await take(changes, 2)) == {(Change.DELETED, "n/b", 2), (Change.MODIFIED, "n/d", 6)}
    assert reflector.present_bad_objects == 0


async def test_garbage_on_the_stream_restarts_the_watch(reflector, server, changes):
    async with next_watch(server) as watch:
        watch.put_nowait(b'{"type": "ADDED", "obj\n')
        watch.put_nowait(None)
    async with next_watch(server) as watch:
        watch.put_nowait(event("ADDED", pod("a", 150, x=1)))
        assert await take(changes, 1) == [(Change.ADDED, "n/a", 1)]
    assert reflector.restarts == 1


@pytest.mark.parametrize(
    "sent",
    [
        {"type": "ADDED", "object": {"metadata": {"name": "a", "namespace": "n"}}},  # no version
        {"type": "ADDED", "object": {"metadata": []}},
        {"type": "ADDED", "object": 7},
        {"type": "ERROR", "object": {"code": "many"}},
        {"type": "ERROR", "object": 7},
    ],
)
async def test_an_answer_of_another_shape_is_listed_anew(reflector, server, changes, sent):
    async with next_watch(server) as watch:
        server.objects = [pod("b", 2, x=2)]
        watch.put_nowait(orjson.dumps(sent) + b"\n")
        watch.put_nowait(None)
    async with next_watch(server):
        assert (Change.ADDED, "n/b", 2) in await take(changes, 1)
    assert reflector.restarts == 1


async def test_a_callback_that_fails_does_not_end_the_watch(api, server, caplog):
    told = asyncio.Queue()

    def on_change(change, key, value):
        told.put_nowait(key)
        raise RuntimeError("consumer broke")

    server.objects = [pod("a", 1, x=1)]
    async with Reflector(api, PODS, lambda obj: obj["x"], on_change=on_change, sleep=Pauses()) as reflector:
        async with next_watch(server) as watch:
            watch.put_nowait(event("ADDED", pod("b", 101, x=2)))
            assert [await asyncio.wait_for(told.get(), SOON) for _ in range(2)] == ["n/a", "n/b"]
        assert reflector.bad_objects == 2


async def test_listing_anew_shows_what_a_watch_that_is_behind_does_not(reflector, server, changes):
    server.objects = [pod("a", 1, x=1), pod("b", 2, x=2)]
    async with next_watch(server):
        await take(changes, 2)
    server.objects = [pod("b", 3, x=7)]
    reflector.relist()
    assert not reflector.synced.is_set()
    assert dict(reflector.items) == {"n/a": 1, "n/b": 2}
    async with next_watch(server) as watch:
        assert reflector.synced.is_set()
        assert await take(changes, 2) == [(Change.DELETED, "n/a", 1), (Change.MODIFIED, "n/b", 7)]
        watch.put_nowait(event("ADDED", pod("c", 101, x=3)))
        assert await take(changes, 1) == [(Change.ADDED, "n/c", 3)]
    assert reflector.restarts == 0
