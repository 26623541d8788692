"""The extender's heap is kept small, beside kube-scheduler's questions and not before the first lists."""

import asyncio
from collections.abc import Callable

import pytest
from aiohttp.test_utils import TestClient, TestServer

from gpushare.extender import Extender, server

from .conftest import ApiWithKubelet, options


async def test_it_begins_after_the_first_lists_and_waits_for_a_quiet_moment(
    cluster: ApiWithKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[str, Callable[[], bool]]] = []

    async def keep_small(is_quiet: Callable[[], bool]) -> None:
        begun.append((extender.not_ready(), is_quiet))
        await asyncio.Event().wait()

    monkeypatch.setattr(server, "keep_small", keep_small)
    cluster.add_node("n1")
    pod = cluster.make_pod("a")
    now = [0.0]
    extender = Extender(cluster, options(), clock=lambda: now[0])  # type: ignore[arg-type]
    async with extender.watching(), TestClient(TestServer(extender.verbs.app())) as client:
        while not begun:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
        ((missing, is_quiet),) = begun
        assert missing == ""
        assert is_quiet(), "nobody has asked yet"
        now[0] = 100.0
        async with client.post("/filter", json={"Pod": pod, "NodeNames": ["n1"]}) as answer:
            assert answer.status == 200
        assert not is_quiet()
        now[0] += server.QUIET_SECONDS + 0.1
        assert is_quiet()
