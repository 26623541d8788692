"""Kubernetes quantities: "250m", "8Gi", "1e3"."""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Final

MOST_MILLI: Final = 2**40
"""Most CPU that any amount counts as, a thousand million cores; a million such amounts still add up in 64 bits."""
MOST_BYTES: Final = 2**60
"""Most memory that any amount counts as, an exbibyte; it is added up in MiB."""
MOST_COUNT: Final = 2**40
"""Most of an extended resource that any amount counts as."""
_LONGEST: Final = 64  # the API server writes far shorter amounts
_QUANTITY: Final = re.compile(
    r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?)([numkMGTPE]|[KMGTPE]i|)"
)
_SUFFIXES: Final[Mapping[str, Decimal]] = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "": Decimal(1),
    "k": Decimal(10**3),
    "M": Decimal(10**6),
    "G": Decimal(10**9),
    "T": Decimal(10**12),
    "P": Decimal(10**15),
    "E": Decimal(10**18),
    "Ki": Decimal(2**10),
    "Mi": Decimal(2**20),
    "Gi": Decimal(2**30),
    "Ti": Decimal(2**40),
    "Pi": Decimal(2**50),
    "Ei": Decimal(2**60),
}


def parse_quantity(text: str | int) -> Decimal:
    """Return a Kubernetes quantity in base units ("250m" is 0.25, "1Ki" is 1024).

    Raises:
        ValueError: it is not a quantity.
    """
    text = str(text)
    match = _QUANTITY.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None:
        raise ValueError(f"{text[:_LONGEST]!r} is not a quantity")
    return Decimal(match[1]) * _SUFFIXES[match[2]]


def parse_cpu_milli(text: str | int) -> int:
    """Return an amount of CPU in whole thousandths, `MOST_MILLI` at most: the API itself sets no bound.

    Raises:
        ValueError: it is not a quantity.
    """
    return min(int(parse_quantity(text) * 1000), MOST_MILLI)


def parse_bytes(text: str | int) -> int:
    """Return an amount of memory in whole bytes, `MOST_BYTES` at most: the API itself sets no bound.

    Raises:
        ValueError: it is not a quantity.
    """
    return min(int(parse_quantity(text)), MOST_BYTES)


def parse_count(text: str | int) -> int:
    """Return an amount of an extended resource; accepts suffixes, as the API server stores 1000 as "1k".

    Raises:
        ValueError: it is not a whole number from 0.
    """
    value = parse_quantity(text)
    if value < 0 or value != value.to_integral_value():
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)
