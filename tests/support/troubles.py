"""docs/guide/troubleshooting.md as its reader has it: what it says that a symptom looks like, by its headings."""

import re
from functools import cache
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "troubleshooting.md"
_ITALIC = re.compile(r"(?<![*\w])\*(?!\*)([^*]+)\*(?![*\w])")
_CODE = re.compile(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)*)`")
_OPEN = re.compile(r"(\.\.\.|\d+(?:\.\d+)?(?:%|%?(?![\w.])))")
# A sentence about one process is also one about several.
_ONE, _SOME = r"process\ \d[\d.]*\ uses", r"process(?:es)? [\d, ]+(?:and \d+ more )?uses?"


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


def _pattern(sentence: str) -> re.Pattern[str]:
    parts = _OPEN.split(sentence)
    return re.compile("".join(_part(part) for part in parts).replace(_ONE, _SOME))


def _part(part: str) -> str:
    if part == "...":
        return ".+?"
    if part[:1].isdigit():
        return r"\d[\d.]*" + ("(?:%| percent)" if part.endswith("%") else "")
    return re.sub(r"GPU\b", "GPUs?", re.escape(part))
