"""A GPU that two nodes list belongs to the first: in the table of claims, and through a whole extender."""

from collections.abc import Set as AbstractSet
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.core.placement import GpuSpec
from gpushare.extender.claims import KEPT_SECONDS, LOOK_SECONDS, MOST_KEPT, ContestedGpu, GpuClaims
from gpushare.extender.explain import CONTESTED_SECONDS, Explainer
from gpushare.extender.reduce import GpuNodeView
from gpushare.kube import EVENTS, GPUNODES, NODES


def view(name: str, *uuids: str, created_at: str = "", unhealthy: str = "", **allocated: str) -> GpuNodeView:
    gpus = tuple(GpuSpec(uuid, "H200", 1000) for uuid in uuids)
    return GpuNodeView(
        name, gpus, frozenset(unhealthy.split()), {uid: (uuid,) for uid, uuid in allocated.items()}, created_at
    )


def owned(claims: GpuClaims, *nodes: str) -> dict[str, set[str]]:
    return {node: {gpu.uuid for gpu in claims.own(node).gpus} for node in nodes}


class Settled:
    """Claims after the first lists, with a clock that the test turns and the pods that it names."""

    def __init__(self) -> None:
        self.now = 0.0
        self.decided: dict[str, set[str]] = {}
        self.claims = GpuClaims(lambda: self.now)
        self.claims.settle({})

    def passes(self, seconds: float) -> tuple[str, ...]:
        """Let time pass, with a look at kept GPUs at its end; return the nodes that got a GPU."""
        self.now += seconds
        return self.claims.end_kept(lambda nodes: self.decided)


@pytest.fixture
def settled() -> Settled:
    return Settled()


@pytest.fixture
def claims(settled: Settled) -> GpuClaims:
    return settled.claims


def test_who_lists_anothers_gpu_does_not_get_it(claims: GpuClaims) -> None:
    claims.put(view("real", "g1", "g2"))
    thief = view("thief", "g1", "t1", unhealthy="g1 t1", p="g1", q="t1")
    assert claims.put(thief) == ((), ())
    assert owned(claims, "real", "thief") == {"real": {"g1", "g2"}, "thief": {"t1"}}
    assert claims.own("thief").unhealthy == {"t1"}, "nor does it say how the GPU is"
    assert claims.own("thief").allocated == {"q": ("t1",)}, "nor who runs there"
    assert claims.contested() == (ContestedGpu("g1", "real", "thief"),)
    assert claims.put(view("real", "g1", "g2", unhealthy="g2")) == ((), ())
    assert owned(claims, "real", "thief") == {"real": {"g1", "g2"}, "thief": {"t1"}}


def test_a_gpu_that_its_owner_does_not_list_for_a_moment_stays_its_own(
    settled: Settled, claims: GpuClaims
) -> None:
    """Before: one report without it gave it to the other node for good."""
    claims.put(view("real", "g1", "g2"))
    claims.put(view("thief", "g1"))
    assert claims.put(view("real", "g2")) == ((), ())
    assert owned(claims, "real", "thief") == {"real": {"g2"}, "thief": set()}
    assert claims.contested() == (ContestedGpu("g1", "real", "thief"),)
    assert settled.passes(KEPT_SECONDS - 1) == ()
    assert claims.put(view("real", "g1", "g2")) == ((), ())
    assert settled.passes(2 * KEPT_SECONDS) == ()
    assert owned(claims, "real", "thief") == {"real": {"g1", "g2"}, "thief": set()}


def test_who_comes_while_a_gpu_is_kept_does_not_get_it(settled: Settled, claims: GpuClaims) -> None:
    claims.put(view("real", "g1"))
    claims.put(view("real"))
    claims.put(view("thief", "g1"))
    assert owned(claims, "real", "thief") == {"real": set(), "thief": set()}
    assert claims.drop("real") == ("thief",), "unless the node is gone"
    assert owned(claims, "thief") == {"thief": {"g1"}}
    assert settled.passes(KEPT_SECONDS) == ()


def test_a_gpu_that_was_moved_is_the_next_nodes_when_its_time_is_over(settled: Settled, claims: GpuClaims) -> None:
    claims.put(view("old", "g1", "g2"))
    claims.put(view("new", "g1"))
    claims.put(view("old", "g2"))
    assert settled.passes(KEPT_SECONDS - 1) == ()
    assert settled.passes(LOOK_SECONDS) == ("new",)
    assert owned(claims, "old", "new") == {"old": {"g2"}, "new": {"g1"}}
    assert claims.contested() == ()
    claims.put(view("old", "g1", "g2"))
    assert owned(claims, "old", "new") == {"old": {"g2"}, "new": {"g1"}}, "who comes back is the last"


def test_a_gpu_is_kept_for_as_long_as_its_owner_has_pods_on_it(settled: Settled, claims: GpuClaims) -> None:
    claims.put(view("real", "g1"))
    claims.put(view("thief", "g1"))
    claims.put(view("real"))
    settled.decided = {"g1": {"real", "thief"}}
    for _ in range(3):
        assert settled.passes(KEPT_SECONDS) == ()
    settled.decided = {"g1": {"thief"}}
    assert settled.passes(KEPT_SECONDS - 1) == ()
    assert settled.passes(LOOK_SECONDS) == ("thief",)


def test_pods_are_read_once_a_minute_and_only_while_a_gpu_is_kept(settled: Settled, claims: GpuClaims) -> None:
    reads: list[float] = []

    def decided(nodes: AbstractSet[str]) -> dict[str, set[str]]:
        assert nodes == {"a"}
        reads.append(settled.now)
        return {}

    claims.put(view("a", "g1"))
    for second in range(300):
        settled.now = float(second)
        claims.end_kept(decided)
        if second == 100:
            claims.put(view("a"))
    assert reads == [101.0, 161.0, 221.0, 281.0]


def test_an_agent_that_lists_other_gpus_each_time_keeps_a_few(settled: Settled, claims: GpuClaims) -> None:
    for number in range(20):
        claims.put(view("thief", *(f"g{number}-{gpu}" for gpu in range(MOST_KEPT))))
    claims.put(view("other", *(f"g{number}-0" for number in range(20))))
    assert owned(claims, "other") == {"other": {f"g{number}-0" for number in range(1, 19)}}
    settled.passes(KEPT_SECONDS)
    assert owned(claims, "other", "thief")["other"] == {f"g{number}-0" for number in range(19)}


def test_a_node_that_is_gone_leaves_its_gpus_to_the_next(claims: GpuClaims) -> None:
    claims.put(view("a", "g1"))
    claims.put(view("b", "g1"))
    claims.put(view("c", "g1"))
    assert claims.drop("a") == ("b",)
    assert owned(claims, "b", "c") == {"b": {"g1"}, "c": set()}
    assert claims.drop("c") == ()
    assert claims.drop("never-seen") == ()
    claims.put(view("a", "g1"))
    assert owned(claims, "a", "b") == {"a": set(), "b": {"g1"}}, "who comes back is the last"


def test_after_a_restart_the_older_gpunode_counts_as_the_first_whatever_the_order_of_the_list() -> None:
    thief, real = view("a-thief", "g1", created_at="2026-11-22"), view("real", "g1", created_at="2026-11-21")
    for first, second in ((thief, real), (real, thief)):
        claims = GpuClaims()
        claims.put(first)
        losers, _ = claims.put(second)
        assert losers == (("a-thief",) if first is thief else ())
        assert owned(claims, "real", "a-thief") == {"real": {"g1"}, "a-thief": set()}


def restarted(*views: GpuNodeView, **decided: str) -> tuple[GpuClaims, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Claims after a restart, and who lost and got a GPU at its end; `decided` has the nodes of pods, by GPU."""
    claims = GpuClaims(lambda: 0.0)
    for each in views:
        claims.put(each)
    return claims, claims.settle({uuid: set(nodes.split()) for uuid, nodes in decided.items()})


OLDER_THIEF = view("a-thief", "g1", "g2", "t1", created_at="2026-11-20")
REAL = view("real", "g1", "g2", created_at="2026-11-21")


@pytest.mark.parametrize("views", [(OLDER_THIEF, REAL), (REAL, OLDER_THIEF)])
def test_after_a_restart_a_gpu_in_use_stays_where_its_pods_are_also_if_an_older_node_lists_it(
    views: tuple[GpuNodeView, ...],
) -> None:
    """Before: the older GpuNode took it at each restart."""
    claims, changes = restarted(*views, g1="real", t1="a-thief")
    assert owned(claims, "real", "a-thief") == {"real": {"g1"}, "a-thief": {"g2", "t1"}}, "the idle one is lost"
    assert changes == (("a-thief",), ("real",))
    assert set(claims.contested()) == {
        ContestedGpu("g1", "real", "a-thief"),
        ContestedGpu("g2", "a-thief", "real"),
    }


def test_after_a_restart_the_older_of_two_with_pods_has_the_gpu() -> None:
    """An agent can write such a decision for a pod of its node."""
    claims, _ = restarted(OLDER_THIEF, REAL, g1="real a-thief")
    assert owned(claims, "real", "a-thief") == {"real": set(), "a-thief": {"g1", "g2", "t1"}}


def test_after_a_restart_a_gpu_in_use_is_kept_also_if_its_node_does_not_list_it() -> None:
    gone = view("real", created_at="2026-11-21")
    claims, _ = restarted(OLDER_THIEF, gone, g1="real", g3="real gone-node", g4="gone-node")
    claims.put(view("late-thief", "g3", "g4"))
    assert owned(claims, "a-thief", "late-thief") == {"a-thief": {"g2", "t1"}, "late-thief": {"g4"}}
    claims.put(view("real", "g1", "g3"))
    assert owned(claims, "real") == {"real": {"g1", "g3"}}


def test_after_a_restart_who_has_pods_but_does_not_list_a_gpu_makes_no_claim_beside_an_owner() -> None:
    claims, changes = restarted(OLDER_THIEF, view("b", created_at="2026-11-21"), g1="a-thief b")
    assert changes == ((), ())
    assert claims.contested() == ()
    assert claims.drop("b") == ()
    assert claims.drop("a-thief") == ()


NAMES = st.sampled_from(["a", "b", "c"])
GPUS = st.frozensets(st.sampled_from(["g1", "g2", "g3"]))
PODS_ON = st.dictionaries(st.sampled_from(["g1", "g2", "g3"]), st.sets(NAMES))
STEPS = st.lists(
    st.one_of(
        st.tuples(NAMES, GPUS),
        st.tuples(NAMES, st.none()),
        st.tuples(st.just("pods"), PODS_ON),
        st.tuples(st.just("passes"), st.sampled_from([LOOK_SECONDS, KEPT_SECONDS / 2, KEPT_SECONDS])),
    ),
    max_size=30,
)


@given(STEPS, st.integers(0, 30), PODS_ON)
def test_whatever_nodes_say_a_gpu_has_one_owner_at_most_who_keeps_it(
    steps: Any, restart: int, pods_then: Any
) -> None:
    settled = Settled()
    settled.claims = claims = GpuClaims(lambda: settled.now)
    listed: dict[str, frozenset[str]] = {}
    last: dict[tuple[str, str], float] = {}  # when a node last listed a GPU, or had a pod on it
    before: dict[str, str] = {}
    for number, (node, gpus) in enumerate(steps):
        if number == restart:
            settled.decided = pods_then
            claims.settle(pods_then)
            before = {}
        if node == "pods":
            settled.decided = gpus
        elif node == "passes":
            settled.passes(gpus)
            for uuid, names in settled.decided.items():
                last |= {(name, uuid): settled.now for name in names}
        elif gpus is None:
            claims.drop(node)
            listed.pop(node, None)
        else:
            claims.put(view(node, *sorted(gpus), created_at=node))
            listed[node] = gpus
        last |= {(name, uuid): settled.now for name, uuids in listed.items() for uuid in uuids}
        owners: dict[str, str] = {}
        for name in listed:
            for uuid in owned(claims, name)[name]:
                assert uuid not in owners, "no GPU is on two nodes"
                owners[uuid] = name
        contested = claims.contested()
        assert {(each.node, each.uuid) for each in contested} == {
            (name, uuid) for name, uuids in listed.items() for uuid in uuids if owners.get(uuid) != name
        }
        for each in contested:
            assert each.owner == owners.get(each.uuid, each.owner)
            assert each.owner in listed, "a node that is gone owns nothing"
        if number >= restart:
            for uuid, owner in before.items():
                is_kept = owner in listed and settled.now - last[owner, uuid] < KEPT_SECONDS
                if is_kept or uuid in listed.get(owner, ()):
                    assert owners.get(uuid, owner) == owner, "it lists it, or did a moment ago, or has pods on it"
            before |= owners
    settled.decided = {}
    claims.settle({})
    settled.passes(KEPT_SECONDS)
    settled.passes(KEPT_SECONDS)
    assert set().union(*(owned(claims, name)[name] for name in listed)) == set().union(*listed.values())


class Events:
    def __init__(self) -> None:
        self.bodies: list[Any] = []

    async def create(self, resource: Any, body: Any, *, namespace: str) -> None:
        assert resource is EVENTS
        self.bodies.append(body)


async def test_an_agent_that_lists_another_nodes_gpu_takes_nothing_from_it(running: Any, cluster: Any) -> None:
    """Before: the real node became unschedulable."""
    stolen = {
        "uuid": "GPU-n2-0",
        "index": 0,
        "model": "H200",
        "memoryMiB": 81920,
        "health": "Unhealthy",
        "tenants": [],
    }
    cluster.add_node("a-thief", gpus=0)
    cluster.put(GPUNODES, {"metadata": {"name": "a-thief"}, "status": {"gpus": [stolen]}})
    real = dict(cluster.objects[GPUNODES]["n2"])
    real["status"] = {
        "gpus": [dict(gpu, index=gpu["index"]) for gpu in real["status"]["gpus"]],
        "driverVersion": "2",
    }
    cluster.put(GPUNODES, real)
    await cluster.settle()
    cluster.make_pod("whole", "2")
    await cluster.settle()
    assert "n2" in (await running.filter("whole"))["NodeNames"]
    assert await running.bind("whole", "n2") == ""
    assert set(running.held()["whole"]) == {"GPU-n2-0", "GPU-n2-1"}
    ledger = running.extender.ledger
    assert [str(each) for each in ledger.claims.contested()] == [
        "GPU GPU-n2-0 belongs to node n2, which had it first; what node a-thief says of it is ignored"
    ]

    now, events = [1000.0], Events()
    explainer = Explainer(events, ledger, lambda: now[0])  # type: ignore[arg-type]
    for _ in range(3):
        await explainer.round()
    assert [(b["reason"], b["regarding"]["kind"], b["regarding"]["name"]) for b in events.bodies] == [
        ("GpuOfAnotherNode", "Node", "a-thief")
    ]
    now[0] += CONTESTED_SECONDS
    await explainer.round()
    assert len(events.bodies) == 2

    cluster.remove(GPUNODES, "n2")
    await cluster.settle()
    assert ledger.claims.contested() == ()


async def test_a_round_over_many_contested_gpus_compares_each_once(running: Any, monkeypatch: Any) -> None:
    """Before: each told one with all others, seconds of each second where 500 nodes came with new names."""
    ledger, compared, equals = running.extender.ledger, [0], ContestedGpu.__eq__

    def counted(one: ContestedGpu, other: object) -> bool:
        compared[0] += 1
        return equals(one, other)

    for number in range(200):
        ledger.claims.put(view(f"thief-{number}", "GPU-n1-0"))
    now, events = [1000.0], Events()
    explainer = Explainer(events, ledger, lambda: now[0])  # type: ignore[arg-type]
    for _ in range(200):
        await explainer.round()
    assert len(events.bodies) == 200
    monkeypatch.setattr(ContestedGpu, "__eq__", counted)
    await explainer.round()
    assert compared[0] <= 400


def list_another(cluster: Any, node: str, gpu: str, **metadata: str) -> None:
    """Let a node list a GPU, as unhealthy, besides its own."""
    known = cluster.objects[GPUNODES].get(node, {"status": {"gpus": []}})
    stolen = {"uuid": gpu, "index": 9, "model": "H200", "memoryMiB": 81920, "health": "Unhealthy", "tenants": []}
    status = {"gpus": [*known["status"]["gpus"], stolen]}
    cluster.put(GPUNODES, {"metadata": {"name": node, **metadata}, "status": status})


async def test_a_restarted_extender_leaves_gpus_in_use_to_their_node_whoever_is_older(
    cluster: Any, serve_cluster: Any
) -> None:
    """Before: n2 lost its GPU, was counted as full there, and the older node's lie on its health counted."""
    cluster.add_node("n1")
    cluster.add_node("n2")
    async with serve_cluster(cluster) as running:
        cluster.make_pod("half", "0.5")
        await cluster.settle()
        assert await running.bind("half", "n2") == ""
        cluster.allocate("half")
    (gpu,) = running.held()["half"]
    list_another(cluster, "n1", gpu, creationTimestamp="2026-11-20T00:00:00Z")
    real = cluster.objects[GPUNODES]["n2"]
    cluster.put(GPUNODES, real | {"metadata": {"name": "n2", "creationTimestamp": "2026-11-21T00:00:00Z"}})
    async with serve_cluster(cluster) as again:
        state = again.extender.ledger.state
        assert state.gpu_node(gpu) == "n2"
        row, slot = state.gpu_at(gpu)
        assert state.share_free_milli[slot, row] == 500
        assert state.healthy[slot, row]
        cluster.make_pod("other", "0.5")
        await cluster.settle()
        assert await again.bind("other", "n2") == ""


async def test_a_report_without_a_gpu_gives_it_to_nobody_for_minutes_and_while_pods_use_it(
    cluster: Any, serve_cluster: Any
) -> None:
    """Before: one such report, and the GPU was the other node's for good."""
    now = [1000.0]
    cluster.add_node("n1")
    cluster.add_node("n2", gpus=1)
    async with serve_cluster(cluster, clock=lambda: now[0]) as running:
        ledger = running.extender.ledger

        async def seconds_pass(seconds: float) -> None:
            await cluster.settle()
            now[0] += seconds
            ledger.listen(now[0])

        cluster.make_pod("half", "0.5")
        await cluster.settle()
        assert await running.bind("half", "n2") == ""
        cluster.allocate("half")
        list_another(cluster, "n1", "GPU-n2-0")
        await cluster.settle()
        real = cluster.objects[GPUNODES]["n2"]
        cluster.put(GPUNODES, real | {"status": {"gpus": []}})
        await seconds_pass(2 * KEPT_SECONDS)
        assert ledger.state.gpu_node("GPU-n2-0") is None
        cluster.put(GPUNODES, real)
        await cluster.settle()
        assert ledger.state.gpu_node("GPU-n2-0") == "n2"
        assert ledger.state.tenants("GPU-n2-0")

        cluster.put(GPUNODES, real | {"status": {"gpus": []}})
        cluster.finish("half")
        await seconds_pass(KEPT_SECONDS - 1)
        assert ledger.state.gpu_node("GPU-n2-0") is None
        await seconds_pass(LOOK_SECONDS)
        assert ledger.state.gpu_node("GPU-n2-0") == "n1", "moved, as it seems"


async def test_a_machine_that_joins_again_under_another_name_has_its_gpus(
    cluster: Any, serve_cluster: Any
) -> None:
    """Its agent outlived the Node by a moment and wrote the GpuNode again, which nothing deletes."""
    cluster.add_node("old")
    async with serve_cluster(cluster) as running:
        state = running.extender.ledger.state
        cluster.remove(NODES, "old")
        ghost = cluster.objects[GPUNODES]["old"]
        cluster.remove(GPUNODES, "old")
        cluster.put(GPUNODES, ghost)
        await cluster.settle()
        assert state.node_names == ()
        cluster.add_node("new", gpus=0)
        cluster.put(GPUNODES, ghost | {"metadata": {"name": "new"}})
        await cluster.settle()
        assert {state.gpu_node(gpu) for gpu in ("GPU-old-0", "GPU-old-1")} == {"new"}
        assert running.extender.ledger.claims.contested() == ()
    old = {"name": "old", "creationTimestamp": "2026-11-20T00:00:00Z"}
    cluster.put(GPUNODES, ghost | {"metadata": old})
    async with serve_cluster(cluster) as again:
        ledger = again.extender.ledger
        assert ledger.state.gpu_node("GPU-old-0") == "new", "after a restart too, though the other is older"
        cluster.add_node("late")
        node, late = cluster.objects[NODES]["late"], cluster.objects[GPUNODES]["late"]
        cluster.remove(NODES, "late")
        await cluster.settle()
        assert ledger.state.row("late") is None
        cluster.put(GPUNODES, late | {"status": {"gpus": late["status"]["gpus"][:1]}})
        cluster.put(NODES, node)
        await cluster.settle()
        assert ledger.state.uuids(ledger.state.row("late")) == ("GPU-late-0",), "as its agent wrote it last"


async def test_a_node_that_gets_a_gpu_and_loses_another_after_the_first_lists_has_what_is_its_own(
    cluster: Any, serve_cluster: Any
) -> None:
    """The state refuses a GPU that is still on another node, so all are taken before one is given."""
    for node in ("n1", "n2", "n3"):
        cluster.add_node(node, gpus=1)
    async with serve_cluster(cluster) as running:
        for pod, node in (("a", "n3"), ("b", "n2")):
            cluster.make_pod(pod, "1")
            await cluster.settle()
            assert await running.bind(pod, node) == ""
            cluster.allocate(pod)
    list_another(cluster, "n1", "GPU-n2-0", creationTimestamp="2026-11-20T00:00:00Z")
    list_another(cluster, "n2", "GPU-n3-0", creationTimestamp="2026-11-21T00:00:00Z")
    youngest = {"name": "n3", "creationTimestamp": "2026-11-22T00:00:00Z"}
    cluster.put(GPUNODES, cluster.objects[GPUNODES]["n3"] | {"metadata": youngest})
    async with serve_cluster(cluster) as again:
        state = again.extender.ledger.state
        assert [state.gpu_node(f"GPU-{node}-0") for node in ("n1", "n2", "n3")] == ["n1", "n2", "n3"]
