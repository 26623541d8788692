"""An agent without a cluster: the real plugin and its real registration, as a process of the front's.

Files in $AGENT_FOLDER say how it behaves. `hang`: the next Allocate is never answered. `crash`: each Allocate ends
the process. `fail`: it ends at its start, with status 3. `sick`: a GPU is unhealthy.
"""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.deviceplugin.fakes import GPU_A, GPU_B

from gpushare.core.gpu import GpuHealth, GpuInfo, Health
from gpushare.runtime.parent import end_with_parent
from gpushare_deviceplugin.plugin import DevicePlugin
from gpushare_deviceplugin.registration import Registrar
from gpushare_deviceplugin.state import NodeState

FOLDER = Path(os.environ["AGENT_FOLDER"])


class Plugin(DevicePlugin):
    """The real one, with the ways to go wrong."""

    async def Allocate(self, request: Any, context: Any) -> Any:
        if (FOLDER / "crash").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        if (FOLDER / "hang").exists():
            (FOLDER / "hang").unlink()
            await asyncio.Event().wait()
        return await super().Allocate(request, context)


async def look(state: NodeState) -> None:
    """Set the GPUs' health as the folder says."""
    while True:
        for uuid in (GPU_A, GPU_B):
            is_sick = (FOLDER / "sick").exists() and uuid == GPU_A
            state.set_health(uuid, GpuHealth(Health.UNHEALTHY, "XID 79") if is_sick else GpuHealth(Health.HEALTHY))
        await asyncio.sleep(0.02)


async def main() -> None:
    """Serve until SIGTERM."""
    written = FOLDER / "pid.new"
    written.write_text(str(os.getpid()))
    written.replace(FOLDER / "pid")  # who reads meanwhile finds a whole one
    state = NodeState(time.monotonic)
    state.set_gpus(tuple(GpuInfo(uuid, n, "NVIDIA H200", 143771, 132) for n, uuid in enumerate((GPU_A, GPU_B))))
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    looking = asyncio.create_task(look(state))
    plugin = Plugin(state, FOLDER)
    try:
        await Registrar(plugin, state, Path(os.environ["GPUSHARE_PLUGINS_DIRECTORY"])).run()
    except asyncio.CancelledError:
        looking.cancel()
        print("the agent was told to end", file=sys.stderr)


if __name__ == "__main__":
    end_with_parent()
    if (FOLDER / "fail").exists():
        sys.exit(3)
    asyncio.run(main())
