"""Cautious packing (docs/design.md 5): no pod goes where the interference model says that it would hurt too much.

`Judge` knows the tenants of every GPU by the profiles of their workloads, and what a newcomer would do to each
such set; a set is judged once, however many GPUs hold it. `Cautious` is any placement policy kept off the GPUs
that the judge refuses. Where a tenant's workload has no profile on that GPU model, nothing is refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from gpushare.core.api import Reason, Rejection
from gpushare.core.interference import InterferenceModel, Prediction, TenantTable
from gpushare.core.placement.fitting import fitting_gpus
from gpushare.core.placement.known import KnownWorkload
from gpushare.core.placement.search import PlacementPolicy
from gpushare.core.placement.shapes import GPU_MILLI, Shape
from gpushare.core.placement.state import BoolArray, ClusterState, FloatArray, IntArray

TIE_WEIGHT: Final = 0.4
"""Policies score in whole points, but for less than 0.2 between equals, so that a gain of -1 to 1 times this only
decides between equals."""
MOST_SETS: Final = 20_000
"""Kinds of sets remembered, 1 KB each or so; beyond, all is looked at anew."""
MOST_NEWCOMERS: Final = 256
_MOST_SHOWN: Final = 99.0
_LEAST: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Member:
    """One tenant of a set, under its cap (1 to 100)."""

    known: KnownWorkload
    thread_percentage: int


@dataclass(frozen=True, slots=True)
class TenantSet:
    """The known tenants of a GPU, in a fixed order."""

    gpu_model: str
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A tenant to place, under the cap that it would run under (1 to 100)."""

    known: KnownWorkload
    thread_percentage: int


@dataclass(slots=True)
class _Verdicts:
    """By id of set: whether the newcomer may join, what summed progress it adds, and the worst of its tenants."""

    accepts: BoolArray
    gains: FloatArray
    slowdowns: FloatArray
    tolerated: FloatArray
    newcomer_suffers: BoolArray


class Judge:
    """What each GPU holds, and what a newcomer would do there.

    Args:
        model: where the interference model comes from; called when first needed.
        known: what is known now of a tenant's workload, by its pod's uid; None: what was known when it was placed.
    """

    def __init__(
        self, model: Callable[[], InterferenceModel], known: Callable[[str], KnownWorkload | None] | None = None
    ) -> None:
        self.version = 0
        self._model, self._known = model, known
        self._tables: dict[str, _PredictionTable] = {}
        self._sets: list[TenantSet] = []
        self._ids: dict[TenantSet, int] = {}
        self._verdicts: dict[Newcomer, _Verdicts] = {}
        self._resident: IntArray = np.zeros((0, 0), np.int64)
        self._resident_as_of: tuple[int, int] = (-1, -1)
        self._seen = 0
        self._clear()

    def forget(self) -> None:
        """What is known of some workload has changed: look again."""
        self.version += 1
        self._clear()

    def _clear(self) -> None:
        """Set 0 stands for a GPU about which there is nothing to say: empty, or with somebody unknown."""
        nothing = TenantSet("", ())
        self._sets, self._ids, self._verdicts = [nothing], {nothing: 0}, {}
        self._resident_as_of = (-1, -1)
        self._tables = {model: table for model, table in self._tables.items() if len(table) < MOST_SETS}
        for table in self._tables.values():
            table.drop_sets()

    def resident_sets(self, state: ClusterState) -> IntArray:
        """Id of the set of tenants on each GPU, (width, rows)."""
        if len(self._sets) > MOST_SETS:
            self.forget()
        changed = state.changed_since(self._seen)
        if self._resident_as_of != (self.version, state.epoch) or changed is None:
            self._resident = np.zeros(state.clients.shape, np.int64)
            self._resident_as_of = (self.version, state.epoch)
            changed = np.flatnonzero(state.clients.any(axis=0))
        self._seen = state.change_count
        for row in changed.tolist():
            clients = state.clients[:, row].tolist()
            for slot, uuid in enumerate(state.uuids(row)):
                self._resident[slot, row] = self._set_of(state, slot, row, uuid) if clients[slot] else 0
        return self._resident

    def _set_of(self, state: ClusterState, slot: int, row: int, uuid: str) -> int:
        gpu_model = state.model_names[int(state.model_ids[slot, row])]
        members: list[Member] = []
        for tenant in state.tenants(uuid):
            known = tenant.known if self._known is None else self._known(tenant.pod_uid)
            if known is None or known.gpu_model not in {"", gpu_model}:
                return 0
            members.append(Member(known, tenant.thread_percentage))
        members.sort(key=lambda each: (each.known.key, each.thread_percentage, each.known.max_slowdown))
        found = TenantSet(gpu_model, tuple(members))
        if found not in self._ids:
            self._ids[found] = len(self._sets)
            self._sets.append(found)
        return self._ids[found]

    def verdicts(self, newcomer: Newcomer) -> _Verdicts:
        """The verdict on every set so far; only sets not judged yet cost anything."""
        found = self._verdicts.get(newcomer)
        done = len(found.accepts) if found is not None else 0
        if found is None or done < len(self._sets):
            more = self._judge(newcomer, done)
            if found is None:
                found = more
            else:
                found = _Verdicts(
                    *(np.concatenate([getattr(found, n), getattr(more, n)]) for n in _Verdicts.__slots__)
                )
            if len(self._verdicts) >= MOST_NEWCOMERS:
                del self._verdicts[next(iter(self._verdicts))]
            self._verdicts[newcomer] = found
        return found

    def _judge(self, newcomer: Newcomer, begin: int) -> _Verdicts:
        """The verdict on the sets from `begin` on."""
        count = len(self._sets) - begin
        verdicts = _Verdicts(
            np.ones(count, bool), np.zeros(count), np.ones(count), np.ones(count), np.zeros(count, bool)
        )
        by_model: dict[str, list[int]] = {}
        for number, each in enumerate(self._sets[begin:], begin):
            if each.members:
                by_model.setdefault(each.gpu_model, []).append(number)
        for gpu_model, numbers in by_model.items():
            if newcomer.known.gpu_model in {"", gpu_model}:
                if gpu_model not in self._tables:
                    self._tables[gpu_model] = _PredictionTable(self._model().for_gpu(gpu_model))
                self._judge_on(self._tables[gpu_model], newcomer, numbers, np.array(numbers) - begin, verdicts)
        return verdicts

    def _judge_on(
        self,
        table: "_PredictionTable",
        newcomer: Newcomer,
        numbers: Sequence[int],
        at: IntArray,
        verdicts: _Verdicts,
    ) -> None:
        """Judge sets on one GPU model in one pass; the newcomer is in the first place of each."""
        resident, before = table.sets(numbers, [self._sets[number] for number in numbers])
        (row,) = table.rows([Member(newcomer.known, newcomer.thread_percentage)]).tolist()
        index = np.column_stack([np.full(len(numbers), row), resident])
        joint = table.predict(index)
        excess = np.where(index >= 0, table.floors[index] / np.maximum(joint.lower, _LEAST), 0.0)
        worst = excess.argmax(axis=1)
        lines = np.arange(len(numbers))
        verdicts.accepts[at] = excess[lines, worst] <= 1.0
        verdicts.gains[at] = joint.progress.sum(axis=1) - before
        verdicts.slowdowns[at] = np.minimum(_MOST_SHOWN, 1.0 / np.maximum(joint.lower[lines, worst], _LEAST))
        verdicts.tolerated[at] = table.tolerated[index[lines, worst]]
        verdicts.newcomer_suffers[at] = worst == 0


class _PredictionTable:
    """Every tenant judged on one GPU model so far, prepared for the model once.

    Attributes:
        floors, tolerated: by row, one for each member: the least progress that it must keep, and the slowdown that
            this tolerates.
    """

    def __init__(self, model: InterferenceModel) -> None:
        self._model = model
        self._table: TenantTable | None = None
        self.floors: FloatArray = np.zeros(0)
        self.tolerated: FloatArray = np.zeros(0)
        self._row: dict[Member, int] = {}
        self.drop_sets()

    def __len__(self) -> int:
        return len(self._row)

    def drop_sets(self) -> None:
        """Drop the set ids, keep the member rows."""
        self._line: dict[int, int] = {}
        self._index: IntArray = np.zeros((0, 1), np.int64)
        self._summed: FloatArray = np.zeros(0)

    def rows(self, members: Sequence[Member]) -> IntArray:
        """The rows of members, old and new."""
        new = [member for member in dict.fromkeys(members) if member not in self._row]
        if new:
            begin = len(self._row)
            self._row.update((member, begin + number) for number, member in enumerate(new))
            more = self._model.table([m.known.profile for m in new], [m.thread_percentage for m in new])
            self._table = more if self._table is None else self._table.with_more(more)
            alone = self._model.predict_sets(more, np.arange(len(new))[:, None])
            floors, tolerated = _floors(new, alone.progress[:, 0], alone.lower[:, 0])
            self.floors = np.concatenate([self.floors, floors])
            self.tolerated = np.concatenate([self.tolerated, tolerated])
        return np.array([self._row[member] for member in members], np.int64)

    def predict(self, index: IntArray) -> Prediction:
        """What the model says of sets of rows (sets x places)."""
        assert self._table is not None, "rows come from members"
        return self._model.predict_sets(self._table, index)

    def sets(self, numbers: Sequence[int], sets: Sequence[TenantSet]) -> tuple[IntArray, FloatArray]:
        """Rows of the members of sets (sets x places, -1 where there is none), and their summed progress."""
        new = [(number, each) for number, each in zip(numbers, sets, strict=True) if number not in self._line]
        if new:
            rows = self.rows([member for _, each in new for member in each.members]).tolist()
            width = max(self._index.shape[1], *(len(each.members) for _, each in new))
            index = np.full((len(self._line) + len(new), width), -1, np.int64)
            begin = len(self._line)
            index[:begin, : self._index.shape[1]] = self._index
            at = 0
            for line, (number, each) in enumerate(new, begin):
                self._line[number] = line
                index[line, : len(each.members)] = rows[at : at + len(each.members)]
                at += len(each.members)
            self._index = index
            self._summed = np.concatenate([self._summed, self.predict(index[begin:]).progress.sum(axis=1)])
        lines = [self._line[number] for number in numbers]
        return self._index[lines], self._summed[lines]


def _floors(
    members: Sequence[Member], alone: FloatArray, alone_lower: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Least progress that each member must keep at the lower bound, and the slowdown that this tolerates.

    It is 1 / maxSlowdown. A tenant whose own cap may cost it that much already, before any neighbour, asked for so
    small a share; neighbours may then cost it maxSlowdown beyond that (docs/adr/0091).
    """
    most = np.array([max(1.0, member.known.max_slowdown) for member in members])
    floors: FloatArray = np.where(alone_lower >= 1.0 / most, 1.0, np.minimum(alone, 1.0)) / most
    return floors, 1.0 / np.maximum(floors, _LEAST)


class Cautious:
    """A policy for one newcomer that takes only GPUs that the judge accepts, and among equals the greatest gain.

    Gain is the summed progress that the newcomer adds to a GPU whose tenants are all known; 0 stands for an empty
    GPU, so that of equals one where sharing pays comes before an empty one, and that before one where it does not.
    """

    is_choosy = True

    def __init__(self, policy: PlacementPolicy, judge: Judge, newcomer: Newcomer) -> None:
        self.name = f"{policy.name} for {newcomer!r}"
        self._policy, self._judge, self._newcomer = policy, judge, newcomer

    def rank(self, state: ClusterState, shape: Shape, rows: IntArray, gpu_fits: BoolArray) -> FloatArray:
        """The policy's scores with the gain as a tie-break; -inf where every GPU that fits is refused."""
        sets = self._judge.resident_sets(state).take(rows, 1)
        verdicts = self._judge.verdicts(self._newcomer)
        accepted = gpu_fits & verdicts.accepts[sets]
        takes = accepted.any(axis=0)
        scores = np.full(len(rows), -np.inf)
        if takes.any():
            gains = np.where(accepted, verdicts.gains[sets], -1.0).max(axis=0)[takes]
            scores[takes] = self._policy.rank(state, shape, rows[takes], accepted[:, takes])
            scores[takes] += TIE_WEIGHT * np.clip(gains, -1.0, 1.0)
        return scores

    def pick(self, state: ClusterState, shape: Shape, row: int, slots: list[int]) -> Sequence[int]:
        """The policy's GPU, or one with as much free share where the gain is greater."""
        sets = self._judge.resident_sets(state)[:, row]
        verdicts = self._judge.verdicts(self._newcomer)
        accepted = [slot for slot in slots if verdicts.accepts[sets[slot]]]
        (chosen,) = self._policy.pick(state, shape, row, accepted)
        free = state.share_free_milli[:, row]
        equals = [slot for slot in accepted if free[slot] == free[chosen]]
        return (max(equals, key=lambda slot: (verdicts.gains[sets[slot]], slot == chosen)),)

    def select(self, scores: FloatArray) -> int:
        """As the policy."""
        return self._policy.select(scores)

    def token(self, state: ClusterState) -> object:
        """Changes with the policy's and with what is known."""
        inner = self._policy.token(state)
        return None if inner is None else (inner, self._judge.version)

    def takes(self, state: ClusterState, row: int, slot: int) -> bool:
        """Whether the judge accepts a GPU."""
        resident = int(self._judge.resident_sets(state)[slot, row])
        return bool(self._judge.verdicts(self._newcomer).accepts[resident])

    def refusals(self, state: ClusterState, shape: Shape, rows: IntArray) -> tuple[list[Rejection], IntArray]:
        """Return one rejection per node of `rows`, taken from its least-violating GPU, and each row's index."""
        sets = self._judge.resident_sets(state).take(rows, 1)
        verdicts = self._judge.verdicts(self._newcomer)
        fits = fitting_gpus(state, shape, rows)
        harm = np.where(fits, (verdicts.slowdowns / verdicts.tolerated)[sets], np.inf)
        best = sets[harm.argmin(axis=0), np.arange(len(rows))]
        kinds, groups = np.unique(np.stack([best, fits.sum(axis=0)]), axis=1, return_inverse=True)
        return [self._rejection_of(verdicts, *kind) for kind in kinds.T.tolist()], groups.reshape(-1)

    @staticmethod
    def _rejection_of(verdicts: _Verdicts, at: int, count: int) -> Rejection:
        who = "it" if verdicts.newcomer_suffers[at] else "a tenant there"
        gpus = "1 GPU" if count == 1 else f"{count} GPUs"
        return Rejection(
            Reason.SLOWDOWN,
            f"has room on {gpus}, but {who} could run up to {verdicts.slowdowns[at]:.1f} times as long as alone, "
            f"at most {verdicts.tolerated[at]:.1f} is tolerated",
        )


def cautious(
    policy: PlacementPolicy, judge: Judge, shape: Shape, known: KnownWorkload | None, thread_percentage: int
) -> PlacementPolicy:
    """The policy to place one request by: cautious for a part of a GPU and a known workload, else as it is."""
    if known is None or shape.gpu_count != 1 or shape.share_milli >= GPU_MILLI:
        return policy
    return Cautious(policy, judge, Newcomer(known, thread_percentage))
