"""The threats of docs/security.md: each row of its table with the test that tries it."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "security.md"
_STEP = re.compile(r"^\| ([0-9, ]+) \| `(tests/gpu/\w+\.py)::(\w+)` \| (.+) \|$", re.MULTILINE)
_LAST_CELL = re.compile(r"^\| .* \| `(tests/(?!gpu/)[\w/]+\.py::[\w:]+)` \|$", re.MULTILINE)
_ROW = re.compile(r"^\| ([0-9]*)(, H)? ?\| (.+?) \| (.+?) \| `(tests/[\w/]+\.py)::([\w:]+)` \|$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Threat:
    """One row; `number` is the threat's in the review, None for those that held when it was made.

    `is_on_gpu`: the page claims that a step on a real GPU tries it as well.
    """

    number: int | None
    is_on_gpu: bool
    what: str
    answer: str
    path: str
    test: str

    @property
    def is_in_pod(self) -> bool:
        """Whether it is tried in a pod on a real kubelet."""
        return self.path.startswith("tests/e2e/")

    @property
    def node_id(self) -> str:
        """The test as pytest names it."""
        return f"{self.path}::{self.test}"


def threats() -> tuple[Threat, ...]:
    """Every row of the table of threats."""
    return tuple(
        Threat(int(row[0]) if row[0] else None, bool(row[1]), row[2], row[3], row[4], row[5])
        for row in _ROW.findall(_section("## Threats"))
    )


def gpu_steps() -> dict[tuple[str, str], frozenset[int]]:
    """The steps on a real GPU that the page names, each by its file and function, with the threats it tries."""
    return {
        (path, step): frozenset(int(number) for number in numbers.split(","))
        for numbers, path, step, _ in _STEP.findall(_section("## On a real GPU"))
    }


def row_count() -> int:
    """How many rows the table has, readable or not."""
    return len([line for line in _section("## Threats").splitlines() if line.startswith("| ")]) - 1


def named_in_rows() -> tuple[str, ...]:
    """Every test that stands in the last cell of a row of the page, in whichever table."""
    return tuple(_LAST_CELL.findall(PAGE.read_text(encoding="utf-8")))


def _section(heading: str) -> str:
    """Return what stands under a heading, up to the next one of its level."""
    return PAGE.read_text().partition(f"{heading}\n")[2].partition("\n## ")[0]
