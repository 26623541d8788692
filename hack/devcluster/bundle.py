"""`make gpu-bundle`: what hack/gpu/cluster needs on a machine without network, in two parts that travel apart.

    OUT/cluster/    Kubernetes, etcd, containerd, runc, CNI plugins, NVIDIA's container toolkit
    OUT/gpushare/   gpushare's image, layer by layer, and helm

Each part is a folder of compressed pieces beside `bundle.json`, which names them; certificates are made
over there. Where the second part leaves no room for the checkout in one transfer, the first, which is always
unpacked before it, takes some of its pieces.
"""

import io
import json
import re
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path

from devcluster import backends, debian, image, pieces, tools
from devcluster.progress import Failed, run, say, step
from devcluster.settings import KUBERNETES_VERSION, REPOSITORY, SCHEDULER_IMAGE, containerd_major

MIB = 1 << 20
SLACK_BYTES = MIB // 4  # bundle.json, folders, and the few lines that the checkout grows by until it is carried
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


def make(out: Path, transfer_mib: float | None = None) -> None:
    """Make both parts; what did not change since the last time is taken from the cache.

    Args:
        transfer_mib: what the machine takes in at once, one part and the checkout; None: anything.
    """
    with step("making the bundle"):
        facts, made = {}, {}
        for part, (told, unpacked) in (("cluster", _cluster_pieces()), ("gpushare", _gpushare_pieces())):
            facts[part], made[part] = told, _compressed(unpacked)
        checkout = checkout_bytes(REPOSITORY, out)
        sizes = {part: {name: piece.stat().st_size for name, piece in made[part].items()} for part in made}
        moved: tuple[str, ...] = ()
        if transfer_mib is not None:
            moved = pieces_to_move(sizes["cluster"], sizes["gpushare"], checkout, int(transfer_mib * MIB))
        if moved:
            say(f"beside the checkout, gpushare's part has no room for {', '.join(moved)}: the cluster's takes it")
        made["cluster"] |= {name: made["gpushare"].pop(name) for name in moved}
        facts["cluster"]["layers"] = [name for name in moved if name.startswith("layer-")]
        for part, content in made.items():
            size = _write(out / part, facts[part], content)
            say(f"{out / part}: {size / MIB:.1f} MiB, with the checkout {(size + checkout) / MIB:.1f}")


def checkout_bytes(checkout: Path, bundle: Path) -> int:
    """Return the size of what travels of a checkout beside a part: all files that git does not ignore."""
    listed = run(["git", "-C", checkout, "ls-files", "-z", "--cached", "--others", "--exclude-standard"])
    files = {checkout / name for name in listed.split("\0") if name}
    return sum(file.lstat().st_size for file in files if file.is_file() and not file.is_relative_to(bundle))


def pieces_to_move(
    cluster: Mapping[str, int], gpushare: Mapping[str, int], checkout: int, transfer: int
) -> tuple[str, ...]:
    """Return the pieces that the cluster's part takes from gpushare's, the fewest bytes that make both travel.

    Args:
        cluster, gpushare: each piece's size in bytes.
        checkout: bytes that travel beside either part.
        transfer: bytes that travel at once.

    Raises:
        Failed: no split leaves room for the checkout.
    """
    room = transfer - checkout - SLACK_BYTES
    first, second = sum(cluster.values()), sum(gpushare.values())
    choices = (names for count in range(len(gpushare) + 1) for names in combinations(gpushare, count))
    sized = ((sum(gpushare[name] for name in names), names) for names in choices)
    fitting = [choice for choice in sized if first + choice[0] <= room and second - choice[0] <= room]
    if not fitting:
        raise Failed(
            f"{transfer / MIB:.1f} MiB travel at once, {checkout / MIB:.1f} MiB of them the checkout: a part of "
            f"{first / MIB:.1f} MiB and one of {second / MIB:.1f} MiB do not fit, however the second is split; "
            "take files from the checkout, or name by --limit what the machine takes in at once"
        )
    return min(fitting)[1]


def _cluster_pieces() -> tuple[dict[str, object], dict[str, bytes]]:
    tools.install_packages()
    own = tools.containerd()
    programs = {f"bin/{name}": own / name if own else _found(name) for name in tools.CONTAINERD_PROGRAMS}
    programs |= {f"bin/{name}": _found(name) for name in ("etcd", "runc", "openssl")}
    programs |= {f"cni/{name}": tools.CNI_DIRECTORY / name for name in ("bridge", "host-local", "loopback")}
    programs |= {
        f"lib/{name}": Path(LIBRARIES, name) for name in ("libseccomp.so.2", "libssl.so.3", "libcrypto.so.3")
    }
    programs |= {"bin/pause": tools.pause(), "bin/busybox": debian.busybox()}
    toolkit = tools.nvidia_toolkit()
    return {"kubernetes": KUBERNETES_VERSION, "containerd": containerd_major()}, {
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


def _compressed(content: Mapping[str, bytes]) -> dict[str, Path]:
    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(content, pool.map(pieces.compressed, content, content.values()), strict=True))


def _write(folder: Path, facts: Mapping[str, object], made: Mapping[str, Path]) -> int:
    """Write a part; return its size in bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, piece in made.items():
        shutil.copyfile(piece, folder / f"{name}.xz")
    (folder / "bundle.json").write_text(json.dumps({**facts, "pieces": [f"{name}.xz" for name in made]}, indent=1))
    return sum(path.stat().st_size for path in folder.iterdir())
