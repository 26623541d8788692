"""Links of the documentation that `mkdocs build` does not see: to sources, and to other people's sites.

As a hook of mkdocs, links of pages to sources, which are not part of the site, become plain words. As a command it
asks each outer link once, and writes down which answered:

    python hack/site_links.py --outer [-o docs/measurements/outer-links.md]

A link is dead where its host says so (404 or 410), and the exit status is then 1. A host that cannot be reached
from this machine, or that refuses to answer it, says nothing of the link: that is unknown, never dead.
"""

import argparse
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from enum import StrEnum
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urldefrag, urlsplit

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs" / "measurements" / "outer-links.md"
MEANS = (
    "Alive: the host answered with the page. Dead: it said that there\nis none. Unknown: the machine did not reach"
    " the host, or was refused, which says nothing of the link."
)
PATIENCE_SECONDS = 20.0
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?:src|operator|deviceplugin|tests|hack|helm|bench|README)[^)]*\)")
_FENCED = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"https?://[^\s<>\]\"'|]+")
# Names of no real site: examples (RFC 2606), this machine, and services in a cluster.
_NO_SITE = re.compile(r"(^|\.)example\.(com|org|net)$|^127\.|^localhost$|^[^.]+$|\.svc$")


class State(StrEnum):
    """State of a link."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


def on_page_markdown(markdown: str, **_: Any) -> str:
    return _OUTSIDE.sub(r"\1", markdown)


def outer_links(pages: Iterable[Path]) -> dict[str, list[str]]:
    """Return each link to another site, without its anchor, and the pages that have it; code is not searched."""
    found: dict[str, list[str]] = {}
    for page in pages:
        text = _CODE.sub("", _FENCED.sub("", page.read_text()))
        for written in _LINK.findall(text):
            link = urldefrag(_trimmed(written)).url
            name = str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name
            parts = urlsplit(link)
            # an address with a port is a service's, not a page
            if (
                parts.port is None
                and not _NO_SITE.search(parts.hostname or "")
                and name not in found.setdefault(link, [])
            ):
                found[link].append(name)
    return dict(sorted(found.items()))


def _trimmed(written: str) -> str:
    """Return the link without the sentence's punctuation and Markdown's bracket around it."""
    link = written.rstrip(".,;:!?")
    while link.endswith(")") and link.count(")") > link.count("("):
        link = link[:-1].rstrip(".,;:!?")
    return link


def ask(link: str) -> tuple[State, str]:
    """Return whether a link's host knows it, and its answer."""
    request = urllib.request.Request(link, headers={"User-Agent": "gpushare-docs-links"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
            return State.ALIVE, str(answer.status)
    except urllib.error.HTTPError as error:
        gone = error.code in {HTTPStatus.NOT_FOUND, HTTPStatus.GONE}
        return (State.DEAD if gone else State.UNKNOWN), str(error.code)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return State.UNKNOWN, f"not reached: {str(reason)[:80]}"


def outer(pages: Iterable[Path], asking: Callable[[str], tuple[State, str]] = ask) -> tuple[int, str]:
    """Return the number of dead links, and a table of all of them."""
    rows = ["| link | state | answer | on |", "|---|---|---|---|"]
    count = dict.fromkeys(State, 0)
    for link, where in outer_links(pages).items():
        state, answer = asking(link)
        count[state] += 1
        rows.append(f"| <{link}> | {state} | {answer} | {', '.join(where)} |")
    total = ", ".join(f"{number} {state}" for state, number in count.items())
    return count[State.DEAD], f"{sum(count.values())} links: {total}.\n\n" + "\n".join(rows) + "\n"


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--outer", action="store_true", required=True, help="ask every link to another site")
    parser.add_argument(
        "-o", "--output", type=Path, help="write the result here too, with the date and the commit"
    )
    arguments = parser.parse_args()
    # a record of links is no page that has them
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    own = arguments.output.resolve() if arguments.output else None
    dead, table = outer([page for page in pages if page not in {own, RECORD}])
    print(table, end="")
    if own is not None:
        head = f"`python hack/site_links.py --outer`, {datetime.now(UTC):%Y-%m-%d}, at {_commit()}."
        own.write_text(f"# Links to other sites\n\n{head} {MEANS}\n\n{table}")
    return 1 if dead else 0


if __name__ == "__main__":
    sys.exit(main())
