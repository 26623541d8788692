"""`make gpu-bundle`: what hack/gpu/cluster needs on a machine without network, in two parts that travel apart.

    OUT/cluster/    Kubernetes, etcd, containerd, runc, CNI plugins, NVIDIA's container toolkit
    OUT/gpushare/   gpushare's image, layer by layer, and helm

Each part is a folder of compressed pieces beside `bundle.json`, which names them; certificates are made
over there.
"""

import io
import json
import re
import shutil
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from devcluster import backends, debian, image, pieces, tools
from devcluster.progress import Failed, say, step
from devcluster.settings import KUBERNETES_VERSION, SCHEDULER_IMAGE

PART_MIB = 56  # with the checkout's own 8 MiB it fits into the 64 MiB that are often the limit of one transfer
OWN_LAYERS = 2  # the image's last layers, dependencies and code: they travel byte for byte
LIBRARIES = "/usr/lib/x86_64-linux-gnu"

# What no part of gpushare touches in its image's base: half of what would travel.
_SHARE = "perl perl5 doc man locale info python-wheels common-licenses bash-completion lintian zoneinfo debconf"
_SHARE += " gcc keyrings"
_LIB = r"perl|gconv|e2fsprogs|lib(apt-|gnutls|db-|unistring|gcrypt|p11|hogweed|nettle|ext2fs|systemd|udev)"
_LIB += r"|lib(zstd|lz4|gmp|icu)"
_PROGRAMS = r"perl|(apt|dpkg|gpgv|mke2fs|e2fsck|fsck|mkfs|debugfs|tune2fs|resize2fs|dumpe2fs|e2)"
_PYTHON = "ensurepip|lib2to3|pydoc_data|test|idlelib|distutils"
NEEDLESS = re.compile(
    rf"(\./)?(usr/share/({'|'.join(_SHARE.split())})(/|$)|usr/lib/[^/]*-linux-gnu/({_LIB})|usr/s?bin/({_PROGRAMS})"
    rf"|usr/lib/(apt|dpkg)|var/lib/(dpkg|apt)/|var/(cache|log)|usr/lib/python3\.?\d*/({_PYTHON})"
    r"|usr/lib/python3/dist-packages/pip)"
)


def make(out: Path) -> None:
    """Make both parts; what did not change since the last time is taken from the cache."""
    with step("making the bundle"):
        for part, content in (("cluster", _cluster_pieces()), ("gpushare", _gpushare_pieces())):
            _write(out / part, *content)


def _cluster_pieces() -> tuple[dict[str, object], dict[str, bytes]]:
    tools.install_packages()
    programs = {f"bin/{name}": _found(name) for name in ("etcd", "containerd", "containerd-shim-runc-v2", "ctr")}
    programs |= {f"bin/{name}": _found(name) for name in ("runc", "openssl")}
    programs |= {f"cni/{name}": tools.CNI_DIRECTORY / name for name in ("bridge", "host-local", "loopback")}
    programs |= {
        f"lib/{name}": Path(LIBRARIES, name) for name in ("libseccomp.so.2", "libssl.so.3", "libcrypto.so.3")
    }
    programs |= {"bin/pause": tools.pause(), "bin/busybox": debian.busybox()}
    toolkit = tools.nvidia_toolkit()
    return {"kubernetes": KUBERNETES_VERSION}, {
        "kubernetes.tar": pieces.archive_of({"bin/kube": tools.kubernetes()}),
        "programs.tar": pieces.archive_of(programs),
        "nvidia.tar": pieces.archive_of({f"bin/{name}": toolkit / name for name in tools.NVIDIA_TOOLKIT_PROGRAMS}),
    }


def _found(program: str) -> Path:
    place = shutil.which(program)
    if place is None:
        raise Failed(f"{program} is not installed")
    return Path(place).resolve()


def _gpushare_pieces() -> tuple[dict[str, object], dict[str, bytes]]:
    name, archive = image.build(docker=backends.docker_answers())
    with tarfile.open(archive) as tar:
        manifest = json.loads(_member(tar, "manifest.json"))[0]
        config = json.loads(_member(tar, manifest["Config"]))
        config.pop("history", None)
        layers = dict(_layers(tar, manifest["Layers"]))
    config["rootfs"]["diff_ids"] = [pieces.digest(layer) for layer in layers.values()]
    facts = {
        "image": name,
        "scheduler": f"{SCHEDULER_IMAGE}:v{KUBERNETES_VERSION}",
        "config": config,
        "layers": list(layers),
    }
    return facts, {"helm.tar": pieces.archive_of({"bin/helm": tools.helm()}), **layers}


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    data = tar.extractfile(name)
    if data is None:
        raise Failed(f"the image's archive has no {name}")
    return data.read()


def _layers(tar: tarfile.TarFile, names: list[str]) -> Iterator[tuple[str, bytes]]:
    for number, name in enumerate(names):
        layer = _member(tar, name)
        yield f"layer-{number}.tar", layer if number >= len(names) - OWN_LAYERS else _trimmed(layer)


def _trimmed(layer: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(layer)) as source, tarfile.open(fileobj=out, mode="w") as kept:
        for member in source:
            if not NEEDLESS.match(member.name):
                kept.addfile(member, source.extractfile(member) if member.isreg() else None)
    return out.getvalue()


def _write(folder: Path, facts: dict[str, object], content: dict[str, bytes]) -> None:
    with ThreadPoolExecutor(max_workers=2) as pool:
        made = dict(zip(content, pool.map(pieces.compressed, content, content.values()), strict=True))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, piece in made.items():
        shutil.copyfile(piece, folder / f"{name}.xz")
    (folder / "bundle.json").write_text(json.dumps({**facts, "pieces": [f"{name}.xz" for name in made]}, indent=1))
    size = sum(path.stat().st_size for path in folder.iterdir()) / (1 << 20)
    say(f"{folder}: {size:.1f} MiB")
    if size > PART_MIB:
        raise Failed(f"{folder} has {size:.1f} MiB, more than {PART_MIB}: move a piece to the other part")
