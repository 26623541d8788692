"""Kopf itself, as our handlers set it up, on the fake API server: what would end its watchers, and does not."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import kopf
import pytest
import yaml
from aiohttp import web
from tests.operator.live import Running

from gpushare.core.api import names
from gpushare.core.backoff import Backoff
from gpushare.kube import PODS, Json
from gpushare.kube.fake import ObjectStore, app
from gpushare_operator import handlers, session
from gpushare_operator.session import log_in

PATIENCE_SECONDS = 60.0
KOPFS_ATTEMPTS = 9  # by default, after which its watcher ends


def resources(group: str, version: str, *kinds: str) -> Json:
    listed = [
        {
            "name": f"{kind.lower()}s",
            "singularName": kind.lower(),
            "kind": kind,
            "namespaced": kind == "Pod",
            "verbs": ["get", "list", "watch"],
        }
        for kind in kinds
    ]
    return {"kind": "APIResourceList", "groupVersion": f"{group}/{version}", "resources": listed}


DISCOVERY: dict[str, Json] = {
    "/api": {"versions": ["v1"]},
    "/api/v1": resources("", "v1", "Pod", "Namespace"),
    "/apis": {
        "groups": [
            {
                "name": "apiextensions.k8s.io",
                "versions": [{"version": "v1"}],
                "preferredVersion": {"version": "v1"},
            }
        ]
    },
    "/apis/apiextensions.k8s.io/v1": resources("apiextensions.k8s.io", "v1", "CustomResourceDefinition"),
}


class Server:
    """The fake API server; `refusals` are the answers that come first, by path.

    Attributes:
        asked: the paths of all requests.
    """

    def __init__(self) -> None:
        self.store = ObjectStore()
        self.refusals: dict[str, list[int]] = {}
        self.asked: list[str] = []
        self.app = app(self.store)
        self.app.middlewares.append(self._answer)

    @web.middleware
    async def _answer(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.asked.append(request.path)
        if request.path in DISCOVERY:
            return web.json_response(DISCOVERY[request.path])
        if self.refusals.get(request.path):
            status = self.refusals[request.path].pop(0)
            body = {"kind": "Status", "code": status, "message": f"refused by the test with {status}"}
            return web.json_response(body, status=status)
        answer: web.StreamResponse = await handler(request)
        return answer

    def pod(self, namespace: str, name: str) -> None:
        labels = {"gpushare.io/managed": "true"}
        metadata = {"namespace": namespace, "name": name, "uid": f"uid-{name}", "labels": labels}
        self.store.put(PODS, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {}})


class Seen:
    """The pods that Kopf brought."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._came = asyncio.Event()

    async def put(self, event: kopf.RawEvent, **_: Any) -> None:
        self.names.add(event["object"]["metadata"]["name"])
        self._came.set()

    async def until(self, *expected: str) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not self.names.issuperset(expected):
                self._came.clear()
                await self._came.wait()


class Nobody:
    """An observer who takes no notice."""

    def begins(self, path: str) -> None:
        """Take no notice."""

    def page(self, path: str, body: Json) -> None:
        """Take no notice."""

    def answered(self, path: str, status: int) -> None:
        """Take no notice."""

    def must_list(self, path: str) -> bool:
        """Leave every watch alone."""
        return False


class Rereader(Nobody):
    """An observer who has forgotten a path's objects when the test says so, and counts the lists of it."""

    def __init__(self, path: str) -> None:
        self.path, self.has_forgotten, self.lists = path, False, 0

    def begins(self, path: str) -> None:
        if path == self.path:
            self.has_forgotten = False
            self.lists += 1

    def must_list(self, path: str) -> bool:
        return self.has_forgotten and path == self.path


Runs = Callable[..., Any]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, free_port: int) -> Runs:
    """Runs Kopf on a server for some namespaces."""

    async def connection(_: kopf.OperatorSettings) -> kopf.ConnectionInfo:
        return kopf.ConnectionInfo(server=f"http://127.0.0.1:{free_port}")

    monkeypatch.setattr(session, "_connection", connection)
    monkeypatch.setattr(session, "RETRIES", Backoff(0.01, 0.02))

    @asynccontextmanager
    async def run(
        server: Server, *namespaces: str, observer: session.ListObserver | None = None
    ) -> AsyncIterator[Seen]:
        runner = web.AppRunner(server.app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", free_port).start()
        registry, seen, ends = kopf.OperatorRegistry(), Seen(), asyncio.Event()

        @kopf.on.login(registry=registry)
        async def login(settings: kopf.OperatorSettings, **_: Any) -> kopf.AiohttpSession:
            return await log_in(observer or Nobody(), settings)

        async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
            await handlers.configure(settings=settings)
            settings.process.ultimate_exiting_timeout = None  # this process is the tests'

        kopf.on.startup(registry=registry)(configure)
        kopf.on.event("", "v1", "pods", registry=registry)(seen.put)
        works = asyncio.create_task(
            kopf.operator(registry=registry, standalone=True, namespaces=namespaces, stop_flag=ends)
        )
        try:
            yield seen
            assert not works.done(), "Kopf has ended"
        finally:
            ends.set()
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not works.done():
                    server.store.break_watches()  # else Kopf waits for the server's tasks, which are in its loop
                    await asyncio.sleep(0.02)
            await runner.cleanup()

    return run


def of(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods"


@pytest.mark.parametrize("status", [403, 404, 503])
async def test_a_namespace_may_be_refused_for_as_long_as_it_takes(runs: Runs, status: int) -> None:
    server = Server()
    server.refusals[of("bank")] = [status] * 4 * KOPFS_ATTEMPTS
    server.pod("shop", "here")
    server.pod("bank", "there")
    async with runs(server, "shop", "bank") as seen:
        await seen.until("here")
        server.pod("shop", "later")
        await seen.until("later", "there")
        assert server.refusals[of("bank")] == []


async def test_a_watch_that_is_refused_goes_on_once_it_may(runs: Runs) -> None:
    server = Server()
    server.pod("shop", "first")
    async with runs(server, "shop", "bank") as seen:
        await seen.until("first")
        async with asyncio.timeout(PATIENCE_SECONDS):
            while ("WATCH", of("shop")) not in server.store.requests:  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(0.01)
        server.refusals[of("shop")] = [403] * 3 * KOPFS_ATTEMPTS
        server.store.break_watches()
        server.pod("shop", "meanwhile")
        await seen.until("meanwhile")
        assert server.refusals[of("shop")] == []


async def test_a_watch_of_forgotten_objects_begins_with_a_list_and_goes_on(runs: Runs) -> None:
    server, observer = Server(), Rereader(of("shop"))
    server.pod("shop", "first")
    async with runs(server, "shop", observer=observer) as seen:
        await seen.until("first")
        async with asyncio.timeout(PATIENCE_SECONDS):
            while ("WATCH", of("shop")) not in server.store.requests:  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(0.01)
        assert observer.lists == 1
        seen.names.clear()
        observer.has_forgotten = True
        server.store.break_watches()
        await seen.until("first")
        assert observer.lists == 2
        server.pod("shop", "later")
        await seen.until("later")
        server.store.break_watches()
        server.pod("shop", "last")
        await seen.until("last")
        assert observer.lists == 2, "an ordinary watch goes on where it was"


async def test_kopf_needs_no_list_of_namespaces_or_definitions(runs: Runs) -> None:
    """What is made between its list and its watch of them, Kopf does not notice; so it takes neither."""
    server = Server()
    async with runs(server, "shop") as seen:
        server.pod("shop", "web")
        await seen.until("web")
    assert {path for path in server.asked if path not in DISCOVERY} == {of("shop")}


@pytest.mark.integration
async def test_a_process_whose_kopf_fails_all_the_same_ends(tmp_path: Path, free_ports: Callable[[], int]) -> None:
    """Its other watchers then wait for ever for credentials that nobody brings; kubelet starts it anew."""
    server, port = Server(), free_ports()
    server.store.served = {names.GROUP: (names.VERSION,)}
    server.refusals[of("bank")] = [503, 503, 503, 400]  # the other watch is open by then
    server.pod("shop", "here")
    runner = web.AppRunner(server.app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    config = {
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    operator = Running(tmp_path / "kubeconfig", free_ports(), free_ports(), tmp_path / "operator.log")
    operator.start("shop", "bank", "a", "b", "c", "d")
    assert operator.process is not None
    try:
        await asyncio.to_thread(operator.process.wait, PATIENCE_SECONDS)
    finally:
        operator.process.kill()
        print(operator.log.read_text()[-5000:])
        await runner.cleanup()
