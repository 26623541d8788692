"""preempt: only victims that free the GPU share that is needed."""

import asyncio

import pytest

from gpushare.extender import verbs
from gpushare.kube import PODS


def asks_for_cpu(pod, cpu):
    pod["spec"]["containers"][0]["resources"]["requests"] = {"cpu": cpu}


@pytest.fixture
async def full(running):
    """n1: GPU 0 holds low-a and low-b (30% each), GPU 1 holds low-c (40%, and 8 of the CPUs) and high (40%)."""
    cluster = running.cluster
    for name, fraction, priority, gpu in (
        ("low-a", "0.3", 0, 0),
        ("low-b", "0.3", 5, 0),
        ("low-c", "0.4", 0, 1),
        ("high", "0.4", 100, 1),
    ):
        pod = cluster.make_pod(name, fraction, priority=priority)
        percent = int(float(fraction) * 100)
        if name == "low-c":
            asks_for_cpu(pod, "8")
        pod["spec"]["nodeName"] = "n1"
        pod["metadata"]["annotations"] |= {
            "gpushare.io/gpu": f"GPU-n1-{gpu}",
            "gpushare.io/thread-percentage": str(percent),
            "gpushare.io/memory-limit": "0=1000M",
        }
    for name in ("low-a", "low-b", "low-c", "high"):
        cluster.allocate(name)
    await cluster.settle()
    assert len(running.held()) == 4
    return running


async def preempt(running, name, victims, violations=0):
    uids = {pod: running.cluster.pod(pod)["metadata"]["uid"] for pod in ("low-a", "low-b", "low-c", "high")}
    body = {
        "Pod": running.cluster.pod(name),
        "NodeNameToMetaVictims": {
            "n1": {"Pods": [{"UID": uids.get(v, v)} for v in victims], "NumPDBViolations": violations}
        },
    }
    answer = (await running.post("preempt", body))["NodeNameToMetaVictims"]
    names = {uid: pod for pod, uid in uids.items()}
    return {node: [names.get(p["UID"], p["UID"]) for p in proposed["Pods"]] for node, proposed in answer.items()}


async def test_victims_that_free_a_gpu_stand(full):
    full.cluster.make_pod("new", "0.6", priority=10)
    assert await preempt(full, "new", ["low-a"]) == {"n1": ["low-a"]}


async def test_victims_on_the_wrong_gpu_are_replaced(full):
    full.cluster.make_pod("new", "0.6", priority=10)
    assert await preempt(full, "new", ["low-b"]) == {"n1": ["low-b"]}
    full.cluster.make_pod("wide", "0.65", priority=10)
    # low-c's leaving frees 60% of GPU 1: not enough; one of the two on GPU 0 is, and the lower one goes
    assert await preempt(full, "wide", ["low-c"]) == {"n1": ["low-a"]}


async def test_no_victims_at_all_are_proposed_for_higher_tenants(full):
    full.cluster.make_pod("new", "0.9", priority=3)
    assert await preempt(full, "new", ["low-a", "low-c"]) == {}


async def test_both_lower_tenants_leave_when_one_is_not_enough(full):
    full.cluster.make_pod("new", "1", priority=10)
    assert {node: sorted(pods) for node, pods in (await preempt(full, "new", ["low-c"])).items()} == {
        "n1": ["low-a", "low-b"]
    }


async def test_pods_that_are_not_ours_stay_victims(full):
    full.cluster.make_pod("new", "0.65", priority=10)
    assert await preempt(full, "new", ["cpu-hog", "low-c"]) == {"n1": ["cpu-hog", "low-a"]}


@pytest.fixture
async def short(full):
    """n1 has no CPU left: 56 of its 64 are cpu-hog's, which is not ours, and 8 are low-c's."""
    hog = {"metadata": {"name": "hog", "namespace": "default", "uid": "cpu-hog"}, "status": {"phase": "Running"}}
    asked = {"resources": {"requests": {"cpu": "56"}}}
    full.cluster.put(PODS, hog | {"spec": {"nodeName": "n1", "containers": [asked]}})
    await full.cluster.settle()
    state = full.extender.ledger.state
    assert state.cpu_free_milli[state.row("n1")] == 0
    full.cluster.make_pod("new", "0.65", priority=10)
    asks_for_cpu(full.cluster.pod("new"), "8")
    return full


async def test_a_victim_whose_cpu_is_needed_stays(short):
    found = await preempt(short, "new", ["low-c"])
    assert {node: sorted(pods) for node, pods in found.items()} == {"n1": ["low-a", "low-c"]}


async def test_a_victim_whose_cpu_others_free_is_spared(short):
    assert await preempt(short, "new", ["cpu-hog", "low-c"]) == {"n1": ["cpu-hog", "low-a"]}


async def test_a_victim_whose_cpu_nobody_needs_is_spared(full):
    full.cluster.make_pod("new", "0.65", priority=10)
    asks_for_cpu(full.cluster.pod("new"), "4")
    assert await preempt(full, "new", ["low-c"]) == {"n1": ["low-a"]}


async def test_trying_changes_nothing(full):
    before, free = full.held(), full.extender.ledger.state.share_free_milli.copy()
    full.cluster.make_pod("new", "1", priority=10)
    await preempt(full, "new", ["low-c"])
    assert full.held() == before
    assert (full.extender.ledger.state.share_free_milli == free).all()


async def test_unknown_nodes_and_bad_pods_get_no_candidates(full):
    full.cluster.make_pod("new", "1.5", priority=10, limit=50)
    assert await preempt(full, "new", ["low-a"]) == {}
    full.cluster.make_pod("fine", "0.6", priority=10)
    body = {"Pod": full.cluster.pod("fine"), "NodeNameToMetaVictims": {"nowhere": {"Pods": [{"UID": "x"}]}}}
    assert await full.post("preempt", body) == {"NodeNameToMetaVictims": {}}


async def test_all_others_are_served_meanwhile_and_the_answer_comes_in_time(cluster, serve_cluster, monkeypatch):
    """Each node takes a second; of the nodes that the time does not allow the next question begins."""
    now, asked, others = [0.0], [], []

    def slow(_request, _context, node, **_more):
        now[0] += 1.0
        asked.append(node)
        return ("victim",) if node != "n1" else ()

    async def beats():
        while True:
            others.append(len(asked))
            await asyncio.sleep(0)

    monkeypatch.setattr(verbs, "choose_victims", slow)
    nodes = [f"n{number}" for number in range(9)]
    for node in nodes:
        cluster.add_node(node)
    async with serve_cluster(cluster, clock=lambda: now[0]) as running:
        cluster.make_pod("new", "0.6", priority=10)
        body = {
            "Pod": cluster.pod("new"),
            "NodeNameToMetaVictims": {node: {"Pods": [{"UID": "x"}]} for node in nodes},
        }
        task = asyncio.create_task(beats())
        answered = (await running.post("preempt", body))["NodeNameToMetaVictims"]
        task.cancel()
        assert asked == nodes[:5]
        assert list(answered) == ["n0", "n2", "n3", "n4"]
        assert {1, 2, 3, 4} <= set(others)
        await running.post("preempt", body)
        assert asked[5:] == [*nodes[5:], "n0"]
