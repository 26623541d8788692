"""The page of every report: sections, sortable tables, figures in words; for light, dark, phones and print.

Everything is in the one file: no script, style or picture is loaded from elsewhere, and the page's own security
policy forbids the browser to load one.
"""

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_HERE: Final = Path(__file__).parent
_FEW_COLUMNS: Final = 7  # this many fit on A4 (tests/cli/test_report_in_browser.py); more are printed smaller


@dataclass(frozen=True, slots=True)
class TableCell:
    """One cell of a table: the text shown, and the value to sort by; None sorts last."""

    text: str
    value: float | str | None

    @property
    def key(self) -> str:
        """Return the key that the page's script sorts by."""
        return "" if self.value is None else str(self.value)


def text(words: str) -> TableCell:
    """Return a cell of words."""
    return TableCell(words, words)


def number(value: float | None, form: str = "{:.2f}") -> TableCell:
    """Return a cell of a number; a dash if unknown."""
    return TableCell("–", None) if value is None or math.isnan(value) else TableCell(form.format(value), value)


@dataclass(frozen=True, slots=True)
class Answer:
    """One figure of the first screen: a question, its answer, and what the figure means."""

    question: str
    answer: str
    meaning: str


def answers(found: Iterable[Answer]) -> str:
    """Render the questions and answers at the top of a report."""
    return (
        '<dl class="answers">'
        + "".join(
            f"<div><dt>{_(one.question)}</dt><dd>{_(one.answer)}<small>{_(one.meaning)}</small></dd></div>"
            for one in found
        )
        + "</dl>"
    )


def section(heading: str, lead: str, *parts: str) -> str:
    """Render a section: its heading, one sentence on what it shows, and its content."""
    return f"<section><h2>{_(heading)}</h2><p>{_(lead)}</p>{''.join(parts)}</section>"


def paragraph(words: str) -> str:
    """Render a paragraph of explanation."""
    return f'<p class="soft">{_(words)}</p>'


def table(
    caption: str,
    heads: Sequence[str],
    rows: Sequence[Sequence[TableCell]],
    *,
    marked: frozenset[int] = frozenset(),
) -> str:
    """Render a table that is sorted by clicking a column's head; numbers are aligned at the right.

    Args:
        marked: indices of highlighted rows.
    """
    numeric = [all(not isinstance(row[at].value, str) for row in rows) and at > 0 for at in range(len(heads))]
    head = "".join(
        f'<th scope="col"{_class(is_number)}><button type="button">{_(name)}</button></th>'
        for name, is_number in zip(heads, numeric, strict=True)
    )
    body = "".join(
        f"<tr{' class=ours' if index in marked else ''}>"
        + "".join(
            f'<td{_class(is_number)} data-v="{_(cell.key)}">{_(cell.text)}</td>'
            for cell, is_number in zip(row, numeric, strict=True)
        )
        + "</tr>"
        for index, row in enumerate(rows)
    )
    many = " class=many" if len(heads) > _FEW_COLUMNS else ""
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{_(caption)}"><table{many}>'
        f"<caption>{_(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _class(is_number: bool) -> str:
    return ' class="n"' if is_number else ""


def page(title: str, subtitle: str, parts: Sequence[str], footer: str) -> str:
    """Render the whole file."""
    style, script = ((_HERE / name).read_text() for name in ("page.css", "page.js"))
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{_(title)}</title><style>{style}</style></head><body><header><h1>{_(title)}</h1>"
        f'<p class="soft">{_(subtitle)}</p></header><main>{"".join(parts)}</main>'
        f"<footer><p>{_(footer)}</p></footer><script>{script}</script></body></html>\n"
    )


def _(words: str) -> str:
    return html.escape(words)
