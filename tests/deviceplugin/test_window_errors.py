"""How the agent's inference erred from window to window on GPUs, and what the simulator of jobs assumes of it."""

import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from gpushare.sim.table_ours import InferenceError

TESTS = Path(__file__).parents[1]
SESSIONS = ("h200-loop-steps.json", "h100-loop-steps.json")  # those with what the loop acted by
SETTLED_SECONDS = 8.0  # after the newcomer came
LEAST_WINDOWS = 6


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TESTS / "gpu"))
    import counts  # noqa: PLC0415 - of the suite that needs a GPU, which this part of it does not

    return counts


def errors(counts: Any, *, throttled: bool) -> list[list[float]]:
    """Inferred less counted progress, window by window, of each job while it was throttled or while it was not."""
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for name in SESSIONS:
        session = json.loads((TESTS / "data" / "loop" / name).read_text())
        alone = {each["program"]: each["iterations_per_s"] for each in session["alone"]}
        for scene in session["scenes"]:
            for step in scene["steps"]:
                for job in step["tenants"]:
                    if step["at"] <= scene["newcomer_at"] + SETTLED_SECONDS or job["progress"] is None:
                        continue
                    told = scene["counts"][job["pod"]]
                    rate = counts.rate_of(told, step["at"] - step["seconds"], step["at"])
                    if rate is not None and (job["duty"] < 1) == throttled:
                        key = name, scene["scene"], job["pod"]
                        found[key].append(job["progress"] - rate / alone[job["pod"]])
    return [each for each in found.values() if len(each) >= LEAST_WINDOWS]


def root_mean_square(figures: list[float]) -> float:
    return fmean(figure**2 for figure in figures) ** 0.5


def test_most_of_the_error_of_a_job_that_is_not_throttled_stays_as_the_simulator_assumes(counts: Any) -> None:
    """Said in docs/measurements/jobs.md."""
    free = errors(counts, throttled=False)
    assert len(free) == 4
    standing, passing = root_mean_square(list(map(fmean, free))), root_mean_square(list(map(stdev, free)))
    assert (round(standing, 3), round(passing, 3)) == (0.030, 0.011)
    assumed = InferenceError()
    assert assumed.standing > assumed.passing
    assert assumed.stated > (standing**2 + passing**2) ** 0.5


def test_the_windows_of_throttled_jobs_differ_more(counts: Any) -> None:
    """In these sessions chance decided whether two were frozen at once (docs/adr/0204)."""
    stopped = errors(counts, throttled=True)
    assert len(stopped) == 6
    standing, passing = root_mean_square(list(map(fmean, stopped))), root_mean_square(list(map(stdev, stopped)))
    assert (round(standing, 3), round(passing, 3)) == (0.017, 0.048)
