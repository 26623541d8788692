"""Pods that are not ours count: what they take of a node, and shares held without our decision."""

import copy

import pytest

from gpushare.extender.others import OtherPod, reduce_other_pod
from gpushare.kube import GPUNODES, NODES, PODS


def other(name, node="n1", cpu="2", memory="4Gi", share=0, **metadata):
    limits = {"gpushare.io/share": str(share)} if share else {}
    return {
        "metadata": {"name": name, "namespace": "kube-system", "uid": f"uid-{name}", **metadata},
        "spec": {
            "nodeName": node,
            "containers": [{"resources": {"requests": {"cpu": cpu, "memory": memory}, "limits": limits}}],
        },
        "status": {"phase": "Running"},
    }


def free(served, node="n1"):
    state = served.extender.ledger.state
    row = state.row(node)
    return int(state.cpu_free_milli[row]), int(state.node_memory_free_mib[row])


def free_shares(served, node="n1"):
    state = served.extender.ledger.state
    return state.share_free_milli[:2, state.row(node)].tolist()


def test_a_pod_is_reduced_to_what_it_takes():
    assert reduce_other_pod(other("p")) == OtherPod("uid-p", "n1", 2000, 4096)
    assert reduce_other_pod(other("p", share=150)) == OtherPod("uid-p", "n1", 2000, 4096, 150)


def test_a_pod_that_requests_as_a_whole_takes_that():
    pod = other("p")
    pod["spec"]["resources"] = {"requests": {"cpu": "60", "memory": "400Gi"}}
    assert reduce_other_pod(pod) == OtherPod("uid-p", "n1", 60_000, 400 * 1024)


def test_pods_that_take_nothing_or_are_ours_are_left_out():
    waiting, ended = other("p", node=None), other("p")
    ended["status"]["phase"] = "Succeeded"
    assert reduce_other_pod(waiting) is None
    assert reduce_other_pod(ended) is None
    assert reduce_other_pod(other("p", labels={"gpushare.io/managed": "true"})) is None


async def test_their_requests_are_not_free_for_ours(running):
    before = free(running)
    running.cluster.put(PODS, other("a"))
    running.cluster.put(PODS, other("b", cpu="500m", memory="1Gi"))
    await running.cluster.settle()
    assert free(running) == (before[0] - 2500, before[1] - 5120)
    assert free(running, "n2") == before

    running.cluster.put(PODS, other("a", cpu="1"))
    running.cluster.remove(PODS, "kube-system/b")
    await running.cluster.settle()
    assert free(running) == (before[0] - 1000, before[1] - 4096)

    running.cluster.put(PODS, copy.deepcopy(other("a")) | {"status": {"phase": "Failed"}})
    await running.cluster.settle()
    assert free(running) == before


async def test_a_pod_replaced_while_the_watch_was_away_is_counted_once(running):
    """A StatefulSet's next pod has the name of the one before, and a new list shows only that one."""
    before = free(running), free(running, "n2")
    running.cluster.put(PODS, other("a", share=40))
    await running.cluster.settle()
    running.cluster.put(PODS, other("a", node="n2", share=30, uid="uid-next"))
    await running.cluster.settle()
    assert free(running) == before[0]
    assert free(running, "n2") == (before[1][0] - 2000, before[1][1] - 4096)
    assert (free_shares(running), sum(free_shares(running, "n2"))) == ([1000, 1000], 1700)
    running.cluster.remove(PODS, "kube-system/a")
    await running.cluster.settle()
    assert (free(running), free(running, "n2")) == before
    assert sum(free_shares(running, "n2")) == 2000


async def test_a_node_that_comes_later_has_less_from_the_start(running):
    running.cluster.put(PODS, other("a", node="n3"))
    await running.cluster.settle()
    running.cluster.add_node("n3")
    await running.cluster.settle()
    assert free(running, "n3") == (62000, 508 * 1024)


async def test_a_full_node_is_refused(running):
    running.cluster.put(PODS, other("big", cpu="63500m"))
    await running.cluster.settle()
    pod = running.cluster.make_pod("p")
    pod["spec"]["containers"][0]["resources"]["requests"] = {"cpu": "1"}
    running.cluster.put(PODS, pod)
    await running.cluster.settle()
    answer = await running.filter("p")
    assert answer["NodeNames"] == ["n2"]
    answer = await running.filter("p", ["n1"])
    assert "CPU" in answer["FailedNodes"]["n1"]


async def test_a_share_bound_by_hand_is_counted_where_the_agent_lists_it(running):
    running.cluster.put(PODS, other("a", share=40))
    await running.cluster.settle()
    assert sorted(free_shares(running)) == [600, 1000]

    gpunode = copy.deepcopy(running.cluster.objects[GPUNODES]["n1"])
    gpunode["status"]["gpus"][1]["tenants"] = [{"podUid": "uid-a", "share": 40}]
    running.cluster.put(GPUNODES, gpunode)
    await running.cluster.settle()
    assert free_shares(running) == [1000, 600]

    running.cluster.remove(PODS, "kube-system/a")
    await running.cluster.settle()
    assert free_shares(running) == [1000, 1000]


async def test_waiting_pods_hear_of_the_gpu_that_such_a_share_is_not_on(running):
    """Before: they were asked about again when something else changed, or after kube-scheduler's five minutes."""
    running.cluster.put(PODS, other("a", share=40))
    await running.cluster.settle()
    rooms = []
    running.extender.ledger.on_room = lambda: rooms.append(free_shares(running))
    gpunode = copy.deepcopy(running.cluster.objects[GPUNODES]["n1"])
    gpunode["status"]["gpus"][1]["tenants"] = [{"podUid": "uid-a", "share": 40}]
    running.cluster.put(GPUNODES, gpunode)
    await running.cluster.settle()
    assert rooms == [[1000, 600]]
    gpunode["status"]["gpus"][1]["tenants"][0] |= {"clients": 1}
    running.cluster.put(GPUNODES, gpunode)
    await running.cluster.settle()
    assert len(rooms) == 1


async def test_a_share_above_one_gpu_is_counted_as_whole_gpus(running):
    running.cluster.put(PODS, other("a", share=200))
    await running.cluster.settle()
    assert free_shares(running) == [0, 0]


async def test_a_share_bound_by_hand_is_counted_on_the_gpus_that_its_node_still_has(running):
    running.cluster.add_node("n3", gpus=4)
    running.cluster.put(PODS, other("a", node="n3", share=300))
    gpunode = copy.deepcopy(running.cluster.objects[GPUNODES]["n3"])
    for gpu in gpunode["status"]["gpus"][1:]:
        gpu["tenants"] = [{"podUid": "uid-a", "share": 100}]
    running.cluster.put(GPUNODES, gpunode)
    await running.cluster.settle()
    state = running.extender.ledger.state
    assert state.share_free_milli[:4, state.row("n3")].tolist() == [1000, 0, 0, 0]
    lessened = copy.deepcopy(gpunode)
    del lessened["status"]["gpus"][1]
    for _ in range(2):  # and at a list of a restarted extender, which has not seen the GPU
        running.cluster.put(GPUNODES, lessened)
        await running.cluster.settle()
        assert state.share_free_milli[:3, state.row("n3")].tolist() == [1000, 0, 0]
        running.cluster.remove(GPUNODES, "n3")
        await running.cluster.settle()


async def test_a_managed_pod_without_a_decision_is_counted_until_it_has_one(running):
    pod = copy.deepcopy(running.cluster.make_pod("p", "0.30"))
    pod["spec"]["nodeName"] = "n1"
    pod["spec"]["containers"][0]["resources"]["requests"] = {"cpu": "3"}
    running.cluster.put(PODS, pod)
    await running.cluster.settle()
    assert free_shares(running) == [700, 1000]
    assert free(running)[0] == 61000

    decided = copy.deepcopy(pod)
    decided["metadata"]["annotations"] |= {
        "gpushare.io/gpu": "GPU-n1-1",
        "gpushare.io/thread-percentage": "30",
        "gpushare.io/memory-limit": "0=100M",
    }
    running.cluster.put(PODS, decided)
    await running.cluster.settle()
    assert free_shares(running) == [1000, 700]
    running.cluster.remove(PODS, "default/p")
    await running.cluster.settle()
    assert (free_shares(running), free(running)[0]) == ([1000, 1000], 64000)


async def test_a_running_pod_that_gains_and_loses_our_label_is_counted_once(running):
    running.cluster.put(PODS, other("a", share=40))
    await running.cluster.settle()
    running.cluster.put(PODS, other("a", share=40, labels={"gpushare.io/managed": "true"}))
    await running.cluster.settle()
    assert (sum(free_shares(running)), free(running)[0]) == (1600, 62000)
    running.cluster.put(PODS, other("a", share=40))
    await running.cluster.settle()
    assert (sum(free_shares(running)), free(running)[0]) == (1600, 62000)


async def test_preemption_gives_back_what_leaving_pods_take(running):
    running.cluster.put(PODS, other("big", cpu="63500m"))
    await running.cluster.settle()
    pod = running.cluster.make_pod("p", priority=10)
    pod["spec"]["containers"][0]["resources"]["requests"] = {"cpu": "1"}
    answer = await running.post(
        "preempt",
        {
            "Pod": pod,
            "NodeNameToMetaVictims": {"n1": {"Pods": [{"UID": "uid-big"}], "NumPDBViolations": 0}},
        },
    )
    assert [one["UID"] for one in answer["NodeNameToMetaVictims"]["n1"]["Pods"]] == ["uid-big"]
    assert free(running)[0] == 500


@pytest.mark.parametrize("amount", ["9E", "5P", "1e300"])
@pytest.mark.parametrize("labels", [{}, {"gpushare.io/managed": "true"}])
async def test_a_pod_that_asks_for_more_than_there_can_be_stops_nothing(running, labels, amount):
    """Whoever may create a pod with spec.nodeName chooses its requests and limits."""
    cluster, ledger = running.cluster, running.extender.ledger
    for name in ("x", "y"):
        hostile = other(name, cpu=amount, memory=amount, labels=labels)
        hostile["spec"]["containers"][0]["resources"]["limits"] = {"gpushare.io/share": amount}
        cluster.put(PODS, hostile)
    await cluster.settle()
    assert max(free(running)) < 0
    assert await ledger.learn(1e6)
    cluster.make_pod("p")
    cluster.pod("p")["spec"]["containers"][0]["resources"]["requests"] = {"cpu": "1"}
    assert (await running.filter("p"))["NodeNames"] == ["n2"]

    node = copy.deepcopy(cluster.objects[NODES]["n1"])
    node["status"]["allocatable"]["cpu"] = "32"
    cluster.put(NODES, node)
    await cluster.settle()
    assert ledger.state.uuids(ledger.state.row("n1")) == ("GPU-n1-0", "GPU-n1-1")
    for name in ("x", "y"):
        cluster.remove(PODS, f"kube-system/{name}")
    await cluster.settle()
    assert free(running)[0] == 32_000
    assert set((await running.filter("p"))["NodeNames"]) == {"n1", "n2"}
