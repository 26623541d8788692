"""Log set-up of every gpushare process: lines on stderr with time, level and component."""

import logging
import os
import sys
from collections.abc import Mapping
from typing import Final

LOG_LEVEL: Final = "GPUSHARE_LOG_LEVEL"
LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s %(message)s"


def log_level_of(environment: Mapping[str, str] = os.environ) -> str:
    """Return the level that the environment sets, else INFO."""
    return environment.get(LOG_LEVEL) or "INFO"


def set_up_logging(level: str) -> None:
    """Start logging from this level on.

    Raises:
        SystemExit: there is no such level; it carries a sentence for stderr.
    """
    if level.upper() not in LEVELS:
        sys.exit(f'{LOG_LEVEL}, --log-level: "{level}" is not one of {", ".join(LEVELS)}')
    logging.basicConfig(level=level.upper(), format=_FORMAT)
