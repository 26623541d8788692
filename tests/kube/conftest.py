"""A little API server over real HTTP: lists, watches, patches and bindings as a test scripts them.

Not the shipped fake (gpushare.kube.fake), which behaves as an API server does: here the client and the reflector
are shown what none should send (half an object on a watch, a page of HTML, refusals in a given order), and
requests are looked at as they went over the wire, content type and body.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from gpushare.kube import Api, connect


class FakeServer:
    """Scripted answers; requests are kept as (method, path, query, content type, body)."""

    def __init__(self) -> None:
        self.objects: list[dict[str, Any]] = []
        self.version = 100
        self.requests: list[tuple[str, str, dict[str, str], str, Any]] = []
        self.failures: list[tuple[int, dict[str, Any], dict[str, str]]] = []
        self.watches: list[asyncio.Queue[bytes | None]] = []
        self.watch_started = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = await request.json() if raw else None
        self.requests.append((request.method, request.path, dict(request.query), request.content_type, body))
        if self.failures:
            status, answer, headers = self.failures.pop(0)
            return web.json_response(answer, status=status, headers=headers)
        if request.query.get("watch") == "true":
            return await self.watch(request)
        if request.method == "GET" and request.path.endswith("pods"):
            return self.list(request)
        return web.json_response(body or {"kind": "Status"})

    def list(self, request: web.Request) -> web.Response:
        limit = int(request.query.get("limit") or len(self.objects) or 1)
        start = int(request.query.get("continue") or 0)
        metadata = {"resourceVersion": str(self.version)}
        if start + limit < len(self.objects):
            metadata["continue"] = str(start + limit)
        return web.json_response({"metadata": metadata, "items": self.objects[start : start + limit]})

    async def watch(self, request: web.Request) -> web.StreamResponse:
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.watches.append(queue)
        response = web.StreamResponse()
        await response.prepare(request)
        self.watch_started.set()
        while (chunk := await queue.get()) is not None:
            await response.write(chunk)
        return response


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    fake = FakeServer()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", fake.handle)
    running = TestServer(app)
    await running.start_server()
    fake.url = str(running.make_url("")).rstrip("/")  # type: ignore[attr-defined]
    yield fake
    for queue in fake.watches:
        queue.put_nowait(None)
    await running.close()


@pytest.fixture
async def api(server: FakeServer, tmp_path: Any) -> AsyncIterator[Api]:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(
        f"""apiVersion: v1
kind: Config
clusters: [{{name: fake, cluster: {{server: "{server.url}"}}}}]
users: [{{name: me, user: {{token: s3cret}}}}]
contexts: [{{name: fake, context: {{cluster: fake, user: me}}}}]
current-context: fake
"""
    )
    async with connect(kubeconfig) as connected:
        yield connected
