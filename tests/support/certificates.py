"""Certificates for servers of tests, each its own authority."""

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def make_pair(
    directory: Path,
    name: str = "localhost",
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    hosts: Sequence[str] = ("localhost",),
) -> bytes:
    """Write tls.crt and tls.key for these hosts and 127.0.0.1 into a directory; return the certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    names = [*(x509.DNSName(host) for host in hosts), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(since or now - timedelta(days=1))
        .not_valid_after(until or now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    directory.mkdir(exist_ok=True, parents=True)
    (directory / "tls.key").write_bytes(private)
    (directory / "tls.crt").write_bytes(pem)
    return pem
