"""Run the commands that documents quote figures of, and fail where a figure is gone from their output.

A page names a command and what it prints in an HTML comment beside the figures:

    <!-- docs-check: gpushare model evaluate --dataset D --protocol as-is
    2 0.032 0.016
    matching 0.987
    -->

Each line below the command is looked for in the output: one line of it must hold these words and numbers in this
order, with anything between them. A number with a decimal point fits when the printed one rounds to it; percent
signs do not count. Every figure (a number with a decimal point or a percent sign) must also stand in the page, so
that neither can change without the other. The command runs by bash in the repository with $TMP, an empty folder.
Commands that take longer than a minute are not checked but listed in docs/measurements/README.md.

    python hack/docs_check.py [--list] [PAGE ...]
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, ROUND_HALF_UP, Decimal, InvalidOperation
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT_SECONDS = 600.0  # a command of a minute on a quiet machine, on one that is ten times as busy

_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_CHECK = re.compile(r"<!-- docs-check: (?P<command>.*?)\n(?P<rows>.*?)-->", re.DOTALL)
_SEPARATORS = re.compile(r"[\s│┃|,;:(){}\[\]\"`*]+")
_FIGURE = re.compile(r"[-+]?\d[\d,]*\.\d+%?|[-+]?\d+%")


@dataclass(frozen=True, slots=True)
class Check:
    """A command of a page, and the rows of words and numbers that its output must hold."""

    page: str
    command: str
    rows: tuple[tuple[str, ...], ...]


def checks_of(page: str, text: str) -> list[Check]:
    """Return the checks that a page names, in its order."""
    found = []
    for match in _CHECK.finditer(text):
        rows = tuple(tuple(words(line)) for line in match["rows"].splitlines() if line.strip())
        found.append(Check(page, match["command"].strip(), rows))
    return found


def words(line: str) -> list[str]:
    """Return words and numbers of a line of output, without table frames and punctuation around them."""
    return [word for word in _SEPARATORS.split(line) if word]


def fits(expected: str, printed: str) -> bool:
    """Return whether a printed word is the expected one; a printed number fits if it rounds to it."""
    if expected == printed:
        return True
    try:
        wanted, found = Decimal(expected.rstrip("%")), Decimal(printed.rstrip("%"))
    except InvalidOperation:
        return False
    if not found.is_finite() or not wanted.is_finite():
        return False
    if "." not in expected:
        return wanted == found  # counts and labels
    unit = Decimal(1).scaleb(int(wanted.as_tuple().exponent))
    return wanted in {found.quantize(unit, rounding) for rounding in (ROUND_HALF_EVEN, ROUND_HALF_UP)}


def holds(row: Sequence[str], line: str) -> bool:
    """Return whether a line of output has the row's words in their order."""
    printed = iter(words(line))
    return all(any(fits(expected, word) for word in printed) for expected in row)


def missing_from_output(check: Check, output: str) -> list[str]:
    """Return a sentence for each row that no line of the output holds."""
    lines = output.splitlines()
    return [
        f'{check.page}: no line that `{check.command}` prints has "{" ".join(row)}"'
        for row in check.rows
        if not any(holds(row, line) for line in lines)
    ]


def missing_from_page(check: Check, text: str) -> list[str]:
    """Return a sentence for each figure of the check that the page itself does not quote."""
    quoted = {figure.rstrip("%") for figure in _FIGURE.findall(_COMMENT.sub("", text))}
    return [
        f"{check.page}: the figure {word} of `{check.command}` is not in the page"
        for row in check.rows
        for word in row
        if _FIGURE.fullmatch(word) and word.rstrip("%") not in quoted
    ]


def run(command: str) -> str:
    """Return what a command prints on standard output.

    Raises:
        subprocess.SubprocessError: it failed or took too long.
    """
    parts = [str(ROOT), *(str(ROOT / part) for part in ("src", "operator", "deviceplugin"))]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(parts),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "TMP": folder,
            "COLUMNS": "200",
        }
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
            env=environment,
            timeout=LIMIT_SECONDS,
        )
    return done.stdout


def pages(names: Sequence[str]) -> list[Path]:
    """Return the pages named, or every page that users read."""
    if names:
        return [Path(name).resolve() for name in names]
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the pages; 1 where a figure is gone."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--list", action="store_true", help="print the commands instead of running them")
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="Markdown pages; all when none is named")
    options = parser.parse_args(arguments)
    wrong: list[str] = []
    outputs: dict[str, str] = {}
    for path in pages(options.pages):
        text = path.read_text()
        name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
        for check in checks_of(name, text):
            if options.list:
                print(f"{name}: {check.command}")
                continue
            wrong += missing_from_page(check, text)
            began = time.monotonic()
            try:
                if check.command not in outputs:
                    outputs[check.command] = run(check.command)
            except subprocess.CalledProcessError as error:
                wrong.append(f"{name}: `{check.command}` failed: {error.stderr.strip()[-500:]}")
                continue
            except subprocess.TimeoutExpired:
                wrong.append(f"{name}: `{check.command}` took longer than {LIMIT_SECONDS:.0f} s")
                continue
            gone = missing_from_output(check, outputs[check.command])
            print(
                f"{'FAIL' if gone else 'ok':4} {time.monotonic() - began:5.1f} s  {name}: {check.command}",
                flush=True,
            )
            wrong += gone
    for sentence in wrong:
        print(sentence, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
