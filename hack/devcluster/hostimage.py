"""An image of this machine's own shell, Python and small libraries, without any of the driver's, for tenants on a
machine that can pull none: whatever CUDA finds in it came there through NVIDIA's container toolkit.

PyTorch is too large to copy; pods mount its folders read-only from the host.
"""

import io
import json
import os
import tarfile
from collections.abc import Collection, Sequence
from pathlib import Path

from devcluster import archive, progress
from devcluster.driver import LIBRARIES
from devcluster.progress import Failed

LARGEST_LIBRARY, LARGEST_PROGRAM = 12 << 20, 8 << 20
# The driver's and CUDA's libraries, and compilers'
LEFT_OUT = (
    "libcuda",
    "libnvidia",
    "libnv",
    "libcu",
    "libnpp",
    "libLLVM",
    "libclang",
    "libgo.",
    "libasan",
    "libtsan",
    "libnccl",
)
PLAIN_PYTHON = "/usr/bin/python3"  # the system's, in the image
DIRECTORIES = {"tmp": 0o1777, "root": 0o700} | dict.fromkeys(("etc", "proc", "sys", "dev", "run", "jobs"), 0o755)
SETTINGS = ("/etc/ld.so.conf", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf")
# Compiled files stay: without them every pod would compile what it imports.
UNNEEDED_PYTHON = {"test", "idlelib", "tkinter", "ensurepip", "lib2to3", "dist-packages"}
# the interpreter says where it is, and from where it imports
_PROBE = "import json, sys, torch; print(json.dumps([sys.executable, sys.base_prefix, sys.prefix, *sys.path]))"


def write(out: Path, name: str) -> None:
    """Write a docker-archive of the image `name`."""
    layer = out.with_suffix(".tenant-layer")
    with tarfile.open(layer, "w") as tar:
        for link in ("bin", "sbin", "lib", "lib64"):
            if Path("/", link).is_symlink():
                member = tarfile.TarInfo(link)
                member.type, member.linkname = tarfile.SYMTYPE, str(Path("/", link).readlink())
                tar.addfile(member)
        for directory, mode in DIRECTORIES.items():
            member = tarfile.TarInfo(directory)
            member.type, member.mode = tarfile.DIRTYPE, mode
            tar.addfile(member)
        for path in _files():
            _add(tar, path)
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [archive.digest_of(layer)]},
    }
    archive.write_layers(out, name, config, [layer])
    layer.unlink()


def _files() -> list[Path]:
    found = [path for path in sorted(LIBRARIES.iterdir()) if ".so" in path.name and _fits(path, LARGEST_LIBRARY)]
    found += [path for path in (Path("/usr/lib64/ld-linux-x86-64.so.2"),) if path.exists()]
    programs = sorted(Path("/usr/bin").iterdir())
    found += [path for path in programs if not path.name.startswith("nvidia") and _fits(path, LARGEST_PROGRAM)]
    found += [
        path for path in map(Path, ("/usr/sbin/ldconfig", "/usr/sbin/ldconfig.real", *SETTINGS)) if path.exists()
    ]
    return found + [path for library in _standard_libraries() for path in _below(library)]


def _fits(path: Path, most: int) -> bool:
    if path.name.startswith(LEFT_OUT):
        return False
    return path.is_symlink() or (path.is_file() and path.stat().st_size < most)


def _standard_libraries() -> list[Path]:
    """Return the system's Python 3 libraries, which a virtual environment refers to."""
    return [path for path in Path("/usr/lib").glob("python3*") if path.is_dir()]


def _below(root: Path) -> list[Path]:
    found = []
    for place, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in UNNEEDED_PYTHON]
        found += [Path(place, name) for name in names]
    return found


def _add(tar: tarfile.TarFile, path: Path) -> None:
    member = tar.gettarinfo(path, arcname=str(path).lstrip("/"))
    member.uid = member.gid = 0
    if member.islnk():  # a second name of a file: here a file of its own
        member.type, member.linkname, member.size = tarfile.REGTYPE, "", path.stat().st_size
    if member.isreg():
        with path.open("rb") as data:
            tar.addfile(member, data)
    else:
        tar.addfile(member, io.BytesIO())


def python() -> tuple[str, list[str]]:
    """Return the interpreter that has PyTorch (GPU_PYTHON, else python3), and the folders a pod has to mount."""
    program = os.environ.get("GPU_PYTHON", "python3")
    try:
        output = progress.run([program, "-I", "-c", _PROBE], timeout_seconds=120)
    except Failed as failed:
        raise Failed(f"{program} has no PyTorch: set GPU_PYTHON to one that has. {failed}") from None
    executable, *folders = json.loads(output.strip().splitlines()[-1])
    return executable, outermost(folders, {str(path) for path in _standard_libraries()})


def outermost(folders: Sequence[str], in_image: Collection[str]) -> list[str]:
    """Return the folders that hold all of `folders`, without what the image has and without the whole system."""
    found: list[str] = []
    for folder in sorted({folder for folder in folders if Path(folder).is_dir()}, key=len):
        if folder not in {"/", "/usr"} and not any(
            f"{folder}/".startswith(f"{one}/") for one in (*found, *in_image)
        ):
            found.append(folder)
    return found
