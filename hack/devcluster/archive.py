"""Write small image archives without any container tool: one layer of given files."""

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write(
    out: Path,
    name: str,
    files: Mapping[str, Path],
    *,
    entrypoint: Sequence[str],
    links: Mapping[str, str] | None = None,
) -> None:
    """Write a docker-archive of the image `name` to `out`: `files` by their path in the image, and `links`."""
    layer = out.with_suffix(".layer")
    with tarfile.open(layer, "w") as tar:
        tmp = tarfile.TarInfo("tmp")
        tmp.type, tmp.mode = tarfile.DIRTYPE, 0o1777
        tar.addfile(tmp)
        for target, source in files.items():
            member = tar.gettarinfo(source.resolve(), arcname=target.lstrip("/"))
            member.uid = member.gid = 0
            member.mtime = 0
            with source.open("rb") as data:
                tar.addfile(member, data)
        for place, points_to in (links or {}).items():
            member = tarfile.TarInfo(place.lstrip("/"))
            member.type, member.linkname = tarfile.SYMTYPE, points_to
            tar.addfile(member)
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": list(entrypoint), "Env": ["PATH=/usr/local/bin:/usr/bin:/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [digest_of(layer)]},
    }
    write_layers(out, name, config, [layer])
    layer.unlink()


def write_layers(out: Path, name: str, config: Mapping[str, Any], layers: Sequence[Path]) -> None:
    """Write a docker-archive of an image that has these layers already; `config` names their digests."""
    body = json.dumps(config).encode()
    config_name = f"{hashlib.sha256(body).hexdigest()}.json"
    names = [f"layer-{number}.tar" for number in range(len(layers))]
    manifest = json.dumps([{"Config": config_name, "RepoTags": [name], "Layers": names}]).encode()
    with tarfile.open(out, "w") as tar:
        for member_name, content in ((config_name, body), ("manifest.json", manifest)):
            member = tarfile.TarInfo(member_name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for layer_name, layer in zip(names, layers, strict=True):
            tar.add(layer, arcname=layer_name)


def digest_of(layer: Path) -> str:
    with layer.open("rb") as data:
        return f"sha256:{hashlib.file_digest(data, 'sha256').hexdigest()}"
