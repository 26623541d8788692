"""The documentation's site: it builds without a warning, and Chromium opens each page without trouble."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from browser import DESK, PHONE, SITE, chromium, looking_into
from playwright.sync_api import Browser

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
AT_ONCE = 8  # pages; each has to be silent for half a second until it counts as open


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("built") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "WARNING" not in done.stdout + done.stderr
    return folder


def test_every_page_is_built_and_loads_nothing_from_elsewhere(site: Path) -> None:
    written = sorted((ROOT / "docs").rglob("*.md"))
    pages = sorted(site.rglob("index.html"))
    assert len(pages) == len(written) > 100
    outside = [
        link
        for page in pages
        for link in re.findall(r'(?:src|href)="(https?://[^"]+)"', page.read_text())
        if re.search(r"\.(css|js|woff2?)\b", link)
    ]
    assert not outside


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


def pages_of(folder: Path) -> list[str]:
    """The addresses of a folder's pages, below the folder's own."""
    return [str(path.relative_to(folder)).removesuffix("index.html") for path in sorted(folder.rglob("*.html"))]


def trouble_of(browser: Browser, folder: Path, pages: list[str]) -> list[str]:
    """What the browser says against these pages, and what they ask of other hosts."""
    found: list[str] = []
    with ExitStack() as stack:
        looks = [stack.enter_context(looking_into(browser, folder)) for _ in pages[:AT_ONCE]]
        for first in range(0, len(pages), AT_ONCE):
            opened = list(zip(looks, pages[first : first + AT_ONCE], strict=False))
            for look, page in opened:
                look.go(SITE + page)
            for look, page in opened:
                look.settle()
                outside = [url for url in look.requested if not url.startswith((SITE, "data:", "blob:"))]
                found += [f"{page}: {each}" for each in look.trouble + outside]
    return found


def test_pages_open_without_an_error_and_ask_no_other_host(browser: Browser, site: Path) -> None:
    """Every page but of the decisions, of prose from one template, every tenth."""
    decisions = [page for page in pages_of(site) if page.startswith("adr/")]
    assert len(decisions) > 50
    opened = [page for page in pages_of(site) if page not in decisions] + decisions[::10]
    assert trouble_of(browser, site, opened) == []


@pytest.mark.parametrize(
    ("markup", "why"),
    [
        ("<script>console.error('oh')</script>", "error: oh"),
        ("<script>nothing.at.all</script>", "nothing is not defined"),
        ("<img src='missing.png' alt=''>", "404"),
        ("<script>setTimeout(() => fetch('https://example.com/x.js'), 100)</script>", "https://example.com/x.js"),
    ],
)
def test_trouble_would_be_found(browser: Browser, tmp_path: Path, markup: str, why: str) -> None:
    (tmp_path / "index.html").write_text(f"<!doctype html><link rel=icon href='data:,'><p>x</p>{markup}")
    found = trouble_of(browser, tmp_path, pages_of(tmp_path))
    assert any(why in each for each in found), found


def test_the_demos_recording_plays_to_its_end(browser: Browser, site: Path) -> None:
    lines = (ROOT / "docs" / "guide" / "demo.cast").read_text().splitlines()
    last = json.loads(lines[-1])[2].strip()
    with looking_into(browser, site) as look:
        look.open(f"{SITE}guide/demo/")
        screen = look.page.locator(".ap-term-text")
        assert not screen.inner_text().strip(), "nothing is played yet"
        look.page.locator(".ap-overlay-start").click()
        look.page.get_by_text("run alone for fifteen seconds").wait_for()
        first = screen.inner_text()
        assert last not in first
        look.page.keyboard.press("9")  # on to nine tenths of it
        screen.get_by_text(last).wait_for()
        assert screen.inner_text() != first
        assert look.trouble == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESK])
@pytest.mark.parametrize("page", ["", "guide/demo/", "metrics/"])
def test_axe_finds_nothing_wrong(browser: Browser, site: Path, page: str, width: int, scheme: str) -> None:
    with looking_into(browser, site, width=width, scheme=scheme) as look:
        look.open(SITE + page)
        assert look.violations() == []
