"""Options of a part of gpushare: command line first, then GPUSHARE_... of the environment, then default."""

import argparse
from collections.abc import Mapping
from typing import Final, Protocol

_PREFIX: Final = "GPUSHARE_"


class AddOption(Protocol):
    """Adds `--name` to a parser, `extra` being argparse's own keywords."""

    def __call__(self, name: str, default: object, help_text: str, **extra: object) -> None:
        """Add one option."""
        ...


def options_of(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> AddOption:
    """What adds options to this parser whose defaults this environment may change."""

    def add(name: str, default: object, help_text: str, **extra: object) -> None:
        variable = _PREFIX + name.upper().replace("-", "_")
        parser.add_argument(
            f"--{name}",
            default=environment.get(variable, default),
            help=f"{help_text} (env {variable})",
            **extra,  # type: ignore[arg-type]  # argparse's keywords vary by option
        )

    return add
