"""What a pod's preemption frees on a GPU is kept for it until it is bound, by what the API says alone."""

from __future__ import annotations

import copy
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gpushare.cli.explain import explanation_of
from gpushare.cli.explain_words import as_record, why_there
from gpushare.cli.live import Objects, cluster_of
from gpushare.cli.plan import context_of, plan_one
from gpushare.cli.scheduler_filters import SchedulerFilters
from gpushare.core.api import PodView, Reason, Rejection
from gpushare.core.placement import (
    ClusterState,
    DecisionContext,
    GpuSpec,
    Judge,
    NodeSpec,
    Placement,
    PlacementRequest,
    Settings,
    decide,
)
from gpushare.data import default_model
from gpushare.extender.nominated import MOST_LOOKED_AT, NominatedPods
from gpushare.extender.wire import plain
from gpushare.kube import GPUNODES, GPUSHARES, NODES, PODS

RELEASE = Settings("bestfit", gpu_memory_reserve_mib=0)
KEPT = "GPU GPU-n1-0 is kept for default/urgent, which is nominated to this node"
SHORT = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/1 nodes are available",
}


def ago(seconds: float) -> str:
    return (datetime.now(UTC) - timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def run_on(cluster: Any, name: str, fraction: str, gpu: int, *, priority: int = 0, memory: str = "1000M") -> None:
    """A pod that runs on one GPU of n1."""
    pod = cluster.make_pod(name, fraction, priority=priority)
    pod["spec"]["nodeName"] = "n1"
    pod["metadata"]["annotations"] |= {
        "gpushare.io/gpu": f"GPU-n1-{gpu}",
        "gpushare.io/thread-percentage": str(int(float(fraction) * 100)),
        "gpushare.io/memory-limit": f"0={memory}",
        "gpushare.io/decided-at": "2026-11-21T00:00:00Z",
    }
    cluster.allocate(name)


def ask_to_leave(cluster: Any, name: str, *, kills_in: float = 30) -> None:
    """The API server marks a pod as deleted; it is gone only once its containers have ended."""
    pod = copy.deepcopy(cluster.pod(name))
    pod["metadata"]["deletionTimestamp"] = ago(-kills_in)
    cluster.put(PODS, pod)


def nominate(cluster: Any, name: str, node: str = "n1", *, seconds_ago: float = 1) -> None:
    """What kube-scheduler writes once it has evicted the victims, and the API server into `managedFields`."""
    pod = copy.deepcopy(cluster.pod(name))
    owned = {"f:status": {"f:conditions": {}, "f:nominatedNodeName": {}}}
    entry = {"manager": "kube-scheduler", "subresource": "status", "time": ago(seconds_ago), "fieldsV1": owned}
    pod["metadata"]["managedFields"] = [entry]
    pod["status"] |= {"nominatedNodeName": node, "conditions": [SHORT]}
    cluster.put(PODS, pod)


def objects_of(cluster: Any) -> Objects:
    kinds = (NODES, GPUNODES, GPUSHARES, PODS)
    return Objects(RELEASE.to_mapping(), *(list(cluster.objects[kind].values()) for kind in kinds))


def by_plan(cluster: Any, name: str) -> Any:
    """What `plan` says of a pod on the cluster's present objects."""
    live = cluster_of(objects_of(cluster))
    request = live.request_of(cluster.pod(name))
    assert isinstance(request, PlacementRequest)
    return decide(request, context_of(live, []), node="n1")


async def refusal(running: Any, name: str) -> str:
    """Why n1 is not for a pod, by filter and, if it is asked all the same, by bind and `plan`; empty if it is."""
    await running.cluster.settle()
    found = await running.filter(name, ["n1"])
    if found["NodeNames"]:
        assert not isinstance(by_plan(running.cluster, name), Rejection)
        return ""
    sentence = found["FailedNodes"]["n1"]
    assert await running.bind(name, "n1") == f"node n1: {sentence}"
    assert plain(by_plan(running.cluster, name).detail) == sentence
    return str(sentence)


@pytest.fixture
async def preempting(cluster: Any, serve_cluster: Any) -> Any:
    """GPU 0 of n1 is full with "low-a"; GPU 1 is half full. "urgent" wants 90% and has "low-a" evicted."""
    cluster.add_node("n1")
    run_on(cluster, "low-a", "0.7", 0)
    run_on(cluster, "other", "0.5", 1, priority=100)
    async with serve_cluster(cluster, settings=RELEASE) as running:
        cluster.make_pod("urgent", "0.9", priority=10)
        body = {
            "Pod": cluster.pod("urgent"),
            "NodeNameToMetaVictims": {"n1": {"Pods": [{"UID": cluster.pod("low-a")["metadata"]["uid"]}]}},
        }
        assert (await running.post("preempt", body))["NodeNameToMetaVictims"]["n1"]["Pods"]
        ask_to_leave(cluster, "low-a")
        nominate(cluster, "urgent")
        await cluster.settle()
        yield running


async def test_who_asks_between_the_victims_end_and_the_next_try_does_not_get_the_gpu(preempting: Any) -> None:
    """kube-scheduler asks about n1: by its sums 60% are left beside "urgent", which are on two GPUs."""
    cluster = preempting.cluster
    cluster.make_pod("low-b", "0.55")
    cluster.remove(PODS, "default/low-a")
    assert await refusal(preempting, "low-b") == KEPT
    assert (await preempting.filter("urgent"))["NodeNames"] == ["n1"]
    assert await preempting.bind("urgent", "n1") == ""
    assert preempting.held()["urgent"] == ("GPU-n1-0",)


async def test_who_fits_beside_it_or_elsewhere_on_the_node_is_placed(preempting: Any) -> None:
    cluster = preempting.cluster
    cluster.remove(PODS, "default/low-a")
    for name, fraction, gpu in (("half", "0.5", 1), ("small", "0.1", 0)):
        cluster.make_pod(name, fraction)
        assert await refusal(preempting, name) == ""
        assert await preempting.bind(name, "n1") == ""
        assert preempting.held()[name] == (f"GPU-n1-{gpu}",)
        cluster.allocate(name)
    cluster.make_pod("more", "0.01")
    await cluster.settle()
    assert not (await preempting.filter("more"))["NodeNames"]
    assert await preempting.bind("urgent", "n1") == ""


async def test_room_beside_a_victim_that_is_still_ending_is_kept_too(preempting: Any) -> None:
    cluster = preempting.cluster
    cluster.make_pod("low-b", "0.55")
    cluster.make_pod("low-c", "0.3")
    assert "needs 55 percent" in await refusal(preempting, "low-b")
    run_on(cluster, "more", "0.3", 1)
    assert await refusal(preempting, "low-c") == KEPT


@pytest.mark.parametrize(("overdue", "kept"), [(3500, KEPT), (3700, "")])
async def test_a_victim_that_does_not_end_keeps_room_for_an_hour_only(
    preempting: Any, overdue: float, kept: str
) -> None:
    """Before: for ever, as each word that kube-scheduler writes of the nominated pod renews the nomination."""
    cluster = preempting.cluster
    ask_to_leave(cluster, "low-a", kills_in=-overdue)
    run_on(cluster, "more", "0.3", 1)
    cluster.make_pod("low-c", "0.3")
    assert await refusal(preempting, "low-c") == kept


@pytest.mark.parametrize(("priority", "kept"), [(9, KEPT), (10, KEPT), (11, "")])
async def test_it_counts_for_others_of_equal_or_lower_priority(preempting: Any, priority: int, kept: str) -> None:
    preempting.cluster.make_pod("next", "0.55", priority=priority)
    preempting.cluster.remove(PODS, "default/low-a")
    assert await refusal(preempting, "next") == kept


async def test_memory_that_kube_scheduler_does_not_count_is_kept_too(cluster: Any, serve_cluster: Any) -> None:
    cluster.add_node("n1", gpus=1)
    run_on(cluster, "low-a", "0.7", 0, memory="60000M")
    async with serve_cluster(cluster, settings=RELEASE) as running:
        cluster.make_pod("urgent", "0.4", priority=10, memory="60Gi")
        nominate(cluster, "urgent")
        cluster.remove(PODS, "default/low-a")
        cluster.make_pod("low-b", "0.1", memory="30Gi")
        cluster.make_pod("low-c", "0.1", memory="10Gi")
        assert await refusal(running, "low-b") == KEPT
        assert await refusal(running, "low-c") == ""


async def test_two_on_one_gpu_are_kept_room_for_both(cluster: Any, serve_cluster: Any) -> None:
    cluster.add_node("n1", gpus=1)
    async with serve_cluster(cluster, settings=RELEASE) as running:
        for name in ("urgent", "urgent-2"):
            cluster.make_pod(name, "0.4", priority=10)
            nominate(cluster, name)
        cluster.make_pod("low-b", "0.3")
        cluster.make_pod("low-c", "0.2")
        assert "is nominated to this node" in await refusal(running, "low-b")
        assert await refusal(running, "low-c") == ""
        for name in ("urgent-2", "urgent"):
            assert await running.bind(name, "n1") == ""


async def test_the_place_is_where_room_comes_first(cluster: Any, serve_cluster: Any) -> None:
    """Not on the GPU that policy bestfit would choose if all had left: there a pod takes an hour to end."""
    cluster.add_node("n1")
    run_on(cluster, "slow", "0.5", 0)
    run_on(cluster, "quick", "0.5", 1)
    async with serve_cluster(cluster, settings=RELEASE) as running:
        cluster.make_pod("urgent", "0.9", priority=10)
        nominate(cluster, "urgent")
        ask_to_leave(cluster, "slow", kills_in=3600)
        ask_to_leave(cluster, "quick", kills_in=30)
        cluster.make_pod("low-b", "0.4")
        await cluster.settle()
        assert await running.bind("low-b", "n1") == ""
        assert running.held()["low-b"] == ("GPU-n1-0",)


async def end(running: Any, how: str) -> None:
    cluster = running.cluster
    match how:
        case "deleted":
            cluster.remove(PODS, "default/urgent")
        case "being deleted":
            ask_to_leave(cluster, "urgent")
        case "elsewhere":
            nominate(cluster, "urgent", "n2")
        case "cleared":
            pod = copy.deepcopy(cluster.pod("urgent"))
            del pod["status"]["nominatedNodeName"]
            cluster.put(PODS, pod)
        case "left behind":
            nominate(cluster, "urgent", seconds_ago=3601)
        case "bound elsewhere":
            cluster.add_node("n2")
            await cluster.settle()
            assert await running.bind("urgent", "n2") == ""


@pytest.mark.parametrize(
    "how", ["deleted", "being deleted", "elsewhere", "cleared", "left behind", "bound elsewhere"]
)
async def test_it_ends_with_the_nomination_and_who_stood_back_is_woken(preempting: Any, how: str) -> None:
    cluster, rooms = preempting.cluster, []
    cluster.make_pod("low-b", "0.55")
    cluster.remove(PODS, "default/low-a")
    assert await refusal(preempting, "low-b") == KEPT
    ledger = preempting.extender.ledger
    ledger.keep()
    keep, ledger.keep = ledger.keep, lambda: None  # lest the extender itself is first, if all this takes a second
    await end(preempting, how)
    await cluster.settle()
    ledger.on_room = lambda: rooms.append(how)
    keep()
    assert rooms
    assert await refusal(preempting, "low-b") == ""


async def test_a_nomination_without_a_time_counts_as_for_kube_scheduler(preempting: Any) -> None:
    cluster = preempting.cluster
    pod = copy.deepcopy(cluster.pod("urgent"))
    del pod["metadata"]["managedFields"]
    cluster.put(PODS, pod)
    cluster.remove(PODS, "default/low-a")
    cluster.make_pod("low-b", "0.55")
    assert await refusal(preempting, "low-b") == KEPT


async def test_a_restarted_extender_and_the_other_replica_keep_the_same(
    preempting: Any, serve_cluster: Any
) -> None:
    cluster = preempting.cluster
    cluster.make_pod("low-b", "0.55")
    for gone in ((), ("default/low-a",)):
        for key in gone:
            cluster.remove(PODS, key)
        async with serve_cluster(cluster, settings=RELEASE) as other:
            assert other.extender.ledger.context.nominated == preempting.extender.ledger.context.nominated != ()
            assert (await other.filter("low-b"))["NodeNames"] == []


async def test_nobody_else_is_kept_that_gpu_for_waiting_long(preempting: Any) -> None:
    """Nor is another one kept for who is nominated."""
    cluster = preempting.cluster
    cluster.remove(PODS, "default/low-a")
    for name in ("old", "urgent"):
        pod = cluster.make_pod("old", "0.8") if name == "old" else copy.deepcopy(cluster.pod(name))
        pod["metadata"]["creationTimestamp"] = ago(7200)
        pod["status"]["conditions"] = [SHORT]
        cluster.put(PODS, pod)
    await cluster.settle()
    ledger = preempting.extender.ledger
    ledger.keep()
    assert [(each.pod.name, each.gpu_uuids) for each in ledger.kept] == [("default/old", ("GPU-n1-1",))]
    context = context_of(cluster_of(objects_of(cluster)), [])
    assert [(each.pod.name, each.gpu_uuids) for each in context.kept] == [("default/old", ("GPU-n1-1",))]
    assert await preempting.bind("urgent", "n1") == ""


async def test_another_preempts_without_the_room_of_who_is_nominated(preempting: Any) -> None:
    """For 80% "next", of equal priority, would have the victims of "urgent"; "other" it may not evict."""
    cluster = preempting.cluster
    cluster.make_pod("next", "0.8", priority=10)
    body = {
        "Pod": cluster.pod("next"),
        "NodeNameToMetaVictims": {"n1": {"Pods": [{"UID": cluster.pod("low-a")["metadata"]["uid"]}]}},
    }
    assert (await preempting.post("preempt", body))["NodeNameToMetaVictims"] == {}
    cluster.pod("next")["spec"]["priority"] = 11
    assert (await preempting.post("preempt", body))["NodeNameToMetaVictims"].keys() == {"n1"}


async def test_explain_says_what_is_kept_and_plan_counts_it_as_kube_scheduler_does(preempting: Any) -> None:
    cluster = preempting.cluster
    found, facts = explanation_of(objects_of(cluster), cluster.pod("urgent"), [])
    [sentence] = [line for line in why_there(found, facts) if "kept" in line]
    assert "is kept for it until default/low-a has left: pods of no higher priority" in sentence
    assert as_record(found, facts)["kept"]["is_nominated"]
    cluster.remove(PODS, "default/low-a")
    cluster.objects[NODES]["n1"]["status"]["allocatable"]["gpushare.io/share"] = "150"  # kubelet's latest count
    cluster.make_pod("low-b", "0.2")
    live = cluster_of(objects_of(cluster))
    request = live.request_of(cluster.pod("low-b"))
    assert isinstance(request, PlacementRequest)
    decided = plan_one(request, context_of(live, []), SchedulerFilters(live.scheduler_nodes)).decided
    assert isinstance(decided, Rejection)
    assert decided.reason is Reason.SHARES_NOT_OFFERED


def view(name: str, *, node: str = "", bound: str = "", leaves: str = "") -> PodView:
    metadata = {"name": name, "namespace": "default", "uid": name}
    metadata |= {"deletionTimestamp": leaves} if leaves else {}
    spec: dict[str, Any] = {"priority": 10} | ({"nodeName": bound} if bound else {})
    return PodView.from_object({"metadata": metadata, "spec": spec, "status": {"nominatedNodeName": node}})


def test_places_are_computed_for_nodes_that_have_changed_and_a_few_in_turn() -> None:
    asked: list[str] = []

    def request_of(pod: PodView) -> PlacementRequest:
        asked.append(pod.name)
        return PlacementRequest(pod.uid, 800, priority=pod.priority, queued_at=0.0)

    def look() -> list[str]:
        asked.clear()
        nominated.keeping(context, request_of)
        return sorted(asked)

    count = MOST_LOOKED_AT + 2
    state = ClusterState(NodeSpec(f"n{each}", (GpuSpec(f"g{each}", "H200", 80_000),)) for each in range(count))
    context = DecisionContext.of(state, Settings("bestfit"), Judge(default_model))
    state.reserve("tenant", Placement("n0", ("g0",), 1000), PlacementRequest("tenant", 500))
    nominated = NominatedPods()
    assert nominated.keeping(context, request_of) is context
    for each in range(count):
        nominated.put(view(f"p{each}", node=f"n{each}"))
    assert len(look()) == count
    assert look() == []
    nominated.put(view("elsewhere", bound="n99", leaves="2026-11-21T00:00:00Z"))
    assert look() == []
    nominated.put(view("tenant", bound="n0", leaves="2026-11-21T00:00:00Z"))
    assert look() == ["p0"]
    assert [each.node for each in nominated.keeping(context, request_of).nominated].count("n0") == 1
    state.release("tenant")
    nominated.drop("tenant")
    assert look() == ["p0"]
    nominated.drop("p1")
    assert look() == []
    assert "n1" not in {each.node for each in nominated.keeping(context, request_of).nominated}
    nominated.put(view("p2", node="n3"))
    assert look() == ["p2", "p3"]
    state.remove_node("n4")
    assert look() == ["p4"], "before: a node that came or went had all computed anew, a millisecond each"
    assert "n4" not in {each.node for each in nominated.keeping(context, request_of).nominated}
    state.add_node(NodeSpec("n4", (GpuSpec("g4", "H200", 80_000),)))
    assert look() == ["p4"]
    state.add_node(NodeSpec("new", (GpuSpec("new", "H200", 80_000),)))
    assert look() == []
    state.remove_node("n4")
    assert look() == ["p4"]
    seen: set[str] = set()
    for _ in range(2):
        nominated.look_again()
        found = look()
        assert MOST_LOOKED_AT <= len(found) <= MOST_LOOKED_AT + 1
        seen.update(found)
    assert len(seen) == count - 1
