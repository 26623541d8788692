"""A workload's profile: its solo counters, rate, memory and cap curve, and its progress beside probes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntFlag
from typing import Final

import numpy as np
import numpy.typing as npt

from gpushare.core.gpu import COUNTERS, Counters
from gpushare.core.interference.learned_effects import NO_EFFECTS, Effects
from gpushare.core.progress import MAX_CAPPED_PROGRESS, busy_ratio, progress_alone

Array = npt.NDArray[np.float64]

# Standard programs beside which a workload may be measured, both uncapped (docs/interference.md).
PROBES: Final = ("probe-compute", "probe-memory", "probe-short")


class ProfileError(Exception):
    """A profile cannot be used; the message is one sentence that says why."""


@dataclass(frozen=True, slots=True)
class Profile:
    """One workload alone on a GPU.

    Attributes:
        counters: at 100% threads, ratios; None where not measured.
        iterations_per_s: rate at 100%; None if unknown.
        memory_mib: device memory; None if unknown.
        cap_curve: thread percentage -> progress relative to 100%; may be empty.
        capped: thread percentage -> counters at that cap; may be empty.
        probes: by name in `PROBES`, the workload's progress beside the probe and the probe's own, both uncapped.
        effects: learned effects beside others.
        phases: other work that it does for part of the time; a phase has no phases itself.
    """

    counters: Counters
    iterations_per_s: float | None = None
    memory_mib: int | None = None
    cap_curve: Mapping[int, float] = field(default_factory=dict)
    capped: Mapping[int, Counters] = field(default_factory=dict)
    probes: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    effects: Effects = NO_EFFECTS
    phases: tuple["Profile", ...] = ()


class Lacking(IntFlag):
    """Parts that a profile lacks, which make its intervals wider."""

    NOTHING = 0
    CAP_CURVE = 1
    COUNTERS = 2
    PROBES = 4


LACKINGS: Final = tuple(Lacking(number) for number in range(8))  # every combination, in the order of their numbers


# Counters that the law relies on and that cannot be computed from others (any_tensor_util is a sum of others).
_LEANED_ON: Final = ("sm_occupancy", "integer_util", "dram_bw_util", "graphics_util")


def lacking(profile: Profile) -> Lacking:
    """Return what a profile lacks; a cap curve without the counters under those caps counts as lacking."""
    curve = knows_caps(profile)
    counters = all(getattr(profile.counters, name) is not None for name in _LEANED_ON)
    probes = knows_probes(profile)
    return Lacking(
        Lacking.CAP_CURVE * (not curve) + Lacking.COUNTERS * (not counters) + Lacking.PROBES * (not probes)
    )


def knows_caps(profile: Profile) -> bool:
    """Return whether counters under a cap were measured."""
    return any(cap < 100 for cap in profile.capped)


def knows_probes(profile: Profile) -> bool:
    """Return whether the workload was measured beside every probe."""
    return all(probe in profile.probes for probe in PROBES)


def without(profile: Profile, what: Lacking) -> Profile:
    """Return the profile as if less had been measured, to determine the intervals of such profiles."""
    if what & Lacking.CAP_CURVE:
        profile = replace(profile, cap_curve={}, capped={})
    if what & Lacking.PROBES:
        profile = replace(profile, probes={})
    if what & Lacking.COUNTERS:
        profile = replace(
            profile,
            counters=_poorer(profile.counters),
            capped={cap: _poorer(each) for cap, each in profile.capped.items()},
        )
    return profile


def _poorer(counters: Counters) -> Counters:
    return replace(counters, any_tensor_util=None, imma_tensor_util=None, integer_util=None, graphics_util=None)


def cap_progress(profile: Profile, cap: float) -> float:
    """Return the progress alone under a cap (0 to 1): interpolated where measured, else predicted."""
    return progress_alone(profile.counters, profile.cap_curve, cap)


# What `vector` estimates from; how they were chosen is not recorded. Mean errors over the shipped dataset's 53
# programs alone and, in brackets, over their 138 runs under caps: 0.15 (0.06) and 0.10 (0.05)
# (tests/core/interference/test_estimated_counters.py).
_OCCUPANCY_OF_ACTIVITY: Final = 0.35
_INTEGER_OF_OCCUPANCY: Final = 0.4  # indices and addresses


def vector(counters: Counters) -> Array:
    """Return the counters in the order of COUNTERS; those not measured are estimated from the others."""
    values = {name: getattr(counters, name) for name in COUNTERS}
    if values["any_tensor_util"] is None:
        tensor = [values[name] or 0.0 for name in ("dfma_tensor_util", "hmma_tensor_util", "imma_tensor_util")]
        values["any_tensor_util"] = min(1.0, sum(tensor))
    if values["graphics_util"] is None:
        values["graphics_util"] = busy_ratio(counters)
    if values["sm_occupancy"] is None:
        values["sm_occupancy"] = _OCCUPANCY_OF_ACTIVITY * (values["sm_util"] or 0.0)
    if values["integer_util"] is None:
        values["integer_util"] = _INTEGER_OF_OCCUPANCY * values["sm_occupancy"]
    return np.array([value or 0.0 for value in values.values()])


def capped_vector(profile: Profile, cap: float) -> Array:
    """Return the counters alone under a cap: interpolated where measured, else scaled by the progress."""
    if not knows_caps(profile):
        return vector(profile.counters) * cap_progress(profile, cap)
    measured = {**profile.capped, 100: profile.counters}
    below = max((point for point in measured if point <= 100 * cap), default=0)
    start = vector(measured[below]) if below else np.zeros(len(COUNTERS))
    above = min((point for point in measured if point > 100 * cap), default=None)
    if above is None:
        return start
    return np.asarray((vector(measured[above]) - start) / (above - below) * (100 * cap - below) + start)


_SM, _OCCUPANCY, _TENSOR, _FP32, _HMMA, _INTEGER, _DRAM, _GRAPHICS = (
    COUNTERS.index(name)
    for name in (
        "sm_util",
        "sm_occupancy",
        "any_tensor_util",
        "fp32_util",
        "hmma_tensor_util",
        "integer_util",
        "dram_bw_util",
        "graphics_util",
    )
)
_TYPICAL_ITERATION_SECONDS: Final = 0.004


# A gap below this part of the time is treated as rounding of the counter.
_LEAST_GAP: Final = 0.02
_NARROW: Final = (0.5, 0.25)  # caps at which most programs are measured alone


def _gap(used: float) -> float:
    return float(np.log(max(_LEAST_GAP, 1.0 + _LEAST_GAP - min(1.0, used))))


def _under_caps(profile: Profile, whole: Array) -> list[float]:
    """Return how caps change a program's counters, and the logarithm of the time in which its SMs are idle.

    The idle part depends on how long single kernels hold the SMs, and so on which of two uncapped tenants wins
    (correlation of -0.83 with the strengths fitted to 157 contended pairs, docs/measurements/interference.md).
    """
    numbers = [_gap(whole[_SM])]
    for cap in _NARROW:
        now = capped_vector(profile, cap)
        numbers += [min(2.0, now[of] / max(whole[of], 0.02)) for of in (_SM, _OCCUPANCY, _DRAM)]
        numbers += [min(2.0, now[_GRAPHICS]), _gap(now[_SM] / cap)]
    return numbers


# Features that not every profile has, at the end in this order; `Fill` estimates them for other profiles.
CAP_FEATURES: Final = 10  # of counters under caps
PROBE_FEATURES: Final = 4 * len(PROBES)
_LEAST_BESIDE: Final = 0.02  # progress beside a probe below which differences are noise


def _beside_probes(profile: Profile) -> list[float]:
    """Return the progress of workload and probe beside each other, as ratios and logarithms, or zeros."""
    if not knows_probes(profile):
        return [0.0] * PROBE_FEATURES
    both = [
        min(max(each, _LEAST_BESIDE), MAX_CAPPED_PROGRESS) for probe in PROBES for each in profile.probes[probe]
    ]
    return [*np.log(both).tolist(), *both]


def features(profile: Profile, cap: float) -> Array:
    """Return one tenant under a cap (0 to 1) as the network's input: 53 numbers of order one."""
    whole, now, progress = vector(profile.counters), capped_vector(profile, cap), cap_progress(profile, cap)
    busy = max(whole[_GRAPHICS], 0.05)
    running = whole[[_SM, _OCCUPANCY, _TENSOR, _FP32, _INTEGER, _DRAM]] / busy
    seconds = 1.0 / profile.iterations_per_s if profile.iterations_per_s else _TYPICAL_ITERATION_SECONDS
    return np.array(
        [
            *np.sqrt(np.maximum(now, 0.0)),
            *running,
            np.sqrt(whole[_OCCUPANCY] / max(whole[_SM], 0.02)),
            progress,
            cap,
            progress / max(cap, 0.01) / 4,
            cap_progress(profile, 0.5),
            cap_progress(profile, 0.25),
            whole[_GRAPHICS],
            whole[_SM],
            whole[_OCCUPANCY],
            min(1.0, cap / max(running[0], 0.05)),
            np.clip(np.log10(seconds), -4.0, 0.0),
            min(0.0, np.log10(max(seconds * whole[_SM], 1e-5))),
            *_under_caps(profile, whole),
            *_beside_probes(profile),
        ]
    )


# Counters whose sum over tenants is bounded by the GPU: DRAM is one bus. In 898 shared runs on an H200 the
# device's use never exceeded what one program reaches alone (docs/measurements/interference.md).
CONSERVED: Final = ("dram_bw_util",)


def uses(profiles: Sequence[Profile], caps: Sequence[float]) -> Array:
    """Return each tenant's use of the conserved counters alone under its cap: counters x tenants, ratios."""
    places = [COUNTERS.index(name) for name in CONSERVED]
    whole = [
        vector(profile.counters)[places] * cap_progress(profile, cap)
        for profile, cap in zip(profiles, caps, strict=True)
    ]
    return np.array(whole).reshape(len(whole), len(CONSERVED)).T


def feature_table(profiles: Sequence[Profile], caps: Sequence[float]) -> tuple[Array, Array]:
    """Return the features (tenants x 53) and the progress alone under the cap (tenants) of profiles and caps."""
    rows = [features(profile, cap) for profile, cap in zip(profiles, caps, strict=True)]
    alone = [cap_progress(profile, cap) for profile, cap in zip(profiles, caps, strict=True)]
    return np.array(rows), np.array(alone)
