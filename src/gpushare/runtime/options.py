"""Command-line options of a gpushare process, with defaults from environment variables `GPUSHARE_...`."""

import argparse
from collections.abc import Mapping
from typing import Final, Protocol

_PREFIX: Final = "GPUSHARE_"


class AddOption(Protocol):
    """Add the option `--name` to a parser; `extra` goes to `argparse` as it is."""

    def __call__(self, name: str, default: object, help_text: str, **extra: object) -> None:
        """Add one option."""
        ...


def options_of(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> AddOption:
    """Return an `add_option` whose default is `$GPUSHARE_<NAME>` where `environment` has it."""

    def add(name: str, default: object, help_text: str, **extra: object) -> None:
        variable = _PREFIX + name.upper().replace("-", "_")
        parser.add_argument(
            f"--{name}",
            default=environment.get(variable, default),
            help=f"{help_text} (env {variable})",
            **extra,  # type: ignore[arg-type]  # argparse's keywords vary by option
        )

    return add
