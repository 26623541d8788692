"""Place NVIDIA's driver and container toolkit where their packages install them.

Some machines have the driver in a folder of its own (GPU_DRIVER_ROOT), its programs behind scripts. Only files
that are missing are placed, every one is recorded, and `Placed.remove` takes exactly those away again.
"""

import json
import os
import shutil
from pathlib import Path

from devcluster.progress import Failed, run

LIBRARIES = Path("/usr/lib/x86_64-linux-gnu")
PROGRAMS = Path("/usr/bin")
DRIVER_PROGRAMS = ("nvidia-smi", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server")
DRIVER_LIBRARIES = ("libcuda*.so*", "libnvidia*.so*", "libnvcuvid*.so*", "libnvoptix*.so*")
BEFORE = ".before-gpushare"
TOOLKIT_CONFIG = Path("/etc/nvidia-container-runtime/config.toml")
CDI_SPECIFICATION = Path("/var/run/cdi/nvidia.yaml")


class Placed:
    """The files that were put outside the state directory."""

    def __init__(self, record: Path) -> None:
        self._record = record

    def files(self) -> list[str]:
        return json.loads(self._record.read_text()) if self._record.exists() else []

    def copy(self, source: Path, target: Path) -> None:
        """Copy, links as links, unless something is there."""
        if os.path.lexists(target):
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        self._note(target)
        shutil.copy2(source, target, follow_symlinks=False)

    def replace(self, source: Path, target: Path) -> None:
        """Copy over what is there, and keep that beside it."""
        kept = target.with_name(target.name + BEFORE)
        if os.path.lexists(kept):  # an earlier attempt was interrupted: the existing file is ours
            target.unlink(missing_ok=True)
        elif os.path.lexists(target):
            self._note(kept)
            target.rename(kept)
        self.copy(source, target)

    def write(self, target: Path, text: str) -> None:
        if target.exists():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        self._note(target)
        target.write_text(text)

    def remove(self) -> None:
        """Take them away; what was kept goes back, and what was noted but not yet moved stays where it is."""
        names = self.files()
        for name in names:
            if not name.endswith(BEFORE) and name + BEFORE not in names:
                Path(name).unlink(missing_ok=True)
        for name in names:
            if name.endswith(BEFORE) and os.path.lexists(name):
                Path(name).replace(name.removesuffix(BEFORE))

    def forget(self) -> None:
        """Drop the record, once all of it is taken away."""
        self._record.unlink(missing_ok=True)

    def _note(self, target: Path) -> None:
        """Record the files before anything is moved or written, so that an interruption leaves nothing unknown."""
        self._record.parent.mkdir(parents=True, exist_ok=True)
        self._record.write_text(json.dumps([*self.files(), str(target)]))


def install(placed: Placed) -> None:
    """Place the driver's libraries and programs where they are missing, and see that the driver answers."""
    root = driver_root()
    if not (LIBRARIES / "libcuda.so.1").exists():
        for pattern in DRIVER_LIBRARIES:
            for library in sorted((root / "lib64").glob(pattern)):
                placed.copy(library, LIBRARIES / library.name)
    for program in DRIVER_PROGRAMS:
        found = next((path for path in sorted(root.rglob(f"*{program}*")) if is_elf(path)), None)
        if found is not None and not is_elf(PROGRAMS / program):  # a wrapper script of the program is not enough
            placed.replace(found.resolve(), PROGRAMS / program)
    _forget(root)
    run(["ldconfig"], timeout_seconds=60)
    missing = [program for program in DRIVER_PROGRAMS if shutil.which(program) is None]
    if missing:
        raise Failed(f"no {', '.join(missing)}: install NVIDIA's driver, or set GPU_DRIVER_ROOT to its folder")
    listed = run([PROGRAMS / "nvidia-smi", "-L"], timeout_seconds=60)
    if "GPU 0" not in listed:
        raise Failed(f"nvidia-smi lists no GPU: {listed.strip()[:200]}")


def driver_root() -> Path:
    return Path(os.environ.get("GPU_DRIVER_ROOT", "/usr/local/nvidia"))


def is_elf(path: Path) -> bool:
    try:
        with path.open("rb") as data:
            return data.read(4) == b"\x7fELF"
    except OSError:
        return False


def _forget(root: Path) -> None:
    """Leave the driver's own folder out of this process's paths and those of what it starts."""
    path = [part for part in os.environ.get("PATH", "").split(os.pathsep) if not part.startswith(str(root))]
    os.environ["PATH"] = os.pathsep.join(path)
    os.environ.pop("LD_LIBRARY_PATH", None)


def install_toolkit(placed: Placed, programs: Path, log: Path) -> None:
    """Place NVIDIA's container toolkit and its configuration, where the machine has none."""
    for program in ("nvidia-container-runtime", "nvidia-ctk", "nvidia-cdi-hook", "runc"):
        placed.copy(programs / program, PROGRAMS / program)
    placed.write(
        TOOLKIT_CONFIG,
        f"""[nvidia-container-cli]
root = "/"
load-kmods = false
[nvidia-container-runtime]
debug = "{log}"
log-level = "info"
mode = "auto"
runtimes = ["runc"]
""",
    )


def specify(placed: Placed, work: Path) -> None:
    """Write the CDI specification of the machine's GPUs by UUID, as the toolkit's nvidia-cdi-refresh keeps it."""
    work.mkdir(parents=True, exist_ok=True)
    written = work / CDI_SPECIFICATION.name
    command = [PROGRAMS / "nvidia-ctk", "cdi", "generate", "--device-name-strategy=uuid", f"--output={written}"]
    run(command, timeout_seconds=60)
    placed.copy(written, CDI_SPECIFICATION)
