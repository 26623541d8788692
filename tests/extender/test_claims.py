"""A GPU that two nodes list belongs to the first: in the table of claims, and through a whole extender."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.core.placement import GpuSpec
from gpushare.extender.claims import ContestedGpu, GpuClaims
from gpushare.extender.explain import CONTESTED_SECONDS, Explainer
from gpushare.extender.reduce import GpuNodeView
from gpushare.kube import EVENTS, GPUNODES


def view(name: str, *uuids: str, created_at: str = "", unhealthy: str = "", **allocated: str) -> GpuNodeView:
    gpus = tuple(GpuSpec(uuid, "H200", 1000) for uuid in uuids)
    return GpuNodeView(
        name, gpus, frozenset(unhealthy.split()), {uid: (uuid,) for uid, uuid in allocated.items()}, created_at
    )


def owned(claims: GpuClaims, *nodes: str) -> dict[str, set[str]]:
    return {node: {gpu.uuid for gpu in claims.own(node).gpus} for node in nodes}


@pytest.fixture
def claims() -> GpuClaims:
    claims = GpuClaims()
    claims.settle()
    return claims


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


def test_a_gpu_that_was_moved_is_the_next_nodes_once_the_first_lists_it_no_more(claims: GpuClaims) -> None:
    claims.put(view("old", "g1", "g2"))
    claims.put(view("new", "g1"))
    assert claims.put(view("old", "g2")) == ((), ("new",))
    assert owned(claims, "old", "new") == {"old": {"g2"}, "new": {"g1"}}
    assert claims.contested() == ()


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


NODES = st.sampled_from(["a", "b", "c"])
GPUS = st.frozensets(st.sampled_from(["g1", "g2", "g3"]))


@given(st.lists(st.one_of(st.tuples(NODES, GPUS), st.tuples(NODES, st.none())), max_size=30))
def test_whatever_nodes_say_a_listed_gpu_has_exactly_one_owner_who_keeps_it(steps: Any) -> None:
    claims = GpuClaims()
    claims.settle()
    listed: dict[str, frozenset[str]] = {}
    before: dict[str, str] = {}
    for node, gpus in steps:
        if gpus is None:
            claims.drop(node)
            listed.pop(node, None)
        else:
            claims.put(view(node, *sorted(gpus)))
            listed[node] = gpus
        owners: dict[str, str] = {}
        for name in listed:
            for uuid in owned(claims, name)[name]:
                assert uuid not in owners, "no GPU is on two nodes"
                owners[uuid] = name
        assert set(owners) == set().union(*listed.values())
        assert set(claims.contested()) == {
            ContestedGpu(uuid, owners[uuid], name)
            for name, uuids in listed.items()
            for uuid in uuids
            if owners[uuid] != name
        }
        for uuid, owner in before.items():
            if uuid in listed.get(owner, ()):
                assert owners[uuid] == owner, "its owner still lists it"
        before = owners


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
        "GPU GPU-n2-0 belongs to node n2, which listed it first; what node a-thief says of it is ignored"
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
