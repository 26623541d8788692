"""python -m bench learning [--windows N ...] [--seeds N] [--noise SD] [--pairs PRIOR ...]

How well the interference model predicts sets of ten programs that it was not fitted to, as live profiles (one
signature each, no cap curve, no probes), before and after windows of other sets were seen. The measured table of
the H200 is the truth; each program sees at most N windows, of sets drawn at random, with noise on the inferred
progress; the sets that were not drawn are predicted, and the programs alone under caps. Mean absolute error of a
tenant's progress, and how many truths the 90% interval holds.

With --pairs: whether it helps to remember, beyond what is learnt of each program, by how much a pair of programs
itself was missed. After eight windows of each program 1, 2 and 4 further windows of a pair are seen, and the pair
is predicted under its other caps: without and with the mean residual of each of its two programs beside the other
(of the logarithm of its progress), shrunk by windows / (windows + PRIOR).
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

import numpy as np

from gpushare.core.api import LearnedEffect
from gpushare.core.control import SeenTenant, learnt
from gpushare.core.interference import Forecast, InterferenceModel, Profile, effects_of
from gpushare.data import H200_TABLE, default_model
from gpushare.research.dataset import parse
from gpushare.research.solo_profiles import profile_of

GPU = "NVIDIA H200"
_LEAST_SEEN = 0.06  # a window of a tenant that hardly moves is not learnt from


@dataclass(frozen=True, slots=True)
class MeasuredSet:
    """One set of the table: programs, caps and measured progress, in order."""

    programs: tuple[str, ...]
    caps: tuple[int, ...]
    progress: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Judged:
    """Of sets of one size: mean absolute error, part of the truths within the interval, tenants."""

    error: float
    covered: float
    tenants: int


@cache
def table() -> tuple[Mapping[str, Profile], tuple[MeasuredSet, ...]]:
    """Return the programs' live profiles, and every set of different programs, those alone under a cap too."""
    data = parse(files("gpushare.data").joinpath(H200_TABLE).read_bytes().splitlines())
    profiles = {}
    for program in data.solo:
        whole = profile_of(data, program)
        profiles[program] = Profile(whole.counters, whole.iterations_per_s)
    sets = []
    for run in data.runs:
        progress = data.progress(run)
        if progress is not None and (len(run.tenants) > 1 or run.tenants[0].thread_percentage < 100):
            programs = tuple(tenant.workload for tenant in run.tenants)
            if len(set(programs)) == len(programs):
                sets.append(
                    MeasuredSet(programs, tuple(t.thread_percentage for t in run.tenants), tuple(progress))
                )
    return profiles, tuple(sets)


def predicted(
    model: InterferenceModel, one: MeasuredSet, profiles: Mapping[str, Profile], known: Mapping[str, LearnedEffect]
) -> Sequence[Forecast]:
    """Predict a set with what is known of its programs."""
    tenants = []
    for program, cap in zip(one.programs, one.caps, strict=True):
        learned = [known[program]] if program in known else []
        tenants.append((replace(profiles[program], effects=effects_of(learned, GPU)), cap))
    return model.predict(tenants)


def learn(seed: int, windows: int, noise: float) -> tuple[dict[str, LearnedEffect], set[int]]:
    """Let programs see windows; return what was learnt, and which sets were seen."""
    profiles, sets = table()
    rng, model = np.random.default_rng(seed), default_model()
    known: dict[str, LearnedEffect] = {}
    seen: set[int] = set()
    counts = dict.fromkeys(profiles, 0)
    for at in rng.permutation(len(sets)).tolist() if windows else ():
        one = sets[at]
        if len(one.programs) == 1 or any(counts[program] >= windows for program in one.programs):
            continue
        seen.add(at)
        forecasts = predicted(model, one, profiles, known)
        observed = np.maximum(_LEAST_SEEN, np.array(one.progress) + rng.normal(0.0, noise, len(one.progress)))
        window = [
            SeenTenant(
                program, cap, float(progress), noise, forecast.progress, (forecast.upper - forecast.lower) / 3.29
            )
            for program, cap, progress, forecast in zip(one.programs, one.caps, observed, forecasts, strict=True)
        ]
        known |= learnt(window, known, GPU)
        for program in one.programs:
            counts[program] += 1
    return known, seen


def judge(known: Mapping[str, LearnedEffect], seen: set[int]) -> dict[int, Judged]:
    """Judge the prediction of every set that was not seen, by number of tenants."""
    profiles, sets = table()
    errors: dict[int, list[tuple[float, bool]]] = {}
    for at, one in enumerate(sets):
        if at not in seen:
            for forecast, truth in zip(
                predicted(default_model(), one, profiles, known), one.progress, strict=True
            ):
                missed = abs(min(1.0, forecast.progress) - truth)
                errors.setdefault(len(one.programs), []).append(
                    (missed, forecast.lower <= truth <= forecast.upper)
                )
    return {
        size: Judged(float(np.mean([e for e, _ in each])), float(np.mean([c for _, c in each])), len(each))
        for size, each in sorted(errors.items())
    }


def pair_residuals(seed: int, windows: int, noise: float, prior: float) -> list[tuple[float, float]]:
    """Return the errors without and with a pair's own residuals, of each pair under caps not seen."""
    profiles, sets = table()
    known, seen = learn(seed, 8, noise)
    rng = np.random.default_rng([seed, windows])
    of_pair: dict[tuple[str, ...], list[int]] = {}
    for at, one in enumerate(sets):
        if len(one.programs) == 2 and at not in seen:
            of_pair.setdefault(tuple(sorted(one.programs)), []).append(at)
    errors = []
    for places in of_pair.values():
        order = [sets[at] for at in rng.permutation(places).tolist()]
        said = [
            [min(1.0, each.progress) for each in predicted(default_model(), one, profiles, known)] for one in order
        ]
        residuals: dict[str, list[float]] = {}
        for one, progress in zip(order[:windows], said, strict=False):
            observed = np.maximum(_LEAST_SEEN, np.array(one.progress) + rng.normal(0.0, noise, 2))
            for program, seen_progress, before in zip(one.programs, observed, progress, strict=True):
                residuals.setdefault(program, []).append(float(np.log(seen_progress / max(_LEAST_SEEN, before))))
        for one, progress in zip(order[windows:], said[windows:], strict=True):
            for program, before, truth in zip(one.programs, progress, one.progress, strict=True):
                own = residuals[program]
                shift = np.mean(own) * len(own) / (len(own) + prior)
                errors.append((abs(before - truth), abs(min(1.0, before * float(np.exp(shift))) - truth)))
    return errors


def main(arguments: Sequence[str]) -> None:
    """Print a row for each number of windows and size of set."""
    parser = argparse.ArgumentParser(prog="python -m bench learning", description=__doc__)
    parser.add_argument("--windows", type=int, nargs="+", default=[0, 1, 2, 4, 8, 16])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--noise", type=float, default=0.05)
    parser.add_argument("--pairs", type=float, nargs="+", metavar="PRIOR")
    asked = parser.parse_args(arguments)
    if asked.pairs:
        print("windows of the pair  prior  error without  with its residuals  tenants judged")
        for windows in (1, 2, 4):
            for prior in asked.pairs:
                found = [
                    e for seed in range(asked.seeds) for e in pair_residuals(seed, windows, asked.noise, prior)
                ]
                without, with_them = np.mean(found, axis=0)
                print(f"{windows:19d}  {prior:5g}  {without:13.3f}  {with_them:18.3f}  {len(found):14d}")
        return
    print("windows  tenants  error  in the 90% interval  tenants judged")
    for windows in asked.windows:
        runs = [judge(*learn(seed, windows, asked.noise)) for seed in range(asked.seeds if windows else 1)]
        for size in runs[0]:
            each = [run[size] for run in runs]
            error, covered = (np.mean([getattr(one, name) for one in each]) for name in ("error", "covered"))
            print(f"{windows:7d}  {size:7d}  {error:.3f}  {covered:19.0%}  {sum(one.tenants for one in each):14d}")
