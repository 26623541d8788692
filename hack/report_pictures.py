#!/usr/bin/env python3
"""Writes the pictures of `gpushare report` in docs/guide: light, dark and on a phone; run after the page changes.

The page is that of a simulation, drawn again with the same seed; nothing is needed besides Debian's Chromium.
"""

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from devcluster import debian
from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
GUIDE = ROOT / "docs" / "guide"
COLOCATION = ROOT / "src" / "gpushare" / "data" / "h200-colocation.jsonl"


@dataclass(frozen=True)
class Shot:
    """One picture: the top of the page, in a window of this size."""

    name: str
    width: int
    height: int
    scheme: Literal["light", "dark"]
    scale: int = 1


SHOTS = (
    Shot("report.png", 1100, 1250, "light"),
    Shot("report-dark.png", 1100, 1250, "dark"),
    Shot("report-phone.png", 360, 1500, "light", scale=2),
)


def gpushare(*words: str | Path) -> None:
    """Run our command line."""
    program = "import sys; sys.argv[0] = 'gpushare'; from gpushare.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", program, *map(str, words)]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


def page(folder: Path) -> Path:
    """Write the report of a simulation: 60 jobs on 4 H200s."""
    trace, report = folder / "trace.csv", folder / "report.html"
    drawn = ("--jobs", "60", "--interarrival", "60", "--length", "1800")
    gpushare("sim", "trace", "--colocation", COLOCATION, *drawn, "-o", trace)
    how = ("--gpus", "4", "--policy", "gpushare")
    gpushare("sim", "jobs", "--trace", trace, "--colocation", COLOCATION, *how, "--report", report)
    return report


def take(browser: Browser, file: Path, shot: Shot, into: Path) -> None:
    """Write one picture."""
    context = browser.new_context(
        viewport={"width": shot.width, "height": shot.height},
        color_scheme=shot.scheme,
        device_scale_factor=shot.scale,
        offline=True,
    )
    opened = context.new_page()
    opened.goto(file.as_uri())
    opened.screenshot(path=into / shot.name)
    context.close()


def main() -> None:
    into = Path(sys.argv[1]) if len(sys.argv) > 1 else GUIDE
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = page(Path(folder))
        # as root Chromium has no sandbox; the page is our own
        browser = playwright.chromium.launch(executable_path=debian.chromium(), args=["--no-sandbox"])
        for shot in SHOTS:
            take(browser, file, shot, into)
            print(into / shot.name)
        browser.close()


if __name__ == "__main__":
    main()
