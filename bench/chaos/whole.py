"""hack/hostile: the whole suite by one command. Every threat, then faults at random, a soak and an upgrade.

    hack/hostile [--directory DIR] [--page docs/measurements/hostile.md]

Each part begins when the one before has ended, whatever it found. The same command goes on where a run was
stopped: a part that has ended is not run again, faults continue at the next one, an interrupted soak or
upgrade starts again. Each part that has ended is in the page. Some hours as it stands. Needs root and the local
backend of hack/cluster, which it brings up and leaves up. Ends 1 when a rule was broken or a threat is not held.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from devcluster.progress import say
from devcluster.settings import REPOSITORY

from bench.chaos.run import RUN_FILE, read_outcomes
from bench.chaos.soak import read_result
from bench.chaos.upgrading import UPGRADE_FILE, read_stages

PAGE: Final = REPOSITORY / "docs" / "measurements" / "hostile.md"
STATE_FILE: Final = "parts.json"
UPGRADE_STAGES: Final = 4
_SIGNALLED: Final = 128  # a shell's codes from here on, and Python's below 0, are of a program that was stopped

RunCommand = Callable[[Sequence[str], Mapping[str, str]], int]


@dataclass(frozen=True, slots=True)
class Plan:
    """Options of a whole run."""

    directory: Path
    page: Path = PAGE
    faults: int = 1000
    seed: int = 42
    soak_minutes: float = 120.0
    upgrade_minutes: float = 2.0
    pods_per_minute: float = 20.0


_USUAL: Final = Plan(REPOSITORY / "dist" / "hostile")


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 when everything held."""
    options = parse(arguments)
    return whole(options, run_command)


def parse(arguments: Sequence[str] | None = None) -> Plan:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="hack/hostile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, default=_USUAL.directory, metavar="DIR")
    parser.add_argument("--page", type=Path, default=PAGE, help="whose tables are replaced")
    parser.add_argument("--faults", type=int, default=_USUAL.faults)
    parser.add_argument("--seed", type=int, default=_USUAL.seed, help="of the faults and the load")
    parser.add_argument("--soak-minutes", type=float, default=_USUAL.soak_minutes)
    parser.add_argument("--upgrade-minutes", type=float, default=_USUAL.upgrade_minutes, help="after each change")
    parser.add_argument("--pods-per-minute", type=float, default=_USUAL.pods_per_minute)
    return Plan(**vars(parser.parse_args(arguments)))


def run_command(command: Sequence[str], more: Mapping[str, str]) -> int:
    """Run a command in the repository; return its code."""
    say(" ".join(command))
    return subprocess.run(command, cwd=REPOSITORY, env={**os.environ, **more}, check=False).returncode


def whole(plan: Plan, run: RunCommand) -> int:
    """Run every part that has not ended yet; 0 when all held, 1 when not, another code where one was cut off."""
    plan.directory.mkdir(parents=True, exist_ok=True)
    codes = _read(plan)
    for name, act, has_ended in (
        ("threats", _threats, lambda code: 0 <= code < _SIGNALLED),
        ("faults", _faults, lambda _: _faults_ended(plan)),
        ("soak", _soak, lambda _: _soak_ended(_latest(plan, "soak"))),
        ("upgrade", _upgrade, lambda _: _upgrade_ended(_latest(plan, "upgrade"))),
    ):
        if name in codes:
            say(f"{name}: ended before, with {codes[name]}")
            continue
        code = act(plan, run)
        if not has_ended(code):
            say(f"{name} was cut off ({code}); the same command goes on there")
            return code or 1
        codes[name] = code
        _write(plan, codes)
        _report(plan, run)
    return int(any(codes.values()))


def _read(plan: Plan) -> dict[str, int]:
    try:
        found: dict[str, int] = json.loads((plan.directory / STATE_FILE).read_text())
    except FileNotFoundError:
        return {}
    return found


def _write(plan: Plan, codes: Mapping[str, int]) -> None:
    new = plan.directory / f".{STATE_FILE}"
    new.write_text(json.dumps(codes) + "\n")
    new.replace(plan.directory / STATE_FILE)


def _threats(plan: Plan, run: RunCommand) -> int:
    """Run each threat's test, on the cluster's API server; without a cluster those that need it would skip."""
    if code := run(("hack/cluster", "up"), {}):
        return -code
    return run((sys.executable, "tests/hostile/run.py", "--write", str(plan.page)), {})


def _faults(plan: Plan, run: RunCommand) -> int:
    directory = plan.directory / "faults"
    where = ("--resume", str(directory)) if (directory / RUN_FILE).exists() else ("--directory", str(directory))
    return run(("hack/chaos", "--faults", str(plan.faults), "--seed", str(plan.seed), *where), {})


def _faults_ended(plan: Plan) -> bool:
    made = read_outcomes(plan.directory / "faults")
    return bool(made) and made[-1].number >= plan.faults - 1


def _soak(plan: Plan, run: RunCommand) -> int:
    return run(("hack/chaos", "--soak", "--minutes", f"{plan.soak_minutes:g}", *_churn(plan, "soak")), {})


def _soak_ended(directory: Path) -> bool:
    result = read_result(directory)
    return result is not None and result.is_whole


def _upgrade(plan: Plan, run: RunCommand) -> int:
    return run(("hack/chaos", "--upgrade", "--minutes", f"{plan.upgrade_minutes:g}", *_churn(plan, "upgrade")), {})


def _upgrade_ended(directory: Path) -> bool:
    return (directory / UPGRADE_FILE).exists() and len(read_stages(directory)) >= UPGRADE_STAGES


def _churn(plan: Plan, name: str) -> tuple[str, ...]:
    """Return the options of a part that starts again, in a directory of its own, after an interruption."""
    number = len(_tries(plan, name)) + 1
    rate = ("--pods-per-minute", f"{plan.pods_per_minute:g}", "--seed", str(plan.seed))
    return *rate, "--directory", str(plan.directory / f"{name}-{number}")


def _tries(plan: Plan, name: str) -> list[Path]:
    found = [one for one in plan.directory.glob(f"{name}-*") if one.name.removeprefix(f"{name}-").isdecimal()]
    return sorted(found, key=lambda one: int(one.name.removeprefix(f"{name}-")))


def _latest(plan: Plan, name: str) -> Path:
    return (_tries(plan, name) or [plan.directory / f"{name}-1"])[-1]


def _report(plan: Plan, run: RunCommand) -> None:
    """Put the tables of every part that has ended so far into the page."""
    ended = [
        directory
        for directory, has_ended in (
            (plan.directory / "faults", _faults_ended(plan)),
            (_latest(plan, "soak"), _soak_ended(_latest(plan, "soak"))),
            (_latest(plan, "upgrade"), _upgrade_ended(_latest(plan, "upgrade"))),
        )
        if has_ended
    ]
    if ended:
        run(("hack/chaos", "--report", *map(str, ended), "--write", str(plan.page)), {})
