"""Makes the runs of Pan's comparison: part after part, as far as the time goes."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from bench.papers.plan import TIMING, Part, ProgramSet, expected, phase_of, rounds, sets_of_seven
from bench.papers.programs import SEVEN, known_as, suite
from gpushare.core.interference import ProfileError, Wish, best_caps
from gpushare.data import default_model
from gpushare.research.calibration.collector import PoolMaker, collect, pools_of
from gpushare.research.calibration.counters import DriverCounters, RunCounters
from gpushare.research.calibration.daemon import mps_daemon
from gpushare.research.calibration.plan import left_of
from gpushare.research.calibration.resume import earlier_runs
from gpushare.research.calibration.simulated import SimulatedCounters, simulated_pools
from gpushare.research.calibration.workload import Stage
from gpushare.research.dataset import DatasetError, Mechanism, parse
from gpushare.research.solo_profiles import profile_of

MAX_SLOWDOWN: Final = 1.5
"""How much slower than alone our caps may make each of two, as the chart has it for class throughput."""
CHOSEN: Final = "our-caps.json"
MADE_UP: Final = "NVIDIA H200"

Say = Callable[[str], None]


def file_of(directory: Path, part: Part) -> Path:
    """Return a part's raw results."""
    return directory / f"pan-{part.value}.jsonl"


def missing(directory: Path) -> list[tuple[int, Part]]:
    """Return the parts, with their rounds, that the directory does not hold whole."""
    ours = chosen_caps(directory)
    found = []
    for number, part in rounds():
        phases = [phase_of(part, ours)] * (number + 1)
        if left_of(phases, earlier_runs(file_of(directory, part)).runs):
            found.append((number, part))
    return found


def chosen_caps(directory: Path) -> dict[ProgramSet, tuple[int, ...]]:
    """Return our caps of each set as they were chosen once; empty where they were not yet."""
    path = directory / CHOSEN
    if not path.exists():
        return {}
    return {tuple(each["tenants"]): tuple(each["caps"]) for each in json.loads(path.read_text())}


def choose_caps(directory: Path) -> dict[ProgramSet, tuple[int, ...]]:
    """Choose our caps of each set by the programs' signatures alone, as this GPU just showed them, and keep them.

    Raises:
        RuntimeError: a program has no signature: the part `alone` is not whole.
    """
    if found := chosen_caps(directory):
        return found
    try:
        data = parse(file_of(directory, Part.ALONE).read_bytes().splitlines())
        profiles = {name: profile_of(data, name) for name in SEVEN}
    except (OSError, DatasetError, ProfileError) as error:
        raise RuntimeError(f"our caps cannot be chosen yet: {error}") from None
    model = default_model().for_gpu(data.gpu_model)
    chosen = {
        tenants: best_caps(
            model, [Wish(profiles[name], max_slowdown=MAX_SLOWDOWN * len(tenants) / 2) for name in tenants]
        ).thread_percentages
        for tenants, _ in sets_of_seven()
    }
    kept = [{"tenants": tenants, "caps": caps} for tenants, caps in chosen.items()]
    (directory / CHOSEN).write_text(json.dumps(kept, indent=1) + "\n")
    return chosen


def session(directory: Path, *, budget_seconds: float, simulated: bool, say: Say) -> bool:
    """Make what is missing and fits; return whether nothing is missing any more."""
    began = time.monotonic()
    directory.mkdir(parents=True, exist_ok=True)
    counters: RunCounters = SimulatedCounters(MADE_UP) if simulated else DriverCounters()
    for number, part in missing(directory):
        left = budget_seconds - (time.monotonic() - began)
        ours: Mapping[ProgramSet, tuple[int, ...]] = {}
        if part in (Part.PAIRS, Part.TOGETHER):
            try:
                ours = choose_caps(directory)
            except RuntimeError as error:
                say(str(error))
                continue
        needed = expected([(number, part)], ours)
        if needed > left:
            say(f"{part.value}, round {number}, takes about {needed:.0f} s: too long for this call")
            continue
        phase = phase_of(part, ours)
        say(f"{part.value}, round {number}: {len(phase.runs)} runs, about {needed:.0f} s")
        with contextlib.ExitStack() as stack:
            collect(
                [phase] * (number + 1),
                file_of(directory, part),
                pools=_pools(part, [name for name, _ in phase.cells], stack, simulated=simulated),
                mechanism=part.mechanism,
                timing=TIMING,
                budget_seconds=left,
                counters=counters,
                progress=lambda *_: None,
                log=say,
            )
    return not missing(directory)


def _pools(part: Part, names: list[str], stack: contextlib.ExitStack, *, simulated: bool) -> PoolMaker:
    if simulated:
        return simulated_pools(part.mechanism, known_as=known_as)
    environment = None
    if part.mechanism is Mechanism.MPS:
        environment = stack.enter_context(mps_daemon())
    else:  # an earlier part's daemon is gone, and so is its folder; another's must not be joined
        os.environ["CUDA_MPS_PIPE_DIRECTORY"] = "/nonexistent/no-mps"
    return pools_of(suite(sorted(set(names))), Stage(), environment)
