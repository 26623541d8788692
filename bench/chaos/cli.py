"""hack/chaos: bring load onto the local cluster, inject faults at random, and audit after each; or soak.

    hack/chaos --faults 1000 --seed 42 [--minutes N] [--directory DIR]
    hack/chaos --resume DIR --faults 1000 [--minutes N]     go on where that run stopped, with the same faults
    hack/chaos --soak --minutes 120 --pods-per-minute 20
    hack/chaos --upgrade --minutes 3 [--former COMMIT]      churn while helm upgrades and rolls back
    hack/chaos --report DIR --write docs/measurements/hostile.md

Needs root and the local backend of hack/cluster: it brings the cluster up and installs gpushare. Everything is
written below DIR (default: dist/chaos/<time>). Ends 1 when a rule was broken. SIGTERM or ctrl-c ends a soak early
with the table of what it measured; of one that was killed, --report DIR has it.
"""

import argparse
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from devcluster import backends
from devcluster.demo import Demo
from devcluster.local import LocalCluster
from devcluster.progress import Failed, say
from devcluster.settings import REPOSITORY

from bench.chaos import report
from bench.chaos.load import Filling
from bench.chaos.plan import QUICK, FaultKind
from bench.chaos.run import FAULTS_FILE, FaultOutcome, read_header, read_outcomes, write_header
from bench.chaos.setting import set_up
from bench.chaos.soak import SHORTEST_MINUTES, SOAK_FILE, USAGE_FILE, Interruption, read_result, read_samples, soak
from bench.chaos.upgrade import FORMER
from bench.chaos.upgrading import UPGRADE_FILE, read_stages, upgrade

POPULATION = 8
# A run is about what breaks; a pod that is moved away for a neighbour's promise would look like a lost pod.
# Generous tolerances, as a pod that waits for a neighbour's promise tests nothing.
INSTALL = ("--set", "policy.retraction=none,policy.maxSlowdown=3,policy.latencyMaxSlowdown=2")
# Wider still, as full GPUs would be left a fifth empty for the sake of promises.
INSTALL_FULL = ("--set", "policy.retraction=none,policy.maxSlowdown=10,policy.latencyMaxSlowdown=10")


def main() -> int:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that faults are taken back
    try:
        if options.report:
            return _report(options.report, options.write)
        cluster = backends.pick()
        if not isinstance(cluster, LocalCluster):
            raise Failed(f"faults reach into the local cluster only, this is {cluster.name}")
        directory = options.resume or options.directory or _new_directory()
        directory.mkdir(parents=True, exist_ok=True)
        cluster.up()
        if options.upgrade:
            return _upgrade(cluster, directory, options)
        filling = filling_of(options, directory)
        image = Demo(cluster).install(*(INSTALL_FULL if filling is Filling.FULL else INSTALL))["image"]
        if options.soak:
            return _soak(cluster, image, directory, options, filling)
        return _chaos(cluster, image, directory, options, filling)
    except Failed as failed:
        print(f"hack/chaos: {failed}", file=sys.stderr)
        return 1


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; what makes no sense ends the program."""
    parser = argparse.ArgumentParser(
        prog="hack/chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--faults", type=int, default=1000, help="how many in all, those of a resumed run included"
    )
    parser.add_argument("--seed", type=int, default=42, help="the same seed gives the same faults")
    parser.add_argument("--kinds", choices=["all", "quick"], default="all", help="quick: what CI takes")
    parser.add_argument("--only", type=FaultKind, nargs="+", metavar="KIND", help=f"of: {', '.join(FaultKind)}")
    parser.add_argument(
        "--load",
        type=Filling,
        choices=list(Filling),
        help="full: more pods than the GPUs have room for; roomy: none waits for room. Default: full for faults, "
        "roomy for a soak; an upgrade is always roomy",
    )
    parser.add_argument("--minutes", type=float, help="stop after so many; of a soak or of a stage")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="go on with the run of that directory")
    parser.add_argument("--directory", type=Path, metavar="DIR", help="where to write")
    parser.add_argument("--soak", action="store_true", help="no faults: churn, and measure each part")
    parser.add_argument("--upgrade", action="store_true", help="no faults: churn, upgrade and roll back")
    parser.add_argument("--former", default=FORMER, metavar="COMMIT", help="what to upgrade from")
    parser.add_argument("--pods-per-minute", type=float, default=20.0)
    parser.add_argument(
        "--report", type=Path, nargs="+", metavar="DIR", help="print the tables of these runs together"
    )
    parser.add_argument("--write", type=Path, metavar="PAGE", help="with --report: replace them in this page")
    options = parser.parse_args(arguments)
    if options.soak and options.minutes is not None and options.minutes < SHORTEST_MINUTES:
        parser.error(f"a soak of less than {SHORTEST_MINUTES:.1f} minutes has too few samples to compare")
    if options.soak and options.directory and (options.directory / USAGE_FILE).exists():
        parser.error(f"{options.directory} has a soak already")
    return options


def _new_directory() -> Path:
    return REPOSITORY / "dist" / "chaos" / f"{datetime.now(UTC):%Y%m%d-%H%M%S}"


def filling_of(options: argparse.Namespace, directory: Path) -> Filling:
    """Return the load of a run; a resumed one keeps its own."""
    if options.resume:
        return Filling(read_header(directory).get("load", Filling.ROOMY))  # older runs did not tell
    usual = Filling.ROOMY if options.soak else Filling.FULL
    return options.load or usual


def _chaos(
    cluster: LocalCluster, image: str, directory: Path, options: argparse.Namespace, filling: Filling
) -> int:
    begun = time.monotonic()
    kinds = tuple(options.only or (QUICK if options.kinds == "quick" else FaultKind))
    here = _machine()
    header: dict[str, Any] = {"seed": options.seed, "kinds": list(kinds), "load": filling, **here}
    if options.resume:
        header = read_header(directory)  # stays as it was: what was made so far is of then
        header["resumed"] = [*header.get("resumed", []), here]
    write_header(directory, header)
    done = read_outcomes(directory)
    first = done[-1].number + 1 if done else 0
    seed, kinds = int(header["seed"]), tuple(map(FaultKind, header["kinds"]))
    until = begun + options.minutes * 60 if options.minutes else float("inf")
    say(f"faults {first} to {options.faults - 1} of seed {seed}, into {directory}")
    with set_up(cluster, image, seed + first, f"{seed}-{first}", filling) as setting:
        run = setting.chaos(directory, POPULATION, here["commit"])
        if missing := run.settle_first():
            raise Failed(f"the load does not come up: {'; '.join(missing)}")
        new = run.run(seed, range(first, options.faults), kinds, until=until)
    print(report.chaos_table(read_outcomes(directory), heading([directory])))
    return int(any(one.violations for one in new))


def _soak(
    cluster: LocalCluster, image: str, directory: Path, options: argparse.Namespace, filling: Filling
) -> int:
    minutes = 120.0 if options.minutes is None else options.minutes
    write_header(directory, {"minutes": minutes, "pods_per_minute": options.pods_per_minute, **_machine()})
    name = f"soak-{options.seed}"
    with set_up(cluster, image, options.seed, name, filling) as setting, Interruption() as interruption:
        result = soak(
            setting.eye,
            setting.load,
            setting.freezes,
            directory,
            minutes=minutes,
            pods_per_minute=options.pods_per_minute,
            population=POPULATION,
            is_interrupted=lambda: bool(interruption),
        )
        print(_soak_text(directory), flush=True)
    if not result.is_whole:
        return 128 + interruption.signal_number
    return int(bool(result.violations) or not all(one.is_flat for one in result.growths))


def _upgrade(cluster: LocalCluster, directory: Path, options: argparse.Namespace) -> int:
    minutes = 3.0 if options.minutes is None else options.minutes
    header = {"former": options.former[:7], "minutes": minutes, "pods_per_minute": options.pods_per_minute}
    write_header(directory, {**header, **_machine()})
    stages = upgrade(
        cluster,
        directory,
        former=options.former,
        image=backends.push_images(cluster)["image"],
        install=lambda: Demo(cluster).install(*INSTALL),
        seconds=minutes * 60,
        pods_per_minute=options.pods_per_minute,
        population=POPULATION,
        seed=options.seed,
    )
    print(_upgrade_text(directory))
    return int(any(one.violations or one.settled_seconds is None for one in stages))


def _upgrade_text(directory: Path) -> str:
    header = read_header(directory)
    heading = f"{_what(header)}: from {header['former']} and back, {header['pods_per_minute']:g} pods a minute"
    return report.upgrade_table(read_stages(directory), heading)


def _soak_text(directory: Path) -> str:
    header, result = read_header(directory), read_result(directory)
    asked = f"{header['minutes']:g} minutes"
    rate = f"{header['pods_per_minute']:g} pods a minute"
    if result is None:  # an older one, which wrote nothing else before its end
        measured, growths = read_samples(directory)
        rest = "cut off, so that its pods and broken rules are unknown"
        return report.soak_table(growths, f"{_what(header)}: {measured:.0f} of {asked}, {rate}, {rest}")
    length = asked if result.is_whole else f"ended early, at {result.minutes:.0f} of {asked}"
    counts = f"{result.created} pods created and {result.deleted} gone; {len(result.violations)} rules broken"
    return report.soak_table(result.growths, f"{_what(header)}: {length}, {rate}, {counts}")


def _report(directories: list[Path], page: Path | None) -> int:
    chaos = [one for one in directories if (one / FAULTS_FILE).exists()]
    texts = []
    if chaos:
        outcomes = [outcome for one in chaos for outcome in read_outcomes(one)]
        texts.append((report.CHAOS_MARKS, report.chaos_table(outcomes, heading(chaos))))
    soaks = [one for one in directories if (one / SOAK_FILE).exists() or (one / USAGE_FILE).exists()]
    texts += [(report.SOAK_MARKS, _soak_text(one)) for one in soaks]
    if upgrades := [_upgrade_text(one) for one in directories if (one / UPGRADE_FILE).exists()]:
        texts.append((report.UPGRADE_MARKS, "\n\n".join(upgrades)))
    for marks, text in texts:
        print(text)
        if page is not None:
            report.write(page, marks, text)
    return 0


def heading(directories: Sequence[Path]) -> str:
    """Return when, of which commits and where these runs were made, by what each fault was made with."""
    headers = [read_header(one) for one in directories]
    times = [each for one in headers for each in (one, *one.get("resumed", []))]
    commits = [
        commit
        for directory, header in zip(directories, headers, strict=True)
        for commit in _commits(read_outcomes(directory), header["commit"])
    ]
    dates, machines, seeds = (
        ", ".join(dict.fromkeys(str(one[name]) for one in of))
        for of, name in ((times, "date"), (times, "machine"), (headers, "seed"))
    )
    return f"{dates}, commit {'; '.join(dict.fromkeys(commits))}, {machines}, seed {seeds}"


def _commits(outcomes: Sequence[FaultOutcome], first: str) -> list[str]:
    """Return the commits, with the faults of each where there are several; older outcomes do not say theirs."""
    numbers: dict[str, list[int]] = {}
    for one in outcomes:
        numbers.setdefault(one.commit or first, []).append(one.number)
    if len(numbers) < 2:
        return list(numbers) or [first]
    return [f"{commit} (faults {min(found)} to {max(found)})" for commit, found in numbers.items()]


def _what(header: dict[str, Any]) -> str:
    return f"{header['date']}, commit {header['commit']}, {header['machine']}"


def _machine() -> dict[str, str]:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    release = platform.release().split("-", maxsplit=1)[0]
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "commit": done.stdout.strip(),
        "machine": f"{os.cpu_count()} cores, Linux {release}, Python {platform.python_version()}",
    }


if __name__ == "__main__":
    sys.exit(main())
