"""Common part of the page generators: a table's cell, and writing or checking the page."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def cell(text: str) -> str:
    """Return a text as a table's cell shows it."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def write_or_check(page: Path, text: str) -> int:
    """Write a page, or with --check compare it; return the exit status, 1 where it is not as generated."""
    if "--check" in sys.argv[1:]:
        return 0 if page.exists() and page.read_text() == text else 1
    page.write_text(text)
    print(f"wrote {page.relative_to(ROOT)}")
    return 0
