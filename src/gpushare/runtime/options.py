"""What a gpushare process is told: command-line options, and environment variables `GPUSHARE_...`.

The extender and the agent have an option for each variable (`options_of`). The operator and admission, whose
command lines are Kopf's and nearly empty, read variables alone (`Variables`). The MPS host and its children have
options alone, which the host passes on. An empty variable is one that was not given: a chart renders it so.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

_PREFIX: Final = "GPUSHARE_"


class VariableError(ValueError):
    """A variable's value cannot be used; one sentence that names both."""


@dataclass(frozen=True, slots=True)
class Variables:
    """A process's variables, by their names without `GPUSHARE_`, written as options are: `max-selectors`.

    Every method raises VariableError where a value is not what it should be.
    """

    environment: Mapping[str, str]

    def text(self, name: str, default: str = "") -> str:
        """Return a value as it is."""
        return self.environment.get(variable_of(name)) or default

    def one_of(self, name: str, choices: Iterable[str], default: str) -> str:
        """Return one of some words."""
        value, allowed = self.text(name, default), tuple(choices)
        if value not in allowed:
            raise VariableError(f'{variable_of(name)}: "{value}" is not one of {", ".join(allowed)}')
        return value

    def flag(self, name: str) -> bool:
        """Return whether it is true; default: false."""
        return self.one_of(name, ("true", "false"), "false") == "true"

    def count(self, name: str, default: int, *, least: int = 0) -> int:
        """Return a whole number."""
        value = self.text(name, str(default))
        if not value.isdecimal() or int(value) < least:
            raise VariableError(f'{variable_of(name)}: "{value}" is not a whole number from {least}')
        return int(value)

    def words(self, name: str) -> tuple[str, ...]:
        """Return what stands between commas and spaces."""
        return tuple(self.text(name).replace(",", " ").split())


def variable_of(name: str) -> str:
    """Return the variable of an option's name."""
    return _PREFIX + name.upper().replace("-", "_")


class AddOption(Protocol):
    """Add the option `--name` to a parser; `extra` goes to `argparse` as it is."""

    def __call__(self, name: str, default: object, help_text: str, **extra: object) -> None:
        """Add one option."""
        ...


def options_of(parser: argparse.ArgumentParser, environment: Mapping[str, str] | None) -> AddOption:
    """Return an `add_option` whose default is `$GPUSHARE_<NAME>` where `environment` has it; None: no variables.

    argparse does not hold a default to the choices, so a variable's value is held to them here. An empty variable
    is none where only some words or numbers are allowed: a chart renders a value so that it was not given.
    """

    def add(name: str, default: object, help_text: str, **extra: object) -> None:
        variable = variable_of(name)
        value = None if environment is None else environment.get(variable)
        choices = extra.get("choices")
        if value == "" and (choices is not None or "type" in extra):
            value = None
        if value is not None and isinstance(choices, Sequence) and value not in choices:
            parser.error(f'{variable}: "{value}" is not one of {", ".join(map(str, choices))}')
        parser.add_argument(
            f"--{name}",
            default=default if value is None else value,
            help=help_text if environment is None else f"{help_text} (env {variable})",
            **extra,  # type: ignore[arg-type]  # argparse's keywords vary by option
        )

    return add
