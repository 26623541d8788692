"""A GPU is kept for a pod that has waited long, by what the API says alone: another replica goes on with it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpushare.cli.explain import explanation_of
from gpushare.cli.explain_words import as_record, why_there
from gpushare.cli.live import Objects, cluster_of
from gpushare.cli.plan import context_of
from gpushare.core.api import Rejection
from gpushare.core.placement import Placement, ProbationSettings, Settings, decide, survey
from gpushare.extender.wire import plain
from gpushare.kube import GPUNODES, GPUSHARES, NODES, PODS

SHORT = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/2 nodes are available",
}


def ago(**how_long: float) -> str:
    return (datetime.now(UTC) - timedelta(**how_long)).strftime("%Y-%m-%dT%H:%M:%SZ")


def make_old(cluster: Any, name: str, fraction: str, *, spec: Any = None, **how_long: float) -> None:
    """A pod that was created a while ago and that kube-scheduler found no node for."""
    pod = cluster.make_pod(name, fraction)
    pod["metadata"]["creationTimestamp"] = ago(**(how_long or {"hours": 2}))
    pod["status"]["conditions"] = [SHORT]
    pod["spec"] |= spec or {}
    cluster.put(PODS, pod)


def make_young(cluster: Any, name: str, fraction: str, **more: Any) -> None:
    pod = cluster.make_pod(name, fraction, **more)
    pod["metadata"]["creationTimestamp"] = ago(seconds=2)
    cluster.put(PODS, pod)


async def fill(running: Any, cluster: Any, *fractions: str) -> None:
    """One pod after the other, wherever the extender has it."""
    for number, fraction in enumerate(fractions):
        name = f"runs{number}"
        make_young(cluster, name, fraction)
        node = (await running.filter(name))["NodeNames"][0]
        assert await running.bind(name, node) == ""
        cluster.allocate(name)
        await cluster.settle()


@pytest.fixture
async def full(cluster: Any, serve_cluster: Any) -> Any:
    """One node with two GPUs, 70% of each in use."""
    cluster.add_node("n1")
    async with serve_cluster(cluster, settings=Settings("bestfit", gpu_memory_reserve_mib=0)) as running:
        await fill(running, cluster, "0.7", "0.7")
        yield running


async def keep(running: Any) -> list[tuple[str, tuple[str, ...]]]:
    await running.cluster.settle()
    running.extender.ledger.keep()
    return [(each.pod.name, each.gpu_uuids) for each in running.extender.ledger.kept]


async def test_younger_pods_go_elsewhere_or_are_told_why_in_filter_and_bind(full: Any, cluster: Any) -> None:
    make_old(cluster, "large", "0.8")
    make_young(cluster, "one", "0.3")
    make_young(cluster, "two", "0.3")
    [(name, (uuid,))] = await keep(full)
    assert name == "default/large"
    assert (await full.filter("one"))["NodeNames"] == ["n1"]
    assert await full.bind("one", "n1") == ""
    assert uuid not in full.held()["one"]
    cluster.allocate("one")
    await cluster.settle()
    refused = await full.filter("two")
    assert not refused["NodeNames"]
    assert refused["FailedNodes"]["n1"] == f"GPU {uuid} is kept for default/large, which has waited 2 h"
    assert "is kept for default/large" in await full.bind("two", "n1")
    text = full.extender.metrics.registry.get_sample_value(
        "gpushare_extender_rejections_total", {"reason": "KeptForAnother"}
    )
    assert text == 2


async def test_the_old_pod_gets_its_gpu_and_the_young_one_is_woken(full: Any, cluster: Any) -> None:
    make_old(cluster, "large", "0.8")
    make_young(cluster, "one", "0.3")
    [(_, (uuid,))] = await keep(full)
    leaves = next(pod for pod, gpus in full.held().items() if gpus == (uuid,))
    cluster.finish(leaves)
    assert await keep(full) == [("default/large", (uuid,))]  # it fits by now, and nobody else takes it
    assert await full.bind("large", "n1") == ""
    assert full.held()["large"] == (uuid,)
    assert await keep(full) == []
    assert (await full.filter("one"))["NodeNames"] == ["n1"]


async def test_another_replica_keeps_the_same_at_once(full: Any, cluster: Any, serve_cluster: Any) -> None:
    make_old(cluster, "large", "0.8")
    make_old(cluster, "later", "0.9", hours=1)
    kept = await keep(full)
    assert kept[0][0] == "default/large"
    async with serve_cluster(cluster, settings=Settings("bestfit", gpu_memory_reserve_mib=0)) as other:
        assert await keep(other) == kept


ON_N9 = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n9"]}]}
REQUIRED = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [ON_N9]}}


@pytest.mark.parametrize(
    "spec",
    [
        {"nodeSelector": {"pool": "other"}},
        {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]},
        {"affinity": {"nodeAffinity": REQUIRED}},
    ],
    ids=["selector", "gate", "affinity"],
)
async def test_nothing_is_kept_for_a_pod_that_may_not_run_here(full: Any, cluster: Any, spec: Any) -> None:
    make_old(cluster, "large", "0.8", spec=spec)
    assert await keep(full) == []


async def test_a_tainted_node_is_kept_only_for_who_tolerates_it(full: Any, cluster: Any) -> None:
    make_old(cluster, "large", "0.8")
    node = cluster.objects[NODES]["n1"]
    taint = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}
    cluster.put(NODES, node | {"spec": {"taints": [taint]}})
    assert await keep(full) == []
    make_old(cluster, "tolerant", "0.8", spec={"tolerations": [{"key": "gpu", "operator": "Exists"}]})
    assert [name for name, _ in await keep(full)] == ["default/tolerant"]
    cluster.put(NODES, node | {"spec": {}})
    assert "default/large" in [name for name, _ in await keep(full)]


async def test_a_pod_waits_since_its_gates_went(full: Any, cluster: Any) -> None:
    make_old(cluster, "queued", "0.8", spec={"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]})
    await cluster.settle()
    pod = cluster.pod("queued")
    cluster.put(PODS, pod | {"spec": pod["spec"] | {"schedulingGates": []}})
    assert await keep(full) == []


async def test_nothing_is_kept_where_it_is_switched_off(cluster: Any, serve_cluster: Any) -> None:
    cluster.add_node("n1")
    release = Settings("bestfit", gpu_memory_reserve_mib=0, reserve_after_seconds=0)
    async with serve_cluster(cluster, settings=release) as running:
        await fill(running, cluster, "0.7", "0.7")
        make_old(cluster, "large", "0.8")
        assert await keep(running) == []


def objects_of(cluster: Any, release: Settings) -> Objects:
    return Objects(
        release.to_mapping(), *(list(cluster.objects[r].values()) for r in (NODES, GPUNODES, GPUSHARES, PODS))
    )


async def test_explain_names_the_gpu_and_who_has_to_leave(full: Any, cluster: Any) -> None:
    make_old(cluster, "large", "0.8")
    [(_, (uuid,))] = await keep(full)
    leaves = next(pod for pod, gpus in full.held().items() if gpus == (uuid,))
    found, facts = explanation_of(objects_of(cluster, Settings("bestfit")), cluster.pod("large"), [])
    [sentence] = [line for line in why_there(found, facts) if "kept" in line]
    assert f"is kept for it until default/{leaves} has left" in sentence
    assert as_record(found, facts)["kept"]["leaving"] == [f"default/{leaves}"]


class Time:
    """The Unix time of an extender: pods wait and decisions are dated by it; the test turns it."""

    def __init__(self, running: Any) -> None:
        self._ledger = running.extender.ledger
        self.now = 8.0 * round(datetime.now(UTC).timestamp() / 8) + 1  # the first waiting pod's turn is just over
        self._ledger._now = lambda: self.now
        running.extender.binder._now = lambda: datetime.fromtimestamp(self.now, UTC)

    def passes(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1
            self._ledger.keep()


def by_name(cluster: Any, release: Settings) -> Objects:
    """The objects as the API lists them, so that nothing tells which pod is older but its decision."""
    found = ([each for _, each in sorted(cluster.objects[r].items())] for r in (NODES, GPUNODES, GPUSHARES, PODS))
    return Objects(release.to_mapping(), *found)


async def run(running: Any, time: Time, name: str, percent: int) -> None:
    """A pod that runs wherever the extender has it."""
    make_young(running.cluster, name, f"{percent / 100:g}")
    nodes = (await running.filter(name))["NodeNames"]
    if nodes:
        time.now += 1
        assert await running.bind(name, nodes[0]) == ""
        running.cluster.allocate(name)
        await running.cluster.settle()


async def test_another_replica_and_plan_know_which_tenant_is_the_oldest(cluster: Any, serve_cluster: Any) -> None:
    """It is expected to leave first; the API lists pods by name."""
    cluster.add_node("n1")
    release = Settings("bestfit", gpu_memory_reserve_mib=0)
    async with serve_cluster(cluster, settings=release) as running:
        time = Time(running)
        await run(running, time, "z", 70)
        await run(running, time, "a", 70)
        make_old(cluster, "large", "0.8")
        kept = await keep(running)
        assert kept == [("default/large", running.held()["z"])]
        async with serve_cluster(cluster, settings=release) as other:
            assert await keep(other) == kept
    by_plan = context_of(cluster_of(by_name(cluster, release)), []).kept
    assert [(each.pod.name, each.gpu_uuids) for each in by_plan] == kept


async def test_a_place_is_searched_anew_within_eight_seconds(full: Any, cluster: Any) -> None:
    """Until then the extender keeps the place that it had; `plan` has the better one at once."""
    time = Time(full)
    make_old(cluster, "large", "0.8")
    [(_, before)] = await keep(full)
    leaves = next(pod for pod, gpus in full.held().items() if gpus != before)
    better = full.held()[leaves]
    cluster.finish(leaves)
    assert await keep(full) == [("default/large", before)]
    by_plan = context_of(cluster_of(objects_of(cluster, Settings("bestfit"))), []).kept
    assert [each.gpu_uuids for each in by_plan] == [better]
    time.passes(6)
    assert [each.gpu_uuids for each in full.extender.ledger.kept] == [before]
    time.passes(1)
    assert [each.gpu_uuids for each in full.extender.ledger.kept] == [better]


@dataclass(frozen=True)
class Event:
    """What happens next: a young pod comes, an old one is asked about, or one that runs leaves."""

    young: int = 0
    old: int | None = None
    leaves: int | None = None


EVENTS = st.one_of(
    st.builds(Event, young=st.sampled_from([10, 20, 30, 50, 70])),
    st.builds(Event, young=st.sampled_from([10, 20, 30, 50, 70])),
    st.builds(Event, old=st.integers(0, 2)),
    st.builds(Event, leaves=st.integers(0, 20)),
    st.builds(Event, leaves=st.integers(0, 20)),
)


async def agree(
    make_cluster: Any, serve_cluster: Any, gpus: list[int], busy: list[int], old: list[int], events: list[Event]
) -> None:
    cluster = make_cluster()
    release = Settings("bestfit", probation=ProbationSettings(0.0))
    for number, width in enumerate(gpus):
        cluster.add_node(f"n{number}", gpus=width, model="NVIDIA H200")
    async with serve_cluster(cluster, settings=release, best_nodes=0, fence_timeout_seconds=0.0) as running:
        time = Time(running)
        for number in range(sum(gpus)):
            await run(running, time, f"p{50 - number}", busy[number % len(busy)])
        for number, percent in enumerate(old):
            make_old(cluster, f"old{number}", f"{percent / 100:g}", hours=1 + (number + 1) % len(old))
        for number, event in enumerate(events):
            await cluster.settle()
            time.passes(16)
            if event.leaves is not None:
                names = sorted(running.held())
                if names:
                    cluster.finish(names[event.leaves % len(names)])
                continue
            if event.old is not None:
                name = f"old{event.old % len(old)}"
            else:
                name = f"q{50 - number}"
                make_young(cluster, name, f"{event.young / 100:g}")
            if cluster.pod(name)["spec"].get("nodeName") is None:
                await cluster.settle()
                await ask_both(running, time, release, name)


async def ask_both(running: Any, time: Time, release: Settings, name: str) -> None:
    """The extender and `plan`, which reads the API anew, name the same nodes, GPU and cap, or the same reasons."""
    cluster, ledger = running.cluster, running.extender.ledger
    live = cluster_of(replace(by_name(cluster, release), read_at=time.now))
    context = context_of(live, [])
    keys = {pod["metadata"]["uid"]: key for key, pod in cluster.objects[PODS].items()}
    assert [(each.pod.name, each.gpu_uuids, {keys[uid] for uid in each.leaving}) for each in ledger.kept] == [
        (each.pod.name, each.gpu_uuids, set(each.leaving)) for each in context.kept
    ]
    asked = live.request_of(cluster.pod(name))
    assert not isinstance(asked, Rejection)
    by_plan = survey(asked, context)
    found = await running.filter(name, list(cluster.objects[NODES]))
    assert set(found["NodeNames"] or ()) == set(by_plan.nodes)
    if not found["NodeNames"]:
        refused = (found["FailedNodes"] or {}) | (found["FailedAndUnresolvableNodes"] or {})
        assert refused == {node: plain(each.detail) for node, each in by_plan.rejections().items()}
        return
    node = found["NodeNames"][0]
    decided = decide(asked, context, node=node)
    assert isinstance(decided, Placement)
    assert await running.bind(name, node) == ""
    cluster.allocate(name)
    await cluster.settle()
    written = cluster.pod(name)["metadata"]["annotations"]
    assert written["gpushare.io/gpu"] == ",".join(decided.gpu_uuids)
    assert written["gpushare.io/thread-percentage"] == str(decided.thread_percentage)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    gpus=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    busy=st.lists(st.sampled_from([30, 60, 70, 90]), min_size=1, max_size=4),
    old=st.lists(st.sampled_from([60, 80, 100, 200]), min_size=1, max_size=3),
    events=st.lists(EVENTS, min_size=1, max_size=10),
)
def test_plan_and_the_extender_keep_alike(make_cluster, serve_cluster, gpus, busy, old, events):
    """One to three old pods, while others come and leave; by then every place was searched anew."""
    asyncio.run(agree(make_cluster, serve_cluster, gpus, busy, old, events))
