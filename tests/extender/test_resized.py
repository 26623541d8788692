"""CPU and memory requests that are changed in place while a pod runs count at once, for it and for others."""

import copy

import pytest

from gpushare.kube import PODS


def ask(cluster, name, cpu, memory="1Gi"):
    """Set a pod's requests, as the API server does on the subresource `resize` too."""
    pod = copy.deepcopy(cluster.pod(name))
    pod["spec"]["containers"][0]["resources"]["requests"] = {"cpu": cpu, "memory": memory}
    cluster.put(PODS, pod)


def free(running):
    state = running.extender.ledger.state
    row = state.row("n1")
    return int(state.cpu_free_milli[row]), int(state.node_memory_free_mib[row])


@pytest.fixture
async def tenant(cluster, serve_cluster):
    """One node of 64 CPUs and 512 GiB with a tenant of 56 CPUs, and a pod that wants 16."""
    cluster.add_node("n1", gpus=1)
    for name, cpu in (("tenant", "56"), ("new", "16")):
        cluster.make_pod(name, priority=0)
        ask(cluster, name, cpu)
    async with serve_cluster(cluster) as running:
        assert await running.bind("tenant", "n1") == ""
        cluster.allocate("tenant")
        await cluster.settle()
        yield running


async def test_what_a_smaller_request_frees_is_given_away(tenant):
    assert (await tenant.filter("new"))["NodeNames"] == []
    before = tenant.extender.ledger.state.reservations[tenant.cluster.pod("tenant")["metadata"]["uid"]]
    room = []
    tenant.extender.ledger.on_room = lambda: room.append("room")
    ask(tenant.cluster, "tenant", "8", "512Mi")
    await tenant.cluster.settle()
    assert room, "waiting pods are told"
    assert free(tenant) == (56_000, 512 * 1024 - 512)
    assert (await tenant.filter("new"))["NodeNames"] == ["n1"]
    assert await tenant.bind("new", "n1") == ""
    after = tenant.extender.ledger.state.reservations[tenant.cluster.pod("tenant")["metadata"]["uid"]]
    assert (after.placement, after.order) == (before.placement, before.order)
    assert after.placement.thread_percentage == before.placement.thread_percentage
    assert after.request.share_milli == before.request.share_milli


async def test_what_a_larger_request_takes_is_given_to_nobody(tenant):
    ask(tenant.cluster, "tenant", "8")
    await tenant.cluster.settle()
    assert (await tenant.filter("new"))["NodeNames"] == ["n1"]
    ask(tenant.cluster, "tenant", "50")
    await tenant.cluster.settle()
    assert free(tenant)[0] == 14_000
    assert (await tenant.filter("new"))["NodeNames"] == []
    assert "CPU" in await tenant.bind("new", "n1")
    ask(tenant.cluster, "tenant", "1", "512Gi")
    await tenant.cluster.settle()
    assert "memory" in await tenant.bind("new", "n1")
    tenant.cluster.remove(PODS, "default/tenant")
    await tenant.cluster.settle()
    assert free(tenant) == (64_000, 512 * 1024)


@pytest.mark.parametrize("cpu", ["9E", "65"])
async def test_what_the_node_cannot_give_is_not_counted(tenant, cpu):
    """A request that kubelet finds infeasible stays in the spec; the node still has the room."""
    ask(tenant.cluster, "tenant", "8")
    await tenant.cluster.settle()
    pod = copy.deepcopy(tenant.cluster.pod("tenant"))
    container = pod["spec"]["containers"][0]
    container["resources"]["requests"]["cpu"] = cpu
    status = pod.setdefault("status", {})
    status["conditions"] = [{"type": "PodResizePending", "status": "True", "reason": "Infeasible"}]
    status["containerStatuses"] = [
        {"name": container["name"], "allocatedResources": {"cpu": "8", "memory": "1Gi"}}
    ]
    tenant.cluster.put(PODS, pod)
    await tenant.cluster.settle()
    assert free(tenant)[0] == 56_000
    assert (await tenant.filter("new"))["NodeNames"] == ["n1"]
    status["conditions"][0]["reason"] = "Deferred"  # it may come, so the room is kept
    tenant.cluster.put(PODS, pod)
    await tenant.cluster.settle()
    assert (await tenant.filter("new"))["NodeNames"] == []


async def test_waiting_pods_are_told_of_what_another_systems_pod_gives_back(tenant):
    """kube-scheduler asks again at the same event; before, a refusal that came ahead of our watch stood."""
    room = []
    tenant.extender.ledger.on_room = lambda: room.append("room")
    pod = {
        "metadata": {"name": "other", "namespace": "default", "uid": "other"},
        "spec": {"nodeName": "n1", "containers": [{"name": "main", "resources": {}}]},
        "status": {"phase": "Running"},
    }
    asked = []
    for cpu in ("2", "4", "3"):
        pod = copy.deepcopy(pod)
        pod["spec"]["containers"][0]["resources"]["requests"] = {"cpu": cpu}
        tenant.cluster.put(PODS, pod)
        await tenant.cluster.settle()
        asked.append(len(room))
    assert asked == [0, 0, 1]


async def test_waiting_pods_are_told_of_the_gpu_that_a_corrected_decision_leaves(cluster, serve_cluster):
    cluster.add_node("n1", gpus=2)
    async with serve_cluster(cluster) as running:
        cluster.make_pod("tenant", "1")
        cluster.make_pod("new", "1")
        assert await running.bind("tenant", "n1") == ""
        cluster.allocate("tenant")
        await cluster.settle()
        room = []
        running.extender.ledger.on_room = lambda: room.append("room")
        pod = copy.deepcopy(cluster.pod("tenant"))
        [left] = {"GPU-n1-0", "GPU-n1-1"} - {pod["metadata"]["annotations"]["gpushare.io/gpu"]}
        pod["metadata"]["annotations"]["gpushare.io/gpu"] = left
        cluster.put(PODS, pod)
        await cluster.settle()
        assert room
