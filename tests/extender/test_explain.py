"""A pod that kube-scheduler refused by its own count gets an event that says how much is free where."""

from typing import Any

from gpushare.extender.explain import AGAIN_SECONDS, MAX_EXPLAINED, Explainer
from gpushare.kube import EVENTS, NODES, PODS, AlreadyExists

SHORT = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/2 nodes are available: 2 Insufficient gpushare.io/share.",
}


class Events:
    """The API's events, by name."""

    def __init__(self) -> None:
        self.by_name: dict[str, Any] = {}

    async def create(self, resource: Any, body: Any, *, namespace: str) -> None:
        assert resource is EVENTS
        if body["metadata"]["name"] in self.by_name:
            raise AlreadyExists("there", status=409)
        self.by_name[body["metadata"]["name"]] = body


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def fill(running: Any, cluster: Any) -> None:
    for index in range(4):
        name = f"low{index}"
        cluster.make_pod(name, "0.7")
        node = (await running.filter(name))["NodeNames"][0]
        assert await running.bind(name, node) == ""
        cluster.allocate(name)
        await cluster.settle()


def wait_short(cluster: Any, name: str) -> None:
    pod = cluster.make_pod(name, "0.5")
    pod["status"]["conditions"] = [SHORT]
    cluster.put(PODS, pod)


async def test_the_event_says_how_much_is_free_and_is_written_once(running: Any, cluster: Any) -> None:
    await fill(running, cluster)
    wait_short(cluster, "waits")
    await cluster.settle()
    events, clock = Events(), Clock()
    one, other = (Explainer(events, running.extender.ledger, clock) for _ in range(2))
    for explainer in (one, other, one):
        await explainer.round()
    (event,) = events.by_name.values()
    assert event["note"] == "0/2 GPU nodes fit: 2 needs 50 percent of one GPU, the freest has 30 percent free"
    assert (event["regarding"]["name"], event["type"], event["reason"]) == ("waits", "Warning", "NoRoom")


async def test_a_changed_answer_is_told_after_a_while_and_none_once_it_fits(running: Any, cluster: Any) -> None:
    await fill(running, cluster)
    wait_short(cluster, "waits")
    await cluster.settle()
    events, clock = Events(), Clock()
    explainer = Explainer(events, running.extender.ledger, clock)
    await explainer.round()
    cluster.finish("low0")
    await cluster.settle()
    clock.now += AGAIN_SECONDS
    await explainer.round()
    assert len(events.by_name) == 1


async def test_of_very_many_waiting_pods_each_is_told_in_its_turn(running: Any, cluster: Any) -> None:
    await fill(running, cluster)
    count = MAX_EXPLAINED * int(AGAIN_SECONDS) + 20
    for number in range(count):
        wait_short(cluster, f"p{number}")
    await cluster.settle()
    events, clock = Events(), Clock()
    explainer = Explainer(events, running.extender.ledger, clock)
    for _ in range(count // MAX_EXPLAINED):
        await explainer.round()
        clock.now += 1.0
    told = {event["regarding"]["name"] for event in events.by_name.values()}
    assert told == {f"p{number}" for number in range(count)}


async def test_room_on_a_node_where_the_pod_may_not_run_is_no_room_for_it(running: Any, cluster: Any) -> None:
    await fill(running, cluster)
    cluster.add_node("n3")
    node = cluster.objects[NODES]["n3"]
    cluster.put(NODES, {**node, "spec": {"taints": [{"key": "own", "value": "team", "effect": "NoSchedule"}]}})
    wait_short(cluster, "waits")
    await cluster.settle()
    ledger = running.extender.ledger
    assert not ledger.fits_somewhere(ledger.pods[cluster.pod("waits")["metadata"]["uid"]])
    events = Events()
    await Explainer(events, ledger, Clock()).round()
    (event,) = events.by_name.values()
    assert event["note"] == (
        "0/3 GPU nodes fit: 2 needs 50 percent of one GPU, the freest has 30 percent free; "
        "1 it has the taint own=team:NoSchedule, which the pod does not tolerate"
    )
    cluster.put(NODES, {**node, "spec": {}})
    await cluster.settle()
    assert ledger.fits_somewhere(ledger.pods[cluster.pod("waits")["metadata"]["uid"]])


async def test_pods_that_wait_for_something_else_are_left_to_others(running: Any, cluster: Any) -> None:
    pod = cluster.make_pod("waits", "0.5")
    pod["status"]["conditions"] = [SHORT | {"message": "0/2 nodes are available: 2 Insufficient cpu."}]
    cluster.put(PODS, pod)
    await cluster.settle()
    events = Events()
    await Explainer(events, running.extender.ledger, Clock()).round()
    assert events.by_name == {}
