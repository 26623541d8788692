"""Interference model's predictions for each GPU's tenants, from a process that ends after answering.

The model needs numpy, which would keep 13 MiB in the agent although answers change only with the tenants. So the
agent runs `gpushare_deviceplugin.forecaster` when they change, for all GPUs at once, and keeps the answers.
"""

import asyncio
import itertools
import logging
import math
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import orjson

from gpushare.core.backoff import Backoff
from gpushare.core.progress import Prior, TenantLoad
from gpushare_deviceplugin.state import NodeState

_log = logging.getLogger(__name__)

PAUSE_SECONDS: Final = 10.0  # between two questions: one costs 0.2 s of a core
BACKOFF: Final = Backoff(first_seconds=PAUSE_SECONDS, longest_seconds=600.0)
ANSWER_SECONDS: Final = 60.0
# A signature that moves by less counts as the same: the windows behind it differ by as much.
SAME_RATIO: Final = 0.03
# Error of a prediction while tenants are stopped for the whole of the time in sum: near the least error of
# inference in three recorded sessions on an H200 (docs/measurements/loop-h200.md).
THROTTLE_ERROR: Final = 0.3
MOST_WHOLE: Final = 5  # tenants of which every set that may run together is asked about: 31 sets

Priors = tuple[Prior | None, ...]


class ForecastError(Exception):
    """The model gave no answer; asking later can help."""


@dataclass(frozen=True, slots=True)
class Question:
    """The tenants of one GPU as input of the model.

    Attributes:
        tenants: pod uids; loads: in the same order, under the caps in force.
        duties: part of the time that each of them may run; empty if none is throttled.
    """

    gpu_model: str
    tenants: tuple[str, ...]
    loads: tuple[TenantLoad, ...]
    duties: tuple[float, ...] = ()

    def is_about_the_same(self, other: "Question") -> bool:
        """Return whether the other has the same tenants under the same caps."""
        return (self.gpu_model, self.tenants, self.caps) == (other.gpu_model, other.tenants, other.caps)

    def is_near(self, other: "Question") -> bool:
        """Return whether the other's answer is still good: the same tenants, and no signature changed much."""
        return self.is_about_the_same(other) and all(
            _is_near(one, two) for one, two in zip(self.loads, other.loads, strict=True)
        )

    @property
    def caps(self) -> tuple[int, ...]:
        """Return the thread percentages of the loads."""
        return tuple(load.thread_percentage for load in self.loads)

    def of(self, running: Sequence[int]) -> "Question":
        """Return the question about the tenants at these positions, while the others are stopped."""
        return Question(
            self.gpu_model, tuple(self.tenants[at] for at in running), tuple(self.loads[at] for at in running)
        )

    def parts(self) -> list[tuple[int, ...]]:
        """Return the sets that run while others are stopped: all of them, or those that lack one tenant."""
        everyone = range(len(self.loads))
        fewest = 1 if len(everyone) <= MOST_WHOLE else max(1, len(everyone) - 1)
        sizes = range(fewest, len(everyone))
        return [running for size in sizes for running in itertools.combinations(everyone, size)]


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


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """The predictions for a question's tenants.

    Attributes:
        priors: with all running; parts: for each set that runs while others are stopped (`Question.parts`).
    """

    question: Question
    priors: Priors
    parts: Mapping[tuple[int, ...], Priors]

    def under(self, duties: Sequence[float]) -> Priors:
        """Return the predictions under these duties: the mixture of the sets with and without each tenant.

        They are less certain than those of the sets: a stopped tenant's queued work continues (docs/facts.md 25),
        and it is unknown whether two tenants are stopped at the same moments.
        """
        throttled = [at for at, duty in enumerate(duties) if duty < 1.0]
        if not throttled or not self.parts:
            return self.priors
        more = THROTTLE_ERROR * min(1.0, sum(1.0 - duties[at] for at in throttled))
        if len(self.priors) <= MOST_WHOLE:
            weighted = _mixture(duties, throttled)
            mixed = [self._mixed(at, weighted) for at in range(len(self.priors))]
        else:
            mixed = [self._nearly(at, duties, throttled) for at in range(len(self.priors))]
        return tuple(prior and Prior(prior.mean, math.hypot(prior.error, more)) for prior in mixed)

    def _in(self, running: tuple[int, ...], at: int) -> Prior | None:
        if at not in running:
            return _STOPPED
        priors = self.priors if len(running) == len(self.priors) else self.parts[running]
        return priors[running.index(at)]

    def _mixed(self, at: int, weighted: Sequence[tuple[float, tuple[int, ...]]]) -> Prior | None:
        found = [(weight, self._in(running, at)) for weight, running in weighted if running]
        known = [(weight, prior) for weight, prior in found if prior is not None]
        if len(known) < len(found):
            return None
        return Prior(sum(w * p.mean for w, p in known), sum(w * p.error for w, p in known))

    def _nearly(self, at: int, duties: Sequence[float], throttled: Sequence[int]) -> Prior | None:
        """Return the mixture as if two tenants were never stopped at once; for sets too large for all subsets."""
        whole = self.priors[at]
        if whole is None:
            return None
        mean = whole.mean
        for other in throttled:
            rest = self._in(tuple(each for each in range(len(self.priors)) if each != other), at)
            if other != at and rest is not None:
                mean += (1.0 - duties[other]) * (rest.mean - whole.mean)
        duty = duties[at]
        return Prior(duty * min(1.0, mean), max(duty, 0.1) * whole.error)


_STOPPED: Final = Prior(0.0, 0.0)


def _mixture(duties: Sequence[float], throttled: Sequence[int]) -> list[tuple[float, tuple[int, ...]]]:
    """Return the sets that run together, each with its part of the time."""
    found = []
    for stopped in itertools.product((False, True), repeat=len(throttled)):
        absent = {at for at, is_stopped in zip(throttled, stopped, strict=True) if is_stopped}
        weight = math.prod(1.0 - duties[at] if at in absent else duties[at] for at in throttled)
        found.append((weight, tuple(at for at in range(len(duties)) if at not in absent)))
    return found


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
            self._state.counts.error("forecast")
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
