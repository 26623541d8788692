"""The interference model's predictions for each GPU's tenants, from a process that ends with its answer.

The model needs numpy, 13 MiB that would stay in the agent for an answer that changes with the tenants. So the
agent runs `gpushare_deviceplugin.forecaster` when they change, for all GPUs at once, and keeps the answers.
"""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import orjson

from gpushare.core.progress import Prior, TenantLoad
from gpushare.runtime.backoff import Backoff
from gpushare_deviceplugin.state import NodeState

_log = logging.getLogger(__name__)

PAUSE_SECONDS: Final = 10.0  # between two questions: one costs 0.2 s of a core
BACKOFF: Final = Backoff(first_seconds=PAUSE_SECONDS, longest_seconds=600.0)
ANSWER_SECONDS: Final = 60.0
# A signature that moves by less counts as the same: the windows behind it differ by as much.
SAME_RATIO: Final = 0.03

Priors = tuple[Prior | None, ...]


class ForecastError(Exception):
    """The model gave no answer; asking later can help."""


@dataclass(frozen=True, slots=True)
class Question:
    """The tenants of one GPU as input of the model.

    Attributes:
        tenants: pod uids; loads: in the same order, under the caps in force.
    """

    gpu_model: str
    tenants: tuple[str, ...]
    loads: tuple[TenantLoad, ...]

    def is_about_the_same(self, other: "Question") -> bool:
        """Return whether the other has the same tenants under the same caps."""
        return (self.gpu_model, self.tenants, self.caps) == (other.gpu_model, other.tenants, other.caps)

    def is_near(self, other: "Question") -> bool:
        """Return whether the answer to the other serves: the same tenants, and no signature moved much."""
        return self.is_about_the_same(other) and all(
            _is_near(one, two) for one, two in zip(self.loads, other.loads, strict=True)
        )

    @property
    def caps(self) -> tuple[int, ...]:
        """Return the thread percentages of the loads."""
        return tuple(load.thread_percentage for load in self.loads)


Ask = Callable[[Sequence[Question]], Awaitable[Sequence[Priors]]]


def _is_near(one: TenantLoad, two: TenantLoad) -> bool:
    mine, theirs = _figures(one), _figures(two)
    return mine.keys() == theirs.keys() and all(
        abs(value - theirs[name]) <= SAME_RATIO * max(1.0, abs(value)) for name, value in mine.items()
    )


def _figures(load: TenantLoad) -> dict[str, float]:
    curve = {f"cap {cap}": progress for cap, progress in load.cap_curve.items()}
    rate = {"rate": load.iterations_per_s} if load.iterations_per_s else {}
    return {**load.signature.as_dict(), **curve, **rate}


class Forecasts:
    """The last answer for each GPU, and the open questions.

    Args:
        ask: raises ForecastError.
    """

    def __init__(self, state: NodeState, ask: Ask) -> None:
        self._state = state
        self._ask = ask
        self._known: dict[str, tuple[Question, Priors]] = {}
        self._open: dict[str, Question] = {}
        self._opened = asyncio.Event()
        self._failures = 0

    def expected(self, uuid: str, question: Question) -> Sequence[Prior | None]:
        """Return the predictions for a GPU's tenants; none for a tenant until the model has answered about it."""
        asked, priors = self._known.get(uuid, (None, ()))
        if asked is None or not question.is_near(asked):
            self._open[uuid] = question
            self._opened.set()
        if asked is not None and question.is_about_the_same(asked):
            return priors
        return (None,) * len(question.loads)

    async def run(self) -> None:
        """Answer questions until cancelled."""
        while True:
            await self._opened.wait()
            await asyncio.sleep(await self.step())

    async def step(self) -> float:
        """Ask the open questions now; return for how many seconds to leave the model alone."""
        self._opened.clear()
        questions, self._open = self._open, {}
        if not questions:
            return 0.0
        try:
            answers = await self._ask(list(questions.values()))
        except ForecastError as error:
            self._open = questions | self._open
            self._opened.set()
            self._state.counts.error("forecast")
            if not self._failures:
                _log.warning("the interference model does not answer, progress is inferred without it: %s", error)
            self._failures += 1
            return BACKOFF.seconds(self._failures)
        if self._failures:
            _log.info("the interference model answers again")
        self._failures = 0
        for (uuid, question), priors in zip(questions.items(), answers, strict=True):
            self._known[uuid] = (question, priors)
        return PAUSE_SECONDS


async def ask_model(questions: Sequence[Question]) -> Sequence[Priors]:
    """Run the shipped model in a process of its own and return its answers.

    Raises:
        ForecastError: no process, no answer in time, or none that makes sense.
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
