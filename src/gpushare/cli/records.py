"""What -o chooses: a table, a wider one, JSON or YAML."""

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer
import yaml


class Format(StrEnum):
    """The forms of an answer."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"

    @property
    def is_data(self) -> bool:
        """Return whether programs read it."""
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
    """As JSON would have it: no tuples, no enums."""
    return json.loads(json.dumps(value, default=str))
