"""The server's certificate: read from files and reloaded when they change, without a restart."""

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

_log = logging.getLogger(__name__)
CHECK_SECONDS: Final = 10.0  # kubelet itself takes about a minute to renew a mounted Secret


class Certificate:
    """`tls.crt` and `tls.key` of a directory in an SSLContext; new connections use the newest valid pair.

    Raises:
        ssl.SSLError, OSError: by the constructor, when there is no usable pair.

    Attributes:
        context: for the server; always the same object.
        reloads: how often a new pair was loaded; failures: how often loading failed.
    """

    def __init__(self, directory: Path) -> None:
        self._pair = (directory / "tls.crt", directory / "tls.key")
        self.context = _new_context()
        self.reloads = 0
        self.failures = 0
        self._last_error = ""
        self._seen = self._stamp()
        self.context.load_cert_chain(*self._pair)

    def reload_if_changed(self) -> bool:
        """Load a changed pair; log a broken one once and keep the old one in use."""
        try:
            stamp = self._stamp()
            if stamp == self._seen:
                return False
            self._seen = stamp
            _new_context().load_cert_chain(*self._pair)  # a wrong key must not reach the live context
            self.context.load_cert_chain(*self._pair)
        except (
            OSError
        ) as error:  # ssl.SSLError is an OSError; the files may be half-written, so the next change is tried again
            self.failures += 1
            if str(error) != self._last_error:
                _log.error("new certificate cannot be used, the old one stays: %s", error)
            self._last_error = str(error)
            return False
        self._last_error = ""
        self.reloads += 1
        _log.info("new certificate taken up")
        return True

    async def keep(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Check for a new pair until cancelled."""
        while True:
            await sleep(CHECK_SECONDS)
            await asyncio.to_thread(self.reload_if_changed)

    def _stamp(self) -> tuple[tuple[int, int, int], ...]:
        """Return a value that changes when a file is rewritten or a Secret's symlink is swapped."""
        stats = [path.stat() for path in self._pair]
        return tuple((stat.st_mtime_ns, stat.st_ino, stat.st_size) for stat in stats)


def _new_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
