"""Sessions recorded on H200s and H100s, while tenants were stopped: docs/measurements/loop-h200.md."""

import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
SESSIONS = (
    "h200-loop.json",
    "h100-loop.json",
    "h200-loop-1126.json",
    "h200-loop-steps.json",
    "h100-loop-steps.json",
    "h200-loop-turns.json",
    "h200-loop-turns-2.json",
    "h200-loop-1129.json",
)
SECTIONS = (
    ("h200-loop-1126.json", "## On an H200 with today's promises"),
    ("h200-loop-steps.json", "## On an H200, with what the loop acts by"),
    ("h100-loop-steps.json", "## On an H100, with what the loop acts by"),
    ("h200-loop-turns.json", "## On an H200, throttles in turn"),
    ("h200-loop-turns-2.json", "## On an H200, throttles in turn, again"),
    ("h200-loop-1129.json", "## On an H200, with windows taken back"),
)
BAR = 0.05  # mean absolute error of each job's progress
# The jobs that miss it, with their errors.
MISSED = {
    ("h100-loop-steps.json", "training", "fp16_product"): 0.051,
    ("h200-loop-turns-2.json", "training", "fp16_product"): 0.072,
}
KEPT_AGAIN_BAR_SECONDS = 10.0


@pytest.fixture(scope="module", params=SESSIONS)
def session(request: pytest.FixtureRequest) -> Any:
    return {"name": request.param, **json.loads((TESTS / "data" / "loop" / request.param).read_text())}


@pytest.fixture
def rescore(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TESTS / "gpu"))
    import rescore_loop  # noqa: PLC0415 - of the suite that needs a GPU, which this part of it does not

    return rescore_loop


def test_progress_is_inferred_to_the_bar_while_somebody_is_stopped(session: Any, rescore: Any) -> None:
    groups = {key: each for key, each in rescore.by_job(rescore.misses(session)).items() if key[1]}
    assert {program for _, _, program in groups} == {"cnn_inference_b1", "cnn_train_fp32", "fft", "fp16_product"}
    for key, each in groups.items():
        assert len(each) >= 15, key
        scene, _, program = key
        error = fmean(abs(miss.error) for miss in each)
        missed = MISSED.get((session["name"], scene, program))
        assert error <= BAR if missed is None else BAR < error == pytest.approx(missed, abs=5e-4), key


def test_without_the_clock_it_is_not(session: Any, rescore: Any) -> None:
    """Beside a tenant that runs at the power limit the others would look faster, and it slower."""
    groups = rescore.by_job(rescore.misses(session, with_clock=False))
    assert fmean(miss.error for miss in groups["training", True, "cnn_train_fp32"]) > BAR
    assert fmean(miss.error for miss in groups["training", True, "fp16_product"]) < -BAR


def test_a_stopped_job_is_not_counted_as_faster_than_it_is(rescore: Any) -> None:
    told = [(0.1 * n, 10.0 * n) for n in range(6)] + [(1.5 + 0.1 * n, 50.0 + 10 * n) for n in range(6)]
    assert rescore.rate_of(told, 0.0, 2.0) == pytest.approx(50.0)
    assert rescore.rate_of(told, 0.4, 1.6) == pytest.approx(20 / 1.2)
    assert rescore.rate_of(told, 1.9, 4.0) is None, "it counted for less than half of it"
    assert rescore.rate_of(told[:1], 0.0, 1.0) is None


def section(heading: str) -> str:
    """Return a section of the page, without what is printed bold."""
    text = (TESTS.parent / "docs/measurements/loop-h200.md").read_text().replace("**", "")
    return text.split(f"\n{heading}\n")[1].partition("\n## ")[0]


@pytest.mark.parametrize(("name", "heading"), SECTIONS)
def test_what_is_said_of_a_session_is_what_it_recorded(name: str, heading: str) -> None:
    page, session = section(heading), json.loads((TESTS / "data" / "loop" / name).read_text())
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line[:2] == "| "]
    told = iter(row for row in rows if len(row) == 9 and row[0] != "scene, newcomer")
    for scene in session["scenes"]:
        seconds = [(line["at"] - scene["newcomer_at"], line["jobs"]) for line in scene["series"]]
        for job in scene["jobs"]:
            _, job_name, promise, before, lowest, own, inferred, kept, below = next(told)
            figures = [(at, jobs[job["program"]]) for at, jobs in seconds]
            earlier, later = _mean(figures, "true", -12, -6), _mean(figures, "true", 8, 60)
            assert promise == f"{figures[-1][1]['promise']:.2f}"
            assert before == ("" if earlier is None else f"{earlier:.2f}")
            assert own == f"{later:.2f}"
            assert inferred == (f"{found:.2f}" if (found := _mean(figures, "inferred", 8, 60)) else "")
            stopped = fmean(line["throttle"] or 0.0 for at, line in figures if at >= 8)
            assert ("stopped" in job_name) == (stopped > 0)
            assert not stopped or f"stopped {100 * stopped:.0f}% of the time" in job_name
            broken = scene["restored"].get(job["program"], {"broken": False})
            if not broken["broken"]:
                assert (lowest in ("", "never below"), kept, below) == (True, "", "")
                continue
            assert lowest == f"{broken['lowest']:.2f}"
            seconds_to_kept = broken["kept_again_after_s"]
            is_met = seconds_to_kept is not None and seconds_to_kept <= KEPT_AGAIN_BAR_SECONDS
            figure = "to the end" if seconds_to_kept is None else f"{seconds_to_kept:.2f}"
            assert kept.startswith(f"{figure}: {'met' if is_met else 'missed'}")
            assert below == f"{broken['seconds_below']:.2f}"
    assert next(told, None) is None


@pytest.mark.parametrize(("name", "heading"), SECTIONS)
def test_the_errors_that_are_told_of_a_session_are_those_of_its_windows(
    name: str, heading: str, rescore: Any
) -> None:
    page, session = section(heading), json.loads((TESTS / "data" / "loop" / name).read_text())
    with_clock, without = (
        rescore.by_job(rescore.misses(session, with_clock=with_clock)) for with_clock in (True, False)
    )
    told = re.findall(r"^\|[^|]*\| (\w+) \| (0\.\d{3}) \| (0\.\d{3}) \| (0\.\d{3}) \|$", page, re.MULTILINE)
    throttled = [key for key in with_clock if key[1]]
    assert len(told) == len(throttled) == 6
    for (program, *figures), key in zip(told, throttled, strict=True):
        assert program == key[2]
        live = fmean(abs(miss.live) for miss in with_clock[key])
        anew = [fmean(abs(miss.error) for miss in each[key]) for each in (with_clock, without)]
        assert figures == [f"{figure:.3f}" for figure in (live, *anew)]


def _mean(figures: list[tuple[float, Any]], key: str, begin: float, end: float) -> float | None:
    found = [line[key] for at, line in figures if begin <= at <= end and line[key] is not None]
    return fmean(found) if found else None
