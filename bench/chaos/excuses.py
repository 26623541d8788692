"""Adjust a test's time limits on a shared machine that is busy with other things."""

import os
from collections.abc import Sequence
from typing import Final

from bench.chaos.auditor import Rule
from bench.chaos.plan import TRAITS, FaultKind
from bench.chaos.run import FaultOutcome

# Ten processes for each core: what takes 10 ms alone may take 100 ms then, and a starved part misses its times.
BUSY_LOAD_PER_CORE: Final = 10.0
_OF_TIME: Final = frozenset({Rule.SETTLED, Rule.FROZEN})
# What kubelet's device manager answers where it has no plugin; anything else it rejects is ours to explain.
_NO_PLUGIN: Final = ("cannot allocate unregistered device", "no healthy devices present")
# Not about us, but about the observer, who looks late, and kubelet: one id for two pods, a watch that sleeps.
_NOT_OURS: Final = frozenset({Rule.GAP, Rule.DEVICE_RACE, Rule.KUBELET})


def unexcused(outcomes: Sequence[FaultOutcome], cores: int | None = None) -> list[str]:
    """Return every violation but those that a busy machine or kubelet itself explains.

    Kubelet rejects a pod that was bound just before it lost the plugin (docs/measurements/hostile.md), and says
    so; not where only the agent was killed, as the front holds its place. What takes too long is excused above a
    load average of `BUSY_LOAD_PER_CORE` for each core, by what the outcome tells.
    """
    bound = BUSY_LOAD_PER_CORE * (cores or os.cpu_count() or 1)
    return [text for one in outcomes for text in one.violations if not _is_excused(one, text, bound)]


def _is_excused(outcome: FaultOutcome, violation: str, bound: float) -> bool:
    rule = violation.partition(": ")[0]
    if rule == Rule.REJECTED:
        return TRAITS[FaultKind(outcome.kind)].takes_plugin and any(each in violation for each in _NO_PLUGIN)
    return rule in _NOT_OURS or (rule in _OF_TIME and outcome.load_average > bound)
