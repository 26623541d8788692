"""The bind fence, with a clock that the test turns."""

import asyncio
import copy

import pytest

from gpushare.core.api import PodView
from gpushare.extender.fence import PASSING_SECONDS, Fence
from gpushare.kube import GPUNODES, NODES, PODS, Change

SOON = 60.0


async def start(fence, uid, node="n", size=25, gpus=("g0",), memory_mib=0):
    task = asyncio.create_task(fence.enter(uid, node, size, gpus, memory_mib))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


async def test_only_the_same_size_for_another_gpu_on_the_same_node_waits():
    fence = Fence()
    await fence.enter("a", "n", 25, ("g0",))
    for uid, node, size, gpus in (
        ("same gpu", "n", 25, ("g0",)),
        ("other size", "n", 50, ("g1",)),
        ("other node", "m", 25, ("g9",)),
    ):
        assert (await start(fence, uid, node, size, gpus)).done(), uid
    waiting = await start(fence, "b", gpus=("g1",))
    assert not waiting.done()
    fence.allocated("a")
    await asyncio.sleep(0)
    assert not waiting.done()  # "same gpu" is still ahead
    fence.allocated("same gpu")
    await asyncio.wait_for(waiting, SOON)


async def test_pods_of_one_share_that_differ_in_memory_wait_for_each_other_on_the_same_gpu():
    """Before: they were allocated at once, and neither container could be told its limit, for its pod's life."""
    fence = Fence()
    await fence.enter("a", "n", 25, ("g0",), 8192)
    assert (await start(fence, "as much", memory_mib=8192)).done()
    waiting = await start(fence, "less", memory_mib=4096)
    assert not waiting.done()
    for uid in ("a", "as much"):
        fence.allocated(uid)
    await asyncio.wait_for(waiting, SOON)


async def test_bind_waits_for_a_pod_of_another_memory_limit_until_it_is_allocated(running):
    cluster = running.cluster
    for name, memory in (("a", "8Gi"), ("b", "8Gi"), ("c", "4Gi")):
        cluster.make_pod(name, "0.2", memory=memory)
    await cluster.settle()
    assert await running.bind("a", "n1") == ""
    assert await asyncio.wait_for(running.bind("b", "n1"), SOON) == ""
    await cluster.settle()
    waiting = asyncio.create_task(running.bind("c", "n1"))
    await until_held(running, "c")
    assert running.held()["a"] == running.held()["c"]
    for name in ("a", "b"):
        assert not waiting.done()
        cluster.allocate(name)
        await cluster.settle()
    assert await asyncio.wait_for(waiting, SOON) == ""


async def test_waiters_for_different_gpus_pass_one_after_the_other():
    fence = Fence()
    await fence.enter("a", "n", 25, ("g0",))
    first, second = await start(fence, "b", gpus=("g1",)), await start(fence, "c", gpus=("g2",))
    fence.allocated("a")
    done, pending = await asyncio.wait([first, second], timeout=SOON, return_when=asyncio.FIRST_COMPLETED)
    assert len(done) == len(pending) == 1
    fence.allocated("b" if first in done else "c")
    await asyncio.wait_for(pending.pop(), SOON)


async def test_those_that_wait_go_in_the_order_in_which_they_came():
    """Before: in no order, so that who came first could come to its time-out behind all others."""
    fence = Fence()
    await fence.enter("a", "n", 25, ("g0",))
    waiting = {f"p{index}": await start(fence, f"p{index}", gpus=(f"g{index + 1}",)) for index in range(8)}
    previous = "a"
    for uid, task in waiting.items():
        fence.allocated(previous)
        await asyncio.wait(waiting.values(), timeout=0)
        assert [each for each, other in waiting.items() if other.done() and each not in fence.settled] == [uid]
        await task
        previous = uid


async def test_a_stream_of_pods_that_need_not_wait_passes_for_a_while_only(turn):
    """Before: who needed another GPU came to its time-out again and again while the stream went on."""
    fence = Fence(timeout_seconds=10)
    fence.expect("p0", "n", 25, ("g0",))
    other = await start(fence, "other", gpus=("g1",))
    for number in range(1, 18):
        newcomer = await start(fence, f"p{number}")
        fence.allocated(f"p{number - 1}")
        await turn(0.5)
        if other.done():
            break
        assert newcomer.done()
    assert number * 0.5 == PASSING_SECONDS + 0.5
    await other
    assert not newcomer.done()
    assert fence.blockers(f"p{number}", "n", 25, ("g0",)) == ["other"]
    fence.allocated("other")
    await asyncio.wait_for(newcomer, SOON)


async def test_a_pod_whose_binding_was_not_answered_passes_those_that_wait_for_it(turn):
    fence = Fence(timeout_seconds=10)
    await fence.enter("a", "n", 25, ("g0",))
    waiting = await start(fence, "b", gpus=("g1",))
    await turn(PASSING_SECONDS)
    again = await start(fence, "a")
    assert again.done()
    fence.allocated("a")
    await asyncio.wait_for(waiting, SOON)


async def test_who_waited_behind_a_pod_that_gave_up_goes_on(turn):
    fence = Fence(timeout_seconds=10)
    await fence.enter("a", "n", 25, ("g0",))
    first = await start(fence, "first", gpus=("g1",))
    await turn(PASSING_SECONDS)
    second = await start(fence, "second", gpus=("g0",))
    smaller = await start(fence, "smaller", size=20, gpus=("g0",))
    assert smaller.done(), "of another size"
    assert not second.done()
    await turn(10 - PASSING_SECONDS)
    with pytest.raises(TimeoutError):
        await first
    await turn(0)
    assert second.done()
    await second
    assert fence._waiters == {}


async def test_a_pod_that_goes_away_blocks_nobody():
    fence = Fence()
    await fence.enter("a", "n", 25, ("g0",))
    waiting = await start(fence, "b", gpus=("g1",))
    fence.gone("a")
    await asyncio.wait_for(waiting, SOON)


async def test_the_wait_is_bounded(turn):
    fence = Fence(timeout_seconds=10)
    await fence.enter("a", "n", 25, ("g0",))
    waiting = await start(fence, "b", gpus=("g1",))
    await turn(9.9)
    assert not waiting.done()
    await turn(0.2)
    with pytest.raises(TimeoutError):
        await waiting
    assert fence.blockers("x", "n", 25, ("g0",)) == []  # b was never expected


async def test_allocation_is_never_taken_back():
    fence = Fence()
    fence.expect("a", "n", 25, ("g0",))
    fence.allocated("a")
    fence.expect("a", "n", 25, ("g0",))  # an older event of the same pod
    assert fence.blockers("b", "n", 25, ("g1",)) == []


async def until_held(running, name: str) -> None:
    while name not in running.held():  # noqa: ASYNC110 - the request travels over HTTP
        await asyncio.sleep(0)


async def waiting_for_another(running) -> asyncio.Task:
    """Bind a pod "a" to a node and begin to bind "b", which waits until "a" has its other GPU."""
    for name in ("a", "b"):
        running.cluster.make_pod(name, "0.6")
    await running.cluster.settle()
    assert await running.bind("a", "n1") == ""
    await running.cluster.settle()
    waiting = asyncio.create_task(running.bind("b", "n1"))
    await until_held(running, "b")
    return waiting


async def test_bind_waits_for_the_allocation_and_other_nodes_do_not(running):
    cluster = running.cluster
    second = await waiting_for_another(running)
    cluster.make_pod("c", "0.6")
    await cluster.settle()
    assert await running.bind("c", "n2") == ""
    assert not second.done()
    assert set(running.held()) == {"a", "b", "c"}  # room is held while it waits
    node = cluster.objects[GPUNODES]["n1"]
    uid = cluster.pod("a")["metadata"]["uid"]
    gpu = cluster.pod("a")["metadata"]["annotations"]["gpushare.io/gpu"]
    next(g for g in node["status"]["gpus"] if g["uuid"] == gpu)["tenants"] = [{"podUid": uid}]
    cluster.put(GPUNODES, node)
    assert await asyncio.wait_for(second, SOON) == ""
    gpus = {cluster.pod(name)["metadata"]["annotations"]["gpushare.io/gpu"] for name in ("a", "b")}
    assert gpus == {"GPU-n1-0", "GPU-n1-1"}


async def test_a_node_where_binding_would_wait_is_avoided_while_others_fit(running):
    cluster = running.cluster
    for name, fraction in (("a", "0.6"), ("b", "0.6"), ("c", "0.4")):
        cluster.make_pod(name, fraction)
    await cluster.settle()
    assert await running.bind("a", "n1") == ""

    async def scores(name, nodes=("n1", "n2")):
        body = {"Pod": cluster.pod(name), "NodeNames": list(nodes)}
        return {scored["Host"]: scored["Score"] for scored in await running.post("prioritize", body)}

    assert await scores("b") == {"n1": 0, "n2": 10}  # n1 is the better fit, but b would go to its other GPU
    assert (await running.filter("b"))["NodeNames"] == ["n2"]
    assert (await running.filter("b", ["n1"]))["NodeNames"] == ["n1"]
    assert await scores("b", ["n1"]) == {"n1": 10}
    assert (await scores("c"))["n1"] == 10  # another size
    cluster.allocate("a")
    await cluster.settle()
    assert (await scores("b"))["n1"] == 10


async def test_a_node_far_down_the_list_can_be_one_where_binding_would_wait(cluster, serve_cluster):
    """More nodes than GPUs a node: the state's arrays are by GPU slot first."""
    for index in range(5):
        cluster.add_node(f"n{index}", gpus=2)
    async with serve_cluster(cluster) as running:
        for name in ("a", "b"):
            cluster.make_pod(name, "0.6")
        await cluster.settle()
        assert await running.bind("a", "n4") == ""
        assert "n4" not in (await running.filter("b"))["NodeNames"]
        body = {"Pod": cluster.pod("b"), "NodeNames": ["n3", "n4"]}
        scores = {one["Host"]: one["Score"] for one in await running.post("prioritize", body)}
        assert scores == {"n3": 10, "n4": 0}


async def test_equal_pods_asked_for_in_a_row_are_sent_to_different_nodes(running):
    """The second is asked for before the first one's bind has come."""
    cluster = running.cluster
    for name, fraction in (("old", "0.1"), ("a", "0.6"), ("b", "0.6"), ("other", "0.7")):
        cluster.make_pod(name, fraction)
    await cluster.settle()
    assert await running.bind("old", "n1") == ""
    cluster.allocate("old")
    await cluster.settle()
    assert (await running.filter("a"))["NodeNames"] == ["n1"]
    assert (await running.filter("a"))["NodeNames"] == ["n1"]  # its own announcement is none for itself
    assert (await running.filter("b"))["NodeNames"] == ["n2"]
    assert (await running.filter("other"))["NodeNames"] == ["n1"]
    assert (await running.filter("b", ["n1"]))["NodeNames"] == ["n1"]
    assert await asyncio.wait_for(running.bind("b", "n1"), SOON) == ""  # announced pods are no blockers


def test_an_announcement_ends_by_itself_or_with_its_binding():
    fence = Fence()
    for index in range(3):
        fence.announce(f"p{index}", f"n{index}", 60, now=index * 0.4)
    assert fence.announced("new", 60, 0.8) == {"n0", "n1", "n2"}
    assert fence.announced("new", 50, 0.8) == set()
    assert fence.announced("p1", 60, 1.0) == {"n2"}
    fence.expect("p2", "n2", 60, ("g",))
    assert fence.announced("new", 60, 1.0) == {"n1"}
    fence.gone("p1")
    assert fence.announced("new", 60, 1.0) == set()


async def test_bind_takes_the_gpu_for_which_the_fence_is_open(running):
    """GPU 1 is the fuller one and would be the policy's choice, but the fence is open for GPU 0."""
    cluster = running.cluster
    for name, fraction in (("old", "0.5"), ("a", "0.6"), ("b", "0.2"), ("c", "0.2"), ("d", "0.2")):
        cluster.make_pod(name, fraction)
    await cluster.settle()
    for name in ("old", "a"):
        assert await running.bind(name, "n1") == ""
        cluster.allocate(name)
        await cluster.settle()
    first = cluster.pod("old")["metadata"]["annotations"]["gpushare.io/gpu"]
    assert await running.bind("b", "n1") == ""
    cluster.remove(PODS, "default/a")
    await cluster.settle()
    gpu = cluster.pod("b")["metadata"]["annotations"]["gpushare.io/gpu"]
    assert gpu != first  # beside a; now the emptier of the two
    assert await asyncio.wait_for(running.bind("c", "n1"), SOON) == ""
    assert cluster.pod("c")["metadata"]["annotations"]["gpushare.io/gpu"] == gpu


async def test_a_bind_that_waits_in_vain_says_for_whom_and_releases(cluster, serve_cluster, turn):
    cluster.add_node("n1")
    async with serve_cluster(cluster) as running:
        waiting = await waiting_for_another(running)
        await turn(10.1)
        answer = await asyncio.wait_for(waiting, SOON)
        assert cluster.pod("a")["metadata"]["uid"] in answer
        assert set(running.held()) == {"a"}


async def test_a_restarted_extender_still_fences(cluster, serve_cluster):
    cluster.add_node("n1")
    async with serve_cluster(cluster) as first:
        cluster.make_pod("a", "0.6")
        await cluster.settle()
        await first.bind("a", "n1")
    async with serve_cluster(cluster) as second:
        cluster.make_pod("b", "0.6")
        await cluster.settle()
        waiting = asyncio.create_task(second.bind("b", "n1"))
        await until_held(second, "b")
        assert not waiting.done()
        cluster.allocate("a")
        assert await asyncio.wait_for(waiting, SOON) == ""


def allocate_by_gpunode(cluster, node, *uids):
    """The agent lists these pods, and only these, on the node's first GPU."""
    gpunode = copy.deepcopy(cluster.objects[GPUNODES][node])
    gpunode["status"]["gpus"][0]["tenants"] = [{"podUid": uid} for uid in uids]
    cluster.put(GPUNODES, gpunode)


async def test_a_gpunode_that_still_lists_gone_pods_puts_none_of_them_back(running):
    """The agent's list is later than the API server's; and pods of others are on it, too."""
    cluster, fence = running.cluster, running.extender.ledger.fence
    for name in ("a", "b", "c"):
        cluster.make_pod(name, "0.2")
    await cluster.settle()
    uids = {name: cluster.pod(name)["metadata"]["uid"] for name in ("a", "b", "c")}
    for name in ("a", "b"):
        assert await running.bind(name, "n1") == ""
        allocate_by_gpunode(cluster, "n1", *list(uids.values())[: len(running.held())])
        await cluster.settle()
    assert fence.settled == {uids["a"], uids["b"]}
    cluster.remove(PODS, "default/a")
    cluster.finish("b")
    await cluster.settle()
    assert fence.settled == set()
    assert await running.bind("c", "n1") == ""
    allocate_by_gpunode(cluster, "n1", *uids.values(), "uid-of-somebody-elses-pod")
    await cluster.settle()
    assert fence.settled == {uids["c"]}
    assert set(running.held()) == {"c"}


async def test_a_pod_allocated_before_its_binding_was_seen_on_the_watch_is_not_waited_for(running):
    """The GpuNode's watch may be ahead of the pods'."""
    cluster, ledger = running.cluster, running.extender.ledger
    cluster.make_pod("a", "0.2")
    await cluster.settle()
    pod = PodView.from_object(cluster.pod("a"))
    ledger.pod_changed(Change.DELETED, "default/a", pod)  # as if the watch had not yet brought it
    request = ledger.request_of(pod)
    ledger.reserve(request, ledger.choose(pod, request, "n1"))
    ledger.fence.expect(pod.uid, "n1", 20, ("GPU-n1-0",))
    assert ledger.fence.blockers("b", "n1", 20, ("GPU-n1-1",)) == [pod.uid]
    allocate_by_gpunode(cluster, "n1", pod.uid)
    await cluster.settle()
    assert ledger.fence.blockers("b", "n1", 20, ("GPU-n1-1",)) == []


async def test_an_agent_that_lists_a_pod_of_another_node_does_not_open_that_nodes_fence(running):
    """Before: it did, even for a pod that was not bound yet, and two pods could get each other's GPU."""
    cluster, fence = running.cluster, running.extender.ledger.fence
    for name in ("a", "b"):
        cluster.make_pod(name, "0.6")
    await cluster.settle()
    allocate_by_gpunode(cluster, "n2", *(cluster.pod(name)["metadata"]["uid"] for name in ("a", "b")))
    await cluster.settle()
    assert fence.settled == set()
    assert await running.bind("a", "n1") == ""
    await cluster.settle()
    allocate_by_gpunode(cluster, "n2", cluster.pod("a")["metadata"]["uid"])
    await cluster.settle()
    waiting = asyncio.create_task(running.bind("b", "n1"))
    await until_held(running, "b")
    await cluster.settle()
    assert not waiting.done()
    cluster.allocate("a")
    assert await asyncio.wait_for(waiting, SOON) == ""


def fail_gpu(cluster) -> None:
    node = copy.deepcopy(cluster.objects[GPUNODES]["n1"])
    for gpu in node["status"]["gpus"]:
        gpu["health"] = "Unhealthy"
    cluster.put(GPUNODES, node)


def lose_gpus(cluster) -> None:
    node = copy.deepcopy(cluster.objects[GPUNODES]["n1"])
    node["status"]["gpus"] = []
    cluster.put(GPUNODES, node)


def see_agent(cluster, *, runs: bool = True) -> None:
    state = {"name": "agent", "started": runs, "state": {"running" if runs else "terminated": {}}}
    labels = {"app.kubernetes.io/component": "agent"}
    metadata = {"name": "agent-n1", "namespace": "default", "uid": "agent", "labels": labels}
    status = {"phase": "Running", "containerStatuses": [state]}
    cluster.put(PODS, {"metadata": metadata, "spec": {"nodeName": "n1", "containers": []}, "status": status})


def reject(cluster) -> None:
    """Kubelet refuses the pod that the other waits for, which opens the fence."""
    pod = copy.deepcopy(cluster.pod("a"))
    message = "Allocate failed due to no healthy devices present; cannot allocate unhealthy gpushare.io/share"
    pod["status"] = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": message}
    cluster.put(PODS, pod)


@pytest.mark.parametrize(
    ("happens", "why"),
    [
        (fail_gpu, "has become unhealthy"),
        (lose_gpus, "has lost one of its GPUs"),
        (lambda cluster: see_agent(cluster, runs=False), "agent is not running"),
        (reject, "agent is not running"),
        (lambda cluster: cluster.remove(NODES, "n1"), "node n1 has no GPUs any more"),
        (None, ""),
    ],
)
async def test_a_pod_is_not_bound_to_what_failed_while_it_waited_at_the_fence(running, happens, why):
    cluster = running.cluster
    see_agent(cluster)
    waiting = await waiting_for_another(running)
    if happens is not None:
        happens(cluster)
        await cluster.settle()
    if happens is not reject:
        cluster.allocate("a")
    answer = await asyncio.wait_for(waiting, 30)
    assert why in answer
    assert bool(answer) == bool(why)
    assert cluster.pod("b")["spec"].get("nodeName") == (None if why else "n1")
    assert ("b" in running.held()) == (not why)


async def test_a_pod_deleted_while_it_waits_at_the_fence_leaves_nothing_behind(running):
    cluster, ledger = running.cluster, running.extender.ledger
    waiting = await waiting_for_another(running)
    cluster.remove(PODS, "default/b")
    await cluster.settle()
    cluster.allocate("a")
    assert "default/b ended while it waited" in await asyncio.wait_for(waiting, 30)
    assert set(running.held()) == {"a"}
    assert ledger.fence.busy(60) == {}
