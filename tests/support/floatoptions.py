"""Which options of a program take numbers, by its own parser, so that a new option is among them."""

import argparse
import contextlib
from collections.abc import Callable, Mapping, Sequence

import pytest


def float_options(parse: Callable[[Sequence[str], Mapping[str, str]], object]) -> list[str]:
    """Names of the options whose default is a number that may be a fraction, whoever checks it."""
    found: list[str] = []

    class Seen(Exception):
        """The parser is complete."""

    def note(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        found.extend(
            each.option_strings[0]
            for each in parser._actions
            if each.type is float or (each.type is None and _is_number(each.default))
        )
        raise Seen

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Seen):
        patch.setattr(argparse.ArgumentParser, "parse_args", note)
        parse([], {})
    return found


def _is_number(value: object) -> bool:
    try:
        float(str(value))
    except ValueError:
        return False
    return True
