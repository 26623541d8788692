"""How Kopf logs in: by the credentials that `gpushare.kube` reads, without the package's synchronous client."""

import ssl
from pathlib import Path
from typing import Any

import kopf
import pytest
import yaml

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


async def logged_in() -> tuple[str, dict[str, str], ssl.SSLContext]:
    """The server, the headers of every request, and whom TLS trusts."""
    found = await log_in(lambda _path: None, kopf.OperatorSettings())
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
