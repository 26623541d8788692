"""The threats of docs/security.md: each row of its table with the test that tries it."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "security.md"
_ROW = re.compile(r"^\| ([0-9]*)(, H)? ?\| (.+?) \| (.+?) \| `(tests/[\w/]+\.py)::([\w:]+)` \|$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Threat:
    """One row; `number` is the threat's in the review, None for those that held when it was made."""

    number: int | None
    what: str
    answer: str
    path: str
    test: str

    @property
    def node_id(self) -> str:
        """The test as pytest names it."""
        return f"{self.path}::{self.test}"


def threats() -> tuple[Threat, ...]:
    """Every row of the table of threats."""
    section = PAGE.read_text().partition("## Threats")[2]
    return tuple(
        Threat(int(row[0]) if row[0] else None, row[2], row[3], row[4], row[5]) for row in _ROW.findall(section)
    )


def row_count() -> int:
    """How many rows the table has, readable or not."""
    section = PAGE.read_text().partition("## Threats")[2]
    return len([line for line in section.splitlines() if line.startswith("| ")]) - 1
