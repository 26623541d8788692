"""The messages that a front leaves to the one that takes its place: a file in the folder that both share."""

import contextlib
import logging
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_log = logging.getLogger(__name__)
_HEADER: Final = struct.Struct(">4sLLL")  # (_MAGIC, length of each of the three)
_MAGIC: Final = b"gsf1"


@dataclass(frozen=True, slots=True)
class KubeletMessages:
    """The agent's messages that kubelet gets while no agent serves, as raw bytes.

    Attributes:
        registration: its last RegisterRequest.
        devices: its last ListAndWatchResponse.
        options: its DevicePluginOptions; empty until kubelet has asked for them.
    """

    registration: bytes
    devices: bytes
    options: bytes = b""


class KeptFile:
    """The file, replaced as a whole; one thread at a time may use it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> KubeletMessages | None:
        """Return what the front before left; None if it left nothing, or nothing whole."""
        try:
            content = self._path.read_bytes()
        except OSError:
            return None
        if len(content) < _HEADER.size:
            return None
        magic, *lengths = _HEADER.unpack_from(content)
        if magic != _MAGIC or len(content) != _HEADER.size + sum(lengths):
            return None
        parts, start = [], _HEADER.size
        for length in lengths:
            parts.append(content[start : start + length])
            start += length
        return KubeletMessages(*parts)

    def write(self, messages: KubeletMessages) -> None:
        """Replace what is kept; where that fails, keep nothing, as an old list could offer what is gone."""
        parts = (messages.registration, messages.devices, messages.options)
        content = _HEADER.pack(_MAGIC, *map(len, parts)) + b"".join(parts)
        new = self._path.with_suffix(".new")
        try:
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            new.replace(self._path)
        except OSError as error:
            _log.warning("a front that takes over would know no list: %s", error.strerror or error)
            self.remove()

    def remove(self) -> None:
        """Keep nothing."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
