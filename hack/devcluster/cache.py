"""A cache of build results keyed by the hash of their inputs; an entry appears complete or not at all."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from devcluster.settings import cache_dir


def key_of(*parts: str | bytes | Path) -> str:
    """Return the hash of strings and of files (for a directory: every file below it, by name and content)."""
    digest = hashlib.sha256()
    for part in parts:
        for name, data in _pieces(part):
            digest.update(len(name).to_bytes(4, "big") + name.encode() + len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:16]


def _pieces(part: str | bytes | Path) -> Iterable[tuple[str, bytes]]:
    if isinstance(part, str):
        yield "", part.encode()
    elif isinstance(part, bytes):
        yield "", part
    elif part.is_dir():
        for path in sorted(part.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield str(path.relative_to(part)), path.read_bytes()
    else:
        yield part.name, part.read_bytes()


def cached(kind: str, key: str, build: Callable[[Path], None]) -> Path:
    """Return the directory of this key; `build` fills a missing one, which is renamed into place when done."""
    target = cache_dir() / kind / key
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{key}.", dir=target.parent))
    try:
        build(work)
        work.chmod(0o755)
        try:
            work.rename(target)
        except OSError:  # another process built the same entry in the meantime
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def link(name: str, target: Path) -> Path:
    """Link an executable under a stable name in the cache's bin directory."""
    place = cache_dir() / "bin" / name
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.is_symlink() or place.readlink() != target:
        temporary = place.with_name(f".{name}.{os.getpid()}")
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        temporary.rename(place)
    return place
