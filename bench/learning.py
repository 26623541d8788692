"""python -m bench learning [--windows N ...] [--seeds N] [--noise SD] [--held-out] [--by-program]
    [--seen-under CAP ...] [--pairs PRIOR ...]

How well the interference model predicts sets of ten programs that it was not fitted to, as live profiles (one
signature each, no cap curve, no probes), before and after windows of other sets were seen. The measured table of
the H200 is the truth; each program sees at most N windows, of sets drawn at random, with noise on the inferred
progress; the sets that were not drawn are predicted, and the programs alone under caps. Mean absolute error of a
tenant's progress, and how many truths the 90% interval holds.

With --held-out: the same on the shipped dataset. Its programs are left out of the fit a fifth at a time (five
fits, some minutes); every tenant is a live profile and learnt of, and the errors of those left out count. With
--by-program: a further row for each program.

With --seen-under: each program was seen alone, or with its neighbours stopped, under these caps too, so that its
cap curve has what its counters there show (`gpushare.core.progress.progress_shown`): what agents come to know of a
workload whose pods run under several caps.

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
from gpushare.core.progress import progress_shown
from gpushare.data import H200_COLOCATION, H200_TABLE, default_model
from gpushare.research.dataset import Dataset, parse
from gpushare.research.interference.fit import FOLDS, MEMBERS, fitted, sets_of, split_workloads, unfitted
from gpushare.research.solo_profiles import profile_of

GPU = "NVIDIA H200"
_LEAST_SEEN = 0.06  # a window of a tenant that hardly moves is not learnt from


@dataclass(frozen=True, slots=True)
class ProgressSet:
    """One set of the table: programs, caps and measured progress, in order."""

    programs: tuple[str, ...]
    caps: tuple[int, ...]
    progress: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LearningCase:
    """Case with programs that a model was not fitted to.

    Attributes:
        profiles: live ones of all programs of the sets; judged: the programs whose errors count.
    """

    model: InterferenceModel
    profiles: Mapping[str, Profile]
    sets: tuple[ProgressSet, ...]
    judged: frozenset[str]


@dataclass(frozen=True, slots=True)
class Judged:
    """Result for sets of one size: mean absolute error, share of truths within the interval, tenants."""

    error: float
    covered: float
    tenants: int


def shown_curve(data: Dataset, program: str, caps: Sequence[int]) -> dict[int, float]:
    """Return the cap curve that counters under caps show; none is above one under more threads."""
    whole = data.solo_counters(program)
    curve: dict[int, float] = {}
    for cap in sorted(caps, reverse=True):
        seen = data.solo_counters(program, cap)
        if whole is not None and seen is not None and seen.sm_util is not None:
            curve[cap] = min(1.0, progress_shown(whole, seen, cap / 100), *curve.values())
    return curve


@cache
def table(seen_under: tuple[int, ...] = ()) -> tuple[Mapping[str, Profile], tuple[ProgressSet, ...]]:
    """Return the programs' live profiles, and every set of different programs, those alone under a cap too."""
    data = parse(files("gpushare.data").joinpath(H200_TABLE).read_bytes().splitlines())
    profiles = {}
    for program in data.solo:
        whole = profile_of(data, program)
        curve = shown_curve(data, program, seen_under)
        profiles[program] = Profile(whole.counters, whole.iterations_per_s, cap_curve=curve)
    sets = []
    for run in data.runs:
        progress = data.progress(run)
        if progress is not None and (len(run.tenants) > 1 or run.tenants[0].thread_percentage < 100):
            programs = tuple(tenant.workload for tenant in run.tenants)
            if len(set(programs)) == len(programs):
                sets.append(
                    ProgressSet(programs, tuple(t.thread_percentage for t in run.tenants), tuple(progress))
                )
    return profiles, tuple(sets)


def table_world(seen_under: tuple[int, ...] = ()) -> LearningCase:
    """Return the table's ten programs with the shipped model."""
    profiles, sets = table(seen_under)
    return LearningCase(default_model(), profiles, sets, frozenset(profiles))


def held_out_world(data: Dataset, fold: int, seen_under: tuple[int, ...] = ()) -> LearningCase:
    """Return a fifth of a dataset's programs with a model fitted to sets without them."""
    known = sets_of(data)
    training, unseen = split_workloads(known, fold)
    bare = unfitted(data, known, 1)
    fitted_to_rest = fitted(bare, known, training, seed=1, members=MEMBERS, done=lambda _: None)
    model = replace(fitted_to_rest, errors=default_model().errors)
    profiles = {
        name: Profile(each.counters, cap_curve=shown_curve(data, name, seen_under))
        for name, each in zip(known.workloads, known.profiles, strict=True)
    }
    sets = [ProgressSet(known.names(at), known.caps(at), known.progress[at]) for at in unseen]
    different = tuple(one for one in sets if len(set(one.programs)) == len(one.programs))
    return LearningCase(model, profiles, different, frozenset(known.workloads[fold::FOLDS]))


def predicted(
    model: InterferenceModel, one: ProgressSet, profiles: Mapping[str, Profile], known: Mapping[str, LearnedEffect]
) -> Sequence[Forecast]:
    """Predict a set with what is known of its programs."""
    tenants = []
    for program, cap in zip(one.programs, one.caps, strict=True):
        learned = [known[program]] if program in known else []
        tenants.append((replace(profiles[program], effects=effects_of(learned, GPU)), cap))
    return model.predict(tenants)


def learn(
    seed: int, windows: int, noise: float, world: LearningCase | None = None
) -> tuple[dict[str, LearnedEffect], set[int]]:
    """Let programs see windows; return what was learnt, and which sets were seen."""
    world = world or table_world()
    model, profiles, sets = world.model, world.profiles, world.sets
    rng = np.random.default_rng(seed)
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
                program,
                cap,
                float(progress),
                noise,
                forecast.progress,
                (forecast.upper - forecast.lower) / 3.29,
            )
            for program, cap, progress, forecast in zip(one.programs, one.caps, observed, forecasts, strict=True)
        ]
        known |= learnt(window, known, GPU)
        for program in one.programs:
            counts[program] += 1
    return known, seen


def misses(
    known: Mapping[str, LearnedEffect], seen: set[int], world: LearningCase | None = None
) -> dict[tuple[int, str], list[tuple[float, bool]]]:
    """Return error, and whether the interval holds the truth, of every set not seen, by size and program."""
    world = world or table_world()
    found: dict[tuple[int, str], list[tuple[float, bool]]] = {}
    for one in (one for at, one in enumerate(world.sets) if at not in seen):
        forecasts = predicted(world.model, one, world.profiles, known)
        for program, forecast, truth in zip(one.programs, forecasts, one.progress, strict=True):
            if program in world.judged:
                missed = min(1.0, forecast.progress) - truth
                inside = forecast.lower <= truth <= forecast.upper
                found.setdefault((len(one.programs), program), []).append((missed, inside))
    return found


def judge(
    known: Mapping[str, LearnedEffect], seen: set[int], world: LearningCase | None = None
) -> dict[int, Judged]:
    """Judge the prediction of every set that was not seen, by number of tenants."""
    errors: dict[int, list[tuple[float, bool]]] = {}
    for (size, _), each in misses(known, seen, world).items():
        errors.setdefault(size, []).extend(each)
    return {size: judged_of(each) for size, each in sorted(errors.items())}


def judged_of(each: Sequence[tuple[float, bool]]) -> Judged:
    """Sum up errors and whether intervals hold."""
    return Judged(float(np.mean([abs(e) for e, _ in each])), float(np.mean([c for _, c in each])), len(each))


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
        predictions = [
            [min(1.0, each.progress) for each in predicted(default_model(), one, profiles, known)] for one in order
        ]
        residuals: dict[str, list[float]] = {}
        for one, progress in zip(order[:windows], predictions, strict=False):
            observed = np.maximum(_LEAST_SEEN, np.array(one.progress) + rng.normal(0.0, noise, 2))
            for program, seen_progress, before in zip(one.programs, observed, progress, strict=True):
                residuals.setdefault(program, []).append(float(np.log(seen_progress / max(_LEAST_SEEN, before))))
        for one, progress in zip(order[windows:], predictions[windows:], strict=True):
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
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--by-program", action="store_true")
    parser.add_argument("--seen-under", type=int, nargs="+", default=[], metavar="CAP")
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
    data = parse(files("gpushare.data").joinpath(H200_COLOCATION).read_bytes().splitlines())
    caps = tuple(asked.seen_under)
    worlds = [held_out_world(data, fold, caps) for fold in range(FOLDS)] if asked.held_out else [table_world(caps)]
    print("windows  tenants  error  in the 90% interval  tenants judged")
    for windows in asked.windows:
        found: dict[tuple[int, str], list[tuple[float, bool]]] = {}
        for world in worlds:
            for seed in range(asked.seeds if windows else 1):
                for key, each in misses(*learn(seed, windows, asked.noise, world), world).items():
                    found.setdefault(key, []).extend(each)
        for size in sorted({size for size, _ in found}):
            rows = {program: each for (of, program), each in found.items() if of == size}
            whole = [miss for each in rows.values() for miss in each]
            for program, each in [("", whole), *(sorted(rows.items()) if asked.by_program else ())]:
                one = judged_of(each)
                ending = f"  {program}, mean of the misses {np.mean([e for e, _ in each]):+.3f}" if program else ""
                print(f"{windows:7d}  {size:7d}  {one.error:.3f}  {one.covered:19.0%}  {one.tenants:14d}{ending}")
