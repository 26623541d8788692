"""Waiting pods are touched when room appears and kube-scheduler did not ask again by itself."""

import asyncio
import itertools
import socket
import sys
import time

import pytest

from gpushare.core.api import GpuShare, NodeRules, PodView
from gpushare.core.control import SILENT_SECONDS
from gpushare.core.placement import GpuSpec
from gpushare.extender.closed import MOST_MATCHED, PARTS_AT_ONCE
from gpushare.extender.ledger import ShareLedger
from gpushare.extender.others import OtherPod
from gpushare.extender.reduce import GpuNodeView, NodeView
from gpushare.extender.waiting import (
    AGAIN_SECONDS,
    GRACE_SECONDS,
    MAX_EXAMINED,
    MAX_TOUCHES,
    PATIENCE_SECONDS,
    STALE_REASON_SECONDS,
    STALE_SECONDS,
    WaitingPods,
)
from gpushare.kube import GPUNODES, LEASES, PODS, Change


def pod(name, priority=0):
    return PodView.from_object({"metadata": {"name": name, "uid": name}, "spec": {"priority": priority}})


@pytest.fixture
def waiting():
    return WaitingPods()


def names(pods):
    return [one.name for one in pods]


def always(_):
    return True


def test_nothing_is_due_without_room(waiting):
    waiting.refused(pod("a"), 0)
    assert waiting.due(1000, always) == []


def test_due_after_the_grace_and_not_twice(waiting):
    waiting.refused(pod("a"), 0)
    waiting.room(10)
    assert waiting.due(10 + GRACE_SECONDS - 0.1, always) == []
    assert names(waiting.due(10 + GRACE_SECONDS, always)) == ["a"]
    assert waiting.due(11 + GRACE_SECONDS, always) == []
    assert names(waiting.due(10 + GRACE_SECONDS + AGAIN_SECONDS, always)) == ["a"]


def test_a_pod_refused_because_our_watch_was_behind_is_touched(waiting):
    waiting.room(9.99)  # heard of just before the refusal was given, with the state from before
    waiting.refused(pod("a"), 10)
    assert names(waiting.due(10 + GRACE_SECONDS, always)) == ["a"]


def test_a_pod_that_was_served_or_asked_for_again_is_left_alone(waiting):
    for name in ("a", "b"):
        waiting.refused(pod(name), 0)
    waiting.room(10)
    waiting.served("a")
    waiting.refused(pod("b"), 11)
    assert waiting.due(10 + GRACE_SECONDS, always) == []


def test_what_does_not_fit_is_not_touched_and_room_is_forgotten(waiting):
    waiting.refused(pod("a"), 0)
    waiting.room(10)
    assert waiting.due(20, lambda _: False) == []
    asked = []
    waiting.due(30, lambda one: asked.append(one) or True)
    assert asked == []


def test_important_pods_first_and_not_all_at_once(waiting):
    for index in range(MAX_TOUCHES + 5):
        waiting.refused(pod(f"p{index}"), index / 100)
    waiting.refused(pod("vip", priority=9), 1)
    waiting.room(10)
    first = names(waiting.due(20, always))
    assert first[:2] == ["vip", "p0"]
    assert len(first) == MAX_TOUCHES
    assert len(waiting.due(21, always)) == 6


def test_pods_that_are_gone_are_forgotten_but_not_at_once(waiting):
    for second in range(-20, 0):
        waiting.heard(second)
    waiting.refused(pod("a"), 0)
    for second in range(int(STALE_SECONDS)):
        waiting.heard(second)
        waiting.prune(lambda uid: False, second)
        assert len(waiting) == 1
    waiting.heard(STALE_SECONDS)
    waiting.prune(lambda uid: False, STALE_SECONDS)
    assert len(waiting) == 0


def test_who_is_refused_while_the_watch_is_silent_is_kept_until_it_has_caught_up(waiting):
    """Before: forgotten after 10 s, and not woken when room appeared."""
    waiting.heard(0)
    waiting.refused(pod("a"), 60)
    waiting.prune(lambda uid: False, 600)
    assert len(waiting) == 1
    waiting.heard(600)
    waiting.prune(lambda uid: False, 600)
    assert len(waiting) == 1, "what the watch has missed may come within moments"
    waiting.prune(lambda uid: False, 600 + STALE_SECONDS)
    assert len(waiting) == 0


def test_who_stands_behind_very_many_that_do_not_fit_is_touched_in_the_next_rounds(waiting):
    for index in range(2 * MAX_EXAMINED):
        waiting.refused(pod(f"large{index}"), index / 1000)
    waiting.refused(pod("small"), 1)
    waiting.room(10)
    looked = []

    def fits(one):
        looked.append(one.name)
        return one.name == "small"

    found = [names(waiting.due(second, fits)) for second in (20, 21, 22, 23)]
    assert found == [[], [], ["small"], []]
    assert len(looked) == len(set(looked)) == 2 * MAX_EXAMINED + 1, "no more than once for one room"
    waiting.served("small")
    assert waiting.due(24, always) == [], "room is forgotten once all have been looked at"


@pytest.mark.parametrize("again", [False, True])
def test_room_that_appears_while_many_are_looked_at_is_for_all_of_them(waiting, again):
    for index in range(2 * MAX_EXAMINED):
        waiting.refused(pod(f"large{index}"), index / 1000)
    waiting.refused(pod("small"), 1)
    waiting.room(10)
    waiting.due(20, lambda _: False)
    if again:
        waiting.room(20)
    for second in (22, 23):
        waiting.due(second, lambda _: False)
    assert names(waiting.due(24, always)) == ([f"large{index}" for index in range(MAX_TOUCHES)] if again else [])


def test_who_waits_with_a_stale_reason_is_touched_once_for_one_room(waiting):
    """Before: its status said for up to five minutes that 10 percent are free, where it may not take 60 by now."""
    waiting.refused(pod("a"), 0)
    waiting.refused(pod("b"), 1)
    assert waiting.with_stale_reason(STALE_REASON_SECONDS) is None, "nothing has changed since"
    waiting.room(STALE_REASON_SECONDS)
    now = STALE_REASON_SECONDS + 15
    assert waiting.due(now, lambda _: False) == []
    assert [waiting.with_stale_reason(now + second) for second in range(3)] == [pod("a"), pod("b"), None]
    waiting.refused(pod("a"), now + 1)
    waiting.refused(pod("b"), now + 2)
    waiting.room(now + 10)
    assert waiting.due(now + 15, lambda _: False) == []
    assert waiting.with_stale_reason(now + 16) is None, "they are new"
    assert waiting.with_stale_reason(now + 1 + STALE_REASON_SECONDS) == pod("a")
    waiting.room(now + 70)
    assert names(waiting.due(now + 80, always)) == ["a", "b"]
    assert waiting.with_stale_reason(now + 200) is None, "they fit"


def test_words_of_who_is_touched_in_vain_keep_nobody_waiting(waiting):
    for name in "abc":
        waiting.refused(pod(name), 0)
    touched = []
    for second in range(100, 400):
        waiting.room(second)
        waiting.due(second + 0.5, lambda _: False)
        touched += [one.name for one in [waiting.with_stale_reason(second + 0.5)] if one is not None]
    assert min(map(touched.count, "abc")) == max(map(touched.count, "abc")) > 0


@pytest.mark.parametrize("room_again", [False, True])
def test_a_round_without_time_for_all_is_gone_on_with_in_the_next_second(waiting, room_again):
    for index in range(10):
        waiting.refused(pod(f"large{index}"), index / 1000)
    waiting.room(10)
    looked = []

    def fits(one):
        looked.append(one.name)
        return False

    for second in range(20, 25):
        waiting.due(second, fits, lambda: len(looked) % 2 == 1)
        if room_again:
            waiting.room(second + 0.5)
    assert looked == [f"large{index}" for index in range(10)]


async def test_a_round_ends_after_some_milliseconds_where_each_check_takes_long(
    cluster, serve_cluster, monkeypatch
):
    """Before: with 500 nominated pods a round of 200 checks stopped the event loop for seconds."""
    cluster.add_node("n1", gpus=1)
    now, looked = [time.monotonic()], []

    def fits(one):
        looked.append(one.name)
        now[0] += 0.02
        return False

    async with serve_cluster(cluster, lambda: now[0]) as running:
        extender = running.extender
        monkeypatch.setattr(extender.ledger, "fits_somewhere", fits)
        for index in range(10):
            extender.waiting.refused(pod(f"p{index}"), now[0])
        extender.waiting.room(now[0])
        now[0] += 5.0
        await extender.wake()
        assert len(looked) == 3
        await extender.wake()
        assert looked == [f"p{index}" for index in range(6)]


@pytest.mark.parametrize("count", [1, 2 * MAX_EXAMINED])
def test_pods_that_are_touched_in_vain_hold_nobody_up(waiting, count):
    vain = [pod(f"vain{index}", priority=1) for index in range(count)]
    for index, one in enumerate([*vain, pod("large"), pod("small")]):
        waiting.refused(one, index / 1000)
    waiting.room(10)
    has_room = {one.name for one in vain}
    found = []
    for second in range(12, 60):
        if second == 30:
            has_room.add("small")
            waiting.room(30)
        touched = waiting.due(second, lambda one: one.name in has_room)
        for one in touched:
            waiting.refused(one, second + 0.1)
        found += [second for one in touched if one.name == "small"]
    assert found
    assert found[0] <= 30 + 2 + 2 * count / MAX_TOUCHES, "behind two passes over the others"


def test_a_pod_that_is_touched_in_vain_is_touched_ever_less(waiting):
    """It fits, as far as the extender knows, but pods that it must not be beside are on the node."""
    first = pod("a")
    waiting.refused(first, 0)
    waiting.room(10)
    touched = []

    def run(until, seen):
        began = touched[-1] if touched else 10
        for second in range(int(began) + 1, until):
            if waiting.due(second, always):
                touched.append(second)
                waiting.refused(seen, second + 0.5)

    run(1500, first)
    pauses = [after - before for before, after in itertools.pairwise(touched)]
    assert pauses == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    waiting.room(touched[-1] + 2)
    run(touched[-1] + 21, first)
    assert [after - before for before, after in itertools.pairwise(touched)][9:] == [5, 5, 10]


def test_a_changed_pod_is_touched_soon_again(waiting):
    waiting.refused(pod("a"), 0)
    waiting.room(10)
    touched = [second for second in range(11, 100) if waiting.due(second, always)]
    waiting.refused(pod("a", priority=1), 100)
    touched += [second for second in range(101, 115) if waiting.due(second, always)]
    assert touched == [12, 17, 27, 47, 87, 102, 107]


async def test_room_touches_the_pod_through_the_api(cluster, serve_cluster, monkeypatch):
    cluster.add_node("n1", gpus=1)
    async with serve_cluster(cluster) as running:
        cluster.make_pod("a", "1")
        cluster.make_pod("b", "1")
        await cluster.settle()
        assert await running.bind("a", "n1") == ""
        await cluster.settle()
        assert (await running.filter("b"))["NodeNames"] == []
        await running.extender.wake()
        assert cluster.patches == []
        cluster.remove(PODS, "default/a")
        await cluster.settle()
        now = running.extender._clock()
        monkeypatch.setattr(running.extender, "_clock", lambda: now + GRACE_SECONDS + 1)
        await running.extender.wake()
        [(name, body)] = cluster.patches
        assert name == "b"
        assert set(body["metadata"]["annotations"]) == {"gpushare.io/room-since"}
        assert body["metadata"]["uid"] == cluster.pod("b")["metadata"]["uid"]
        await running.extender.wake()
        assert len(cluster.patches) == 1


async def test_who_was_refused_while_the_watch_was_broken_is_woken(cluster, serve_cluster):
    cluster.add_node("n1", gpus=1)
    now = [1000.0]
    async with serve_cluster(cluster, lambda: now[0]) as running:
        cluster.make_pod("tenant", "1")
        await cluster.settle()
        assert await running.bind("tenant", "n1") == ""
        await cluster.settle()
        cluster.flowing.clear()
        cluster.make_pod("unseen", "1")
        assert (await running.filter("unseen"))["NodeNames"] == []
        for _ in range(60):
            now[0] += 1.0
            await running.extender.wake()
        cluster.flowing.set()
        await cluster.settle()
        cluster.remove(PODS, "default/tenant")
        await cluster.settle()
        for _ in range(5):
            now[0] += 1.0
            await running.extender.wake()
        assert [name for name, _ in cluster.patches] == ["unseen"]


async def test_room_that_does_not_suffice_lets_kube_scheduler_say_anew_why_a_pod_waits(cluster, serve_cluster):
    """ "b" was told that 10 percent are free. 60 are by now, which is not enough either."""
    cluster.add_node("n1", gpus=1)
    now = [1000.0]
    async with serve_cluster(cluster, lambda: now[0]) as running:
        for name, fraction in (("a", "0.5"), ("rest", "0.4"), ("b", "0.7")):
            cluster.make_pod(name, fraction)
        await cluster.settle()
        for name in ("a", "rest"):
            assert await running.bind(name, "n1") == ""
            cluster.allocate(name)
            await cluster.settle()
        assert "10 percent free" in (await running.filter("b"))["FailedNodes"]["n1"]
        now[0] += 1.0
        cluster.remove(PODS, "default/a")
        await cluster.settle()
        touched = []
        for _ in range(300):
            now[0] += 1.0
            await running.extender.wake()
            touched += [now[0] - 1000.0 for _ in cluster.patches[len(touched) :]]
        assert [name for name, _ in cluster.patches] == ["b"]
        assert touched == [STALE_REASON_SECONDS]


def waits(cluster, name, **metadata):
    """Create a pod that kube-scheduler has tried in vain."""
    raw = cluster.make_pod(name, "1")
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
    return cluster.put(PODS, raw | {"status": raw["status"] | {"conditions": [condition]}})


@pytest.mark.parametrize("leader", ["", "here", "another", "unknown"])
async def test_who_was_refused_before_a_restart_is_touched_too(cluster, serve_cluster, monkeypatch, leader):
    """Before: only kube-scheduler's own timer, up to five minutes later, had it try the pod again."""
    cluster.add_node("n1", gpus=1)
    waits(cluster, "first")
    cluster.make_pod("untried", "1")
    gated = waits(cluster, "gated")
    cluster.put(PODS, gated | {"spec": gated["spec"] | {"schedulingGates": [{"name": "queue"}]}})
    if leader == "unknown":
        cluster.get_fails = ["away"]
    elif leader:
        holder = f"{socket.gethostname() if leader == 'here' else 'extender-b'}_1"
        spec = {"holderIdentity": holder, "leaseTransitions": 1}
        cluster.store.put(LEASES, {"metadata": {"namespace": "default", "name": "scheduler"}, "spec": spec})
    async with serve_cluster(cluster, lease="scheduler" if leader else "") as running:
        await cluster.settle()
        now = running.extender._clock()
        monkeypatch.setattr(running.extender, "_clock", lambda: now + GRACE_SECONDS + 1)
        await running.extender.wake()
        assert [name for name, _ in cluster.patches] == ([] if leader == "another" else ["first"])


async def test_room_after_a_restart_wakes_who_was_refused_before(cluster, serve_cluster, monkeypatch):
    cluster.add_node("n1", gpus=1)
    async with serve_cluster(cluster) as running:
        cluster.make_pod("tenant", "1")
        await cluster.settle()
        assert await running.bind("tenant", "n1") == ""
    waits(cluster, "first")
    async with serve_cluster(cluster) as running:
        await cluster.settle()
        now = [running.extender._clock() + GRACE_SECONDS + 1]
        monkeypatch.setattr(running.extender, "_clock", lambda: now[0])
        await running.extender.wake()
        assert cluster.patches == []
        cluster.remove(PODS, "default/tenant")
        await cluster.settle()
        now[0] += GRACE_SECONDS + 1
        await running.extender.wake()
        assert [name for name, _ in cluster.patches] == ["first"]


def test_room_that_appears_again_and_again_does_not_put_a_pod_off_for_ever(waiting):
    waiting.refused(pod("a"), 0)
    touched = []
    for second in range(1, 30):
        waiting.room(second)
        touched += [second for _ in waiting.due(second + 0.5, always)]
    assert touched
    assert touched[0] <= 1 + PATIENCE_SECONDS + GRACE_SECONDS


@pytest.mark.parametrize(
    ("terms", "pods", "most"), [(20_000, 3, 0), (250, MAX_EXAMINED, MOST_MATCHED * PARTS_AT_ONCE // 2)]
)
def test_pods_with_very_many_affinity_terms_are_matched_with_few_nodes_in_a_round(
    waiting, monkeypatch, terms, pods, most
) -> None:
    """Before: each of 200 pods had its terms evaluated for each node, 0.85 µs each, in one step of the loop."""
    module = sys.modules[NodeRules.__module__]
    ledger, evaluated, holds = ShareLedger(), [0], module._holds

    def counted(*arguments):
        evaluated[0] += 1
        return holds(*arguments)

    monkeypatch.setattr(module, "_holds", counted)
    for number in range(100):
        name = f"n{number}"
        gpus = (GpuSpec(f"GPU-{name}", "H200", 80_000),)
        ledger.gpunode_changed(Change.ADDED, name, GpuNodeView(name, gpus, frozenset(), {}))
        ledger.node_changed(Change.ADDED, name, NodeView(name, 64_000, 500_000))
    for number in range(pods):
        keys = [f"key-{number}-{term}" for term in range(terms)]
        affinity = {
            "nodeSelectorTerms": [{"matchExpressions": [{"key": key, "operator": "Exists"}]} for key in keys]
        }
        spec = {
            "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": affinity}},
            "containers": [{"name": "main", "resources": {"limits": {"gpushare.io/share": "25"}}}],
        }
        metadata = {"name": f"p{number}", "uid": f"p{number}", "annotations": {"gpushare.io/fraction": "0.25"}}
        waiting.refused(PodView.from_object({"metadata": metadata, "spec": spec}), 0)
    waiting.room(10)
    for moment in (20, 20 + AGAIN_SECONDS):
        evaluated[0] = 0
        ledger.begin_round()
        assert len(waiting.due(moment, ledger.fits_somewhere)) == min(pods, MAX_TOUCHES), "kube-scheduler decides"
        assert evaluated[0] <= most
        waiting.room(moment)


async def test_each_round_matches_rules_anew(cluster, serve_cluster, monkeypatch) -> None:
    cluster.add_node("n1", gpus=1)
    async with serve_cluster(cluster) as running:
        await cluster.settle()
        ledger = running.extender.ledger
        rules = NodeRules((("pool", "b"),), None, (), 1)
        monkeypatch.setattr("gpushare.extender.closed.MOST_MATCHED", 1)
        await running.extender.wake()
        assert list(ledger._closed_to.of(rules, ledger._nodes)) == ["n1"]
        other = NodeRules((("pool", "c"),), None, (), 1)
        assert ledger._closed_to.of(other, ledger._nodes) == {}
        await running.extender.wake()
        assert list(ledger._closed_to.of(other, ledger._nodes)) == ["n1"]


def reported(progress, **spec):
    placements = [{"podUid": "t", "pod": "t", "progress": progress}]
    status = {"observed": {"progress": progress}, "placements": placements}
    return GpuShare.from_object({"metadata": {"name": "s", "uid": "s"}, "spec": spec, "status": status})


def test_what_frees_nothing_is_no_room(waiting):
    """Before: figures of any GpuShare and ends of pods on nodes without GPUs were room, some each second."""
    rooms = []
    ledger = ShareLedger(on_room=lambda: rooms.append("room"))
    view = GpuNodeView("n", (GpuSpec("GPU-n", "H200", 80_000),), frozenset(), {})
    ledger.gpunode_changed(Change.ADDED, "n", view)
    ledger.node_changed(Change.ADDED, "n", NodeView("n", 64_000, 500_000))
    ledger.share_changed(Change.ADDED, "/s", reported(0.5))
    rooms.clear()
    for uid, node in (("x", "n"), ("y", "other")):
        ledger.other_pod_changed(Change.ADDED, f"default/{uid}", OtherPod(uid, node, 1000, 1024))
    ledger.other_pod_changed(Change.DELETED, "default/y", OtherPod("y", "other", 1000, 1024))
    ledger.share_changed(Change.MODIFIED, "/s", reported(0.6))
    assert rooms == []
    ledger.other_pod_changed(Change.DELETED, "default/x", OtherPod("x", "n", 1000, 1024))
    assert rooms == ["room"]
    ledger.share_changed(Change.MODIFIED, "/s", reported(0.6, fraction="0.2"))
    assert rooms == ["room"] * 2
    ledger.share_changed(Change.DELETED, "/s", reported(0.6, fraction="0.2"))
    assert rooms == ["room"] * 3


def test_figures_neither_put_a_touch_off_nor_make_one_in_vain_more_frequent(waiting):
    """Before: the touch came ten seconds after the room, and then each five seconds."""
    now = [0.0]
    ledger = ShareLedger(on_room=lambda: waiting.room(now[0]))
    ledger.share_changed(Change.ADDED, "/s", reported(0.5))
    waiting.due(5, always)
    first = pod("a")
    waiting.refused(first, 9)
    waiting.room(10)
    touched = []
    for second in range(10, 60):
        now[0] = second
        ledger.share_changed(Change.MODIFIED, "/s", reported(0.5 + second / 1000))
        if waiting.due(second + 0.5, always):
            touched.append(second)
            waiting.refused(first, second + 0.6)
    assert touched == [11, 16, 26, 46]


async def test_a_write_that_hangs_holds_up_nothing_that_goes_by_the_time(
    cluster, serve_cluster, monkeypatch
) -> None:
    """Before: no agent was seen to be silent, and no GPU kept, until all touches were answered, 30 s each."""
    monkeypatch.setattr("gpushare.extender.server.WAKE_PERIOD_SECONDS", 0.01)
    hangs, now = asyncio.Event(), [1000.0]

    async def patch(*_, **__):
        hangs.set()
        await asyncio.Event().wait()

    cluster.add_node("n1", gpus=1)
    node = cluster.objects[GPUNODES]["n1"]
    cluster.put(GPUNODES, {**node, "status": {**node["status"], "observedAt": "T0"}})
    monkeypatch.setattr(cluster, "patch", patch)
    async with serve_cluster(cluster, clock=lambda: now[0]) as running, asyncio.timeout(20):
        ledger = running.extender.ledger
        while not ledger._heard_at:  # noqa: ASYNC110 - the watch has no event for it
            await asyncio.sleep(0.01)
        cluster.make_pod("a", "1")
        await cluster.settle()
        running.extender.waiting.refused(PodView.from_object(cluster.pod("a")), now[0])
        running.extender.waiting.room(now[0])
        now[0] += GRACE_SECONDS
        await hangs.wait()
        now[0] += SILENT_SECONDS + 1
        while not ledger.silent:  # noqa: ASYNC110 - nor has the ledger
            await asyncio.sleep(0.01)
