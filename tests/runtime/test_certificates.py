"""A server's certificate: taken up anew while running, and its end told."""

import asyncio
import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from certificates import make_pair

from gpushare.runtime import certificates
from gpushare.runtime.certificates import (
    DIRECTORY_VARIABLE,
    Certificate,
    CertificateCollector,
    expiry_of,
    metrics_certificate,
)


@pytest.mark.parametrize(
    "end", ["2027-01-02T03:04:05", "2049-12-31T23:59:59", "2050-01-01T00:00:00", "2099-06-01T12:00:00"]
)
def test_the_end_is_the_certificates(tmp_path: Path, end: str) -> None:
    """Before 2050 a certificate has two digits for its year, since then four."""
    until = datetime.fromisoformat(end).replace(tzinfo=UTC)
    pem = make_pair(tmp_path, until=until).decode()
    assert expiry_of(pem) == until.timestamp()
    other = make_pair(tmp_path, until=until + timedelta(days=9)).decode()
    assert expiry_of(f"said first\n{pem}{other}") == until.timestamp(), "the first is the server's own"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "none",
        "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        "-----BEGIN CERTIFICATE-----\nMAMCAQE=\n-----END CERTIFICATE-----\n",
        "-----BEGIN CERTIFICATE-----\n%%%%\n-----END CERTIFICATE-----\n",
    ],
)
def test_what_is_no_certificate_has_no_end(text: str) -> None:
    with pytest.raises(ValueError, match="certificate"):
        expiry_of(text)


def test_a_renewed_certificate_moves_its_end(tmp_path: Path) -> None:
    soon = datetime.now(UTC).replace(microsecond=0) + timedelta(days=3)
    make_pair(tmp_path, until=soon)
    certificate = Certificate(tmp_path)
    [family] = CertificateCollector({"metrics": certificate}).collect()
    assert [(s.labels, s.value) for s in family.samples] == [({"certificate": "metrics"}, soon.timestamp())]
    (tmp_path / "tls.crt").write_text("half")
    assert not certificate.reload_if_changed()
    assert certificate.expires_at == soon.timestamp(), "of the one in use"
    make_pair(tmp_path, until=soon + timedelta(days=1000))
    assert certificate.reload_if_changed()
    assert certificate.expires_at == (soon + timedelta(days=1000)).timestamp()


async def test_a_pair_that_comes_late_is_taken_up(tmp_path: Path) -> None:
    certificate = metrics_certificate({DIRECTORY_VARIABLE: str(tmp_path)})
    assert certificate is not None
    assert (certificate.failures, certificate.expires_at) == (1, None)
    assert [family.samples for family in CertificateCollector({"metrics": certificate}).collect()] == [[]]
    make_pair(tmp_path)
    slept = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await certificate.keep(sleep)
    assert (certificate.reloads, slept) == (1, [certificates.CHECK_SECONDS] * 3)
    assert certificate.expires_at is not None


def test_an_absent_pair_fails_once_and_nothing_is_said_of_an_old_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        certificate = Certificate(tmp_path, is_needed=False)
        assert not any(certificate.reload_if_changed() for _ in range(5))
        assert (certificate.is_loaded, certificate.failures) == (False, 1)
        (tmp_path / "tls.crt").write_text("half")
        assert not any(certificate.reload_if_changed() for _ in range(5))
        assert certificate.failures == 2, "other files, another try"
    assert "no usable certificate yet" in caplog.text
    assert "old one" not in caplog.text


def test_a_pair_that_goes_leaves_the_old_one_in_use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_pair(tmp_path)
    certificate = Certificate(tmp_path)
    end = certificate.expires_at
    (tmp_path / "tls.key").unlink()
    with caplog.at_level(logging.ERROR):
        assert not any(certificate.reload_if_changed() for _ in range(5))
    assert (certificate.is_loaded, certificate.failures, certificate.expires_at) == (True, 1, end)
    assert caplog.text.count("the old one stays") == 1
    make_pair(tmp_path)
    assert certificate.reload_if_changed()


def test_without_a_directory_metrics_are_plain() -> None:
    assert metrics_certificate({}) is None
    assert metrics_certificate({DIRECTORY_VARIABLE: ""}) is None
