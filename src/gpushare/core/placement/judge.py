"""The judge: the set of tenants on each GPU, and what a newcomer would do to it (docs/adr/0090).

Everything is computed once for each kind of set. A tenant is reduced to what its promise and the model depend on:
profile, share, class, tolerated slowdown, cap. GPUs with equal tenants have one set between them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from cachetools import LRUCache

from gpushare.core.api import SHARES_PER_GPU, JobClass
from gpushare.core.interference import InterferenceModel
from gpushare.core.placement.caps import cap_choices
from gpushare.core.placement.duties import first_of_least
from gpushare.core.placement.forecasts import ForecastTable, Member
from gpushare.core.placement.known import KeptApart, KnownWorkload
from gpushare.core.placement.shapes import GPU_MILLI, MILLI_PER_PERCENT, PlacementRequest, Tenant, tolerated
from gpushare.core.placement.state import BoolArray, ClusterState, FloatArray, IntArray

MOST_SETS: Final = 20_000
SETS_PER_GPU: Final = 16
LEAST_SETS: Final = 256
"""At most this many sets are remembered beyond one for each GPU: `LEAST_SETS` and `SETS_PER_GPU` for each GPU, but
no more than `MOST_SETS`. A set takes at most 1 KB, and 27 bytes for each kind of newcomer. With more sets
everything is computed anew, which takes time for each GPU, so a small cluster remembers fewer."""
MOST_NEWCOMERS: Final = 256
"""Kinds of newcomers whose verdicts are remembered, those that were asked about last."""
MOST_IMAGINED_SETS: Final = 4096
EMPTY: Final = 0
"""Id of the set without tenants."""
_LEAST: Final = 1e-3


def most_remembered(gpus: int) -> int:
    """Return how many sets are remembered on a cluster, and with how many members `forget` drops a model's."""
    return min(MOST_SETS, LEAST_SETS + SETS_PER_GPU * gpus)


@dataclass(frozen=True, slots=True)
class TenantSet:
    """The tenants of a GPU, in a fixed order."""

    gpu_model: str
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A tenant to place, as the judge sees it.

    Attributes:
        known: None if nothing is known of its workload.
        share_percent: 1 to 99.
    """

    known: KnownWorkload | None
    share_percent: int
    job_class: JobClass
    max_slowdown: float
    is_auto: bool = False

    @classmethod
    def of(cls, request: PlacementRequest) -> "Newcomer":
        """Return the tenant that a request for a part of one GPU would be."""
        known = request.known if request.known is not None and request.known.matters else None
        tolerates = tolerated(request, request.known)
        return cls(known, _percent(request.share_milli), request.job_class, tolerates, request.is_auto)

    def is_known_on(self, gpu_model: str) -> bool:
        """Return whether the model can predict it on a GPU model."""
        return self.known is not None and self.known.profile is not None and _is_of(self.known, gpu_model)

    def caps(self, gpu_model: str) -> tuple[int, ...]:
        """Return the caps that it may start under on a GPU model, ascending."""
        return cap_choices(self.share_percent, self.job_class, is_known=self.is_known_on(gpu_model))

    def member(self, gpu_model: str, cap: int) -> Member:
        """Return it as a member of a set, under a cap."""
        known = self.known if self.is_known_on(gpu_model) else None
        return Member(
            known.key if known is not None else "",
            self.share_percent,
            self.job_class,
            self.max_slowdown,
            cap,
            self.known is not None and self.known.wants_own,
            self.is_auto,
            known.profile if known is not None else None,
        )


@dataclass(slots=True)
class Verdicts:
    """Effects of a newcomer on each set; arrays indexed by set id.

    Attributes:
        accepts: whether it may join.
        gains: summed progress that it adds under its best cap.
        least: of the tenant that is worst off relative to its promise, under the cap that is best for it, the
            bound of its progress.
        promised: that tenant's promise.
        newcomer_suffers: whether that tenant is the newcomer.
        crowds: whether the newcomer or a tenant needs a GPU of its own.
    """

    accepts: BoolArray
    gains: FloatArray
    least: FloatArray
    promised: FloatArray
    newcomer_suffers: BoolArray
    crowds: BoolArray

    @classmethod
    def blank(cls, count: int) -> "Verdicts":
        """Return verdicts that accept everything."""
        return cls(
            np.ones(count, bool),
            np.zeros(count),
            np.ones(count),
            np.ones(count),
            np.zeros(count, bool),
            np.zeros(count, bool),
        )

    def with_more(self, more: "Verdicts") -> "Verdicts":
        """Return these verdicts with those on later sets appended."""
        return Verdicts(*(np.concatenate([getattr(self, n), getattr(more, n)]) for n in Verdicts.__slots__))


class Judge:
    """The sets of tenants on all GPUs, and verdicts on newcomers.

    Args:
        model: returns the interference model; called when first needed.
        known: returns what is known now of a tenant's workload, by pod uid; None: use what was known at placement.
        anything: returns whether anything is known of any workload; used if `known` is given.
        headroom_ratio: `Settings.slowdown_headroom_ratio`.

    Attributes:
        version: rises when the knowledge about any workload changes.
    """

    def __init__(
        self,
        model: Callable[[], InterferenceModel],
        known: Callable[[str], KnownWorkload | None] | None = None,
        anything: Callable[[], bool] = lambda: True,
        *,
        headroom_ratio: float = 0.0,
    ) -> None:
        self.version = 0
        self.headroom_ratio = headroom_ratio
        self._model, self._known, self._anything = model, known, anything
        self._tables: dict[str, ForecastTable] = {}
        self._sets: list[TenantSet] = []
        self._ids: dict[TenantSet, int] = {}
        self._summed: dict[int, float] = {}
        self._held_percent: list[int] = [0]
        self._kinds: dict[tuple[str, Member], int] = {}
        self._places_of_kind: list[tuple[int, int]] = []
        self._census: tuple[tuple[int, int, int], IntArray] = ((-1, -1, -1), np.zeros(1, np.int64))
        self._totals: tuple[tuple[int, int, int], float, float] = ((-1, -1, -1), 0.0, 0.0)
        self._verdicts: LRUCache[Newcomer, Verdicts] = LRUCache(MOST_NEWCOMERS)
        self._imagined: dict[tuple[Newcomer, TenantSet], bool] = {}
        self._resident: IntArray = np.zeros((0, 0), np.int64)
        self._resident_as_of: tuple[int, int] = (-1, -1)
        self._seen = 0
        self._places: dict[frozenset[str], list[tuple[int, int]]] = {}
        self._places_as_of: tuple[int, int, int] = (-1, -1, -1)
        self._apart: dict[tuple[int, int], tuple[KeptApart, ...]] = {}
        self._clear()

    def forget(self) -> None:
        """Recompute everything, because the knowledge about some workload has changed."""
        self.version += 1
        self._clear()

    def _clear(self) -> None:
        nobody = TenantSet("", ())
        self._sets, self._ids, self._summed = [nobody], {nobody: EMPTY}, {}
        self._verdicts.clear()
        self._kinds, self._places_of_kind, self._held_percent, self._imagined = {}, [], [0], {}
        self._resident_as_of = (-1, -1)
        # Rows of workloads that are gone, or of their former profiles, are not asked for again.
        most = most_remembered(self._resident.size)
        self._tables = {model: table for model, table in self._tables.items() if len(table) < most}

    # -- sets of tenants ------------------------------------------------------------------------------------------

    def knows_anything(self, state: ClusterState) -> bool:
        """Return whether anything is known of any tenant; otherwise there is nothing to judge by."""
        return self._anything() if self._known is not None else state.known_tenants > 0

    def is_profiled(self, state: ClusterState, pod_uid: str) -> bool:
        """Return whether the workload of a placed pod has a profile."""
        reservation = state.reservation(pod_uid)
        known = self._known_now(pod_uid, reservation.request.known if reservation is not None else None)
        return known is not None and known.profile is not None

    def _known_now(self, pod_uid: str, at_placement: KnownWorkload | None) -> KnownWorkload | None:
        """Return what is known of a tenant's workload: now, or when it was placed if nobody tells of now."""
        return at_placement if self._known is None else self._known(pod_uid)

    def resident_sets(self, state: ClusterState) -> IntArray:
        """Return the id of the set of tenants on each GPU, (width, rows)."""
        if len(self._sets) > most_remembered(state.clients.size) + state.clients.size:
            self.forget()
        changed = state.changed_since(self._seen)
        if self._resident_as_of != (self.version, state.epoch) or changed is None:
            self._resident = np.zeros(state.clients.shape, np.int64)
            self._resident_as_of = (self.version, state.epoch)
            self._apart = {}
            changed = np.flatnonzero(state.clients.any(axis=0))
        self._seen = state.change_count
        for row in changed.tolist():
            clients = state.clients[:, row].tolist()
            self._resident[:, row] = EMPTY  # also of slots that the row has no GPU for any more
            for slot in range(len(clients)) if self._apart else ():
                self._apart.pop((slot, row), None)
            for slot, uuid in enumerate(state.uuids(row)):
                if clients[slot]:
                    self._resident[slot, row] = self._set_of(state, slot, row, uuid)
        return self._resident

    def census(self, state: ClusterState) -> IntArray:
        """Return the number of GPUs that hold each set, by set id; 0 for the empty set."""
        resident = self.resident_sets(state)
        as_of = (self.version, state.epoch, state.change_count)
        if self._census[0] != as_of:
            counts = np.bincount(resident.ravel(), minlength=len(self._sets))
            counts[EMPTY] = 0
            self._census = (as_of, counts)
        return self._census[1]

    def totals(self, state: ClusterState) -> tuple[float, float]:
        """Return the expected summed progress of all tenants, and the percent of GPUs that they hold."""
        counts = self.census(state)
        as_of = self._census[0]
        if self._totals[0] != as_of:
            numbers = np.flatnonzero(counts)
            summed = counts[numbers] @ np.array(self.summed(numbers.tolist()))
            held_percent = counts[numbers] @ np.array(self._held_percent)[numbers]
            self._totals = (as_of, float(summed), float(held_percent))
        return self._totals[1:]

    def kinds(self, state: ClusterState, most: int) -> list[tuple[str, Member, int]]:
        """Return the most common kinds of tenants, ignoring their caps: (GPU model, member, number of tenants)."""
        counts = self.census(state)
        if not self._places_of_kind:
            return []
        sets, kinds = np.array(self._places_of_kind).T
        found = np.bincount(kinds, weights=counts[sets], minlength=len(self._kinds)).astype(np.int64)
        least = max(1, np.sort(found)[-min(most, len(found))])
        named = list(self._kinds)
        chosen = [(*named[kind], int(found[kind])) for kind in np.flatnonzero(found >= least).tolist()]
        return sorted(chosen, key=lambda each: (-each[2], each[0], each[1].likeness()))[:most]

    def set_at(self, number: int) -> TenantSet:
        """Return a set by its id."""
        return self._sets[number]

    def beside(self, state: ClusterState, pod_uid: str, slot: int, row: int) -> TenantSet:
        """Return the tenants of a GPU without one of them."""
        gpu_model = state.model_names[int(state.model_ids[slot, row])]
        members = [
            _member(tenant, self._known_now(tenant.pod_uid, tenant.known), gpu_model)
            for tenant in state.tenants(state.uuids(row)[slot])
            if tenant.pod_uid != pod_uid
        ]
        return TenantSet(gpu_model, tuple(sorted(members, key=Member.order)))

    def kept_apart(self, state: ClusterState, known: KnownWorkload | None, now: float) -> BoolArray | None:
        """Return the GPUs where a retraction keeps the workload and a tenant apart, (width, rows), or None."""
        if known is None or not known.name:
            return None
        resident = self.resident_sets(state)
        theirs = [
            at
            for at, wary in self._apart.items()
            if any(e.until > now and known.name in e.neighbours for e in wary)
        ]
        avoided = known.apart_from(now)
        if avoided:
            theirs += self._places_of(state, avoided)
        if not theirs:
            return None
        found = np.zeros(resident.shape, bool)
        found[tuple(np.array(theirs).T)] = True
        return found

    def _places_of(self, state: ClusterState, names: frozenset[str]) -> list[tuple[int, int]]:
        """Return (slot, row) of the GPUs that hold a tenant of these workloads."""
        as_of = (self.version, state.epoch, state.change_count)
        if self._places_as_of != as_of:
            self._places, self._places_as_of = {}, as_of
        if names not in self._places:
            found = []
            for uid, reservation in state.reservations.items():
                known = self._known_now(uid, reservation.request.known)
                if known is not None and known.name in names and reservation.slots is not None:
                    found += [(slot, reservation.row) for slot in reservation.slots]
            self._places[names] = found
        return self._places[names]

    def _set_of(self, state: ClusterState, slot: int, row: int, uuid: str) -> int:
        gpu_model = state.model_names[int(state.model_ids[slot, row])]
        members: list[Member] = []
        apart: list[KeptApart] = []
        for tenant in state.tenants(uuid):
            known = self._known_now(tenant.pod_uid, tenant.known)
            members.append(_member(tenant, known, gpu_model))
            if known is not None:
                apart += known.apart
        if apart:
            self._apart[slot, row] = tuple(apart)
        members.sort(key=Member.order)
        return self._number(TenantSet(gpu_model, tuple(members)))

    def _number(self, found: TenantSet) -> int:
        if found not in self._ids:
            self._ids[found] = len(self._sets)
            self._sets.append(found)
            self._held_percent.append(sum(member.share_percent for member in found.members))
            for member in found.members:
                kind = self._kinds.setdefault((found.gpu_model, member.under_least_cap()), len(self._kinds))
                self._places_of_kind.append((self._ids[found], kind))
        return self._ids[found]

    # -- verdicts and forecasts -----------------------------------------------------------------------------------

    def table(self, gpu_model: str) -> ForecastTable:
        """Return the table of the tenants judged on one GPU model so far."""
        if gpu_model not in self._tables:
            self._tables[gpu_model] = ForecastTable(self._model().for_gpu(gpu_model), self.headroom_ratio)
        return self._tables[gpu_model]

    def summed(self, numbers: Sequence[int]) -> list[float]:
        """Return the expected summed progress of the tenants of each set."""
        by_model: dict[str, list[int]] = {}
        for number in numbers:
            if number not in self._summed:
                by_model.setdefault(self._sets[number].gpu_model, []).append(number)
        for gpu_model, new in by_model.items():
            if not gpu_model and new == [EMPTY]:
                self._summed[EMPTY] = 0.0
                continue
            table = self.table(gpu_model)
            index = rows_of(table, [self._sets[number].members for number in new])
            self._summed.update(zip(new, table.forecast(index).summed.tolist(), strict=True))
        return [self._summed[number] for number in numbers]

    def verdicts(self, newcomer: Newcomer) -> Verdicts:
        """Return the verdicts on every set so far; only sets that were not judged yet are computed."""
        found = self._verdicts.get(newcomer)
        done = len(found.accepts) if found is not None else 0
        if found is None or done < len(self._sets):
            more = self._judge(newcomer, done)
            found = more if found is None else found.with_more(more)
            self._verdicts[newcomer] = found
        return found

    def takes(self, request: PlacementRequest, gpu_model: str, tenants: Iterable[Tenant], now: float) -> bool:
        """Return whether a pod could join these tenants, hypothetical ones too (see `verdicts` for real ones)."""
        if request.share_milli >= GPU_MILLI:
            return True
        members: list[Member] = []
        for tenant in tenants:
            # A hypothetical tenant is a pod that the caller may not have told the judge about.
            known = self._known_now(tenant.pod_uid, tenant.known) or tenant.known
            if _are_apart(request.known, known, now):
                return False
            members.append(_member(tenant, known, gpu_model))
        members.sort(key=Member.order)
        newcomer, found = Newcomer.of(request), TenantSet(gpu_model, tuple(members))
        if (newcomer, found) not in self._imagined:
            if len(self._imagined) >= MOST_IMAGINED_SETS:
                self._imagined.clear()
            self._imagined[newcomer, found] = self._takes(newcomer, found)
        return self._imagined[newcomer, found]

    def _takes(self, newcomer: Newcomer, tenants: TenantSet) -> bool:
        if not tenants.members:
            return True
        wants_own = newcomer.known is not None and newcomer.known.wants_own
        if wants_own or any(member.wants_own for member in tenants.members):
            return False
        if not newcomer.is_known_on(tenants.gpu_model) and not any(each.is_known for each in tenants.members):
            return True
        return bool(self._tried(tenants.gpu_model, newcomer, [tenants]).accepts[0])

    def _judge(self, newcomer: Newcomer, begin: int) -> Verdicts:
        """Return the verdicts on the sets from `begin` on."""
        verdicts = Verdicts.blank(len(self._sets) - begin)
        wants_own = newcomer.known is not None and newcomer.known.wants_own
        by_model: dict[str, list[int]] = {}
        for number, each in enumerate(self._sets[begin:], begin):
            if not each.members:
                verdicts.gains[number - begin] = 1.0
                continue
            if sum(m.share_percent - 1 for m in each.members) + newcomer.share_percent > SHARES_PER_GPU:
                continue  # it cannot fit there, however shares were rounded
            crowds = wants_own or any(member.wants_own for member in each.members)
            verdicts.crowds[number - begin] = crowds
            if newcomer.is_known_on(each.gpu_model) or any(member.is_known for member in each.members):
                by_model.setdefault(each.gpu_model, []).append(number)
        for gpu_model, numbers in by_model.items():
            self._judge_on(gpu_model, newcomer, numbers, np.array(numbers) - begin, verdicts)
        verdicts.accepts &= ~verdicts.crowds
        return verdicts

    def _judge_on(
        self, gpu_model: str, newcomer: Newcomer, numbers: Sequence[int], at: IntArray, verdicts: Verdicts
    ) -> None:
        """Judge sets on one GPU model in one pass."""
        before = np.array(self.summed(numbers))
        done = self._tried(gpu_model, newcomer, [self._sets[number] for number in numbers])
        for name in Verdicts.__slots__:
            if name != "crowds":
                getattr(verdicts, name)[at] = getattr(done, name)
        verdicts.gains[at] -= before

    def _tried(self, gpu_model: str, newcomer: Newcomer, sets: Sequence[TenantSet]) -> Verdicts:
        """Judge a newcomer beside sets of tenants; `gains` holds the summed progress of all.

        Its smallest cap is tried, and the highest that leaves the caps of its neighbours free. If neither is
        accepted, the highest cap that protects latency tenants is tried too, with tenants stopped.
        """
        table = self.table(gpu_model)
        caps = newcomer.caps(gpu_model)
        own = dict(zip(caps, table.rows([newcomer.member(gpu_model, cap) for cap in caps]).tolist(), strict=True))
        most = [most_beside(each, newcomer) for each in sets]
        beside = [SHARES_PER_GPU - sum(m.thread_percentage for m in each.members) for each in sets]
        tried = np.array(
            [
                [own[_highest(caps, limit)] for limit in (0, min(apart, top), top)]
                for apart, top in zip(beside, most, strict=True)
            ]
        )
        resident = rows_of(table, [each.members for each in sets])
        done = self._try(table, tried[:, :2], resident, stops=False)
        rest = np.flatnonzero(~done.accepts)
        if len(rest):
            again = self._try(table, tried[rest], resident[rest], stops=True)
            for name in Verdicts.__slots__:
                getattr(done, name)[rest] = getattr(again, name)
        return done

    @staticmethod
    def _try(table: ForecastTable, own: IntArray, resident: IntArray, *, stops: bool) -> Verdicts:
        """Judge a newcomer under each cap, beside each resident set; `gains` holds the summed progress of all.

        Args:
            own: table rows of the newcomer, sets x caps.
            resident: table rows of the residents, sets x places.
        """
        count, choices = own.shape
        index = np.empty((count, choices, 1 + resident.shape[1]), np.int64)
        index[:, :, 0] = own
        index[:, :, 1:] = resident[:, None, :]
        forecast = table.forecast(index.reshape(count * choices, -1), stops=stops)
        kept = forecast.kept.reshape(count, choices)
        summed = forecast.summed.reshape(count, choices)
        accepts = np.asarray(kept.any(axis=1))
        ratio = (forecast.least / np.maximum(forecast.promised, _LEAST)).reshape(count, choices)
        best = np.arange(count) * choices + first_of_least(-ratio)
        return Verdicts(
            accepts,
            np.where(accepts, np.where(kept, summed, -np.inf).max(axis=1), 0.0),
            forecast.least[best],
            forecast.promised[best],
            np.equal(forecast.at[best], 0),
            np.zeros(count, bool),
        )


def _highest(caps: Sequence[int], limit: int) -> int:
    """Return the highest of ascending caps within a limit, or the first."""
    return max((cap for cap in caps if cap <= limit), default=caps[0])


def most_beside(tenants: TenantSet, newcomer: Newcomer) -> int:
    """Return the highest cap that leaves latency tenants their shares of the SMs, or the newcomer's share."""
    if newcomer.job_class is JobClass.LATENCY:
        return SHARES_PER_GPU
    taken = sum(m.share_percent for m in tenants.members if m.job_class is JobClass.LATENCY)
    return max(newcomer.share_percent, SHARES_PER_GPU - taken)


def rows_of(table: ForecastTable, sets: Sequence[Iterable[Member]]) -> IntArray:
    """Return the table rows of the members of sets: sets x places, padded with -1."""
    lists = [list(members) for members in sets]
    rows = iter(table.rows([member for members in lists for member in members]).tolist())
    index = np.full((len(lists), max(map(len, lists), default=0)), -1, np.int64)
    for line, members in enumerate(lists):
        for place in range(len(members)):
            index[line, place] = next(rows)
    return index


def _member(tenant: Tenant, known: KnownWorkload | None, gpu_model: str) -> Member:
    """Return a tenant of a GPU as a member of its set."""
    is_known = known is not None and known.profile is not None and _is_of(known, gpu_model)
    tolerates = tenant.max_slowdown
    if known is not None and known.max_slowdown is not None:
        tolerates = max(1.0, known.max_slowdown)
    return Member(
        known.key if known is not None and is_known else "",
        _percent(tenant.share_milli),
        tenant.job_class,
        tolerates,
        tenant.thread_percentage,
        known is not None and known.wants_own,
        tenant.is_auto,
        known.profile if known is not None and is_known else None,
    )


def _are_apart(one: KnownWorkload | None, other: KnownWorkload | None, now: float) -> bool:
    """Return whether a retraction keeps two workloads off the same GPU."""
    return (
        one is not None
        and other is not None
        and (other.name in one.apart_from(now) or one.name in other.apart_from(now))
    )


def _is_of(known: KnownWorkload, gpu_model: str) -> bool:
    return known.gpu_model in {"", gpu_model}


def _percent(share_milli: int) -> int:
    return max(1, min(SHARES_PER_GPU, round(share_milli / MILLI_PER_PERCENT)))
