"""docs/guide/troubleshooting.md as its reader has it: what it says that a symptom looks like, by its headings.

And docs/guide/slow.md: which rows of its table a screen of `gpushare explain` shows.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "troubleshooting.md"
SLOW_PAGE = PAGE.parent / "slow.md"
_ITALIC = re.compile(r"(?<![*\w])\*(?!\*)([^*]+)\*(?![*\w])")
_CODE = re.compile(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)*)`")
_OPEN = re.compile(r"(\.\.\.|\d+(?:\.\d+)?(?:%|(?=m\b)|%?(?![\w.])))")
# A sentence about one process is also one about several, and back.
_ONE, _SOME = r"process\ \d[\d.]*\ uses", r"process(?:es)? [\d, ]+(?:and \d+ more )?uses?"
_MANY, _ANY = r"\ processes\ use\ ", r"\ process(?:es\ use|\ uses)\ "


@cache
def sections() -> dict[str, str]:
    """The text below each heading."""
    _, *found = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    return {one.partition("\n")[0]: one.partition("\n")[2] for one in found}


def sentences(heading: str) -> list[str]:
    """What a section says is seen: sentences in italics or block quotes, and the first cells of its tables."""
    text = sections()[heading]
    rows = re.findall(r"^\| ([^|`]+) \|", text.replace("| it says |", "").replace("| event |", ""), re.MULTILINE)
    quoted = " ".join(line.removeprefix("> ") for line in text.splitlines() if line.startswith("> "))
    italic = [re.sub(r"(?<!\.)\.$", "", " ".join(one.split())) for one in _ITALIC.findall(text)]
    return [*rows, *italic, *([quoted] if quoted else [])]


def words(heading: str) -> set[str]:
    """The reasons, conditions and events that a section names."""
    return set(_CODE.findall(sections()[heading]))


def told(heading: str, seen: str) -> str:
    """The sentence of a section that `seen` holds, figures and names aside."""
    flat = " ".join(seen.split())
    for sentence in sentences(heading):
        if _pattern(sentence).search(flat):
            return sentence
    raise AssertionError(f"{seen!r} is not in {PAGE.name} under {heading!r}, which tells of {sentences(heading)}")


def says(heading: str, sentence: str, seen: str) -> bool:
    """Whether `seen` holds this sentence of a section, figures and names aside."""
    assert sentence in sentences(heading), f"{PAGE.name} has no {sentence!r} under {heading!r}"
    return bool(_pattern(sentence).search(" ".join(seen.split())))


def _pattern(sentence: str) -> re.Pattern[str]:
    parts = _OPEN.split(sentence)
    return re.compile("".join(_part(part) for part in parts).replace(_ONE, _SOME).replace(_MANY, _ANY))


def _part(part: str) -> str:
    if part == "...":
        return ".+?"
    if part[:1].isdigit():
        return r"\d[\d.]*" + ("(?:%| percent)" if part.endswith("%") else "")
    return re.sub(r"GPU\b", "GPUs?", re.escape(part)).replace(r"\ min", r"\ (?:s|min|h)")


@dataclass(frozen=True)
class Read:
    """A pod's line in the table that `gpushare explain` prints, as slow.md has it read; None for a dash."""

    promised: float | None
    predicted: tuple[float, float] | None
    seen: float | None
    stopped: bool

    @property
    def is_below(self) -> bool:
        return None not in {self.seen, self.promised} and self.seen < self.promised  # type: ignore[operator]


# Each row's first cell, and whether a pod's own line and those of its neighbours show it.
SLOW: dict[str, Callable[[Read, Sequence[Read]], bool]] = {
    "SEEN at or above PROMISED": lambda own, _: own.seen is not None and not own.is_below,
    "SEEN below PROMISED, a neighbour STOPPED": lambda own, others: (
        own.is_below and any(each.stopped for each in others)
    ),
    "SEEN below PROMISED, no pod STOPPED": lambda own, others: (
        own.is_below and not any(each.stopped for each in (own, *others))
    ),
    "STOPPED on your own pod": lambda own, _: own.stopped,
    "PREDICTED far from SEEN, no pod STOPPED": lambda own, others: (
        own.predicted is not None
        and own.seen is not None
        and not own.predicted[0] <= own.seen <= own.predicted[1]
        and not any(each.stopped for each in (own, *others))
    ),
    "a dash at PREDICTED": lambda own, _: own.predicted is None,
    "a dash at SEEN": lambda own, _: own.seen is None,
}


def slow(screen: str) -> set[str]:
    """The rows of slow.md that `gpushare explain` of a placed pod shows; empty where it has no table."""
    lines = screen.splitlines()
    header = next((number for number, line in enumerate(lines) if line.startswith("POD ")), None)
    if header is None:
        return set()
    columns = lines[header].split()
    own: list[Read] = []
    others: list[Read] = []
    for line in lines[header + 1 :]:
        cells = re.split(r" {2,}", line.strip())
        if len(cells) != len(columns):
            break
        (own if cells[0].endswith(" *") else others).append(_read(dict(zip(columns, cells, strict=True))))
    (subject,) = own
    return {row for row, is_shown in SLOW.items() if is_shown(subject, others)}


def _read(cells: dict[str, str]) -> Read:
    promised, seen = (_figure(cells[column]) for column in ("PROMISED", "SEEN"))
    interval = re.fullmatch(r"[\d.]+ \(([\d.]+) to ([\d.]+)\)", cells["PREDICTED"])
    predicted = (float(interval[1]), float(interval[2])) if interval is not None else None
    return Read(promised, predicted, seen, cells["STOPPED"] not in {"-", "0%"})


def _figure(cell: str) -> float | None:
    return None if cell == "-" else float(cell.partition(" ")[0])
