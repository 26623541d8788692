"""How Kopf logs in: by the credentials that `gpushare.kube` reads, without the package's synchronous client."""

import ssl
from pathlib import Path
from typing import Any

import kopf
import pytest
import yaml
from aiohttp import web

from gpushare.kube import Json
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

    def begins(self, path: str) -> None:
        self.shown.append(("begins", path, None))

    def page(self, path: str, body: Json) -> None:
        self.shown.append(("page", path, body))


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
