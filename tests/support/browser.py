"""A real browser looks at a page: Debian's Chromium, without network."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from devcluster import debian
from devcluster.progress import Failed
from installed import lacking
from playwright.sync_api import Browser, Page, sync_playwright

LOAD_MILLISECONDS = 120_000
PHONE, DESK = 360, 1200


@contextmanager
def chromium() -> Iterator[Browser]:
    """Starts the browser; skips where it cannot be had."""
    try:
        program = debian.chromium()
    except Failed as failed:
        lacking("chromium", f"no browser: {failed}")
    with sync_playwright() as playwright:
        # as root Chromium has no sandbox; the pages are our own
        browser = playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox"], timeout=LOAD_MILLISECONDS
        )
        yield browser
        browser.close()


@dataclass
class Look:
    """An open page, and what the browser said of it."""

    page: Page
    trouble: list[str] = field(default_factory=list)
    requested: list[str] = field(default_factory=list)

    def width(self) -> int:
        """How wide the page is; more than the window means that it has to be pushed sideways."""
        return int(self.page.evaluate("document.documentElement.scrollWidth"))

    def violations(self) -> list[str]:
        """Everything that axe finds wrong, with the elements; contrast and labels among its rules."""
        axe = files("axe_playwright_python").joinpath("axe.min.js").read_text()
        # by the browser's own protocol, not as an element of the page: its policy forbids foreign scripts
        self.page.evaluate(axe)
        found = self.page.evaluate("axe.run(document, {resultTypes: ['violations', 'incomplete']})")
        passed = {one["id"] for one in found["passes"]}
        assert {"color-contrast", "document-title", "html-has-lang"} <= passed, passed
        return [
            f"{one['id']}: {node['html'][:200]} {node['failureSummary']}"
            for one in found["violations"]
            for node in one["nodes"]
        ]


@contextmanager
def looking_at(browser: Browser, file: Path, *, width: int = DESK, scheme: str = "light") -> Iterator[Look]:
    """Opens a file, in a window of this width and this colour scheme."""
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, offline=True)  # type: ignore[arg-type]
    page = context.new_page()
    page.set_default_timeout(LOAD_MILLISECONDS)
    look = Look(page)
    page.on("console", lambda message: look.trouble.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: look.trouble.append(str(error)))
    page.on("request", lambda request: look.requested.append(request.url))
    page.goto(file.as_uri())
    yield look
    context.close()
