"""Interference model's predictions for each GPU's tenants, from a process that ends after answering.

The model needs numpy, which would keep 13 MiB in the agent although answers change only with the tenants. So the
agent runs `gpushare_deviceplugin.forecaster` when they change, for all GPUs at once, and keeps the answers.
"""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import orjson

from gpushare.core.backoff import Backoff
from gpushare.core.control import ModelAnswer, Priors, Question
from gpushare.core.progress import Prior
from gpushare_deviceplugin.state import AgentPart, NodeState

_log = logging.getLogger(__name__)

PAUSE_SECONDS: Final = 10.0  # between two questions: one costs 0.2 s of a core
BACKOFF: Final = Backoff(first_seconds=PAUSE_SECONDS, longest_seconds=600.0)
ANSWER_SECONDS: Final = 60.0


class ForecastError(Exception):
    """The model gave no answer; asking later can help."""


Ask = Callable[[Sequence[Question]], Awaitable[Sequence[Priors]]]


class Forecasts:
    """The last answer for each GPU, and the open questions.

    Args:
        ask: raises ForecastError.
        with_parts: ask also about the subsets that run while a throttle stops the others.
    """

    def __init__(self, state: NodeState, ask: Ask, *, with_parts: bool = False) -> None:
        self._state = state
        self._ask = ask
        self._with_parts = with_parts
        self._known: dict[str, ModelAnswer] = {}
        self._open: dict[str, Question] = {}
        self._opened = asyncio.Event()
        self._failures = 0

    def expected(self, uuid: str, question: Question) -> Sequence[Prior | None]:
        """Return the predictions for a GPU's tenants; None for a tenant until the model has answered about it."""
        answer = self._known.get(uuid)
        if answer is None or not question.is_near(answer.question):
            self._open[uuid] = question
            self._opened.set()
        if answer is not None and question.is_about_the_same(answer.question):
            return answer.under(question.duties)
        return (None,) * len(question.loads)

    async def run(self) -> None:
        """Answer questions until cancelled."""
        while True:
            await self._opened.wait()
            await asyncio.sleep(await self.step())

    async def step(self) -> float:
        """Ask the open questions now; return how many seconds to wait before the next."""
        self._opened.clear()
        questions, self._open = self._open, {}
        if not questions:
            return 0.0
        parts = {uuid: question.parts() if self._with_parts else [] for uuid, question in questions.items()}
        asked = [
            each
            for uuid, question in questions.items()
            for each in (question, *(question.of(running) for running in parts[uuid]))
        ]
        try:
            answers = iter(await self._ask(asked))
        except ForecastError as error:
            self._open = questions | self._open
            self._opened.set()
            self._state.counts.error(AgentPart.FORECAST)
            if not self._failures:
                _log.warning("the interference model does not answer, progress is inferred without it: %s", error)
            self._failures += 1
            return BACKOFF.seconds(self._failures)
        if self._failures:
            _log.info("the interference model answers again")
        self._failures = 0
        for uuid, question in questions.items():
            self._known[uuid] = ModelAnswer(question, next(answers), {each: next(answers) for each in parts[uuid]})
        return PAUSE_SECONDS


async def ask_model(questions: Sequence[Question]) -> Sequence[Priors]:
    """Run the shipped model in a process of its own and return its answers.

    Raises:
        ForecastError: no process, no answer in time, or an invalid one.
    """
    payload = orjson.dumps([_written(question) for question in questions], option=orjson.OPT_NON_STR_KEYS)
    command = (sys.executable, "-m", "gpushare_deviceplugin.forecaster")
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    except OSError as error:
        raise ForecastError(str(error)) from error
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            out, errors = await process.communicate(payload)
    except TimeoutError as error:
        raise ForecastError(f"no answer within {ANSWER_SECONDS:.0f} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise ForecastError(f"exit status {process.returncode}: {last}")
    return read_answers(out, questions)


def read_answers(raw: bytes, questions: Sequence[Question]) -> list[Priors]:
    """Parse the forecaster's answers.

    Raises:
        ForecastError: not one mean and error, or null, for each tenant.
    """
    try:
        answers = [tuple(Prior(*each) if each else None for each in answer) for answer in orjson.loads(raw)]
    except (orjson.JSONDecodeError, TypeError) as error:
        raise ForecastError(f"an answer that cannot be read: {error}") from error
    if [len(answer) for answer in answers] != [len(question.loads) for question in questions]:
        raise ForecastError("an answer to another question")
    return answers


def _written(question: Question) -> Mapping[str, Any]:
    return {"gpu_model": question.gpu_model, "loads": [asdict(load) for load in question.loads]}
