"""Options of a gpushare process: command-line options, and environment variables `GPUSHARE_...`.

The extender and the agent have an option for each variable (`options_of`). The operator and admission, whose
command lines are Kopf's and nearly empty, read only variables (`Variables`). The MPS host and its children have
only options, which the host passes on. An empty variable counts as not given, because a chart renders unset values
so.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

_PREFIX: Final = "GPUSHARE_"


class VariableError(ValueError):
    """A variable's value cannot be used; the message is one sentence that names both."""


@dataclass(frozen=True, slots=True)
class Variables:
    """A process's variables, by their names without `GPUSHARE_`, written like options: `max-selectors`.

    Every method raises VariableError for an invalid value.
    """

    environment: Mapping[str, str]

    def text(self, name: str, default: str = "") -> str:
        """Return a value unchanged."""
        return self.environment.get(variable_of(name)) or default

    def one_of(self, name: str, choices: Iterable[str], default: str) -> str:
        """Return a value that must be one of some words."""
        value, allowed = self.text(name, default), tuple(choices)
        if value not in allowed:
            raise VariableError(f'{variable_of(name)}: "{value}" is not one of {", ".join(allowed)}')
        return value

    def flag(self, name: str) -> bool:
        """Return a boolean value; the default is False."""
        return self.one_of(name, ("true", "false"), "false") == "true"

    def count(self, name: str, default: int, *, least: int = 0) -> int:
        """Return a whole number."""
        value = self.text(name, str(default))
        if not value.isdecimal() or int(value) < least:
            raise VariableError(f'{variable_of(name)}: "{value}" is not a whole number from {least}')
        return int(value)

    def words(self, name: str) -> tuple[str, ...]:
        """Return the words of a value, separated by commas and spaces."""
        return tuple(self.text(name).replace(",", " ").split())


def variable_of(name: str) -> str:
    """Return the name of the variable for an option."""
    return _PREFIX + name.upper().replace("-", "_")


class AddOption(Protocol):
    """Function that adds the option `--name` to a parser; `extra` is passed to `argparse`."""

    def __call__(self, name: str, default: object, help_text: str, **extra: object) -> None:
        """Add one option."""
        ...


def options_of(parser: argparse.ArgumentParser, environment: Mapping[str, str] | None) -> AddOption:
    """Return an `add_option` whose default is `$GPUSHARE_<NAME>` if `environment` has it; None: no variables.

    argparse does not check defaults against the choices, so the values of variables are checked here. If only some
    words or numbers are allowed, an empty variable counts as not given, because a chart renders unset values so.
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
