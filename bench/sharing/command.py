"""python -m bench sharing run|report|plan|trace DIR: forty real jobs at one GPU under six ways of sharing it.

    hack/gpu/cluster run -- python -m bench sharing run DIR   # jobs are pods of a cluster with gpushare, one GPU
    python -m bench sharing run DIR --without-kubernetes      # jobs are processes; root, on a machine with a GPU
    python -m bench sharing run DIR --without-kubernetes --simulated    # the dry run: the twin, on any machine
    python -m bench sharing report DIR                        # table and figure of what DIR holds
    python -m bench sharing trace DIR                         # its jobs as a CSV for `gpushare sim jobs`

DIR keeps what was measured; `run` continues where the last one stopped, and ends after --budget minutes.
"""

import argparse
import math
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.sharing.driver import Driver, SessionSettings, SignatureSource, expected_seconds
from bench.sharing.launching import Launcher
from bench.sharing.machine import Machine, NotReadyError, of_a_node, of_this_machine, simulated, why_no_room
from bench.sharing.policies import POLICIES, SharingPolicy
from bench.sharing.records import Records
from bench.sharing.trace import TraceJob, TraceSettings, draw
from gpushare.core.admission import Defaults
from gpushare.sim.job_trace import format_jobs
from gpushare.sim.jobs import Job

_TRACE = ("jobs", "least_seconds", "most_seconds", "load", "seed", "share_ratio")


def main(arguments: list[str]) -> None:
    """Run one of the four."""
    parser = argparse.ArgumentParser(
        prog="bench sharing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["run", "report", "plan", "trace"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--without-kubernetes", action="store_true", help="jobs are processes of this machine")
    parser.add_argument("--simulated", action="store_true", help="the twin instead of a GPU")
    parser.add_argument("--budget", type=float, default=8.0, help="minutes of this call")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument(
        "--policies", nargs="+", choices=sorted(POLICIES), default=list(POLICIES), help="in this order"
    )
    standard, usual = TraceSettings(), SessionSettings()
    parser.add_argument("--alone-seconds", type=float, default=usual.alone_seconds)
    parser.add_argument("--signature-seconds", type=float, default=usual.signature_seconds)
    parser.add_argument(
        "--signatures",
        type=SignatureSource,
        choices=list(SignatureSource),
        default=usual.signatures,
        help="those that the agent takes in the first session (about two minutes), the H200 table's, or none",
    )
    parser.add_argument(
        "--faults", type=int, default=usual.faults, help="in a run of gpushare of its own: so many MPS faults"
    )
    parser.add_argument(
        "--to-the-end",
        action="store_true",
        help="begin a run that may be cut, where the time is too short for all",
    )
    parser.add_argument("--jobs", type=int, default=standard.jobs)
    parser.add_argument("--least-seconds", type=float, default=standard.least_seconds)
    parser.add_argument("--most-seconds", type=float, default=standard.most_seconds)
    parser.add_argument("--load", type=float, default=standard.load)
    parser.add_argument(
        "--share-ratio",
        type=float,
        default=standard.share_ratio,
        help="factor on the shares that jobs ask for",
    )
    parser.add_argument("--seed", type=int, default=standard.seed)
    read = parser.parse_args(arguments)
    if read.what == "report":
        from bench.sharing.report import write_report

        print(write_report(read.directory))
        return
    records = Records.open(read.directory)
    trace = _trace_of(records, read, arguments)
    if read.what == "trace":
        print(format_jobs(as_simulated(draw(trace), records)), end="")
        return
    settings = SessionSettings(
        60.0 * read.budget,
        read.repetitions,
        read.alone_seconds,
        read.signature_seconds,
        read.signatures,
        tuple(read.policies),
        read.faults,
        read.to_the_end,
    )
    if read.what == "plan":
        print(plan(trace, settings, "processes" if read.without_kubernetes else "pods"))
        return
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started ends with it

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {text}", file=sys.stderr, flush=True)

    try:
        launcher, machine = _launcher(read, records, draw(trace), [POLICIES[name] for name in settings.policies])
    except NotReadyError as error:
        sys.exit(str(error))
    try:
        driver = Driver(records, launcher, machine, settings, trace, say)
        if (words := driver.why_not_here()) is not None:
            sys.exit(words)
        driver.session()
    except NotReadyError as error:
        sys.exit(str(error))
    finally:
        launcher.close()


def as_simulated(jobs: Sequence[TraceJob], records: Records) -> list[Job]:
    """Return the jobs for the simulator, with the start of each program as it took in the runs, in the median."""
    starts: dict[str, list[float]] = {}
    for line in records.of("job"):
        if line["ready"] is not None and line["started"] is not None:
            starts.setdefault(line["program"], []).append(line["ready"] - line["started"])
    defaults = Defaults()
    return [
        Job(
            job.name,
            job.program,
            job.arrives,
            job.seconds,
            defaults.max_slowdown_of(job.job_class),
            f"{job.share_percent / 100:g}",
            job.job_class,
            start_seconds=round(statistics.median(starts.get(job.program, [0.0])), 2),
        )
        for job in jobs
    ]


def plan(trace: TraceSettings, settings: SessionSettings, launcher: str) -> str:
    """Return what is to be expected, in words; a pod's start is longer than a process's."""
    jobs = draw(trace)
    work = sum(job.seconds for job in jobs)
    lines = [
        f"{len(jobs)} jobs of {len({job.program for job in jobs})} programs",
        f"{work:.0f} s alone one after the other, each at most {max(job.seconds for job in jobs):.1f} s",
        f"the last comes after {jobs[-1].arrives:.0f} s",
    ]
    total = 0.0
    for name in settings.policies:
        expected = expected_seconds(POLICIES[name], jobs, Records(Path()), launcher)
        total += expected
        lines.append(f"{name}: at most about {expected:.0f} s a run")
    alone = (
        "on each machine about two minutes of programs alone, on the first one six minutes"
        if launcher == "pods"
        else "in each session about one minute of programs alone, in the first one three minutes"
    )
    minutes = settings.repetitions * total / 60
    lines.append(f"{settings.repetitions} repetitions: at most about {minutes:.0f} minutes, and {alone}")
    return "\n".join(lines)


def _trace_of(records: Records, read: argparse.Namespace, arguments: list[str]) -> TraceSettings:
    """Return the trace that the directory began with; other wishes are refused."""
    asked = TraceSettings(**{name: getattr(read, name) for name in _TRACE})
    if not 0 < asked.share_ratio < math.inf:
        sys.exit("--share-ratio is a factor above 0, as 0.5 for half of the share")
    first = records.first("settings")
    if first is None:
        return asked
    kept = TraceSettings(**{name: first.get(name, getattr(TraceSettings(), name)) for name in _TRACE})
    given = [name for name in _TRACE if any(each.startswith(f"--{name.replace('_', '-')}") for each in arguments)]
    if any(getattr(asked, name) != getattr(kept, name) for name in given):
        sys.exit(f"{records.path} was begun with {kept}: take another directory for other jobs")
    return kept


def _launcher(
    read: argparse.Namespace, records: Records, jobs: Sequence[TraceJob], policies: Sequence[SharingPolicy]
) -> tuple[Launcher, Machine]:
    """Return who starts the jobs, and where.

    Raises:
        NotReadyError: the benchmark cannot begin here; nothing was started.
    """
    if not read.without_kubernetes:
        from bench.sharing.pods import PodLauncher, place_of_this_cluster

        if read.signatures is SignatureSource.TABLE:
            raise NotReadyError(
                "a cluster takes its own signatures: --signatures table is for --without-kubernetes"
            )
        place = place_of_this_cluster()
        if (words := why_no_room(place.gpu, jobs, policies)) is not None:
            raise NotReadyError(words)
        return PodLauncher(place), of_a_node(place.gpu, is_simulated=place.tenants.simulated)
    if read.faults:
        raise NotReadyError("faults are injected by pods: --faults is not for --without-kubernetes")
    from bench.sharing.local import LocalLauncher

    machine = simulated() if read.simulated else of_this_machine()
    if (words := why_no_room(machine.gpu, jobs, policies)) is not None:
        raise NotReadyError(words)
    is_cold = read.signatures is SignatureSource.NONE
    known = {} if is_cold else {line["program"]: line["signature"] for line in records.of("signature")}
    # Short: a unix socket's path has at most 107 characters.
    work = Path(tempfile.mkdtemp(prefix="gs-", dir="/tmp"))
    logs = read.directory / "session.log"
    return LocalLauncher(work, machine.gpu, known, twin=read.simulated, logs=logs), machine
