"""`gpushare pods`: the pods that share GPUs, what they were given, and where they are."""

from dataclasses import asdict
from typing import Annotated, Final

import typer

from gpushare.cli.access import AllOption, ContextOption, KubeconfigOption, NamespaceOption, Where, ask, see
from gpushare.cli.columns import Column, gibibytes, ratio, show, whole_percent
from gpushare.cli.console import notes, out
from gpushare.cli.pod_rows import SortKey, TopRow, ordered, rows, style_of
from gpushare.cli.records import Format, FormatOption, emit

app = typer.Typer(help=__doc__)

COLUMNS: Final[tuple[Column[TopRow], ...]] = (
    Column("NAMESPACE", lambda row: row.namespace, rank=4),
    Column("POD", lambda row: row.pod),
    Column("CLASS", lambda row: row.job_class, rank=5),
    Column("STATE", lambda row: row.state),
    Column("GPU", lambda row: row.gpu, rank=1),
    Column("SHARE", lambda row: whole_percent(row.share_percent), rank=2, is_right=True),
    Column("CAP", lambda row: whole_percent(row.thread_percentage), rank=3, is_right=True),
    Column("MEMORY", lambda row: gibibytes(row.memory_limit_mib), rank=6, is_right=True),
    Column("WORKLOAD", lambda row: row.workload, rank=7, wide_only=True),
    Column("PROMISE", lambda row: ratio(row.promise_ratio), rank=7, is_right=True, wide_only=True),
    Column("PROGRESS", lambda row: ratio(row.progress_ratio), rank=7, is_right=True, wide_only=True),
)


@app.callback()
def pods(
    namespace: NamespaceOption = None,
    every: AllOption = False,
    output: FormatOption = Format.TABLE,
    sort: Annotated[SortKey, typer.Option(help="by what to sort")] = SortKey.NAME,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
) -> None:
    """List the pods that share GPUs, what they were given, and where they are."""
    where = Where(None if every else namespace, kubeconfig, context)
    seen = ask(where, lambda api: see(api, where))
    for note in seen.notes:
        notes().print(note)
    found = ordered(rows(seen.pods, seen.nodes, seen.shares), sort)
    if output.is_data:
        emit([asdict(row) for row in found], output)
    elif found:
        show(out(), COLUMNS, found, wide=output is Format.WIDE, style=style_of)
    else:
        out().print("no pod shares a GPU yet")
