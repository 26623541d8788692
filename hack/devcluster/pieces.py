"""Compressed pieces of a bundle, each cached by its content: a changed image costs its changed layer only."""

import hashlib
import io
import lzma
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from devcluster import cache
from devcluster.progress import step

# The dictionary holds the whole Kubernetes binary; x86 code is shorter after its filter.
FILTERS = [
    {"id": lzma.FILTER_X86},
    {"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 128 << 20},
]
CHUNK = 1 << 20


def archive_of(files: Mapping[str, Path]) -> bytes:
    """Return a tar archive of `files` by their name in it; the same files give the same bytes."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, path in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size, member.mode = path.stat().st_size, 0o755
            with path.open("rb") as data:
                tar.addfile(member, data)
    return out.getvalue()


def compressed(name: str, data: bytes) -> Path:
    """Return the file with `data`, compressed."""

    def build(into: Path) -> None:
        with step(f"compressing {name}, {len(data) >> 20} MiB (once for this content)"):
            (into / "data.xz").write_bytes(lzma.compress(data, lzma.FORMAT_XZ, filters=FILTERS))

    return cache.cached("bundle-piece", cache.key_of(repr(FILTERS), data), build) / "data.xz"


def expand(piece: Path, out: IO[bytes]) -> None:
    """Write to `out` what a piece holds."""
    with lzma.open(piece, "rb") as data:
        while chunk := data.read(CHUNK):
            out.write(chunk)


def unpack(piece: Path, directory: Path) -> None:
    """Extract a piece that is an archive; others may be extracted beside it, into the same folders."""
    with lzma.open(piece, "rb") as data, tarfile.open(fileobj=data, mode="r|") as tar:
        for member in tar:
            (directory / member.name).parent.mkdir(parents=True, exist_ok=True)
            tar.extract(member, directory, filter="tar")


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
