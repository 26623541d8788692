"""`gpushare report`: what a cluster's GPUs did over a span of time, as one page to read, send and print."""

import json
import re
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from gpushare.cli.console import notes
from gpushare.cli.errors import UsageError
from gpushare.cli.files import check_writable, is_standard_output, read_text, write_whole
from gpushare.cli.report.moment import usage_of
from gpushare.cli.report.prometheus import PrometheusSpan, read_prometheus
from gpushare.cli.report.usage import (
    NeighbourRow,
    UsageHistory,
    course,
    kept_ratio,
    neighbours,
    other_fractions,
    showback,
)
from gpushare.cli.report.usage_page import render_usage
from gpushare.cli.snapshot import OBJECTS_FILE, believing, read_snapshot

app = typer.Typer(help=__doc__)

_UNITS: Final = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


@app.callback()
def report(
    prometheus: Annotated[
        str | None,
        typer.Option(help="address of the Prometheus that scrapes gpushare", envvar="GPUSHARE_PROMETHEUS"),
    ] = None,
    snapshot: Annotated[
        Path | None, typer.Option(help="a folder that gpushare snapshot wrote, instead of --prometheus")
    ] = None,
    since: Annotated[
        str, typer.Option(help="how far back: minutes, hours, days or weeks, as 90m, 24h, 7d")
    ] = "24h",
    until: Annotated[
        str | None, typer.Option(help="the end, as 2026-11-22T18:00 or with a time zone; default: now, UTC")
    ] = None,
    points: Annotated[int, typer.Option(min=12, max=10000, help="samples in that time")] = 288,
    token_file: Annotated[
        Path | None, typer.Option(help="file with a bearer token, where Prometheus asks for one")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="the HTML page; - for standard output")] = Path(
        "gpushare-report.html"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="print the figures as JSON, all rows of them")] = False,
) -> None:
    """Write what the GPUs did, what sharing gained, whether promises were kept, and who used what."""
    if (prometheus is None) == (snapshot is None):
        raise UsageError(
            "say where the figures come from: --prometheus http://ADDRESS:9090 (or GPUSHARE_PROMETHEUS), "
            "or --snapshot FOLDER, one of them"
        )
    check_writable(output, as_json=as_json)
    if snapshot is not None:
        objects = read_snapshot(snapshot)
        with believing(snapshot):
            read_at = objects.read_at
            if read_at is None:  # written by an older version
                read_at = (snapshot / OBJECTS_FILE).stat().st_mtime
            history = usage_of(objects, snapshot, read_at)
            page, figures = render_usage(history), as_record(history)
    else:
        assert prometheus is not None
        end = _moment(until) if until is not None else time.time()
        if end - parse_span(since) < 0:
            raise UsageError(f'--since "{since}" reaches back to before 1970, where no figure can be')
        history = read_prometheus(
            PrometheusSpan(
                _address(prometheus),
                end - parse_span(since),
                end,
                points,
                _token(token_file) if token_file is not None else None,
            )
        )
        page, figures = render_usage(history), as_record(history)
    write_whole(output, page)
    if as_json:
        typer.echo(json.dumps(figures))
    elif not is_standard_output(output):
        notes().print(f"report: {output}")


def parse_span(words: str) -> float:
    """Return the seconds of a span such as 24h.

    Raises:
        UsageError: it is not a span.
    """
    found = re.fullmatch(r"([0-9]{1,6})([mhdw])", words)
    if found is None or not int(found[1]):
        raise UsageError(
            f'--since "{words}" is no span of time; allowed are minutes, hours, days or weeks, as 24h'
        )
    return int(found[1]) * _UNITS[found[2]]


def _moment(words: str) -> float:
    try:
        found = datetime.fromisoformat(words)
    except ValueError:
        raise UsageError(f'--until "{words}" is no time; write it as 2026-11-22T18:00') from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _token(path: Path) -> str:
    found = read_text(path).strip()
    if not found.isprintable() or " " in found:
        raise UsageError(f"{path} is to hold a bearer token and nothing else, without spaces")
    return found


def _address(words: str) -> str:
    if not re.match(r"https?://[^/]", words):
        raise UsageError(f'--prometheus "{words}" is no address; write it as http://prometheus.monitoring:9090')
    return words


def as_record(history: UsageHistory) -> dict[str, Any]:
    """Return every figure of the page, and the rows that it leaves out, as one object for programs."""
    run = course(history)
    hours = history.hours
    return {
        "source": history.source,
        "begin": datetime.fromtimestamp(history.begin, UTC).isoformat(),
        "end": datetime.fromtimestamp(float(history.times[-1]), UTC).isoformat(),
        "step_seconds": history.step_seconds,
        "unit": history.unit,
        "gpus_in_use": float(run.in_use.sum()) * hours,
        "idle_gpus": float(run.idle.sum()) * hours,
        "known_gpus": float(run.known.sum()) * hours,
        "known_progress": float(run.known_progress.sum()) * hours,
        "given": float(run.given.sum()) * hours,
        "progressed": float(run.progress.sum()) * hours,
        "spared": float(run.spared.sum()) * hours,
        "promise_kept_ratio": kept_ratio(history),
        "retractions": history.retractions,
        "namespaces": [asdict(row) for row in showback(history)],
        "workloads": [asdict(row) for row in showback(history, by_workload=True)],
        "neighbours": [_neighbour_record(row) for row in neighbours(history)],
        "fractions": [asdict(row) for row in other_fractions(history)],
        "notes": list(history.notes),
    }


def _neighbour_record(row: NeighbourRow) -> dict[str, Any]:
    """Return a row by its names in JSON; there, the hours that two workloads shared a GPU are `together`."""
    return {"together" if name == "shared_gpu_hours" else name: value for name, value in asdict(row).items()}
