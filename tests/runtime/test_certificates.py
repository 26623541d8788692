"""A server's certificate: taken up anew while running, and when it is valid."""

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
    Validity,
    metrics_certificate,
    validity_of,
)


@pytest.mark.parametrize(
    "end", ["2027-01-02T03:04:05", "2049-12-31T23:59:59", "2050-01-01T00:00:00", "2099-06-01T12:00:00"]
)
def test_the_end_is_the_certificates(tmp_path: Path, end: str) -> None:
    """Before 2050 a certificate has two digits for its year, since then four."""
    until = datetime.fromisoformat(end).replace(tzinfo=UTC)
    pem = make_pair(tmp_path, until=until).decode()
    assert validity_of(pem).not_after == until.timestamp()
    other = make_pair(tmp_path, until=until + timedelta(days=9)).decode()
    assert validity_of(f"said first\n{pem}{other}") == validity_of(pem), "the first is the server's own"


@pytest.mark.parametrize(
    "start", ["1950-01-01T00:00:00", "1968-12-31T23:59:59", "1970-01-01T00:00:00", "2026-11-30T05:04:03"]
)
def test_the_start_is_the_certificates(tmp_path: Path, start: str) -> None:
    """Two digits from 50 on are years of the last century."""
    since = datetime.fromisoformat(start).replace(tzinfo=UTC)
    until = datetime(2051, 1, 1, tzinfo=UTC)
    pem = make_pair(tmp_path, since=since, until=until).decode()
    assert validity_of(pem) == Validity(since.timestamp(), until.timestamp())


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
def test_what_is_no_certificate_has_no_validity(text: str) -> None:
    with pytest.raises(ValueError, match="certificate"):
        validity_of(text)


def test_a_renewed_certificate_moves_its_validity(tmp_path: Path) -> None:
    now = datetime.now(UTC).replace(microsecond=0)
    last, soon, late = now - timedelta(days=27), now + timedelta(days=3), now + timedelta(days=1000)
    make_pair(tmp_path, since=last, until=soon)
    certificate = Certificate(tmp_path)
    collector = CertificateCollector({"metrics": certificate})

    def published() -> dict[str, float]:
        samples = [sample for family in collector.collect() for sample in family.samples]
        assert all(sample.labels == {"certificate": "metrics"} for sample in samples)
        return {sample.name: sample.value for sample in samples}

    start, end = (f"gpushare_certificate_{time}_timestamp_seconds" for time in ("not_before", "expiry"))
    assert published() == {start: last.timestamp(), end: soon.timestamp()}
    (tmp_path / "tls.crt").write_text("half")
    assert not certificate.reload_if_changed()
    assert published() == {start: last.timestamp(), end: soon.timestamp()}, "of the one in use"
    make_pair(tmp_path, since=now, until=late)
    assert certificate.reload_if_changed()
    assert published() == {start: now.timestamp(), end: late.timestamp()}


async def test_a_pair_that_comes_late_is_taken_up(tmp_path: Path) -> None:
    certificate = metrics_certificate({DIRECTORY_VARIABLE: str(tmp_path)})
    assert certificate is not None
    assert (certificate.failures, certificate.validity) == (1, None)
    assert [family.samples for family in CertificateCollector({"metrics": certificate}).collect()] == [[], []]
    make_pair(tmp_path)
    slept = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await certificate.keep(sleep)
    assert (certificate.reloads, slept) == (1, [certificates.CHECK_SECONDS] * 3)
    assert certificate.validity is not None


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
    validity = certificate.validity
    (tmp_path / "tls.key").unlink()
    with caplog.at_level(logging.ERROR):
        assert not any(certificate.reload_if_changed() for _ in range(5))
    assert (certificate.is_loaded, certificate.failures, certificate.validity) == (True, 1, validity)
    assert caplog.text.count("the old one stays") == 1
    make_pair(tmp_path)
    assert certificate.reload_if_changed()


def test_without_a_directory_metrics_are_plain() -> None:
    assert metrics_certificate({}) is None
    assert metrics_certificate({DIRECTORY_VARIABLE: ""}) is None
