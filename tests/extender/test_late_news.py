"""Nobody's share is given away twice while the watch is behind, an answer is lost or a binding comes late.

Each test forces one order of events. Truth is what the API server holds: the decisions of bound pods.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from collections import Counter

import pytest

from gpushare.extender.binding import UNANSWERED_SECONDS
from gpushare.extender.server import STOOD_STILL_SECONDS
from gpushare.extender.wire import BindArgs
from gpushare.kube import PODS


def sums(cluster) -> Counter[str]:
    """Percents by GPU of the pods that are bound and have not ended."""
    found: Counter[str] = Counter()
    for pod in cluster.objects[PODS].values():
        if pod["spec"].get("nodeName") and pod["status"]["phase"] not in ("Succeeded", "Failed"):
            limits = pod["spec"]["containers"][0]["resources"]["limits"]
            found[pod["metadata"]["annotations"]["gpushare.io/gpu"]] += int(limits["gpushare.io/share"])
    return found


def refuse_by_count(cluster, name: str) -> None:
    """As kube-scheduler does where its own sum of the node's shares has no room."""
    pod = copy.deepcopy(cluster.pod(name))
    pod["status"]["conditions"] = [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/1 nodes are available: 1 Insufficient gpushare.io/share.",
        }
    ]
    cluster.put(PODS, pod)


@pytest.fixture
async def one_gpu(cluster, serve_cluster):
    """One node with one GPU; no clock helps: the fence is out of the way."""
    cluster.add_node("n1", gpus=1)
    for name in ("a", "b"):
        cluster.make_pod(name, "0.6")
    async with serve_cluster(cluster) as running:
        yield running


async def test_explaining_a_waiting_pod_does_not_free_the_room_of_one_just_bound(one_gpu):
    """The watch still shows it waiting, by kube-scheduler's count, when the explainer comes round."""
    cluster = one_gpu.cluster
    refuse_by_count(cluster, "a")
    await cluster.settle()
    cluster.flowing.clear()
    assert await one_gpu.bind("a", "n1") == ""
    await one_gpu.extender.explainer.round()
    assert await one_gpu.bind("b", "n1") != ""
    assert sums(cluster) == {"GPU-n1-0": 60}
    cluster.flowing.set()
    await cluster.settle()
    assert set(one_gpu.held()) == {"a"}


async def test_asking_again_for_a_bound_pod_does_not_free_its_room(one_gpu):
    """kube-scheduler did not wait for the answer of bind, and its watch is behind, too."""
    cluster = one_gpu.cluster
    await cluster.settle()
    waiting = copy.deepcopy(cluster.pod("a"))
    cluster.flowing.clear()
    assert await one_gpu.bind("a", "n1") == ""
    body = {"Pod": waiting, "Nodes": None, "NodeNames": ["n1"]}
    await one_gpu.post("filter", body)
    await one_gpu.post("prioritize", body)
    assert await one_gpu.bind("b", "n1") != ""
    assert await one_gpu.bind("a", "n1") == ""  # it is bound there already
    assert await one_gpu.bind("b", "n1") != ""
    assert sums(cluster) == {"GPU-n1-0": 60}
    assert set(one_gpu.held()) == {"a"}


async def test_events_from_before_a_binding_do_not_undo_it(one_gpu):
    """A status that kube-scheduler wrote before comes after our own write's answer."""
    cluster = one_gpu.cluster
    await cluster.settle()
    cluster.flowing.clear()
    refuse_by_count(cluster, "a")
    assert await one_gpu.bind("a", "n1") == ""
    version = cluster.pod("a")["metadata"]["resourceVersion"]
    cluster.flowing.set()
    await cluster.settle()
    assert cluster.pod("a")["metadata"]["resourceVersion"] == version
    assert await one_gpu.bind("b", "n1") != ""
    await one_gpu.extender.explainer.round()
    assert set(one_gpu.held()) == {"a"}
    cluster.remove(PODS, "default/a")
    await cluster.settle()
    assert one_gpu.held() == {}
    assert await one_gpu.bind("b", "n1") == ""


@pytest.mark.parametrize("get_too", [True, False])
@pytest.mark.parametrize("ask", [True, False])
async def test_a_binding_that_comes_late_finds_its_room_kept(one_gpu, ask, get_too):
    """The API server carries a request out that we gave up: the reservation is there all the time."""
    cluster = one_gpu.cluster
    await cluster.settle()
    cluster.bind_fails, cluster.get_fails = ["late"], ["away"] if get_too else []
    assert await one_gpu.bind("a", "n1") != ""
    if ask:
        await one_gpu.filter("a")
    assert await one_gpu.bind("b", "n1") != ""
    cluster.flowing.clear()
    await cluster.late.pop()()
    await one_gpu.filter("b")
    assert await one_gpu.bind("b", "n1") != ""
    assert sums(cluster) == {"GPU-n1-0": 60}
    assert await one_gpu.bind("a", "n1") == ""
    cluster.flowing.set()
    await cluster.settle()
    assert set(one_gpu.held()) == {"a"}


async def test_a_second_try_repeats_the_decision_of_one_that_may_come_late(cluster, serve_cluster):
    """On a node with two GPUs the policy would by now choose the other; filter answers the same node alone."""
    for name in ("n1", "n2"):
        cluster.add_node(name)
    for name, fraction in (("a", "0.6"), ("b", "0.3"), ("c", "0.5"), ("d", "0.4")):
        cluster.make_pod(name, fraction)
    async with serve_cluster(cluster) as running:
        await cluster.settle()
        cluster.bind_fails = ["late"]
        assert await running.bind("a", "n1") != ""
        first = running.held()["a"]
        assert await running.bind("c", "n1") == ""
        assert running.held()["c"] != first
        assert (await running.filter("a"))["NodeNames"] == ["n1"]
        assert "n1" in await running.bind("a", "n2")  # not elsewhere
        cluster.bind_fails = ["late"]
        assert await running.bind("a", "n1") != ""
        assert running.held()["a"] == first
        await cluster.late.pop(0)()
        assert await running.bind("a", "n1") == ""
        assert cluster.pod("a")["metadata"]["annotations"]["gpushare.io/gpu"] == first[0]
        with contextlib.suppress(Exception):
            await cluster.late.pop(0)()  # refused: it is bound
        await cluster.settle()
        assert await running.bind("d", "n1") == ""
        assert await running.bind("b", "n1") == ""
        assert max(sums(cluster).values()) <= 100


async def test_a_pod_that_may_be_bound_is_refused_with_a_sentence_on_all_other_nodes(cluster, serve_cluster):
    """kube-scheduler asks about these alone where its node has been cordoned since, or is gone."""
    now = [1000.0]
    for name in ("n1", "n2"):
        cluster.add_node(name)
    cluster.make_pod("a", "0.6")
    async with serve_cluster(cluster, clock=lambda: now[0]) as running:
        cluster.bind_fails, cluster.get_fails = ["lost"], ["away"]
        assert await running.bind("a", "n1") != ""
        answer = await running.filter("a", ["n2"])
        assert (answer["NodeNames"], answer["Error"]) == ([], "")
        assert answer["FailedAndUnresolvableNodes"] == {"n2": "it may be bound to n1 already"}
        assert set(running.held()) == {"a"}
        now[0] += UNANSWERED_SECONDS + 1
        await running.extender.binder.look_again(now[0])
        now[0] += 5
        await running.extender.wake()
        assert [name for name, _ in cluster.patches] == ["a"], "kube-scheduler is to ask again"
        while running.extender.refusal():  # noqa: ASYNC110 - the pods are read again, as the clock made a leap
            await asyncio.sleep(0)
        assert (await running.filter("a", ["n2"]))["NodeNames"] == ["n2"]


async def test_a_binding_that_was_never_carried_out_gives_its_room_back_in_time(one_gpu):
    cluster, binder = one_gpu.cluster, one_gpu.extender.binder
    await cluster.settle()
    cluster.bind_fails = ["lost"]
    assert await one_gpu.bind("a", "n1") != ""
    now = one_gpu.extender._clock()
    await binder.look_again(now + UNANSWERED_SECONDS - 1)
    assert set(one_gpu.held()) == {"a"}
    cluster.get_fails = ["away"]
    await binder.look_again(now + UNANSWERED_SECONDS + 60)
    assert set(one_gpu.held()) == {"a"}
    await binder.look_again(now + UNANSWERED_SECONDS + 60)
    assert one_gpu.held() == {}
    assert await one_gpu.bind("b", "n1") == ""


@pytest.mark.parametrize("late", [True, False])
async def test_looking_again_counts_what_is_bound_and_forgets_what_is_gone(one_gpu, late):
    cluster, binder = one_gpu.cluster, one_gpu.extender.binder
    await cluster.settle()
    cluster.bind_fails, cluster.get_fails = ["late"], ["away"]
    assert await one_gpu.bind("a", "n1") != ""
    cluster.flowing.clear()
    if late:
        await cluster.late.pop()()
    else:
        cluster.remove(PODS, "default/a")
    await binder.look_again(time.monotonic() + UNANSWERED_SECONDS + 60)
    assert (await one_gpu.bind("b", "n1") == "") is not late
    cluster.flowing.set()
    await cluster.settle()
    assert max(sums(cluster).values()) == 60


async def test_a_request_that_the_server_did_not_take_frees_its_room_at_once(one_gpu):
    cluster = one_gpu.cluster
    await cluster.settle()
    cluster.bind_fails = ["busy"]
    assert await one_gpu.bind("a", "n1") != ""
    assert one_gpu.held() == {}


async def test_a_pod_that_another_extender_bound_is_counted_where_that_one_put_it(cluster, serve_cluster):
    """Two are at work, as when a leader changes: the first one's binding is not yet on the second one's watch."""
    cluster.add_node("n1")
    for name in ("a", "b", "c", "d"):
        cluster.make_pod(name, "0.6" if name == "a" else "0.5")
    async with serve_cluster(cluster) as first, serve_cluster(cluster) as second:
        await cluster.settle()
        cluster.flowing.clear()
        assert await first.bind("a", "n1") == ""
        assert await second.bind("a", "n1") == ""  # refused by the API server; read again; it is there
        assert second.held() == first.held()
        cluster.flowing.set()
        await cluster.settle()
        assert second.held() == first.held()


async def test_a_bind_that_is_broken_off_keeps_its_room(one_gpu):
    """The task is cancelled between request and answer."""
    cluster = one_gpu.cluster
    await cluster.settle()
    args = BindArgs("a", "default", cluster.pod("a")["metadata"]["uid"], "n1")
    asked = asyncio.Event()
    bind = cluster.bind

    async def never_answers(*args, **more):
        await bind(*args, **more)
        asked.set()
        await asyncio.Event().wait()

    cluster.bind = never_answers
    cluster.flowing.clear()
    task = asyncio.create_task(one_gpu.extender.binder.bind(args))
    await asked.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    cluster.bind = bind
    assert set(one_gpu.held()) == {"a"}
    assert await one_gpu.bind("b", "n1") != ""
    assert await one_gpu.bind("a", "n1") == ""
    assert sums(cluster) == {"GPU-n1-0": 60}


async def test_who_stood_still_reads_the_pods_before_it_answers(cluster, serve_cluster):
    """It leads, stands still for longer than its lease, and is asked by a kube-scheduler that does not know."""
    now = [1000.0]
    cluster.add_node("n1", gpus=1)
    for name in ("a", "b"):
        cluster.make_pod(name, "0.6")
    async with serve_cluster(cluster, clock=lambda: now[0]) as old, serve_cluster(cluster) as new:
        await cluster.settle()
        cluster.flowing.clear()
        assert await new.bind("a", "n1") == ""
        now[0] += STOOD_STILL_SECONDS + 1
        answer = await old.filter("b")  # its own beat may have had them read by now
        assert "the extender is reading pods again" in answer["Error"] or answer["NodeNames"] == []
        while old.extender.not_ready():  # noqa: ASYNC110 - readiness is a question, not an event
            await asyncio.sleep(0)
        assert (await old.filter("b"))["NodeNames"] == []
        assert await old.bind("b", "n1") != ""
        assert sums(cluster) == {"GPU-n1-0": 60}
        cluster.flowing.set()
        await cluster.settle()
        assert set(old.held()) == set(new.held()) == {"a"}


@pytest.mark.parametrize("stands_still", [True, False])
async def test_a_gpu_that_others_fill_while_a_bind_waits_takes_it_no_more(cluster, serve_cluster, stands_still):
    """Both were decided before either was known; the one that waits at the fence sees it before it asks."""
    now = [1000.0]
    cluster.add_node("n1")
    for name, fraction in (("a", "0.6"), ("b", "0.6"), ("c", "0.5")):
        cluster.make_pod(name, fraction)
    async with serve_cluster(cluster, clock=lambda: now[0]) as old, serve_cluster(cluster) as new:
        await cluster.settle()
        assert await old.bind("a", "n1") == ""
        await cluster.settle()
        waiting = asyncio.create_task(old.bind("b", "n1"))
        while "b" not in old.held():  # noqa: ASYNC110 - the request travels over HTTP
            await asyncio.sleep(0)
        assert await new.bind("c", "n1") == ""
        await cluster.settle()
        if stands_still:
            now[0] += STOOD_STILL_SECONDS + 1
        cluster.allocate("a")
        answer = await asyncio.wait_for(waiting, 30)
        assert ("the extender is reading pods again" if stands_still else "filled by others") in answer
        assert max(sums(cluster).values()) == 60
        assert set(old.held()) == {"a", "c"}


async def test_one_look_in_vain_is_enough_for_a_round(cluster, serve_cluster):
    """While the API server is away each look may last 30 s, and the caller's other work waits for it."""
    cluster.add_node("n1")
    names = ("a", "b", "c")
    for name in names:
        cluster.make_pod(name, "0.2")
    async with serve_cluster(cluster) as running:
        await cluster.settle()
        for name in names:
            cluster.bind_fails, cluster.get_fails = ["lost"], ["away"]
            assert await running.bind(name, "n1") != ""
        cluster.get_fails = ["away", "away"]
        later = time.monotonic() + UNANSWERED_SECONDS + 60
        for left in (1, 0):
            await running.extender.binder.look_again(later)
            assert len(cluster.get_fails) == left
            assert set(running.held()) == set(names)
        await running.extender.binder.look_again(later)
        assert running.held() == {}


@pytest.fixture
async def unseen(one_gpu):
    """A pod that was made and bound while the watch is down, and the watch begins again after what `then` does."""
    cluster, extender = one_gpu.cluster, one_gpu.extender
    await cluster.settle()

    async def after(then) -> float:
        cluster.flowing.clear()
        cluster.make_pod("c", "0.6")
        assert await one_gpu.bind("c", "n1") == ""
        bound_at = extender._clock()
        then()
        extender._pods.relist()
        await extender._pods.synced.wait()
        cluster.flowing.set()
        await cluster.settle()
        return bound_at

    return after


async def test_a_successor_of_a_pod_that_no_watch_showed_keeps_its_room(one_gpu, unseen):
    cluster, binder = one_gpu.cluster, one_gpu.extender.binder

    def replace() -> None:
        cluster.remove(PODS, "default/c")
        cluster.make_pod("c", "0.4")

    at = await unseen(replace)
    assert await one_gpu.bind("c", "n1") == ""
    await cluster.settle()
    await binder.look_again(at + UNANSWERED_SECONDS + 1)
    assert set(one_gpu.held()) == {"c"}
    assert await one_gpu.bind("b", "n1") == ""
    assert sums(cluster) == {"GPU-n1-0": 100}


@pytest.mark.parametrize("successor", [False, True])
async def test_a_pod_that_came_and_went_while_the_watch_was_down_gives_its_room_back(one_gpu, unseen, successor):
    """No list and no event ever shows it; its successor, which the watch does not show either, has no place."""
    cluster, binder = one_gpu.cluster, one_gpu.extender.binder
    at = await unseen(lambda: cluster.remove(PODS, "default/c"))
    assert len(one_gpu.held()) == 1
    if successor:
        cluster.flowing.clear()
        cluster.make_pod("c", "0.3")
    await binder.look_again(at + UNANSWERED_SECONDS - 1)
    assert len(one_gpu.held()) == 1
    cluster.get_fails = ["away"]
    await binder.look_again(at + UNANSWERED_SECONDS + 1)
    assert len(one_gpu.held()) == 1, "who cannot ask does not know"
    await binder.look_again(at + UNANSWERED_SECONDS + 1)
    assert one_gpu.held() == {}
    cluster.flowing.set()
    await cluster.settle()
    assert await one_gpu.bind("b", "n1") == ""
    assert sums(cluster) == {"GPU-n1-0": 60}


async def test_a_pod_that_the_watch_does_not_show_keeps_its_room_while_it_is_there(one_gpu):
    cluster, binder = one_gpu.cluster, one_gpu.extender.binder
    await cluster.settle()
    cluster.flowing.clear()
    assert await one_gpu.bind("a", "n1") == ""
    now = one_gpu.extender._clock() + UNANSWERED_SECONDS + 1
    asked = ("GET", "/api/v1/namespaces/default/pods/a")
    before = cluster.store.requests.count(asked)
    for _ in range(3):
        await binder.look_again(now)
    assert cluster.store.requests.count(asked) == before + 1, "one question in a while is enough"
    assert set(one_gpu.held()) == {"a"}
    assert await one_gpu.bind("b", "n1") != ""
    cluster.remove(PODS, "default/a")
    await binder.look_again(now + UNANSWERED_SECONDS + 1)
    assert one_gpu.held() == {}
    cluster.flowing.set()
    await cluster.settle()
    assert one_gpu.held() == {}


class OneByOne:
    """Lets a watch's events through by number, in place of the cluster's `flowing`."""

    def __init__(self) -> None:
        self.left = asyncio.Semaphore(0)

    async def wait(self) -> None:
        await self.left.acquire()

    async def let(self, events: int) -> None:
        for _ in range(events):
            self.left.release()
        for _ in range(10):
            await asyncio.sleep(0)


@pytest.mark.parametrize("events", [1, 2, 3])
async def test_late_news_of_the_pod_before_it_does_not_free_the_room_of_a_pod_of_its_name(
    cluster, serve_cluster, events
):
    """A StatefulSet's next pod is bound while the watch still tells how the one before it ended."""
    cluster.add_node("n1", gpus=1)
    for name, fraction in (("a", "0.4"), ("b", "0.7")):
        cluster.make_pod(name, fraction)
    async with serve_cluster(cluster) as running:
        assert await running.bind("a", "n1") == ""
        await cluster.settle()
        cluster.flowing = OneByOne()
        cluster.allocate("a")
        cluster.remove(PODS, "default/a")
        cluster.make_pod("a", "0.4")
        assert await running.bind("a", "n1") == ""
        await cluster.flowing.let(events)
        assert await running.bind("b", "n1") != ""
        assert sums(cluster) == {"GPU-n1-0": 40}
        await cluster.flowing.let(10)
        assert set(running.held()) == {"a"}
        assert await running.bind("b", "n1") != ""


async def test_nobody_asks_about_a_pod_that_the_watch_has_shown(one_gpu, unseen):
    cluster, binder = one_gpu.cluster, one_gpu.extender.binder
    at = await unseen(lambda: None)
    requests = len(cluster.store.requests)
    await binder.look_again(at + UNANSWERED_SECONDS + 60)
    assert len(cluster.store.requests) == requests
    assert set(one_gpu.held()) == {"c"}
