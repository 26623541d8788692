"""Output formats of -o: a table, a wider one, JSON or YAML."""

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer
import yaml


class Format(StrEnum):
    """Output formats."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"

    @property
    def is_data(self) -> bool:
        """Return whether the output is for programs."""
        return self in {Format.JSON, Format.YAML}


FormatOption = Annotated[Format, typer.Option("--output", "-o", help="table, wide, json or yaml")]


def emit(records: Sequence[Mapping[str, Any]] | Mapping[str, Any], form: Format) -> None:
    """Print records for programs: JSON on one line, or YAML."""
    if form is Format.YAML:
        text = yaml.safe_dump(_plain(records), sort_keys=False, allow_unicode=True, width=1000)
    else:
        text = json.dumps(records, default=str) + "\n"
    typer.echo(text, nl=False)


def _plain(value: Any) -> Any:
    """Return a value as JSON has it, without tuples and enums."""
    return json.loads(json.dumps(value, default=str))
