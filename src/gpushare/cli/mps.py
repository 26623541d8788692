"""`gpushare mps`: look at and act on the MPS daemons and gates of this node."""

import dataclasses
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from gpushare.cli.console import notes, out
from gpushare.cli.errors import AbsentError, UsageError
from gpushare.core.api import HOST_DIRECTORY
from gpushare.mps import MpsError, commands
from gpushare.mps.actions import clients_of_pod, end_clients, program_of, sync_control
from gpushare.mps.layout import GpuDirectory, gpu_directories, status_reader
from gpushare.mps.status import GateStatus

app = typer.Typer(no_args_is_help=True, help=__doc__)
STALE_SECONDS = 10.0

Directory = Annotated[Path, typer.Option("--directory", help="where the MPS host keeps its GPUs")]
Gpu = Annotated[
    str | None, typer.Option("--gpu", help="UUID of the GPU, or its beginning; needed where there are several")
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
DEFAULT_DIRECTORY = Path(HOST_DIRECTORY)


def _gpus(directory: Path, chosen: str | None) -> list[GpuDirectory]:
    found = [gpu for gpu in gpu_directories(directory) if gpu.uuid.startswith(chosen or "")]
    if not found:
        what = f"no GPU {chosen}" if chosen else "no GPU"
        raise UsageError(f"{directory}: {what} is kept here; is the MPS host of gpushare running on this node?")
    return found


def _one(directory: Path, chosen: str | None) -> GpuDirectory:
    found = _gpus(directory, chosen)
    if len(found) > 1:
        raise UsageError(
            f"--gpu: {len(found)} GPUs are kept in {directory}; name one of {', '.join(g.uuid for g in found)}"
        )
    return found[0]


@contextmanager
def _one_sentence_errors() -> Iterator[None]:
    try:
        yield
    except MpsError as error:
        again = "; trying again may help" if error.retryable else ""
        raise UsageError(f"{error}{again}") from None


def _read(gpu: GpuDirectory) -> tuple[GateStatus | None, bool]:
    status = status_reader(gpu).read()
    return status, status is not None and time.time() - status.written_at < STALE_SECONDS


@app.command()
def status(directory: Directory = DEFAULT_DIRECTORY, gpu: Gpu = None, as_json: AsJson = False) -> None:
    """Show each GPU's MPS: state, clients, which processes wait and why, the self-test."""
    rows = [(directory_of, *_read(directory_of)) for directory_of in _gpus(directory, gpu)]
    if as_json:
        values: list[dict[str, Any]] = [
            {"gpu_uuid": g.uuid, "fresh": fresh, **(s.fields_json() if s else {})} for g, s, fresh in rows
        ]
        typer.echo(json.dumps(values))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("GPU", "STATE", "CLIENTS", "HELD", "CEILINGS", "DAEMON", "RESTARTS", "FAULTS", "TURN MEAN"):
        table.add_column(title, no_wrap=True)
    for g, s, fresh in rows:
        if s is None:
            table.add_row(g.uuid, "NoGate")
            continue
        mean = f"{s.turns.durations_seconds_sum / s.turns.count:.3f} s" if s.turns.count else "-"
        reasons = ", ".join(sorted({str(h.reason) for h in s.waiting_connections}))
        table.add_row(
            g.uuid,
            str(s.state) if fresh else f"{s.state} (stale)",
            str(len(s.clients)),
            f"{len(s.waiting_connections)} {reasons}".strip(),
            str(s.self_test.result),
            str(s.daemon_pid or "-"),
            str(s.daemon_restarts),
            str(s.faults),
            mean,
        )
    out().print(table)


@app.command()
def clients(directory: Directory = DEFAULT_DIRECTORY, gpu: Gpu = None, as_json: AsJson = False) -> None:
    """Show every MPS client: its pod, the ceilings it connected under, its memory."""
    read = [(each, *_read(each)) for each in _gpus(directory, gpu)]
    for each, state, fresh in read:
        if not fresh:
            notes().print(_doubt(each, state))
    found = [(each.uuid, state) for each, state, _ in read]
    rows = [(uuid, client) for uuid, state in found if state is not None for client in state.clients]
    if as_json:
        typer.echo(json.dumps([{"gpu_uuid": uuid, **dataclasses.asdict(client)} for uuid, client in rows]))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("PID", "POD", "GPU", "THREADS", "MEM LIMIT", "MEM USED"):
        table.add_column(title, no_wrap=True)
    for uuid, client in rows:
        table.add_row(
            str(client.pid),
            client.pod_uid or "(none)",
            uuid,
            _shown(client.thread_percentage, "{}%"),
            _shown(client.memory_limit_mib, "{} MiB"),
            _shown(client.memory_used_mib, "{} MiB"),
        )
    out().print(table)


def _doubt(gpu: GpuDirectory, status: GateStatus | None) -> str:
    """Say why the listed clients of a GPU are not the present ones."""
    if status is None:
        return f"{gpu.uuid}: there is no gate's status, so its clients are not known"
    age = time.time() - status.written_at
    return f"{gpu.uuid}: the gate's status is {age:.0f} s old, so its clients may be others by now"


def _shown(value: int | None, form: str) -> str:
    return "-" if value is None else form.format(value)


@app.command(name="set")
def set_(
    directory: Directory = DEFAULT_DIRECTORY,
    gpu: Gpu = None,
    thread_percentage: Annotated[int | None, typer.Option(min=1, max=100, help="1 to 100")] = None,
    memory_mib: Annotated[int | None, typer.Option(min=1, help="device memory of one process")] = None,
    priority: Annotated[int | None, typer.Option(min=0, max=1, help="0 normal, 1 below")] = None,
) -> None:
    """Set the server's ceilings for clients that connect from now on; a gate sets its own at each turn."""
    if thread_percentage is None and memory_mib is None and priority is None:
        raise UsageError("nothing to set: give --thread-percentage, --memory-mib or --priority")
    with _one_sentence_errors():
        control = sync_control(_one(directory, gpu))
        servers = control.servers()
        if not servers:
            raise UsageError("no MPS server runs")
        changes = []
        if thread_percentage is not None:
            changes.append(commands.set_active_thread_percentage(servers[0], thread_percentage))
        if memory_mib is not None:
            changes.append(commands.set_device_pinned_mem_limit(servers[0], 0, memory_mib))
        if priority is not None:
            changes.append(commands.set_default_client_priority(priority))
        control.apply(changes)
    typer.echo(f"server {servers[0]}: " + "; ".join(change.text for change in changes))


@app.command()
def terminate(
    directory: Directory = DEFAULT_DIRECTORY,
    gpu: Gpu = None,
    pid: Annotated[int | None, typer.Option(help="one client")] = None,
    pod: Annotated[str | None, typer.Option(help="every client of the pod with this uid")] = None,
    as_json: AsJson = False,
) -> None:
    """Stop one client, or all of a pod's, for a second, then kill it: a longer kernel ends the neighbours too."""
    if (pid is None) == (pod is None):
        raise UsageError("give either --pid or --pod")
    asked = [_one(directory, gpu)] if pid is not None else _gpus(directory, gpu)
    doubts = [_doubt(each, status) for each in asked for status, fresh in [_read(each)] if not fresh]
    results = [end_clients(each, [pid] if pid is not None else clients_of_pod(each, pod or "")) for each in asked]
    ended = [one for result in results for one in result.pids]
    refused = [f"client {one}: {why}" for result in results for one, why in result.refused]
    gone = [f"client {one} has ended by itself" for result in results for one in result.gone]
    if not ended and not refused:
        absent = gone or [f"no client of pod {pod} is on {', '.join(each.uuid for each in asked)}"]
        raise AbsentError("; ".join([*absent, *doubts]))
    for note in (*doubts, *gone):
        notes().print(note)
    if by_gate := [one for result in results for one in result.by_gate]:
        notes().print(f"the gate was ending {by_gate} already")
    if ended:
        typer.echo(json.dumps(ended) if as_json else f"ended {len(ended)} clients: {ended}")
    if refused:
        raise UsageError("; ".join(refused))


@app.command()
def daemon(
    action: Annotated[str, typer.Argument(help="start, stop or log")],
    directory: Directory = DEFAULT_DIRECTORY,
    gpu: Gpu = None,
    yes: Annotated[bool, typer.Option("--yes", help="stop although clients run; it ends them")] = False,
    lines: Annotated[int, typer.Option(min=1, max=100_000, help="of the log")] = 20,
) -> None:
    """Start or adopt, stop, or read the log of one GPU's daemon; an MPS host restarts what is stopped."""
    chosen = _one(directory, gpu)
    with _one_sentence_errors():
        match action:
            case "start":
                typer.echo(f"daemon {sync_control(chosen).start()} runs")
            case "stop":
                control = sync_control(chosen)
                running = len(control.clients())
                if running and not yes:
                    raise UsageError(f"{running} clients run and would end; add --yes to stop all the same")
                control.stop()
                typer.echo("stopped")
            case "log":
                for line in program_of(chosen).log_tail("server.log", lines):
                    typer.echo(line)
            case _:
                raise UsageError(f'"{action}": allowed are start, stop and log')
