"""The chart's certificates as cert-manager issues and renews them: the servers are trusted all the while."""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tests.chart.chartobjects import Json, Render, of_kind

VALUES = {"certManager": {"enabled": True}, "metrics": {"tls": {"enabled": True}}}
Key = ec.EllipticCurvePrivateKey


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


@dataclass(frozen=True)
class Pair:
    """A Secret of cert-manager's: tls.crt, tls.key and ca.crt."""

    certificate: x509.Certificate
    key: Key
    authority: str

    def files(self, directory: Path) -> tuple[Path, Path]:
        private = self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        directory.mkdir(exist_ok=True)
        (directory / "tls.crt").write_text(_pem(self.certificate))
        (directory / "tls.key").write_bytes(private)
        return directory / "tls.crt", directory / "tls.key"


@dataclass
class CertManager:
    """Issues what the rendered Certificates ask for, by issuers of the kinds selfSigned and ca."""

    objects: list[Json]
    secrets: dict[str, Pair] = field(default_factory=dict)

    def spec(self, certificate: str) -> Json:
        (found,) = of_kind(self.objects, "Certificate", certificate)
        spec: Json = found["spec"]
        return spec

    def authority_of(self, certificate: str) -> str:
        """The Certificate whose Secret signs this one; empty where it signs itself."""
        (issuer,) = of_kind(self.objects, "Issuer", self.spec(certificate)["issuerRef"]["name"])
        if "selfSigned" in issuer["spec"]:
            return ""
        secret = issuer["spec"]["ca"]["secretName"]
        (name,) = (
            one["metadata"]["name"]
            for one in of_kind(self.objects, "Certificate")
            if one["spec"]["secretName"] == secret
        )
        return str(name)

    def issue(self, certificate: str) -> None:
        """Issue or renew; a key is made anew unless it is to stay."""
        spec, authority = self.spec(certificate), self.authority_of(certificate)
        before = self.secrets.get(certificate)
        stays = spec.get("privateKey", {}).get("rotationPolicy") == "Never"
        key = before.key if before is not None and stays else ec.generate_private_key(ec.SECP256R1())
        if authority and authority not in self.secrets:
            self.issue(authority)
        signer = self.secrets[authority] if authority else None
        made = _certificate(spec, key, signer)
        self.secrets[certificate] = Pair(made, key, _pem(signer.certificate if signer else made))


def _certificate(spec: Mapping[str, object], key: Key, signer: Pair | None) -> x509.Certificate:
    common = [x509.NameAttribute(NameOID.COMMON_NAME, str(spec["commonName"]))] if "commonName" in spec else []
    subject, now = x509.Name(common), datetime.now(UTC)
    is_authority = bool(spec.get("isCA"))
    hosts: list[str] = spec.get("dnsNames", [])  # type: ignore[assignment]
    names = x509.SubjectAlternativeName([x509.DNSName(host) for host in hosts])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(signer.certificate.subject if signer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=90))
        .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
    )
    if hosts:
        builder = builder.add_extension(names, critical=not common)
    return builder.sign(signer.key if signer else key, hashes.SHA256())


def is_trusted(server: Pair, authority: str, host: str, directory: Path) -> bool:
    """Whether a client that trusts this authority alone takes the server's certificate."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(*server.files(directory))
    trusting = ssl.create_default_context(cadata=authority)
    up, down, back, forth = (ssl.MemoryBIO() for _ in range(4))
    client = trusting.wrap_bio(down, up, server_hostname=host)
    ours = serving.wrap_bio(back, forth, server_side=True)
    for _ in range(6):
        for side in (client, ours):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLCertVerificationError:
                return False
            back.write(up.read())
            down.write(forth.read())
    return client.getpeercert() is not None


@pytest.mark.parametrize("leaf", ["gpushare-admission", "gpushare-metrics"])
def test_a_server_is_trusted_while_kubelet_has_not_brought_it_the_renewed_pair(
    render: Render, tmp_path: Path, leaf: str
) -> None:
    """Before: cainjector made the webhooks trust the new leaf at once, and each server still had the old one."""
    issuing = CertManager(render(VALUES))
    issuing.issue(leaf)
    (host, *_) = issuing.spec(leaf)["dnsNames"]
    for renewed in ((leaf,), (leaf,), (issuing.authority_of(leaf) or leaf, leaf)):
        served = issuing.secrets[leaf]
        assert is_trusted(served, served.authority, host, tmp_path)
        for certificate in renewed:
            issuing.issue(certificate)
        renewed_pair = issuing.secrets[leaf]
        assert renewed_pair.certificate != served.certificate
        assert is_trusted(served, renewed_pair.authority, host, tmp_path), f"{renewed} renewed"
        assert is_trusted(renewed_pair, renewed_pair.authority, host, tmp_path)
    assert not is_trusted(served, renewed_pair.authority, "elsewhere.svc", tmp_path), "the handshake is looked at"


def test_the_authority_outlives_what_it_signs_and_keeps_its_name_and_key(render: Render) -> None:
    issuing = CertManager(render(VALUES))
    authority = issuing.spec(issuing.authority_of("gpushare-admission"))
    assert issuing.authority_of("gpushare-metrics") == issuing.authority_of("gpushare-admission")
    assert (authority["isCA"], authority["privateKey"]["rotationPolicy"]) == (True, "Never")
    assert authority["commonName"]
    assert int(authority["duration"].removesuffix("h")) / 3 > 90 * 24, "renewed long before a leaf of 90 days ends"


def test_an_issuer_of_the_clusters_own_is_used_as_it_is(render: Render) -> None:
    own = {"name": "company", "kind": "ClusterIssuer", "group": "example.com"}
    objects = render({**VALUES, "certManager": {"enabled": True, "issuer": own}})
    assert not of_kind(objects, "Issuer")
    certificates = of_kind(objects, "Certificate")
    assert {c["metadata"]["name"] for c in certificates} == {"gpushare-admission", "gpushare-metrics"}
    assert [c["spec"]["issuerRef"] for c in certificates] == [own] * 2
