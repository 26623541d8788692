"""The cap chosen anew for a pod without a process: for the tenants that are there, and every promise is kept."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gpushare.core.api import FaultDomain, JobClass
from gpushare.core.interference import Profile
from gpushare.core.placement import (
    ClusterState,
    DecisionContext,
    GpuSpec,
    Judge,
    KnownWorkload,
    NewCap,
    NodeSpec,
    Placement,
    PlacementRequest,
    ProbationTerm,
    cap_anew,
    decide,
)
from gpushare.core.placement.judge import TenantSet, rows_of
from gpushare.core.placement.policies import BestFit
from gpushare.core.placement.recap import LEAST_CHANGE_PERCENT
from gpushare.data import default_model
from gpushare.twin.contention import WORKLOADS

H200 = "NVIDIA H200"
T, L = JobClass.THROUGHPUT, JobClass.LATENCY


def known(workload: str, max_slowdown: float = 1.5) -> KnownWorkload:
    solo = WORKLOADS[workload]
    return KnownWorkload(
        f"{workload}:{max_slowdown}", H200, max_slowdown, Profile(solo.solo, solo.iterations_per_s)
    )


class Gpus:
    """Nodes of one GPU each, g0, g1 and so on, and what is known now of the pods on them."""

    def __init__(self, count: int = 1) -> None:
        self.state = ClusterState(NodeSpec(f"n{n}", (GpuSpec(f"g{n}", H200),)) for n in range(count))
        self.known: dict[str, KnownWorkload] = {}
        self.requests: dict[str, PlacementRequest] = {}
        self.context = DecisionContext(self.state, BestFit(), Judge(default_model, self.known.get))

    def put(
        self, uid: str, percent: int, cap: int, what: KnownWorkload | None = None, *, gpu: int = 0, **more: object
    ) -> None:
        if what is not None:
            self.known[uid] = what
        self.requests[uid] = PlacementRequest(uid, percent * 10, known=what, **more)  # type: ignore[arg-type]
        placement = Placement(f"n{gpu}", (f"g{gpu}",), thread_percentage=cap)
        self.state.reserve(uid, placement, self.requests[uid])

    def anew(self, uid: str) -> NewCap | None:
        return cap_anew(self.requests[uid], self.context)

    def caps(self) -> dict[str, int | None]:
        return {uid: each.placement.thread_percentage for uid, each in self.state.reservations.items()}

    def keeps(self, gpu: str = "g0") -> bool:
        """Whether the judge's model keeps every promise on a GPU, under the caps that are decided."""
        row, slot = self.state.gpu_at(gpu)  # type: ignore[misc]
        judge = self.context.judge
        members = judge.set_at(int(judge.resident_sets(self.state)[slot, row])).members
        if not any(member.is_known for member in members):
            return True
        table = judge.table(H200)
        return bool(table.forecast(rows_of(table, [TenantSet(H200, members).members])).kept[0])


def test_the_whole_gpu_once_the_neighbour_has_left_and_none_is_likely_to_come() -> None:
    gpus = Gpus(8)
    gpus.put("a", 50, 50, known("montecarlo-fp32"))
    gpus.put("b", 50, 50, known("stream"))
    gpus.state.release("b")
    assert gpus.anew("a") == NewCap(50, 100, others=0)


def test_the_same_cap_while_its_gpu_is_not_in_its_nodes_report() -> None:
    gpus = Gpus(8)
    gpus.put("a", 50, 50, known("montecarlo-fp32"))
    gpus.state.update_node(NodeSpec("n0", ()))
    assert gpus.anew("a") is None
    gpus.state.update_node(NodeSpec("n0", (GpuSpec("g0", H200),)))
    assert gpus.anew("a") is not None


def test_more_than_its_share_once_its_workload_is_known_beside_others() -> None:
    """In a full cluster too: the share was the cap of an unknown workload."""
    gpus = Gpus()
    gpus.put("a", 25, 25)
    gpus.put("b", 25, 25, known("latency-probe", 9.0))
    assert gpus.anew("a") is None, "nothing is known of it"
    gpus.known["a"] = known("montecarlo-fp32", 9.0)
    gpus.requests["a"] = replace(gpus.requests["a"], known=gpus.known["a"])
    gpus.context.judge.forget()
    found = gpus.anew("a")
    assert found is not None
    assert found.before == 25 < found.after
    assert found.others == 1


def test_less_again_when_a_tenant_of_class_latency_has_come() -> None:
    """Its share of the SMs stays free, although the pod alone had all of them."""
    gpus = Gpus(8)
    gpus.put("a", 25, 100, known("stream", 9.0))
    gpus.put("probe", 50, 100, known("latency-probe", 9.0), job_class=L)
    found = gpus.anew("a")
    assert found is not None
    assert 25 <= found.after <= 50


def test_the_share_again_if_nothing_is_known_of_it_any_more() -> None:
    gpus = Gpus(8)
    gpus.put("a", 25, 75)
    gpus.put("b", 25, 25, known("stream"))
    assert gpus.anew("a") == NewCap(75, 25, others=1)


def test_it_is_what_a_newcomer_would_get() -> None:
    """The same rule as at binding, for each program beside each other one on a GPU that they fill."""
    compared = set()
    for one, other in itertools.permutations(sorted(WORKLOADS), 2):
        gpus = Gpus(2)
        gpus.put("b", 40, 40, known(other, 3.0))
        decided = decide(PlacementRequest("a", 600, known=known(one, 3.0)), gpus.context, node="n0")
        if not isinstance(decided, Placement):
            continue
        gpus.put("a", 60, 1, known(one, 3.0))
        found = gpus.anew("a")
        assert found is not None
        assert found.after == decided.thread_percentage
        compared.add(found.after)
    assert len(compared) > 1, "not the same one everywhere"


@pytest.mark.parametrize(
    "more", [{"job_class": L}, {"fault_domain": FaultDomain.ISOLATED}], ids=["latency", "isolated"]
)
def test_whose_cap_is_no_choice_keeps_it(more: dict[str, object]) -> None:
    gpus = Gpus(8)
    gpus.put("a", 50, 50, known("montecarlo-fp32"), **more)
    assert gpus.anew("a") is None


def test_a_whole_gpu_and_a_pod_without_a_place_keep_theirs() -> None:
    gpus = Gpus(8)
    gpus.put("a", 100, 50, known("montecarlo-fp32"))
    assert gpus.anew("a") is None
    gpus.requests["nowhere"] = PlacementRequest("nowhere", 500)
    assert gpus.anew("nowhere") is None
    gpus.requests["lost"] = PlacementRequest("lost", 500, known=known("montecarlo-fp32"))
    gpus.state.reserve("lost", Placement("gone", ("g-gone",), thread_percentage=50), gpus.requests["lost"])
    assert gpus.anew("lost") is None


def test_a_pod_that_is_of_class_latency_by_now_keeps_its_cap() -> None:
    gpus = Gpus(8)
    gpus.put("a", 50, 50, known("montecarlo-fp32"))
    gpus.requests["a"] = replace(gpus.requests["a"], job_class=L)
    assert gpus.anew("a") is None


def test_nothing_changes_where_the_state_is_not_known() -> None:
    gpus = Gpus(8)
    gpus.put("a", 50, 50, known("montecarlo-fp32"))
    gpus.state.set_health("g0", healthy=False)
    assert gpus.anew("a") is None
    gpus.state.set_health("g0", healthy=True)
    gpus.state.set_silence("n0", 90)
    assert gpus.anew("a") is None
    gpus.state.set_silence("n0", 0)
    gpus.put("b", 60, 60)
    assert gpus.anew("a") is None, "more than a whole GPU is counted there"
    gpus.state.release("b")
    assert gpus.anew("a") is not None


def test_a_pod_on_probation_keeps_its_share_until_its_window_ends() -> None:
    gpus = Gpus(8)
    gpus.put("a", 50, 75)
    gpus.state.set_probation("a", ProbationTerm(frozenset({"w"}), "default/a", until=60.0))
    assert gpus.anew("a") is None
    later = gpus.context.at(61.0)
    assert cap_anew(gpus.requests["a"], later) == NewCap(75, 50, others=0)


@pytest.mark.parametrize("who", ["a", "b"])
def test_nothing_changes_where_somebody_should_have_a_gpu_of_its_own(who: str) -> None:
    gpus = Gpus(8)
    gpus.put("a", 25, 100, known("stream"))
    gpus.put("b", 25, 25, known("latency-probe"))
    assert gpus.anew("a") is not None
    alone = replace(gpus.known[who], wants_own=True)
    gpus.known[who] = alone
    gpus.requests[who] = replace(gpus.requests[who], known=alone)
    gpus.context.judge.forget()
    assert gpus.anew("a") is None


def test_where_no_cap_keeps_the_promises_the_present_one_stays() -> None:
    gpus = Gpus()
    gpus.put("a", 50, 100, known("stream", 1.01))
    gpus.put("b", 50, 100, known("stream", 1.01))
    assert not gpus.keeps()
    gpus.state.set_cap("a", 50)
    assert not gpus.keeps(), "under its share neither"
    gpus.state.set_cap("a", 100)
    assert gpus.anew("a") is None


def test_the_look_itself_changes_nothing() -> None:
    gpus = Gpus(3)
    gpus.put("a", 25, 25, known("montecarlo-fp32"))
    gpus.put("b", 25, 50, known("stream"))
    before = gpus.caps(), gpus.state.change_count, [each.order for each in gpus.state.reservations.values()]
    gpus.anew("a")
    assert (
        gpus.caps(),
        gpus.state.change_count,
        [each.order for each in gpus.state.reservations.values()],
    ) == before


def test_a_changed_cap_leaves_the_pod_as_old_as_it_is() -> None:
    gpus = Gpus(3)
    gpus.put("a", 25, 25, known("montecarlo-fp32"))
    gpus.put("b", 25, 50, known("stream"))
    assert [tenant.thread_percentage for tenant in gpus.state.tenants("g0")] == [25, 50]
    gpus.state.set_cap("a", 75)
    assert [(t.pod_uid, t.thread_percentage) for t in gpus.state.tenants("g0")] == [("a", 75), ("b", 50)]
    before = int(gpus.context.judge.resident_sets(gpus.state)[0, 0])
    gpus.state.set_cap("a", 50)
    assert int(gpus.context.judge.resident_sets(gpus.state)[0, 0]) != before, "the judge has seen it"


programs = st.one_of(
    st.none(), st.builds(known, st.sampled_from(sorted(WORKLOADS)), st.sampled_from([1.05, 1.5, 2.0, 9.0]))
)
tenants = st.lists(
    st.tuples(
        st.integers(1, 60), st.sampled_from([0, 1, 5, 25, 50, 75, 99]), programs, st.sampled_from([T, T, T, L])
    ),
    min_size=1,
    max_size=4,
)


def made(described: list[tuple[int, int, KnownWorkload | None, JobClass]], empty: int) -> Gpus:
    """One GPU with these tenants, each with a cap above its share by some points, and empty GPUs beside it."""
    assume(sum(percent for percent, *_ in described) <= 100)
    gpus = Gpus(1 + empty)
    for number, (percent, above, what, job_class) in enumerate(described):
        cap = 100 if job_class is L else min(100, percent + above)
        gpus.put(f"p{number}", percent, cap, what, job_class=job_class)
    return gpus


@settings(max_examples=60, deadline=None)
@given(tenants, st.sampled_from([0, 1, 7]))
def test_never_below_the_share_never_a_broken_promise_and_done_at_once(
    described: list[tuple[int, int, KnownWorkload | None, JobClass]], empty: int
) -> None:
    gpus = made(described, empty)
    kept = gpus.keeps()
    found = gpus.anew("p0")
    if found is None:
        return
    percent, _, what, job_class = described[0]
    assert job_class is T
    assert percent <= found.after <= 100
    assert abs(found.after - found.before) >= LEAST_CHANGE_PERCENT
    latency = sum(other for other, _, _, other_class in described if other_class is L)
    assert found.after <= max(percent, 100 - latency)
    gpus.state.set_cap("p0", found.after)
    if kept or (what is not None and len(described) > 1):
        assert gpus.keeps(), "every promise can be kept"
    assert gpus.anew("p0") is None, "a second look changes nothing"


@settings(max_examples=60, deadline=None)
@given(tenants, st.sampled_from([0, 1, 7]), st.randoms(use_true_random=False))
def test_pods_without_processes_on_one_gpu_do_not_change_in_turns_for_ever(
    described: list[tuple[int, int, KnownWorkload | None, JobClass]], empty: int, order: st.DataObject
) -> None:
    """Each change makes the GPU's one sum larger, so that it ends; whoever is asked first."""
    gpus = made(described, empty)
    uids = list(gpus.requests)
    seen = {tuple(gpus.caps().items())}
    for _ in range(40):
        order.shuffle(uids)  # type: ignore[attr-defined]
        changed = [(uid, found) for uid in uids if (found := gpus.anew(uid)) is not None][:1]
        if not changed:
            return
        [(uid, found)] = changed
        gpus.state.set_cap(uid, found.after)
        now = tuple(gpus.caps().items())
        assert now not in seen, "no state comes twice"
        seen.add(now)
    pytest.fail("forty changes and no end")
