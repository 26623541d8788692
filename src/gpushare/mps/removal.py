"""Remove what the MPS host leaves on its node after an orderly end: all files of GPUs without tenants."""

import contextlib
import json
import logging
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from gpushare.mps.actions import sync_control
from gpushare.mps.frozen import record_of
from gpushare.mps.layout import Decisions, GpuDirectory, status_reader

logger = logging.getLogger(__name__)
DAEMON_SECONDS: Final = 2.0  # a daemon without clients ends at once


def has_tenants(gpu: GpuDirectory) -> bool:
    """Return whether a pod is decided for the GPU or has clients on it, or if neither can be determined.

    Such a pod mounts the directory. After a removal its next process would find no gate, and run uncapped.
    """
    try:
        decided = bool(Decisions.from_json(json.loads(gpu.decisions.read_text())).pods)
    except FileNotFoundError:
        decided = False
    except (OSError, ValueError):
        return True
    status = status_reader(gpu).read()
    return decided or bool(status and status.clients)


def remove_unused(gpus: Iterable[GpuDirectory]) -> tuple[GpuDirectory, ...]:
    """End the daemons, and remove the directories of GPUs without tenants and an empty record of frozen pods.

    A GPU that is still exclusive keeps its directory too, because it contains the compute mode to restore.

    Returns:
        the GPUs whose directories stay.
    """
    listed = tuple(gpus)
    with ThreadPoolExecutor(max_workers=max(1, len(listed))) as pool:
        stay = tuple(gpu for gpu, gone in zip(listed, pool.map(_remove, listed), strict=True) if not gone)
    for base in {gpu.path.parent for gpu in listed}:
        with contextlib.suppress(OSError):  # the record still has a pod, or does not exist
            record_of(base).rmdir()
    return stay


def _remove(gpu: GpuDirectory) -> bool:
    if has_tenants(gpu):
        return False
    sync_control(gpu).stop(DAEMON_SECONDS)
    if has_tenants(gpu):  # a pod was decided meanwhile; the next host starts another daemon
        return False
    if gpu.compute_mode.exists():
        logger.info("%s stays for the agent, which has to set back the GPU's compute mode", gpu.path)
        return False
    try:
        shutil.rmtree(gpu.path)
    except OSError as error:
        logger.warning("%s is not removed: %s", gpu.path, error)
        return False
    logger.info("no pod has a share of %s: its daemon is ended and its directory removed", gpu.uuid)
    return True
