"""Inference on sessions recorded on two GPUs, while tenants were stopped: docs/measurements/loop-h200.md."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
SESSIONS = ("h200-loop.json", "h100-loop.json")
BAR = 0.05  # mean absolute error of each job's progress


@pytest.fixture(scope="module", params=SESSIONS)
def session(request: pytest.FixtureRequest) -> Any:
    return json.loads((TESTS / "data" / "loop" / request.param).read_text())


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
        assert fmean(abs(miss.error) for miss in each) <= BAR, key


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
