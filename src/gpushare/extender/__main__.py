"""`python -m gpushare.extender`: the scheduler extender."""

import asyncio
import signal
import sys

from gpushare.extender.options import ExtenderOptions, parse_options
from gpushare.extender.server import serve
from gpushare.kube import ApiError, connect
from gpushare.runtime.logs import set_up_logging


async def _until_stopped(options: ExtenderOptions) -> None:
    """Run until SIGTERM or SIGINT; stopping does not affect running pods."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    async with connect(options.kubeconfig, field_manager="gpushare-extender") as api:
        await serve(api, options)


def main() -> None:
    """Run the extender with the command line's options."""
    options = parse_options(sys.argv[1:])
    set_up_logging(options.log_level)
    try:
        asyncio.run(_until_stopped(options))
    except ApiError as error:
        sys.exit(f"gpushare-extender: {error}")


if __name__ == "__main__":
    main()
