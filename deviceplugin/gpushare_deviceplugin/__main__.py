"""`python -m gpushare_deviceplugin`: the node agent."""

import asyncio
import contextlib
import signal
import sys

from gpushare.runtime.logs import set_up_logging
from gpushare.runtime.parent import end_with_parent
from gpushare_deviceplugin import frugal
from gpushare_deviceplugin.options import AgentOptions, parse_options

LINGER_SECONDS = 1.0
"""Wait after SIGTERM: by then kubelet has admitted pods that were bound before we seemed to leave (ADR 0160)."""


async def _until_stopped(options: AgentOptions) -> None:
    """Run until SIGTERM or SIGINT; stopping changes nothing for the pods."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, lambda: loop.call_later(LINGER_SECONDS, task.cancel))
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    from gpushare_deviceplugin.agent import run_agent  # noqa: PLC0415 - after frugal.before_imports

    with contextlib.suppress(asyncio.CancelledError):
        await run_agent(options)


def main() -> None:
    """Run the agent with the command line's options."""
    options = parse_options(sys.argv[1:])
    if options.plugins_directory is not None:
        end_with_parent()  # end with the front: two agents must not serve one node
    frugal.before_imports()
    set_up_logging(options.log_level)
    asyncio.run(_until_stopped(options))


if __name__ == "__main__":
    main()
