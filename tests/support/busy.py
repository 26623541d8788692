"""Whether this machine has too much else to do to be held to times."""

import os

from bench.chaos.excuses import BUSY_LOAD_PER_CORE


def is_busy() -> bool:
    return os.getloadavg()[0] > BUSY_LOAD_PER_CORE * (os.cpu_count() or 1)
