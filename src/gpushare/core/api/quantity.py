"""Kubernetes quantities: "250m", "8Gi", "1e3"."""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Final

_QUANTITY: Final = re.compile(r"^([+-]?[0-9.]+(?:[eE][+-]?\d+)?)([numkMGTPE]|[KMGTPE]i|)$")
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
    """A Kubernetes quantity in base units ("250m" is 0.25, "1Ki" is 1024).

    Raises:
        ValueError: it is not a quantity.
    """
    match = _QUANTITY.match(str(text))
    if match is None:
        raise ValueError(f"{text!r} is not a quantity")
    return Decimal(match[1]) * _SUFFIXES[match[2]]
