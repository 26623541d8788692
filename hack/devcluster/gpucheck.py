"""Check with nvidia-smi whether a cluster of ours can share this machine's GPUs; nothing is changed."""

import re
from collections.abc import Sequence
from pathlib import Path

from devcluster.progress import Failed

MINIMUM_DRIVER = 525  # gpushare.core.gpu's, which is not here where there is no checkout's environment
QUERY = ("--query-gpu=index,driver_version,mig.mode.current,compute_mode", "--format=csv,noheader")
OWN_DIRECTORY = "/run/gpushare"
MPS_PROGRAMS = "nvidia-cuda-mps"  # all that the kernel keeps of the daemon's and the server's names


def check(listed: str, strangers: Sequence[int]) -> None:
    """Refuse GPUs that cannot be shared.

    Args:
        listed: nvidia-smi's answer to QUERY; strangers: pids of MPS daemons that are not gpushare's.

    Raises:
        Failed: one sentence.
    """
    for line in listed.strip().splitlines():
        index, driver, mig, mode = (part.strip() for part in line.split(","))
        series = re.match(r"\d+", driver)
        if series and int(series[0]) < MINIMUM_DRIVER:
            raise Failed(f"the driver is {driver}, and gpushare needs {MINIMUM_DRIVER} or later")
        if mig == "Enabled":
            raise Failed(f"GPU {index} is in MIG mode, in which MPS cannot share it: nvidia-smi -i {index} -mig 0")
        if mode != "Default":
            raise Failed(
                f"GPU {index} is in compute mode {mode}, in which nothing can share it: "
                f"nvidia-smi -i {index} -c DEFAULT changes that"
            )
    if strangers:
        pids = ", ".join(map(str, strangers))
        raise Failed(f"MPS is run by somebody else on this machine (pid {pids}): end it first")


def foreign_mps(proc: Path = Path("/proc")) -> list[int]:
    """Return the pids of MPS daemons and servers that no gpushare of this machine has started."""
    found = []
    for comm in proc.glob("[0-9]*/comm"):
        try:
            if not comm.read_bytes().startswith(MPS_PROGRAMS.encode()):
                continue
            settings = (comm.parent / "environ").read_bytes().split(b"\0")
        except OSError:  # it ended meanwhile
            continue
        if not any(each.startswith(f"CUDA_MPS_PIPE_DIRECTORY={OWN_DIRECTORY}/".encode()) for each in settings):
            found.append(int(comm.parent.name))
    return sorted(found)
