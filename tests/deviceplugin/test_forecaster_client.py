"""The interference model in a process of its own: when it is asked, what stands meanwhile, what failure does."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.deviceplugin.fakes import GPU_A, GPU_B

from gpushare.core.control import Priors, Question
from gpushare.core.gpu import Counters
from gpushare.core.interference import expectation
from gpushare.core.progress import Prior, TenantLoad
from gpushare.data import default_model
from gpushare_deviceplugin import forecaster
from gpushare_deviceplugin.forecaster_client import (
    BACKOFF,
    PAUSE_SECONDS,
    ForecastError,
    Forecasts,
    ask_model,
    read_answers,
)
from gpushare_deviceplugin.state import NodeState

FP32 = Counters(
    sm_util=0.7, sm_occupancy=0.3, fp32_util=0.6, dram_bw_util=0.2, integer_util=0.2, graphics_util=0.9
)
MEMORY = Counters(
    sm_util=0.9, sm_occupancy=0.5, fp32_util=0.1, dram_bw_util=0.9, integer_util=0.1, graphics_util=1.0
)
TWO = Question(
    "NVIDIA H200", ("u1", "u2"), (TenantLoad(FP32, 50, {50: 0.8}, iterations_per_s=20.0), TenantLoad(MEMORY, 100))
)


class Model:
    """Answers every tenant with the same, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Question] = []
        self.broken = False

    async def __call__(self, questions: Sequence[Question]) -> Sequence[Priors]:
        self.asked.extend(questions)
        if self.broken:
            raise ForecastError("no memory")
        return [(Prior(0.5, 0.1),) * len(question.loads) for question in questions]


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def forecasts(state: NodeState, model: Model) -> Forecasts:
    return Forecasts(state, model)


async def test_nothing_is_expected_until_the_model_has_answered_one_question_per_gpu(
    forecasts: Forecasts, model: Model
) -> None:
    for _ in range(3):
        assert forecasts.expected(GPU_A, TWO) == (None, None)
        assert forecasts.expected(GPU_B, replace(TWO, tenants=("u3", "u4"))) == (None, None)
    assert await forecasts.step() == PAUSE_SECONDS
    assert len(model.asked) == 2
    assert forecasts.expected(GPU_A, TWO) == (Prior(0.5, 0.1),) * 2
    assert await forecasts.step() == 0.0
    assert len(model.asked) == 2


async def test_other_tenants_or_caps_are_another_question_and_the_old_answer_is_not_theirs(
    forecasts: Forecasts, model: Model
) -> None:
    forecasts.expected(GPU_A, TWO)
    await forecasts.step()
    recapped = replace(TWO, loads=(replace(TWO.loads[0], thread_percentage=25), TWO.loads[1]))
    for other in (replace(TWO, tenants=("u1", "u9")), recapped):
        assert forecasts.expected(GPU_A, other) == (None, None)
        await forecasts.step()
        assert model.asked[-1] == other
        assert forecasts.expected(GPU_A, other) == (Prior(0.5, 0.1),) * 2


async def test_a_signature_that_moves_is_asked_about_anew_while_the_old_answer_stands(
    forecasts: Forecasts, model: Model
) -> None:
    forecasts.expected(GPU_A, TWO)
    await forecasts.step()
    trembling = replace(TWO, loads=(replace(TWO.loads[0], signature=replace(FP32, fp32_util=0.62)), TWO.loads[1]))
    moved = replace(TWO, loads=(replace(TWO.loads[0], signature=replace(FP32, fp32_util=0.4)), TWO.loads[1]))
    for question, asked in ((trembling, 1), (moved, 2)):
        assert forecasts.expected(GPU_A, question) == (Prior(0.5, 0.1),) * 2
        await forecasts.step()
        assert len(model.asked) == asked


async def test_failure_is_said_once_counted_and_tried_again_with_back_off(
    forecasts: Forecasts, model: Model, state: NodeState, caplog: pytest.LogCaptureFixture
) -> None:
    model.broken = True
    forecasts.expected(GPU_A, TWO)
    delays = [await forecasts.step() for _ in range(7)]
    assert delays[:3] == [PAUSE_SECONDS, 2 * PAUSE_SECONDS, 4 * PAUSE_SECONDS]
    assert delays[-1] == BACKOFF.longest_seconds
    assert state.counts.errors == {"forecast": 7}
    assert len([r for r in caplog.records if "inferred without it: no memory" in r.getMessage()]) == 1
    later = replace(TWO, tenants=("u1", "u9"))
    assert forecasts.expected(GPU_A, later) == (None, None)
    model.broken = False
    await forecasts.step()
    assert model.asked[-1] == later, "what is open is the newest question, not the one that failed"
    assert forecasts.expected(GPU_A, later) == (Prior(0.5, 0.1),) * 2


async def test_the_process_says_what_the_model_says() -> None:
    unseen = Question("NVIDIA A100", ("u1",), (TenantLoad(Counters(fp32_util=0.5), 100),))
    answers = await ask_model([TWO, unseen])
    expected = expectation(default_model().for_gpu("NVIDIA H200"))(TWO.loads)
    for answer, prior in zip(answers[0], expected, strict=True):
        assert answer is not None
        assert prior is not None
        assert (answer.mean, answer.error) == pytest.approx((prior.mean, prior.error))
    assert answers[1] == (None,)


async def test_a_process_that_fails_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpushare_deviceplugin.forecaster_client.sys.executable", "/no/such/python")
    with pytest.raises(ForecastError, match="No such file"):
        await ask_model([TWO])
    monkeypatch.setattr("gpushare_deviceplugin.forecaster_client.sys.executable", "/bin/false")
    with pytest.raises(ForecastError, match="exit status 1"):
        await ask_model([TWO])


@pytest.mark.parametrize("raw", [b"", b"null", b"[[1]]", b"[[[0.5, 0.1]]]", b'{"a": 1}'])
def test_an_answer_that_makes_no_sense_is_no_answer(raw: bytes) -> None:
    with pytest.raises(ForecastError):
        read_answers(raw, [TWO])


def test_the_forecaster_reads_what_is_written() -> None:
    assert forecaster.answer(b"[]") == b"[]"


async def test_what_is_expected_while_somebody_is_stopped_is_less_certain_the_more_so_the_longer(
    state: NodeState, model: Model
) -> None:
    forecasts = Forecasts(state, model, with_parts=True)
    forecasts.expected(GPU_A, TWO)
    await forecasts.step()

    def errors(*duties: float) -> list[float]:
        found = forecasts.expected(GPU_A, replace(TWO, duties=duties))
        return [prior.error for prior in found if prior is not None]

    free, mild, strong = errors(1.0, 1.0), errors(1.0, 0.9), errors(1.0, 0.3)
    assert free == [0.1, 0.1]
    assert mild[0] == pytest.approx(0.1, abs=0.01)
    assert strong[0] > 1.5 * free[0], "how much a stop gives to the neighbour depends on what was queued"
    assert strong[1] > 0.1, "what it makes in 30% of the time is not known better than what it makes in all of it"
