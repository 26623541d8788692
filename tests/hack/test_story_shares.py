"""The shares and tolerated slowdowns of the demo's story leave room for what it tells.

Without that room the story depends on noise: who is let in, and whether a throttle suffices (docs/adr/0144).
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final

import pytest
import yaml

from gpushare.core.control import turns_of
from gpushare.core.gpu import Counters
from gpushare.core.interference import Profile
from gpushare.core.placement import (
    ClusterState,
    DecisionContext,
    GpuSpec,
    Judge,
    KnownWorkload,
    NodeSpec,
    Placement,
    PlacementRequest,
    Settings,
    decide,
)
from gpushare.core.progress import promise_of
from gpushare.data import default_model
from gpushare.twin.contention import WORKLOADS, TwinLoad
from gpushare.twin.drawn import DrawnProgress
from gpushare.twin.table import GPU_MODEL

SAMPLES: Final = Path(__file__).resolve().parents[2] / "hack" / "demo"
USUAL_SLOWDOWN: Final = 1.5  # the chart's default
COUNTER_ERRORS: Final = (0.97, 1.0, 1.02)
CURVE_ERRORS: Final = (None, 0.97, 1.0, 1.03)  # None: the point of the cap curve is not known
DUTIES: Final = tuple(step / 20 for step in range(2, 21))
MARGIN: Final = 0.03  # that the loop leaves above a promise


@dataclass(frozen=True)
class Program:
    """A program of the story: what it runs, and what its manifest asks for."""

    workload: str
    share: int
    max_slowdown: float

    @property
    def load(self) -> TwinLoad:
        runs = WORKLOADS[self.workload]
        return TwinLoad(runs.solo, self.share, runs.iterations_per_s, self.workload)

    @property
    def promise(self) -> float:
        return promise_of(truth(self)[0], self.share, self.max_slowdown)


@cache
def drawn() -> DrawnProgress:
    return DrawnProgress(default_model)


@cache
def truth(*programs: Program) -> tuple[float, ...]:
    return drawn()([each.load for each in programs])


@cache
def programs() -> Mapping[str, Program]:
    found, slowdowns = {}, {}
    for name in ("packed", "etl", "backup", "rank"):
        for one in yaml.safe_load_all((SAMPLES / f"{name}.yaml").read_text()):
            if one["kind"] == "GpuShare":
                slowdowns[one["metadata"]["name"]] = one["spec"]["maxSlowdown"]
            else:
                template = one["spec"]["template"]
                command = template["spec"]["containers"][0]["command"]
                share = round(100 * float(template["metadata"]["annotations"]["gpushare.io/fraction"]))
                found[one["metadata"]["name"]] = Program(command[command.index("--workload") + 1], share, 0.0)
    return {name: replace(one, max_slowdown=slowdowns.get(name, USUAL_SLOWDOWN)) for name, one in found.items()}


def under(duties: Sequence[float], *tenants: Program) -> list[float]:
    """Return the progress of tenants that run parts of the time: the mixture of the sets that run."""
    made = [0.0] * len(tenants)
    for share, running in turns_of(duties):
        if share and running:
            for at, progress in zip(running, truth(*(tenants[at] for at in running)), strict=True):
                made[at] += share * progress
    return made


def best_of_first(first: Program, *others: Program, margin: float) -> float:
    """Return the first tenant's most progress under duties by which the others keep their promises."""
    best = 0.0
    for duties in itertools.product(DUTIES, repeat=len(others)):
        made, *rest = under((1.0, *duties), first, *others)
        if all(
            duty == 1.0 or progress >= other.promise + margin
            for duty, progress, other in zip(duties, rest, others, strict=True)
        ):
            best = max(best, made)
    return best


def test_the_two_first_keep_their_promises_together_and_so_do_the_two_that_are_left() -> None:
    told = programs()
    for pair in ((told["train"], told["recommend"]), (told["etl"], told["rank"])):
        for program, progress in zip(pair, truth(*pair), strict=True):
            assert progress > program.promise + 0.05, program


def test_no_throttle_keeps_the_promise_beside_the_newcomer_and_one_does_beside_the_tolerant_one() -> None:
    train, recommend, etl, backup = (programs()[name] for name in ("train", "recommend", "etl", "backup"))
    assert best_of_first(train, recommend, etl, margin=0.0) < train.promise - 0.07, "else nobody is asked to leave"
    assert best_of_first(train, recommend, backup, margin=MARGIN) > train.promise + 0.1, "else backup leaves too"


@pytest.mark.parametrize("newcomer", ["etl", "backup"])
def test_the_unknown_joins_the_two_whatever_their_profiles_say_within_their_errors(newcomer: str) -> None:
    told = programs()
    for train, recommend in itertools.product(seen_as("train"), seen_as("recommend")):
        state = ClusterState([NodeSpec("demo", (GpuSpec("GPU-0", GPU_MODEL), GpuSpec("GPU-1", GPU_MODEL)))])
        for known in (train, recommend):
            state.reserve(known.name, Placement("demo", ("GPU-0",)), request_of(told[known.name], known))
        if newcomer == "backup":  # etl has left by then, and is alone on the other GPU
            etl = next(iter(seen_as("etl")))
            state.reserve("etl", Placement("demo", ("GPU-1",)), request_of(told["etl"], etl))
        context = DecisionContext.of(state, Settings(), Judge(default_model))
        placement = decide(request_of(told[newcomer], None, newcomer), context)
        assert isinstance(placement, Placement), placement
        assert placement.gpu_uuids == ("GPU-0",), (train, recommend)


def request_of(program: Program, known: KnownWorkload | None, name: str = "") -> PlacementRequest:
    return PlacementRequest(
        known.name if known is not None else name,
        10 * program.share,
        known=known,
        max_slowdown=program.max_slowdown,
    )


def seen_as(name: str) -> Iterator[KnownWorkload]:
    """Yield what may be known of a program: each profile that an agent may have measured of it."""
    program = programs()[name]
    [alone] = truth(program)
    for factor, error in itertools.product(COUNTER_ERRORS, CURVE_ERRORS):
        solo = WORKLOADS[program.workload].solo.as_dict()
        counters = Counters(**{counter: min(1.0, factor * value) for counter, value in solo.items()})
        curve = {} if error is None else {program.share: min(1.0, error * alone)}
        key = f"{name} {factor} {error}"
        profile = Profile(counters, cap_curve=curve)
        yield KnownWorkload(key, GPU_MODEL, program.max_slowdown, profile, name)
