"""The four verbs over HTTP, as kube-scheduler speaks to them."""

import asyncio

import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer

from gpushare.extender import Extender, parse_options
from gpushare.extender.server import HUNG_SECONDS
from gpushare.extender.verbs import scale
from gpushare.kube import GPUNODES, GPUSHARES, NODES, PODS


async def test_filter_says_where_a_pod_fits_and_why_not_elsewhere(running):
    cluster = running.cluster
    for name, fraction in (("a", "0.6"), ("b", "0.7")):
        cluster.make_pod(name, fraction)
        await cluster.settle()
        assert await running.bind(name, "n1") == ""
        cluster.allocate(name)
        await cluster.settle()
    cluster.make_pod("c", "0.5")
    assert (await running.filter("c", ["n1", "n2", "cpu-only"]))["NodeNames"] == ["n2"]
    result = await running.filter("c", ["n1", "cpu-only"])
    assert result == {
        "Nodes": None,
        "NodeNames": [],
        "FailedNodes": {"n1": "needs 50 percent of one GPU, the freest has 40 percent free"},
        "FailedAndUnresolvableNodes": {"cpu-only": "the node has no GPUs that gpushare manages"},
        "Error": "",
    }


async def test_no_pod_is_placed_where_no_client_is_left_for_it(cluster, serve_cluster):
    """Before: each pod counted as one client, however many it had, and who came later waited for ever."""
    cluster.add_node("n1", gpus=1)
    async with serve_cluster(cluster) as running:
        crowd = {"class": "latency", "memory": "64Mi"}
        cluster.make_pod("half", "0.5", **crowd)
        cluster.make_pod("many", "0.01", limit=34, processes="16", **crowd)
        for number in range(9):
            cluster.make_pod(f"small-{number}", "0.01", **crowd)
        await cluster.settle()
        for name in ("half", "many", *(f"small-{number}" for number in range(8))):
            assert await running.bind(name, "n1") == ""
            cluster.allocate(name)
            await cluster.settle()
        result = await running.filter("small-8", ["n1"])
        assert "needs 1 GPU with 1 of 48 MPS clients free, has 0" in result["FailedNodes"]["n1"]
        assert "48 MPS clients" in await running.bind("small-8", "n1")
        cluster.finish("small-0")
        await cluster.settle()
        assert (await running.filter("small-8", ["n1"]))["NodeNames"] == ["n1"]


async def test_filter_answers_the_best_nodes_alone_and_says_nothing_of_others(cluster, serve_cluster):
    """kube-scheduler drops nodes that are in no list of the answer (ADR 0043)."""
    names = [f"n{index}" for index in range(6)]
    for name in names:
        cluster.add_node(name)
    async with serve_cluster(cluster, best_nodes=2) as running:
        for name, fraction, node in (("a", "0.3", "n4"), ("b", "0.6", "n1"), ("full", "2", "n2")):
            cluster.make_pod(name, fraction)
            await cluster.settle()
            assert await running.bind(name, node) == ""
            cluster.allocate(name)
            await cluster.settle()
        pod = cluster.make_pod("c", "0.5")
        result = await running.filter("c", names)
        assert result["NodeNames"] == ["n1"]
        assert not result["FailedNodes"]
        assert not result["FailedAndUnresolvableNodes"]
        prefers = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": {}}]}
        for wish in (
            {"affinity": {"nodeAffinity": prefers}},
            {"affinity": {"nodeAffinity": None, "podAntiAffinity": prefers}},
            {"topologySpreadConstraints": [{"maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway"}]},
        ):
            body = {"Pod": pod | {"spec": pod["spec"] | wish}, "Nodes": None, "NodeNames": names}
            assert set((await running.post("filter", body))["NodeNames"]) == {"n1", "n4"}
        required = {"topologySpreadConstraints": [{"maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}]}
        body = {"Pod": pod | {"spec": pod["spec"] | required}, "Nodes": None, "NodeNames": names}
        assert (await running.post("filter", body))["NodeNames"] == ["n1"]
        node = cluster.objects[NODES]["n0"]
        cluster.put(NODES, node | {"spec": {"taints": [{"key": "old", "effect": "PreferNoSchedule"}]}})
        await cluster.settle()
        assert set((await running.filter("c", names))["NodeNames"]) == {"n1", "n4"}
        nodes = {"items": [{"metadata": {"name": name}} for name in names]}
        whole = await running.post("filter", {"Pod": cluster.pod("c"), "Nodes": nodes, "NodeNames": None})
        assert {node["metadata"]["name"] for node in whole["Nodes"]["items"]} == {"n1", "n4"}
        cluster.remove(NODES, "n0")
        await cluster.settle()
        assert (await running.filter("c", names[1:]))["NodeNames"] == ["n1"]
    async with serve_cluster(cluster, best_nodes=0) as running:
        result = await running.filter("c", names[1:])
        assert result["NodeNames"] == ["n1", "n3", "n4", "n5"]
        assert "needs 50 percent" in result["FailedNodes"]["n2"]


async def test_nodes_that_are_equally_good_are_left_to_kube_scheduler(cluster, serve_cluster):
    for index in range(4):
        cluster.add_node(f"n{index}")
    async with serve_cluster(cluster, best_nodes=3) as running:
        cluster.make_pod("a", "0.5")
        assert (await running.filter("a"))["NodeNames"] == ["n0", "n1", "n2"]


async def test_before_any_gpu_node_is_known_a_pod_is_refused_with_a_sentence(cluster, serve_cluster):
    """The first node of a cluster offers shares before its agent's GpuNode is there."""
    cluster.make_pod("p")
    async with serve_cluster(cluster) as running:
        answer = await running.filter("p", ["n1"])
        assert answer["FailedAndUnresolvableNodes"] == {"n1": "the node has no GPUs that gpushare manages"}
        assert (answer["NodeNames"], answer["Error"]) == ([], "")
        assert await running.post("prioritize", {"Pod": cluster.pod("p"), "NodeNames": ["n1"]}) == []
        await running.extender.explainer.round()
        cluster.add_node("n1")
        await cluster.settle()
        assert (await running.filter("p"))["NodeNames"] == ["n1"]


async def test_filter_reserves_nothing(running):
    running.cluster.make_pod("a", "1")
    for _ in range(5):
        for name in ("n1", "n2"):
            assert (await running.filter("a", [name]))["NodeNames"] == [name]
    assert running.held() == {}


async def test_filter_gives_whole_nodes_back_when_it_got_them(running):
    nodes = {"items": [{"metadata": {"name": "n1"}, "x": 1}, {"metadata": {"name": "nope"}}]}
    pod = running.cluster.make_pod("a")
    result = await running.post("filter", {"Pod": pod, "Nodes": nodes, "NodeNames": None})
    assert result["Nodes"] == {"items": [{"metadata": {"name": "n1"}, "x": 1}]}
    assert result["NodeNames"] is None


async def test_a_wrong_annotation_is_said_on_every_node_and_no_victim_would_help(running):
    running.cluster.make_pod("a", "1.5", limit=50)
    result = await running.filter("a")
    assert result["NodeNames"] == []
    assert set(result["FailedAndUnresolvableNodes"]) == {"n1", "n2"}
    assert "gpushare.io/fraction" in result["FailedAndUnresolvableNodes"]["n1"]


async def test_prioritize_prefers_the_fuller_node(running):
    cluster = running.cluster
    cluster.make_pod("a", "0.5")
    await cluster.settle()
    await running.bind("a", "n2")
    cluster.make_pod("b", "0.25")
    result = await running.post("prioritize", {"Pod": cluster.pod("b"), "NodeNames": ["n1", "n2"]})
    assert {"Host": "n2", "Score": 10} in result
    assert next(entry for entry in result if entry["Host"] == "n1")["Score"] < 10


async def test_bind_writes_the_decision_with_the_binding(running):
    cluster = running.cluster
    cluster.make_pod("a", "0.25", memory="8Gi")
    await cluster.settle()
    assert await running.bind("a", "n1") == ""
    pod = cluster.pod("a")
    assert pod["spec"]["nodeName"] == "n1"
    annotations = pod["metadata"]["annotations"]
    assert annotations["gpushare.io/gpu"] in {"GPU-n1-0", "GPU-n1-1"}
    assert annotations["gpushare.io/thread-percentage"] == "25"
    assert annotations["gpushare.io/memory-limit"] == "0=8192M"
    assert annotations["gpushare.io/decided-at"].endswith("Z")
    assert list(running.held()) == ["a"]


async def test_memory_defaults_to_the_share_and_class_comes_from_the_gpushare(running):
    cluster = running.cluster
    spec = {"selector": {"matchLabels": {"gpushare.io/managed": "true"}}, "class": "latency"}
    cluster.put(GPUSHARES, {"metadata": {"name": "s", "namespace": "default"}, "spec": spec})
    cluster.make_pod("a", "0.25")
    await cluster.settle()
    assert await running.bind("a", "n1") == ""
    annotations = cluster.pod("a")["metadata"]["annotations"]
    assert annotations["gpushare.io/memory-limit"] == "0=20480M"
    assert annotations["gpushare.io/thread-percentage"] == "100"


async def test_whole_gpus(running):
    cluster = running.cluster
    cluster.make_pod("a", "2", limit=200)
    await cluster.settle()
    assert await running.bind("a", "n1") == ""
    annotations = cluster.pod("a")["metadata"]["annotations"]
    assert annotations["gpushare.io/gpu"] == "GPU-n1-0,GPU-n1-1"
    assert annotations["gpushare.io/thread-percentage"] == "100"
    assert annotations["gpushare.io/memory-limit"] == "0=81920M,1=81920M"
    cluster.make_pod("b", "0.01", limit=1)
    assert (await running.filter("b"))["NodeNames"] == ["n2"]


async def test_bind_checks_again(running):
    cluster = running.cluster
    for name in ("a", "b", "c"):
        cluster.make_pod(name, "0.7")
    await cluster.settle()
    assert await running.bind("a", "n1") == ""
    cluster.allocate("a")
    await cluster.settle()
    assert await running.bind("b", "n1") == ""
    assert "70 percent" in await running.bind("c", "n1")
    assert set(running.held()) == {"a", "b"}


@pytest.mark.parametrize("failure", ["refused", "busy"])
async def test_a_failed_binding_releases_its_room(running, failure):
    cluster = running.cluster
    cluster.make_pod("a", "1")
    await cluster.settle()
    cluster.bind_fails = [failure]
    assert await running.bind("a", "n1") != ""
    assert running.held() == {}
    assert await running.bind("a", "n1") == ""


async def test_a_binding_whose_answer_was_lost_counts(running):
    cluster = running.cluster
    cluster.make_pod("a", "1")
    await cluster.settle()
    cluster.bind_fails = ["answer lost"]
    assert await running.bind("a", "n1") == ""
    await cluster.settle()
    assert list(running.held()) == ["a"]


async def test_an_unknown_outcome_is_held_until_somebody_knows(running):
    cluster = running.cluster
    cluster.make_pod("a", "1")
    await cluster.settle()
    cluster.bind_fails, cluster.get_fails = ["lost"], ["still away"]
    assert await running.bind("a", "n1") != ""
    assert list(running.held()) == ["a"]
    await running.filter("a")  # kube-scheduler asks again, which says nothing: its watch may be behind, too
    assert list(running.held()) == ["a"]
    assert await running.bind("a", "n1") == ""
    assert list(running.held()) == ["a"]


async def test_a_pod_replaced_by_another_of_its_name_is_not_bound(running):
    cluster = running.cluster
    old = cluster.make_pod("a", "1")["metadata"]["uid"]
    cluster.remove(PODS, "default/a")
    cluster.make_pod("a", "1")
    await cluster.settle()
    assert "replaced" in await running.bind("a", "n1", uid=old)
    assert running.held() == {}


async def test_deleted_and_finished_pods_release_at_once(running):
    cluster = running.cluster
    for name, node in (("a", "n1"), ("b", "n2")):
        cluster.make_pod(name, "1")
        await cluster.settle()
        assert await running.bind(name, node) == ""
    cluster.remove(PODS, "default/a")
    cluster.finish("b")
    await cluster.settle()
    assert running.held() == {}


async def test_an_unhealthy_gpu_takes_nobody_until_it_recovers(running):
    cluster = running.cluster
    node = cluster.objects[GPUNODES]["n1"]
    for gpu in node["status"]["gpus"]:
        gpu["health"] = "Unhealthy"
    cluster.put(GPUNODES, node)
    await cluster.settle()
    cluster.make_pod("a")
    result = await running.filter("a")
    assert result["NodeNames"] == ["n2"]
    assert "healthy" in (await running.filter("a", ["n1"]))["FailedAndUnresolvableNodes"]["n1"]
    for gpu in node["status"]["gpus"]:
        gpu["health"] = "Healthy"
    cluster.put(GPUNODES, node)
    await cluster.settle()
    assert (await running.filter("a", ["n1"]))["NodeNames"] == ["n1"]


async def test_a_restarted_extender_knows_what_runs(cluster, serve_cluster):
    cluster.add_node("n1")
    async with serve_cluster(cluster) as first:
        for name in ("a", "b", "c"):
            cluster.make_pod(name, "0.6", **{"class": "latency"})
            await cluster.settle()
            await first.bind(name, "n1")
            cluster.allocate(name)
            await cluster.settle()
        before = first.held()
    assert set(before) == {"a", "b"}
    async with serve_cluster(cluster) as second:
        assert second.held() == before
        assert (await second.filter("c"))["NodeNames"] == []


async def test_a_corrected_annotation_moves_the_tenant(running):
    cluster = running.cluster
    cluster.make_pod("a", "0.5")
    await cluster.settle()
    await running.bind("a", "n1")
    pod = cluster.pod("a")
    other = ({"GPU-n1-0", "GPU-n1-1"} - {pod["metadata"]["annotations"]["gpushare.io/gpu"]}).pop()
    pod["metadata"]["annotations"]["gpushare.io/gpu"] = other
    cluster.put(PODS, pod)
    await cluster.settle()
    assert running.held() == {"a": (other,)}


async def test_not_ready_before_all_watches_are_synced(cluster):
    extender = Extender(cluster, parse_options([], {}))
    async with TestClient(TestServer(extender.verbs.app())) as client:
        routes = extender.routes()
        assert routes["/livez"]().status == 200
        answer = routes["/readyz"]()
        assert answer.status == 503
        assert b"gpunodes" in answer.body
        pod = cluster.make_pod("a")
        response = await client.post("/filter", json={"Pod": pod, "NodeNames": ["n1"]})
        assert "starting" in (await response.json(content_type=None))["Error"]


async def test_a_watch_that_breaks_in_an_unknown_way_begins_again(cluster, caplog):
    watch, broken = cluster.watch, []

    async def breaks(resource, **asked):
        if resource is NODES and len(broken) < 2:
            broken.append(resource)
            raise RuntimeError("out of order")
        async for event in watch(resource, **asked):
            yield event

    cluster.watch = breaks
    extender = Extender(cluster, parse_options([], {}))
    async with extender.watching():
        async with asyncio.timeout(60):
            while len(broken) < 2 or extender.not_ready():  # noqa: ASYNC110 - readiness is a question, not an event
                await asyncio.sleep(0.01)
        assert extender.routes()["/livez"]().status == 200
    assert "watch of nodes failed on what was answered" in caplog.text
    assert "out of order" in caplog.text


@pytest.mark.parametrize("how", [RuntimeError("out of order"), asyncio.CancelledError()])
@pytest.mark.parametrize(
    ("task", "needs"),
    [
        ("the first lists", "gpushare.extender.ledger.ShareLedger.learn"),
        ("following the time", "gpushare.extender.ledger.ShareLedger.listen"),
        ("waking waiting pods", "gpushare.extender.ledger.ShareLedger.begin_round"),
        ("the heartbeat", "gpushare.extender.server.Extender._look_back"),
        ("watching the event loop's lag", "prometheus_client.Histogram.observe"),
        ("keeping the heap small", "gpushare.extender.server.keep_small"),
    ],
)
async def test_liveness_fails_once_a_task_has_died(cluster, monkeypatch, task, needs, how):
    """Before: one that died of a cancelled request was taken for one that was stopped."""

    def breaks(*_, **__):
        raise how

    monkeypatch.setattr("gpushare.extender.server.WAKE_PERIOD_SECONDS", 0.01)
    extender = Extender(cluster, parse_options([], {}))
    routes = extender.routes()
    assert routes["/livez"]().status == 200
    monkeypatch.setattr(needs, breaks)
    async with extender.watching():
        async with asyncio.timeout(60):
            while routes["/livez"]().status == 200:  # noqa: ASYNC110 - liveness is a question, not an event
                await asyncio.sleep(0.01)
        answer = routes["/livez"]()
    assert answer.status == 503
    why = "was cancelled" if isinstance(how, asyncio.CancelledError) else "ended: RuntimeError('out of order')"
    assert answer.body == f"{task} {why}\n".encode()


async def test_liveness_fails_while_the_event_loop_is_stuck(cluster):
    now = [0.0]
    extender = Extender(cluster, parse_options([], {}), clock=lambda: now[0])
    now[0] = HUNG_SECONDS
    assert extender.trouble() == ""
    now[0] += 1
    assert "stuck for 61 s" in extender.trouble()


async def test_metrics_tell_what_happened(running):
    cluster = running.cluster
    cluster.make_pod("a", "0.9")
    cluster.make_pod("big", "1")
    await cluster.settle()
    await running.bind("a", "n1")
    await running.filter("big", ["nope"])
    text = running.extender.routes()["/metrics"]().body.decode()
    assert 'gpushare_extender_request_duration_seconds_count{verb="bind"} 1.0' in text
    assert "gpushare_extender_reservations 1.0" in text
    assert 'gpushare_extender_rejections_total{reason="NoGpus"} 1.0' in text
    assert 'gpushare_extender_watch_restarts_total{resource="pods"} 0.0' in text
    assert "gpushare_extender_ready 1.0" in text
    assert 'gpushare_event_loop_lag_seconds_count{part="extender"}' in text


@pytest.mark.parametrize("verb", ["filter", "prioritize", "bind", "preempt"])
@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"Pod": 3}', b"\xff"])
async def test_garbage_is_a_400_with_a_sentence(running, verb, body):
    response = await running.client.post(f"/{verb}", data=body)
    assert response.status == 400
    assert "not " in await response.text()


def test_scores_are_0_to_10_and_only_the_best_get_10():
    assert scale(np.array([])).tolist() == []
    assert scale(np.array([3.0, 3.0])).tolist() == [10, 10]
    assert scale(np.array([0.0, 99.9, 100.0])).tolist() == [0, 8, 10]
    assert scale(np.array([-5.0, -4.0])).tolist() == [0, 10]
