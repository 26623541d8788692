"""Pages of the site that are held to what they describe."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def _pages(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for each in nav if isinstance(nav, list) else nav.values() if isinstance(nav, dict) else ():
        yield from _pages(each)


def test_every_page_but_decisions_and_measurements_is_in_the_menu() -> None:
    written = {str(page.relative_to(DOCS)) for folder in ("", "guide") for page in (DOCS / folder).glob("*.md")}
    menu = [line for line in (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2].splitlines() if line.strip()]
    listed = list(_pages(yaml.safe_load("\n".join(menu))))
    assert sorted(listed) == sorted(written)


def test_the_first_page_leads_to_every_page_of_the_guide() -> None:
    first = (DOCS / "index.md").read_text()
    assert [page.name for page in (DOCS / "guide").glob("*.md") if f"(guide/{page.name})" not in first] == []
    assert "(security.md)" in first
