"""Compute how much more progress the GPUs could make, by the table, while a job waits.

By three ways: the best duties under the caps that are; the best caps too, as if they could be changed; and, apart
from these, the jobs that wait put where they gain, one after the other as hindsight does it. For the last it
also reports why ours refuses them there. The rest of hindsight's lead comes from the choice of partners.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from gpushare.core.interference import promised_progress
from gpushare.core.placement import Newcomer
from gpushare.sim.job_policy_gpushare import GpuSharePolicy
from gpushare.sim.jobs import JobCluster
from gpushare.sim.table_hindsight import CAPS, Asker, TableSearch
from gpushare.sim.table_ours import LiveOnTable
from gpushare.sim.table_policies import WHOLE, share_percent, waiting

HeldKind = tuple[Asker, int, int]  # what a tenant is, its cap, its share
Why = Callable[[JobCluster, int, int], str]  # of a job and a GPU that it may not join

HALF = 0.5


class LossReason(StrEnum):
    EXPECTED = "a promise is expected to be broken, whatever the cap"
    HALF = "every promise is expected to be kept, but not at half a deviation below"
    DEVIATION = "every promise is kept at half a deviation below, but not at one, throttling included"
    CAPS = "a cap would do that was not tried"
    APART = "kept apart after a retraction"
    OWN = "a GPU of its own after retractions"
    KEPT = "the GPU is kept for a job that has waited long"
    FOLLOWS = "beside a job that was refused there"


def why_not(policy: LiveOnTable, cluster: JobCluster, job: int, gpu: int) -> LossReason:
    """Return why ours does not put a job on a GPU, as things stand."""
    request, context = policy._request(cluster, job), policy._context  # noqa: SLF001
    assert context is not None, "it has decided"
    state, judge, newcomer = context.state, context.judge, Newcomer.of(request)
    row = state.row(GpuSharePolicy.node_of(gpu))
    apart = judge.kept_apart(state, request.known, cluster.now_seconds)
    if apart is not None and apart[0, row]:
        return LossReason.APART
    number = int(judge.resident_sets(state)[0, row])
    verdicts = judge.verdicts(newcomer)
    if verdicts.crowds[number]:
        return LossReason.OWN
    if verdicts.accepts[number]:
        return LossReason.KEPT
    surest = -np.inf  # steps from expected to likely progress that the least sure promise has to spare, at best
    for cap in newcomer.caps(policy.gpu_model):
        members = [newcomer.member(policy.gpu_model, cap), *judge.set_at(number).members]
        if not all(each.profile for each in members):
            return LossReason.EXPECTED
        table = policy.model.table(
            [each.profile for each in members], [each.thread_percentage for each in members]
        )
        predicted = policy.model.predict_sets(table, np.arange(len(members))[None])
        floors = np.array(
            [
                promised_progress(each.profile, each.share_percent, each.max_slowdown, is_auto=each.is_auto)
                for each in members
            ]
        )
        step = np.maximum(predicted.progress - predicted.likely, 1e-9)
        surest = max(surest, float(((predicted.progress - floors) / step).min()))
    if surest >= 1.0:
        return LossReason.CAPS
    if surest >= HALF:
        return LossReason.DEVIATION
    return LossReason.HALF if surest >= 0.0 else LossReason.EXPECTED


@dataclass
class LostProgress:
    """Sums over the time in which a job waits, in GPU seconds of progress; `add` is the simulator's `on_span`.

    Attributes:
        made: as it was; duties, caps, room: what the best of each would have added; seconds: GPU seconds.
        unkeepable: GPU seconds of sets whose promises no throttle of one tenant keeps.
        why: says of the room why it is not used; reasons: what of it is for which.
    """

    search: TableSearch
    why: Why | None = None
    made: float = 0.0
    duties: float = 0.0
    caps: float = 0.0
    room: float = 0.0
    seconds: float = 0.0
    unkeepable: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)
    _best: dict[object, float | None] = field(default_factory=dict)
    _room: dict[object, dict[str, float]] = field(default_factory=dict)

    def add(self, cluster: JobCluster, _rates: Mapping[int, float], until: float) -> None:
        """Count a stretch of constant rates from now on."""
        if not cluster.queue:
            return
        elapsed = until - cluster.now_seconds
        residents = [
            tuple(
                sorted((Asker.of(cluster.jobs[t.job]), t.thread_percentage, share_of(cluster, t.job)) for t in gpu)
            )
            for gpu in cluster.gpus
        ]
        for gpu, kinds in enumerate(residents):
            made = sum(cluster.progress(gpu))
            settled, capped = self.best(kinds), self.best(kinds, free_caps=True)
            self.made += made * elapsed
            self.seconds += elapsed
            if settled is None:
                self.unkeepable += elapsed
                settled = made
            self.duties += (settled - made) * elapsed
            self.caps += max(0.0, (capped or 0.0) - settled) * elapsed
        for reason, gain in self._unused(cluster, residents).items():
            self.room += gain * elapsed
            self.reasons[reason] += gain * elapsed

    def best(self, kinds: Sequence[HeldKind], *, free_caps: bool = False, newcomer: bool = False) -> float | None:
        """Return the most summed progress under the promises; None where none keeps them.

        Args:
            free_caps: every cap may be chosen; newcomer: that of the first may.
        """
        if not kinds:
            return 0.0
        askers = [asker for asker, _, _ in kinds]
        key = tuple(askers), None if free_caps else tuple(cap for _, cap, _ in kinds), newcomer
        if key not in self._best:
            names = tuple(asker.workload for asker in askers)
            given = [
                CAPS if free_caps or (newcomer and at == 0) else (cap,) for at, (_, cap, _) in enumerate(kinds)
            ]
            options = self.search._choices(names, given)  # noqa: SLF001
            allowed = self.search._allowed(options, askers)  # noqa: SLF001
            self._best[key] = float(np.where(allowed, options.progress.sum(axis=1), -np.inf).max())
            if not allowed.any():
                self._best[key] = None
        return self._best[key]

    def _unused(self, cluster: JobCluster, residents: list[tuple[HeldKind, ...]]) -> dict[str, float]:
        """Return what the waiting jobs would add if each went where it gains most, as hindsight does it."""
        key = tuple(residents), tuple(cluster.queue)
        if key not in self._room:
            self._room = {key: self._greedy(cluster, list(residents))}
        return self._room[key]

    def _greedy(self, cluster: JobCluster, residents: list[tuple[HeldKind, ...]]) -> dict[str, float]:
        memory = [sum(cluster.truth.memory_mib(asker.workload) for asker, _, _ in kinds) for kinds in residents]
        gained: dict[str, float] = {}
        first = list(residents)
        for job in waiting(cluster):
            asker, share = Asker.of(cluster.jobs[job]), share_of(cluster, job)
            needs = cluster.truth.memory_mib(asker.workload)
            gains = []
            for gpu, kinds in enumerate(residents):
                if (
                    sum(each for _, _, each in kinds) + share > WHOLE
                    or memory[gpu] + needs > cluster.truth.gpu_memory_mib
                ):
                    continue
                if not cluster.truth.offers([asker.workload, *(each.workload for each, _, _ in kinds)]):
                    continue
                after = self.best([(asker, WHOLE, share), *kinds], newcomer=True)
                before = self.best(kinds)
                if after is not None and before is not None:
                    gains.append((after - before, gpu))
            if gains and max(gains)[0] > 0.0:
                gain, gpu = max(gains)
                reason = self._reason(cluster, job, gpu, is_as_it_is=residents[gpu] == first[gpu])
                gained[reason] = gained.get(reason, 0.0) + gain
                memory[gpu] += needs
                residents[gpu] = self._joined(asker, share, residents[gpu])
        return gained

    def _reason(self, cluster: JobCluster, job: int, gpu: int, *, is_as_it_is: bool) -> str:
        if self.why is None:
            return ""
        return self.why(cluster, job, gpu) if is_as_it_is else LossReason.FOLLOWS

    def _joined(self, asker: Asker, share: int, kinds: tuple[HeldKind, ...]) -> tuple[HeldKind, ...]:
        """Return a GPU's tenants with another under the cap that is best there."""
        tried = {
            cap: self.best([(asker, cap, share), *kinds]) for cap in ((WHOLE,) if not asker.can_throttle else CAPS)
        }
        cap = max(tried, key=lambda each: -np.inf if tried[each] is None else tried[each])
        return tuple(sorted([(asker, cap, share), *kinds]))


def share_of(cluster: JobCluster, job: int) -> int:
    """Return the share that a job asks for, 1 to 100."""
    return share_percent(cluster.jobs[job])
