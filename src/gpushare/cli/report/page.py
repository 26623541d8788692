"""The page of every report: sections, tables that sort, figures in words; light, dark, on a phone and in print.

Everything is in the one file: no script, style or picture comes from anywhere else, and the page's own policy forbids
the browser to fetch one.
"""

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

_STYLE: Final = """
:root{color-scheme:light dark;--bg:#fff;--text:#1c2430;--soft:#4d5866;--line:#d5dce4;--card:#f4f6f9;--mark:#e3f3e9;
--one:#0b6bcb;--two:#0a7d36;--three:#b45309;--four:#7a4fc2;--other:#9aa4b1}
@media (prefers-color-scheme:dark){:root{--bg:#14181f;--text:#e8ecf2;--soft:#b3bdca;--line:#39424f;--card:#1d232c;
--mark:#17351f;--one:#6cb2ff;--two:#5fd38a;--three:#f0a35e;--four:#b99cf0;--other:#6b7684}}
@media print{:root{color-scheme:light;--bg:#fff;--text:#000;--soft:#333;--line:#bbb;--card:#fff;--mark:#eee;
--one:#0b6bcb;--two:#0a7d36;--three:#b45309;--four:#7a4fc2;--other:#999}section,figure{break-inside:avoid}}
*{box-sizing:border-box}
body{font:16px/1.5 system-ui,sans-serif;margin:0 auto;padding:1rem;max-width:72rem;background:var(--bg);
color:var(--text);overflow-wrap:anywhere}
h1{font-size:1.6rem;line-height:1.2;margin:.5rem 0}h2{font-size:1.25rem;margin:2.2rem 0 .3rem}
p{margin:.4rem 0;max-width:46rem}.soft,figcaption,caption{color:var(--soft)}
dl.answers{display:grid;grid-template-columns:repeat(auto-fit,minmax(15rem,1fr));gap:.7rem;margin:1rem 0}
dl.answers div{background:var(--card);border:1px solid var(--line);border-radius:.4rem;padding:.6rem .8rem}
dl.answers dt{color:var(--soft);font-size:.9rem}dl.answers dd{margin:0;font-size:1.25rem;font-weight:600}
dl.answers dd small{display:block;font-size:.85rem;font-weight:400;color:var(--soft)}
.wide{overflow-x:auto;margin:.6rem 0}.wide:focus-visible,button:focus-visible{outline:3px solid var(--one)}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.92rem;overflow-wrap:normal}
caption{text-align:left;padding:.2rem 0}th,td{padding:.3rem .5rem;text-align:left;border-bottom:1px solid var(--line);
vertical-align:top}td.n,th.n{text-align:right;white-space:nowrap}tr.ours{background:var(--mark);font-weight:600}
th button{all:unset;cursor:pointer;font-weight:600}th[aria-sort=ascending] button::after{content:" \\25b2"}
th[aria-sort=descending] button::after{content:" \\25bc"}
figure{margin:1rem 0}.plot{display:grid;grid-template-columns:auto 1fr;grid-template-rows:15rem auto;gap:.15rem .4rem}
.plot .y{position:relative;width:3.4rem}.plot .y span{position:absolute;right:0;transform:translateY(50%);
font-size:.78rem;color:var(--soft)}.plot .x{grid-column:2;position:relative;height:1.3rem}
.plot .x span{position:absolute;transform:translateX(-50%);font-size:.78rem;color:var(--soft);white-space:nowrap}
.plot .x span.first{transform:none}.plot .x span.last{transform:translateX(-100%)}
.plot svg{width:100%;height:100%;border-left:1px solid var(--line);border-bottom:1px solid var(--line)}
.plot path{fill:none;vector-effect:non-scaling-stroke}.plot .grid{stroke:var(--line);stroke-width:1}
ul.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.2rem 1rem;padding:0;margin:.3rem 0;font-size:.85rem}
ul.legend i{display:inline-block;width:1.4rem;height:0;border-top:3px solid;vertical-align:middle;margin-right:.4rem}
.one{stroke:var(--one);border-color:var(--one);fill:var(--one)}.two{stroke:var(--two);border-color:var(--two);fill:var(--two)}
.three{stroke:var(--three);border-color:var(--three);fill:var(--three)}
.four{stroke:var(--four);border-color:var(--four);fill:var(--four)}
.other{stroke:var(--other);border-color:var(--other);fill:var(--other)}
footer{margin:3rem 0 1rem;border-top:1px solid var(--line);font-size:.85rem;color:var(--soft)}
"""
_SCRIPT: Final = """
for(const button of document.querySelectorAll('th button'))button.addEventListener('click',()=>{
const head=button.parentElement,table=head.closest('table'),body=table.tBodies[0],at=head.cellIndex;
const down=head.getAttribute('aria-sort')!=='descending';
for(const other of table.tHead.rows[0].cells)other.removeAttribute('aria-sort');
head.setAttribute('aria-sort',down?'descending':'ascending');
const value=row=>row.cells[at].dataset.v;
const rows=[...body.rows].sort((a,b)=>{const x=value(a),y=value(b);
if(x===''||y==='')return (x==='')-(y==='');
const order=head.classList.contains('n')?x-y:x.localeCompare(y);return down?-order:order});
body.append(...rows)});
"""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table: what is shown, and the number that it sorts by; None sorts last."""

    text: str
    value: float | str | None


def text(words: str) -> Cell:
    """Return a cell of words."""
    return Cell(words, words)


def number(value: float | None, form: str = "{:.2f}") -> Cell:
    """Return a cell of a number; a dash where it is not known."""
    return Cell("–", None) if value is None or value != value else Cell(form.format(value), value)


@dataclass(frozen=True, slots=True)
class Answer:
    """One figure of the first screen: a question, its answer, and what the figure means."""

    question: str
    answer: str
    meaning: str


def answers(found: Iterable[Answer]) -> str:
    """Render the questions and answers that begin a report."""
    return (
        '<dl class="answers">'
        + "".join(
            f"<div><dt>{_(one.question)}</dt><dd>{_(one.answer)}<small>{_(one.meaning)}</small></dd></div>"
            for one in found
        )
        + "</dl>"
    )


def section(heading: str, lead: str, *parts: str) -> str:
    """Render a section: its heading, one sentence that says what is seen, and its content."""
    return f"<section><h2>{_(heading)}</h2><p>{_(lead)}</p>{''.join(parts)}</section>"


def paragraph(words: str) -> str:
    """Render a paragraph of explanation."""
    return f'<p class="soft">{_(words)}</p>'


def table(
    caption: str, heads: Sequence[str], rows: Sequence[Sequence[Cell]], *, marked: frozenset[int] = frozenset()
) -> str:
    """Render a table that sorts by the column whose head is pressed; columns of numbers stand to the right.

    Args:
        marked: rows that are set off.
    """
    numeric = [all(not isinstance(row[at].value, str) for row in rows) and at > 0 for at in range(len(heads))]
    head = "".join(
        f'<th scope="col"{_class(is_number)}><button type="button">{_(name)}</button></th>'
        for name, is_number in zip(heads, numeric, strict=True)
    )
    body = "".join(
        f"<tr{' class=ours' if index in marked else ''}>"
        + "".join(
            f'<td{_class(is_number)} data-v="{_("" if cell.value is None else str(cell.value))}">{_(cell.text)}</td>'
            for cell, is_number in zip(row, numeric, strict=True)
        )
        + "</tr>"
        for index, row in enumerate(rows)
    )
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{_(caption)}"><table><caption>{_(caption)}'
        f"</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _class(is_number: bool) -> str:
    return ' class="n"' if is_number else ""


def page(title: str, subtitle: str, parts: Sequence[str], footer: str) -> str:
    """Render the whole file."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{_(title)}</title><style>{_STYLE}</style></head><body><header><h1>{_(title)}</h1>"
        f'<p class="soft">{_(subtitle)}</p></header><main>{"".join(parts)}</main>'
        f"<footer><p>{_(footer)}</p></footer><script>{_SCRIPT}</script></body></html>\n"
    )


def _(words: str) -> str:
    return html.escape(words)
