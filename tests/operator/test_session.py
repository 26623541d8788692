"""How Kopf logs in: by the credentials that `gpushare.kube` reads, without the package's synchronous client."""

import logging
import ssl
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import kopf
import pytest
import yaml
from aiohttp import web
from yarl import URL

from gpushare import kube
from gpushare.core.backoff import Backoff
from gpushare.kube import Json
from gpushare.kube.fake import ObjectStore, app
from gpushare_operator import session
from gpushare_operator.session import log_in

IN_CLUSTER = "kubernetes.aio.config.incluster_config"


@pytest.fixture
def service_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make_certificate: Any) -> Path:
    """What kubelet gives a pod; returns the folder with the token."""
    make_certificate(tmp_path)
    (tmp_path / "token").write_text("first")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.setattr(f"{IN_CLUSTER}.SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(f"{IN_CLUSTER}.SERVICE_CERT_FILENAME", str(tmp_path / "tls.crt"))
    return tmp_path


class Observed:
    """What Kopf's session showed, in order."""

    def __init__(self) -> None:
        self.shown: list[tuple[str, str, Json | None]] = []
        self.statuses: list[tuple[str, int]] = []

    def begins(self, path: str) -> None:
        self.shown.append(("begins", path, None))

    def page(self, path: str, body: Json) -> None:
        self.shown.append(("page", path, body))

    def answered(self, path: str, status: int) -> None:
        self.statuses.append((path, status))

    def must_list(self, path: str) -> bool:
        return False


async def logged_in() -> tuple[str, dict[str, str], ssl.SSLContext]:
    """The server, the headers of every request, and whom TLS trusts."""
    found = await log_in(Observed(), kopf.OperatorSettings())
    async with found.aiohttp_session as session:
        connector: Any = session.connector
        return found.server, dict(session.headers), connector._ssl


async def test_in_a_pod_it_is_the_service_account_and_the_clusters_own_authority(service_account: Path) -> None:
    server, headers, trusted = await logged_in()
    assert server == "https://[fd00::1]:443"
    assert headers["Authorization"].lower() == "bearer first"
    assert trusted.verify_mode == ssl.CERT_REQUIRED
    assert trusted.check_hostname
    assert trusted.cert_store_stats()["x509"] == 1


async def test_each_login_reads_the_token_anew(service_account: Path) -> None:
    """Kopf logs in again once the API server refuses a token that has run out."""
    await logged_in()
    (service_account / "token").write_text("second")
    _, headers, _ = await logged_in()
    assert headers["Authorization"].lower() == "bearer second"


async def test_elsewhere_it_is_a_kubeconfig(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make_certificate: Any
) -> None:
    make_certificate(tmp_path)
    cluster = {"server": "https://api.example:6443", "certificate-authority": str(tmp_path / "tls.crt")}
    pair = {"client-certificate": str(tmp_path / "tls.crt"), "client-key": str(tmp_path / "tls.key")}
    kubeconfig = {
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": pair}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (tmp_path / "config").write_text(yaml.safe_dump(kubeconfig))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    server, headers, trusted = await logged_in()
    assert server == "https://api.example:6443"
    assert "Authorization" not in headers
    assert trusted.cert_store_stats()["x509"] == 1


async def test_without_credentials_kopf_is_told_which_were_looked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    with pytest.raises(kopf.LoginError, match="missing"):
        await logged_in()


PODS = "/api/v1/pods"
FIRST = {"metadata": {"resourceVersion": "5", "continue": "xyz"}, "items": [{"metadata": {"uid": "a"}}]}
LAST = {"metadata": {"resourceVersion": "5"}, "items": []}


@pytest.fixture
async def answering(monkeypatch: pytest.MonkeyPatch, free_port: int) -> Any:
    """An API server of two pages, of refusals, of watches and of objects; returns its address."""

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/gone":
            return web.json_response({"kind": "Status"}, status=404)
        if request.path == "/refused":
            return web.json_response({"kind": "Status", "items": []}, status=503)
        if request.path != PODS:
            return web.json_response({"metadata": {"name": "web"}})
        return web.json_response(LAST if "continue" in request.query else FIRST)

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    address = f"http://127.0.0.1:{free_port}"
    await web.TCPSite(runner, "127.0.0.1", free_port).start()

    async def connection(_: kopf.OperatorSettings) -> kopf.ConnectionInfo:
        return kopf.ConnectionInfo(server=address)

    monkeypatch.setattr(session, "_connection", connection)
    yield address
    await runner.cleanup()


@pytest.fixture
async def serving_store(monkeypatch: pytest.MonkeyPatch, free_port: int) -> Any:
    """The fake API server's address and its objects."""
    store = ObjectStore()
    runner = web.AppRunner(app(store))
    await runner.setup()
    address = f"http://127.0.0.1:{free_port}"
    await web.TCPSite(runner, "127.0.0.1", free_port).start()

    async def connection(_: kopf.OperatorSettings) -> kopf.ConnectionInfo:
        return kopf.ConnectionInfo(server=address)

    monkeypatch.setattr(session, "_connection", connection)
    yield address, store
    await runner.cleanup()


async def test_each_page_of_a_list_is_shown_before_kopf_reads_it_and_nothing_else_is(answering: str) -> None:
    observed = Observed()
    found = await log_in(observed, kopf.OperatorSettings())
    async with found.aiohttp_session as kopfs:

        async def ask(method: str, path: str) -> Any:
            async with kopfs.request(method, answering + path) as response:
                return await response.json()

        assert await ask("get", f"{PODS}?limit=500") == FIRST
        assert observed.shown == [("begins", PODS, None), ("page", PODS, FIRST)]
        assert await ask("get", f"{PODS}?limit=500&continue=xyz") == LAST
        assert observed.shown[2:] == [("page", PODS, LAST)]
        await ask("get", f"{PODS}?watch=true&resourceVersion=5")
        await ask("patch", PODS)
        assert len(observed.shown) == 3
        await ask("get", "/refused")
        await ask("get", f"{PODS}/web")
        assert [event for event, _, _ in observed.shown[3:]] == ["begins", "begins"], "no page of theirs"
        assert observed.statuses[-3:] == [(PODS, 200), ("/refused", 503), (f"{PODS}/web", 200)]


async def test_a_list_whose_next_page_has_expired_begins_again_and_kopf_reads_on(
    monkeypatch: pytest.MonkeyPatch, serving_store: tuple[str, ObjectStore]
) -> None:
    """Kopf's watcher would end with a 410, and the operator with it. Its list has all that is there at the end."""
    address, store = serving_store
    for number in range(5):
        store.put(kube.PODS, {"metadata": {"name": f"p{number}", "namespace": "shop", "uid": f"u{number}"}})
    monkeypatch.setattr(session, "RETRIES", Backoff(0.001, 0.001))
    observed, seen = Observed(), []
    found = await log_in(observed, kopf.OperatorSettings())
    async with found.aiohttp_session as kopfs:
        token: str | None = ""
        for page in range(20):
            if page in {1, 2, 4}:
                store.forget_history()
            query = {"limit": "2"} | ({"continue": token} if token else {})
            async with kopfs.request("get", address + PODS, params=query) as response:
                assert response.status == 200
                body = await response.json()
            seen += [each["metadata"]["name"] for each in body["items"]]
            if not (token := body["metadata"].get("continue")):
                break
    last = max(index for index, (event, _, _) in enumerate(observed.shown) if event == "begins")
    whole = [
        each["metadata"]["name"] for _, _, shown in observed.shown[last + 1 :] for each in (shown or {})["items"]
    ]
    assert whole == ["p0", "p1", "p2", "p3", "p4"]
    assert seen == ["p0", "p1"] * 3 + ["p2", "p3"] + whole, "what is read twice is harmless"
    assert [event for event, _, _ in observed.shown].count("begins") == 4


async def test_each_further_list_that_expires_waits_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(session, "RETRIES", Backoff(0.5, 8.0))
    answers = [410] * 7 + [200]
    observed = session._KopfRequests(Observed(), sleep)

    async def handler(_: Any) -> Any:
        return SimpleNamespace(status=answers.pop(0), release=lambda: None)

    for _ in range(7):  # each new list's second page expires again
        request: Any = SimpleNamespace(method="GET", url=URL(f"http://api{PODS}?limit=2&continue=x"))
        answers.insert(1, 200)
        assert (await observed.send(request, handler)).status == 200
        assert "continue" not in request.url.query
    assert waited == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    observed.page(PODS, LAST)
    answers[:] = [410, 200]
    await observed.send(
        SimpleNamespace(method="GET", url=URL(f"http://api{PODS}?limit=2&continue=x")),  # type: ignore[arg-type]
        handler,
    )
    assert waited[7:] == [0.5], "a whole list begins it anew"


async def test_a_type_that_is_not_served_now_is_a_broken_connection_to_kopf(answering: str) -> None:
    found = await log_in(Observed(), kopf.OperatorSettings())
    async with found.aiohttp_session as kopfs:
        for query in ("limit=500", "watch=true"):
            with pytest.raises(aiohttp.ClientConnectionError, match="does not serve /gone"):
                await kopfs.request("get", f"{answering}/gone?{query}")
        async with kopfs.request("get", f"{answering}/gone") as response:
            assert response.status == 404, "discovery has an answer for it"


def test_kopf_asks_again_for_ever_at_bounded_waits() -> None:
    waits = list(islice(session.EndlessRetries(), 500))
    assert 0.25 <= waits[0] <= 0.5
    assert min(waits[10:]) >= 4.0
    assert max(waits) <= 8.0


def test_kopf_logs_one_refusal_of_a_request() -> None:
    lines = [
        "Request attempt #1 failed; will retry: GET https://api/pods -> APIForbiddenError('...', status=403)",
        "Request attempt #2 failed; will retry: GET https://api/pods -> APIForbiddenError('...', status=403)",
        "Request attempt #10 failed; will retry: GET https://api/pods -> APIForbiddenError('...', status=403)",
        "Request attempt #10 failed; will retry: GET https://api/pods -> APIServerError('...', status=500)",
    ]
    records = [logging.LogRecord("kopf", logging.ERROR, "", 0, line, (), None) for line in lines]
    assert [bool(session.FirstRefusals().filter(each)) for each in records] == [True, False, False, True]


def test_a_refused_watch_that_kopf_begins_anew_is_not_logged_again() -> None:
    """Kopf gives a watch 70 s without an event, its retries included, and then counts from attempt #1 again."""
    watch = "Request attempt #1 failed; will retry: GET https://api/{}/pods?watch=true&resourceVersion={} -> "
    lines = [
        f"{watch.format(place, version)}APIForbiddenError('...', status=403)"
        for place, version in (("shop", 5), ("shop", 5), ("bakery", 5), ("shop", 5), ("shop", 9))
    ]
    records = [logging.LogRecord("kopf", logging.ERROR, "", 0, line, (), None) for line in lines]
    refusals = session.FirstRefusals()
    assert [bool(refusals.filter(each)) for each in records] == [True, False, True, False, True]
