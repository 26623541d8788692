"""`gpushare top`: who shares which GPU, at what cap, what was promised, and how each one fares."""

import asyncio
from dataclasses import asdict
from typing import Annotated

import typer

from gpushare.cli.access import (
    AllOption,
    ContextOption,
    KubeconfigOption,
    NamespaceOption,
    Seen,
    Where,
    ask,
    cluster_error,
    see,
)
from gpushare.cli.columns import show
from gpushare.cli.console import notes, out
from gpushare.cli.pod_rows import COLUMNS, SortKey, ordered, rows, style_of
from gpushare.cli.records import Format, FormatOption, emit
from gpushare.cli.top_screen import REFRESH_SECONDS, View, watch
from gpushare.kube import ApiError

app = typer.Typer(help=__doc__)


def answer(seen: Seen, form: Format, sort: SortKey) -> None:
    """Print the table once."""
    for note in seen.notes:
        notes().print(note)
    found = ordered(rows(seen.pods, seen.nodes, seen.shares), sort)
    if form.is_data:
        emit([asdict(row) for row in found], form)
    elif found:
        show(out(), COLUMNS, found, wide=form is Format.WIDE, style=style_of)
    else:
        out().print("no pod shares a GPU yet")


@app.callback()
def top(
    namespace: NamespaceOption = None,
    every: AllOption = False,
    output: FormatOption = Format.TABLE,
    sort: Annotated[SortKey, typer.Option(help="by what to sort")] = SortKey.GPU,
    once: Annotated[bool, typer.Option("--once", help="print the table once, also on a terminal")] = False,
    watching: Annotated[
        bool, typer.Option("--watch", "-w", help="also into a pipe: print the table anew every 2 s")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", hidden=True, help="the same as -o json")] = False,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
) -> None:
    """Show who shares which GPU, at what cap, what was promised, and how each one fares; live on a terminal."""
    where = Where(None if every else namespace, kubeconfig, context)
    form = Format.JSON if as_json else output
    console = out()
    is_live = console.is_terminal and not console.is_dumb_terminal  # a dumb terminal cannot be overwritten
    if is_live and not once and not form.is_data:
        asyncio.run(_live(where, View(sort), wide=form is Format.WIDE))
        return
    if watching:
        asyncio.run(_repeat(where, form, sort))
        return
    answer(ask(where, lambda api: see(api, where)), form, sort)


async def _repeat(where: Where, form: Format, sort: SortKey) -> None:
    """Print the table every two seconds, for a file or a program."""
    try:
        async with where.connect() as api:
            while True:
                answer(await see(api, where), form, sort)
                await asyncio.sleep(REFRESH_SECONDS)
    except ApiError as error:
        raise cluster_error(error) from error


async def _live(where: Where, view: View, *, wide: bool) -> None:
    """Show the table on the whole terminal until q is pressed."""
    try:
        async with where.connect() as api:
            first = await see(api, where)
            await watch(lambda: see(api, where), first, view, wide=wide, every_seconds=REFRESH_SECONDS)
    except ApiError as error:
        raise cluster_error(error) from error
