"""Command-line options of a gpushare process, with defaults from environment variables `GPUSHARE_...`."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

_PREFIX: Final = "GPUSHARE_"


class AddOption(Protocol):
    """Add the option `--name` to a parser; `extra` goes to `argparse` as it is."""

    def __call__(self, name: str, default: object, help_text: str, **extra: object) -> None:
        """Add one option."""
        ...


def options_of(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> AddOption:
    """Return an `add_option` whose default is `$GPUSHARE_<NAME>` where `environment` has it.

    argparse does not hold a default to the choices, so a variable's value is held to them here. An empty variable
    is none where only some words or numbers are allowed: a chart renders a value so that it was not given.
    """

    def add(name: str, default: object, help_text: str, **extra: object) -> None:
        variable = _PREFIX + name.upper().replace("-", "_")
        value = environment.get(variable)
        choices = extra.get("choices")
        if value == "" and (choices is not None or "type" in extra):
            value = None
        if value is not None and isinstance(choices, Sequence) and value not in choices:
            parser.error(f'{variable}: "{value}" is not one of {", ".join(map(str, choices))}')
        parser.add_argument(
            f"--{name}",
            default=default if value is None else value,
            help=f"{help_text} (env {variable})",
            **extra,  # type: ignore[arg-type]  # argparse's keywords vary by option
        )

    return add
