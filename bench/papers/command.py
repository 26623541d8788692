"""python -m bench papers run|plan|report DIR: the comparisons of two papers on this machine's GPU.

    python -m bench papers plan DIR                    # what is missing, and the seconds of the GPU that it takes
    python -m bench papers run DIR [--budget MINUTES]  # goes on where the last call ended; root
    python -m bench papers run DIR --simulated         # the dry run, on any machine
    python -m bench papers report DIR                  # tables and figure of what DIR holds

--only pan (Pan 2021: pipes, pairs, N together, thread percentages) or gilman (Gilman and Walls 2021: turnaround).
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from bench.papers import collecting, plan, turnaround
from bench.sharing.machine import Machine, NotReadyError, describe, of_this_machine, simulated
from bench.sharing.records import Records
from bench.sharing.trace import table_signatures
from gpushare.research.calibration.counters import DriverCounters, NoCounters

PAN, GILMAN = "pan", "gilman"


def main(arguments: list[str]) -> None:
    """Run one of the three."""
    parser = argparse.ArgumentParser(
        prog="bench papers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["run", "plan", "report"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--simulated", action="store_true", help="made-up programs and the twin instead of a GPU")
    parser.add_argument("--budget", type=float, default=9.0, help="minutes of this call")
    parser.add_argument("--only", choices=[PAN, GILMAN], help="one paper's")
    read = parser.parse_args(arguments)
    if read.what == "report":
        from bench.papers.report import write_report  # noqa: PLC0415 - matplotlib is an extra

        print(write_report(read.directory))
        return
    if read.what == "plan":
        print(planned(read.directory, read.only))
        return
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {text}", file=sys.stderr, flush=True)

    try:
        machine = simulated() if read.simulated else of_this_machine()
        is_whole = _run(read, machine, began, say)
    except (NotReadyError, RuntimeError) as error:
        sys.exit(str(error))
    say("complete" if is_whole else planned(read.directory, read.only))


def planned(directory: Path, only: str | None = None) -> str:
    """Return what is missing and what it takes, in words."""
    lines, total = [], 0.0
    if only != GILMAN:
        missing = collecting.missing(directory)
        ours = collecting.chosen_caps(directory) or plan.guessed_caps()
        for number, part in missing:
            seconds = plan.expected([(number, part)], ours)
            total += seconds
            phase = plan.phase_of(part, ours)
            lines.append(
                f"pan, {part.value}, round {number}: {len(phase.runs)} runs of {len(phase.cells)} workers, "
                f"about {seconds:.0f} s"
            )
    if only != PAN:
        records = Records.open(directory, turnaround.FILE)
        seconds = turnaround.expected_seconds(records)
        total += seconds
        if seconds:
            lines.append(f"gilman: {len(turnaround.missing(records))} runs, about {seconds:.0f} s")
    return "\n".join([*lines, f"{total:.0f} s of the GPU in all ({total / 60:.1f} minutes)"])


def _run(read: argparse.Namespace, machine: Machine, began: float, say: collecting.Say) -> bool:
    directory: Path = read.directory
    records = Records.open(directory, turnaround.FILE)
    if (first := records.first("session")) is not None and first["simulated"] != machine.is_simulated:
        raise RuntimeError(f"{records.path} was begun {'without' if first['simulated'] else 'with'} a GPU")
    records.add("session", began=time.time(), **describe(machine))

    def left() -> float:
        return 60.0 * read.budget - (time.monotonic() - began)

    is_whole = True
    if read.only != GILMAN:
        is_whole = collecting.session(directory, budget_seconds=left(), simulated=read.simulated, say=say)
    if read.only != PAN:
        is_whole = _turnaround(read, machine, records, left(), say) and is_whole
    return is_whole


def _turnaround(
    read: argparse.Namespace, machine: Machine, records: Records, left: float, say: collecting.Say
) -> bool:
    from bench.sharing.local import LocalLauncher  # noqa: PLC0415 - the agent, for this comparison only

    # Short: a unix socket's path has at most 107 characters.
    work = Path(tempfile.mkdtemp(prefix="gs-", dir="/tmp"))
    launcher = LocalLauncher(
        work,
        machine.gpu,
        table_signatures(machine.gpu.model),
        twin=read.simulated,
        logs=read.directory / "session.log",
    )
    try:
        counters = NoCounters() if read.simulated else DriverCounters()
        return turnaround.Turnaround(records, launcher, counters, say).session(left)
    finally:
        launcher.close()
