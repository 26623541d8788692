"""The MPS daemon of one collection: multi-user, in directories of its own, ended afterwards."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PLACES = ("/usr/local/nvidia/bin", "/usr/bin", "/usr/local/cuda/bin", "/usr/local/bin")
_SECONDS = 15.0


def find_control() -> str:
    """Find nvidia-cuda-mps-control.

    Raises:
        RuntimeError: it is not installed.
    """
    found = shutil.which("nvidia-cuda-mps-control", path=os.pathsep.join((os.environ.get("PATH", ""), *_PLACES)))
    if found is None:
        raise RuntimeError("nvidia-cuda-mps-control is not installed; MPS comes with the driver's utilities")
    return found


@contextlib.contextmanager
def mps_daemon() -> Iterator[dict[str, str]]:
    """Start a daemon with its server, yield the environment that its clients need, and end it afterwards."""
    control = find_control()
    root = Path(tempfile.mkdtemp(prefix="gpushare-calibrate-"))
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(root / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(root / "log")}
    for place in environment.values():
        Path(place).mkdir()
    full = {**os.environ, **environment}

    def command(text: str) -> None:
        subprocess.run(
            [control], input=text + "\n", env=full, text=True, timeout=_SECONDS, check=False, capture_output=True
        )

    subprocess.run([control, "-d"], env=full, timeout=_SECONDS, check=True, capture_output=True)
    try:
        command(f"start_server -uid {os.getuid()}")
        yield environment
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            command("quit -t 5")
        shutil.rmtree(root, ignore_errors=True)
