"""What code and documents cite is in the repository: facts and sections by number, pages, ADRs, links."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WHERE = [
    "src",
    "operator",
    "deviceplugin",
    "helm",
    "docs",
    "hack",
    "bench",
    "tests",
    "changelog.d",
    "README.md",
    "CONTRIBUTING.md",
    "Makefile",
    "pyproject.toml",
]
TEXT = {".py", ".md", ".yaml", ".yml", ".toml", ".sh", ".tpl", ".txt", ""}

_NUMBER = r"\d+(?:\.\d+)?"
_NUMBERS = rf"({_NUMBER}(?:(?:, | and | to | or ){_NUMBER})*)"
# "docs/facts.md 11 to 17", "[facts.md](facts.md) 12", "FACTS 12"; the same of design.
_FACTS = re.compile(rf"(?:facts\.md\)?,?|\bFACTS)\s(?:# )?{_NUMBERS}")
_SECTIONS = re.compile(rf"(?:design\.md\)?,?|\bDESIGN)\s(?:sections? )?{_NUMBERS}")
_PAGE = re.compile(r"\bdocs/[\w./-]+\.(?:md|png|toml)\b")
_ADR = re.compile(r"(?:\bADR |adr/)(\d{4})\b")
_LINK = re.compile(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)")


def files() -> list[Path]:
    """Every text file of the project that may cite something, as git knows them."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *WHERE],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    paths = [ROOT / line for line in listed.stdout.splitlines()]
    return [path for path in paths if path.is_file() and path.suffix in TEXT and path != Path(__file__).resolve()]


def facts(text: str) -> set[str]:
    """The numbers of the facts on the page."""
    return set(re.findall(r"^(\d+)\. ", text, re.MULTILINE))


def sections(text: str) -> set[str]:
    """The numbers of the sections on the page, and of the items of their numbered lists: "2" and "2.4"."""
    found: set[str] = set()
    section = ""
    for line in text.splitlines():
        if heading := re.match(r"## (\d+)\. ", line):
            section = heading[1]
            found.add(section)
        elif (item := re.match(r"(\d+)\. ", line)) and section:
            found.add(f"{section}.{item[1]}")
    return found


def cited(pattern: re.Pattern[str], text: str) -> list[str]:
    return [number for group in pattern.findall(text) for number in re.findall(_NUMBER, group)]


def broken_citations(text: str, *, known_facts: set[str], known_sections: set[str], adrs: set[str]) -> list[str]:
    """What a text cites that is not there."""
    wrong = [f"fact {n}" for n in cited(_FACTS, text) if n not in known_facts]
    wrong += [f"section {n} of the design" for n in cited(_SECTIONS, text) if n not in known_sections]
    wrong += [f"ADR {n}" for n in _ADR.findall(text) if n not in adrs]
    return wrong + [page for page in _PAGE.findall(text) if not (ROOT / page).exists()]


def known() -> dict[str, set[str]]:
    return {
        "known_facts": facts((ROOT / "docs/facts.md").read_text()),
        "known_sections": sections((ROOT / "docs/design.md").read_text()),
        "adrs": {path.name[:4] for path in (ROOT / "docs/adr").glob("*.md")},
    }


def test_everything_cited_is_in_the_repository() -> None:
    targets = known()
    wrong = {
        str(path.relative_to(ROOT)): broken
        for path in files()
        if (broken := broken_citations(path.read_text(errors="replace"), **targets))
    }
    assert wrong == {}


def test_every_fact_has_one_row_that_says_where_it_comes_from() -> None:
    text = (ROOT / "docs" / "facts.md").read_text()
    facts, sources = text.split("## Where each fact comes from", 1)
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", facts, re.MULTILINE)]
    rows = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \|$", sources, re.MULTILINE)
    assert len(numbers) >= 35
    assert sorted(numbers) == [int(number) for number, *_ in rows]


def test_every_link_between_pages_leads_somewhere() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {target}"
        for path in files()
        if path.suffix == ".md"
        for target in _LINK.findall(path.read_text())
        if not (path.parent / target).exists()
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("(docs/facts.md 12)", []),
        ("(docs/facts.md 5, 11 to 99)", ["fact 99"]),
        ("# FACTS 77: why", ["fact 77"]),
        ("docs/design.md 2.4 and 2.44", ["section 2.44 of the design"]),
        ("DESIGN section 8", ["section 8 of the design"]),
        ("see docs/nowhere.md", ["docs/nowhere.md"]),
        ("ADR 9999, docs/adr/0040", ["ADR 9999"]),
    ],
)
def test_a_broken_citation_is_found(text: str, wrong: list[str]) -> None:
    assert broken_citations(text, **known()) == wrong


def test_the_tests_that_the_page_of_troubles_names_exist() -> None:
    text = (ROOT / "docs" / "gpushares.md").read_text()
    table = text.split("## When something is wrong", 1)[1].split("\n## ", 1)[0]
    named = re.findall(r"([\w/]+\.py)(?:: (\w+))?", table)
    assert len(named) > 10
    missing = [
        f"{path}: {test}"
        for path, test in named
        if not (file := ROOT / "tests" / path).is_file() or f"def {test}(" not in file.read_text() + "def ("
    ]
    assert not missing


def test_nothing_cites_the_tracker_that_the_repository_does_not_hold() -> None:
    """An issue's number says nothing to who has the repository alone; ours have two digits."""
    own = re.compile(r"\b[Ii]ssue \d{1,2}\b|\b(?:[Tt]he|same|later) issue\b")
    cites = [
        f"{path.relative_to(ROOT)}: {found[0]}" for path in files() for found in own.finditer(path.read_text())
    ]
    assert cites == []
