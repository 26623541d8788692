"""A real browser looks at a page: Debian's Chromium, which finds no host; a folder's files answer it as a site."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from devcluster import debian
from devcluster.progress import Failed
from installed import lacking
from playwright.sync_api import Browser, Error, Page, Request, Route, sync_playwright

LOAD_MILLISECONDS = 120_000
SITE = "http://127.0.0.1/"  # of a folder that is looked at as a site; nothing listens there
PHONE, DESK = 360, 1200
# Why axe leaves a text's contrast open although its styles settle it: it lies in a column of a wide table that is
# pushed out of view, or it is a single character.
OPEN = {"elmPartiallyObscured", "shortTextContent"}
# An element's colour, and that of the nearest ground below it.
COLOURS = """element => {
    const ground = at => getComputedStyle(at).backgroundColor;
    let below = element;
    while (below.parentElement && ground(below) === 'rgba(0, 0, 0, 0)') below = below.parentElement;
    return [getComputedStyle(element).color, ground(below)];
}"""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Starts the browser; skips where it cannot be had."""
    try:
        program = debian.chromium()
    except Failed as failed:
        lacking("chromium", f"no browser: {failed}")
    with sync_playwright() as playwright:
        # as root Chromium has no sandbox; the pages are our own
        arguments = ["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND"]
        browser = playwright.chromium.launch(executable_path=program, args=arguments, timeout=LOAD_MILLISECONDS)
        yield browser
        browser.close()


@dataclass
class Look:
    """An open page, and what the browser said of it."""

    page: Page
    trouble: list[str] = field(default_factory=list)
    requested: list[str] = field(default_factory=list)

    def failed(self, request: Request) -> None:
        """Takes down a request that failed, unless the browser itself ended it, as it does when a page is left."""
        if request.failure != "net::ERR_ABORTED":
            self.trouble.append(f"{request.url}: {request.failure}")

    def go(self, address: str) -> None:
        """Opens an address, and forgets what was said of the page before."""
        del self.trouble[:], self.requested[:]
        try:
            self.page.goto(address)
        except Error as error:
            self.trouble.append(str(error))

    def settle(self) -> None:
        """Waits until the page asks for nothing more."""
        self.page.wait_for_load_state("networkidle")

    def open(self, address: str) -> None:
        """Opens an address until the page has all that it asks for."""
        self.go(address)
        self.settle()

    def width(self) -> int:
        """How wide the page is; more than the window means that it has to be pushed sideways."""
        return int(self.page.evaluate("document.documentElement.scrollWidth"))

    def violations(self) -> list[str]:
        """Everything that axe finds wrong, with the elements; contrast and labels among its rules.

        Also each contrast that axe leaves open, unless the reason is one of OPEN and the styles settle it.
        """
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
        ] + [
            f"{one['id']} left open: {node['html'][:200]} {node['failureSummary']}"
            for one in found["incomplete"]
            if one["id"] == "color-contrast"
            for node in one["nodes"]
            if not self._is_settled(node)
        ]

    def _is_settled(self, node: dict[str, Any]) -> bool:
        """Whether a text whose contrast axe leaves open has enough of it, by its colour and its ground's."""
        (data,) = (check["data"] for check in node["any"] if check["id"] == "color-contrast")
        if data["messageKey"] not in OPEN:
            return False
        (selector,) = node["target"]
        ink, ground = self.page.locator(selector).evaluate(COLOURS)
        return contrast(ink, ground) >= float(data["expectedContrastRatio"].partition(":")[0])


def contrast(one: str, other: str) -> float:
    """The contrast of two opaque colours such as rgb(1, 2, 3), from 1 to 21 (WCAG 2.2)."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    found = re.fullmatch(r"rgb\((\d+), (\d+), (\d+)\)", colour)
    assert found, f"{colour} is not opaque"
    parts = [int(part) / 255 for part in found.groups()]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@contextmanager
def looking(
    browser: Browser, *, width: int = DESK, scheme: str = "light", offline: bool = False
) -> Iterator[Look]:
    """A window of this width and this colour scheme, with nothing open yet."""
    context = browser.new_context(
        viewport={"width": width, "height": 800},
        color_scheme=scheme,  # type: ignore[arg-type]
        offline=offline,
    )
    page = context.new_page()
    page.set_default_timeout(LOAD_MILLISECONDS)
    look = Look(page)
    page.on("console", lambda message: look.trouble.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: look.trouble.append(str(error)))
    page.on("request", lambda request: look.requested.append(request.url))
    page.on("requestfailed", look.failed)
    yield look
    context.close()


@contextmanager
def looking_into(browser: Browser, folder: Path, *, width: int = DESK, scheme: str = "light") -> Iterator[Look]:
    """A window in which this folder's files are a site below SITE, and no other host is found.

    Nothing goes through the machine's network: whenever one of its addresses comes or goes, as where a cluster
    beside the test starts pods, Chromium drops every request that is under way, also one to the loopback.
    """
    with looking(browser, width=width, scheme=scheme) as look:
        look.page.context.route("**/*", partial(_answer, folder))
        yield look


def _answer(folder: Path, route: Route) -> None:
    if not route.request.url.startswith(SITE):
        route.abort("namenotresolved")
        return
    file = folder / unquote(urlsplit(route.request.url).path).lstrip("/")
    file = file / "index.html" if file.is_dir() else file
    if file.is_file():
        route.fulfill(path=file)
    else:
        route.fulfill(status=404, body="not found")


@contextmanager
def looking_at(browser: Browser, file: Path, *, width: int = DESK, scheme: str = "light") -> Iterator[Look]:
    """Opens a file, in a window of this width and this colour scheme."""
    with looking(browser, width=width, scheme=scheme, offline=True) as look:
        look.page.goto(file.as_uri())
        yield look
