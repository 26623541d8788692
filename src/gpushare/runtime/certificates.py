"""A server's certificate: read from files, reloaded without a restart when they change, and when it is valid."""

import asyncio
import logging
import re
import ssl
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_log = logging.getLogger(__name__)
CHECK_SECONDS: Final = 10.0  # kubelet itself takes about a minute to renew a mounted Secret
DIRECTORY_VARIABLE: Final = "GPUSHARE_METRICS_CERTIFICATE"
_BLOCK: Final = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_EXPLICIT_VERSION: Final = 0xA0
_UTC_TIME: Final = 0x17  # its years have two digits: 1950 to 2049 (RFC 5280 4.1.2.5.1)
_TIMES: Final = {_UTC_TIME: "%y%m%d%H%M%SZ", 0x18: "%Y%m%d%H%M%SZ"}  # the other is GeneralizedTime


@dataclass(frozen=True, slots=True)
class Validity:
    """Period in which a certificate is valid.

    Attributes:
        not_before: when it begins, in seconds since 1970.
        not_after: when it ends, in seconds since 1970.
    """

    not_before: float
    not_after: float


class Certificate:
    """`tls.crt` and `tls.key` of a directory in an SSLContext; new connections use the newest valid pair.

    Args:
        is_needed: raise if there is no usable pair; otherwise handshakes fail until there is one.

    Raises:
        ssl.SSLError, OSError: by the constructor, if there is no usable pair.

    Attributes:
        context: for the server; always the same object, which gives each handshake the newest pair as a whole.
        is_loaded: there has been a usable pair.
        reloads: how often a new pair was loaded.
        failures: how often loading failed; each state of the files counts once.
        validity: when the certificate in use is valid; None if unknown.
    """

    def __init__(self, directory: Path, *, is_needed: bool = True) -> None:
        self._pair = (directory / "tls.crt", directory / "tls.key")
        self.context = self._current = _new_context()
        self.context.sni_callback = self._use_newest  # OpenSSL calls it for clients without a server name too
        self.is_loaded = False
        self.reloads = 0
        self.failures = 0
        self.validity: Validity | None = None
        self._last_error = ""
        self._seen: tuple[tuple[int, int, int], ...] | None = None
        try:
            self._seen = self._stamp()
            self._load(self.context)
            self.is_loaded = True
            self.validity = _validity_in(self._pair[0])
        except OSError as error:
            if is_needed:
                raise
            self._failed(error)

    def reload_if_changed(self) -> bool:
        """Load a changed pair; log a broken one once and keep the old one in use."""
        try:
            stamp = self._stamp()
            if stamp == self._seen:
                return False
            self._seen = stamp
            # A context of its own: one in use would have a new certificate without its key for a moment, in which
            # a handshake fails, and a wrong key must not reach it.
            context = _new_context()
            self._load(context)
            self._current = context
            self.is_loaded = True
            self.validity = _validity_in(self._pair[0])
        except OSError as error:  # includes ssl.SSLError; half-written files are tried again when they change
            self._failed(error)
            return False
        self._last_error = ""
        self.reloads += 1
        _log.info("new certificate taken up")
        return True

    def _use_newest(self, connection: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _: ssl.SSLContext) -> None:
        connection.context = self._current

    def _load(self, context: ssl.SSLContext) -> None:
        for path in self._pair:  # the context's error for a missing or unreadable file does not name it
            path.open("rb").close()
        context.load_cert_chain(*self._pair)

    def _failed(self, error: OSError) -> None:
        self.failures += 1
        if str(error) != self._last_error:
            if self.is_loaded:
                _log.error("new certificate cannot be used, the old one stays: %s", error)
            else:
                _log.error("no usable certificate yet, every TLS handshake fails until there is one: %s", error)
        self._last_error = str(error)

    async def keep(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Check for a new pair until cancelled."""
        while True:
            await sleep(CHECK_SECONDS)
            try:
                await asyncio.to_thread(self.reload_if_changed)
            except Exception:  # noqa: BLE001 - whoever keeps it does not look whether this ends
                _log.exception("cannot look for a new certificate, trying again")

    def _stamp(self) -> tuple[tuple[int, int, int], ...]:
        """Return a value that changes when a file appears, vanishes or is rewritten, or a link is swapped."""
        return tuple(_file_stamp(path) for path in self._pair)


class CertificateCollector(Collector):
    """Metrics with the validity of this process's certificates, by use."""

    def __init__(self, certificates: Mapping[str, Certificate]) -> None:
        self._certificates = certificates

    def collect(self) -> Iterable[Metric]:
        """Return the two families; a certificate with an unknown validity is left out of both."""
        start = GaugeMetricFamily(
            "gpushare_certificate_not_before_timestamp_seconds",
            "When the certificate that is in use became valid, in seconds since 1970, by what it is for.",
            labels=["certificate"],
        )
        end = GaugeMetricFamily(
            "gpushare_certificate_expiry_timestamp_seconds",
            "When the certificate that is in use expires, in seconds since 1970, by what it is for.",
            labels=["certificate"],
        )
        for use, certificate in self._certificates.items():
            validity = certificate.validity
            if validity is not None:
                start.add_metric([use], validity.not_before)
                end.add_metric([use], validity.not_after)
        return [start, end]


def metrics_certificate(environment: Mapping[str, str]) -> Certificate | None:
    """Return the certificate for metrics and probes from the environment's directory; None for plain HTTP.

    A broken pair does not stop the process from working; scrapes fail until there is a good one.
    """
    directory = environment.get(DIRECTORY_VARIABLE)
    return Certificate(Path(directory), is_needed=False) if directory else None


def validity_of(pem: str) -> Validity:
    """Return when the first certificate of a PEM text is valid.

    Raises:
        ValueError: there is no certificate in it.
    """
    found = _BLOCK.search(pem)
    if found is None:
        raise ValueError("no certificate")
    try:
        certificate = ssl.PEM_cert_to_DER_cert(found[0])
        _, whole = next(_values(certificate))
        _, signed = next(_values(whole))  # RFC 5280 4.1: tbsCertificate, before its algorithm and signature
        fields = [each for each in _values(signed) if each[0] != _EXPLICIT_VERSION]
        _, validity = fields[3]  # after serial number, algorithm and issuer
        start, end = _values(validity)
        return Validity(_seconds(*start), _seconds(*end))
    except (IndexError, KeyError, StopIteration) as error:
        raise ValueError(f"not a certificate: {error}") from None


def _seconds(tag: int, value: bytes) -> float:
    """Return a time of DER in seconds since 1970."""
    moment = datetime.strptime(value.decode("ascii"), _TIMES[tag]).replace(tzinfo=UTC)
    if tag == _UTC_TIME and moment.year >= 2050:  # strptime reads 50 to 68 as 2050 to 2068
        moment = moment.replace(year=moment.year - 100)
    return moment.timestamp()


def _values(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the tag and content of each value in a sequence's content (X.690 8.1)."""
    at = 0
    while at < len(der):
        tag, size, at = der[at], der[at + 1], at + 2
        if size & 0x80:
            count = size & 0x7F
            size, at = int.from_bytes(der[at : at + count], "big"), at + count
        yield tag, der[at : at + size]
        at += size


def _validity_in(path: Path) -> Validity | None:
    try:
        return validity_of(path.read_text())
    except ValueError as error:
        _log.error("cannot read when %s is valid: %s", path, error)
        return None


def _file_stamp(path: Path) -> tuple[int, int, int]:
    try:
        stat = path.stat()
    except OSError as error:
        return (error.errno or 0, 0, 0)
    return (stat.st_mtime_ns, stat.st_ino, stat.st_size)


def _new_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
