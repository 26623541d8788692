"""Profiles of GpuShares in the extender: refusals on the wire, and the same GpuShare as the rule says."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st
from sharerule import share_of

from gpushare.core.api import CapPoint, GpuShare, PodView, Reason
from gpushare.core.placement import NO_PROBATION, GpuSpec, NodeSpec, Placement, PlacementRequest, Settings
from gpushare.extender.ledger import ShareLedger
from gpushare.extender.workloads import KnownWorkloads
from gpushare.kube import GPUSHARES, Change
from gpushare.twin.contention import WORKLOADS

NAMES = st.sampled_from(["a", "b", "c"])


def gpushare(name, *, owner=None, selector=None, workload="stream", max_slowdown=1.2, profiled=True):
    status = {}
    if profiled:
        counters = WORKLOADS[workload].solo.as_dict()
        status = {"profile": {"gpuModel": "H200", "counters": counters, "windowSeconds": 10.0}}
    spec = {"maxSlowdown": max_slowdown} | ({"selector": {"matchLabels": selector}} if selector else {})
    owners = [{"apiVersion": "v1", "kind": "X", "name": owner, "uid": owner}] if owner else []
    return {
        "apiVersion": "gpushare.io/v1alpha1",
        "kind": "GpuShare",
        "metadata": {"name": name, "namespace": "default", "uid": f"uid-{name}", "ownerReferences": owners},
        "spec": spec,
        "status": status,
    }


def pod(uid="p", owner=None, **labels):
    metadata = {"uid": uid, "name": uid, "namespace": "default", "labels": labels}
    return PodView.from_object({"metadata": metadata | {"ownerReferences": [{"uid": owner}] if owner else []}})


@given(
    st.lists(st.tuples(NAMES, st.none() | NAMES, st.none() | NAMES, st.booleans(), st.booleans()), max_size=8),
    st.none() | NAMES,
    st.none() | NAMES,
)
def test_it_finds_the_gpushare_that_core_finds(changes, owner, label):
    known = KnownWorkloads(lambda: None)
    shares = {}
    asked = pod(owner=owner, **({"app": label} if label else {}))
    for name, share_owner, selected, profiled, deleted in changes:
        if deleted and name in shares:
            known.drop("default", name)
            del shares[name]
        else:
            selector = {"app": selected} if selected else None
            raw = gpushare(name, owner=share_owner, selector=selector, profiled=profiled)
            shares[name] = GpuShare.from_object(raw)
            known.put(shares[name])
        found = share_of(asked.labels, (*asked.owner_uids, asked.uid), shares.values())
        anything = any(share.status.profile is not None for share in shares.values())
        expected = f"default/{found.name}" if found is not None and anything else None
        workload = known.of(asked)
        assert (workload.name if workload else None) == expected
        if workload is not None:
            assert workload.key.split("@")[0] == (expected if found.status.profile is not None else "")


def test_a_pod_that_another_gpushare_selects_now_has_that_ones_profile():
    """Before: its workload stayed unknown, or the former one, until some GpuShare changed."""
    ledger = ShareLedger()
    ledger.share_changed(Change.ADDED, "default/s", GpuShare.from_object(gpushare("s", selector={"app": "s"})))

    def changed(**labels):
        asked = dataclasses.replace(pod(**labels), annotations={"gpushare.io/fraction": "0.5"})
        ledger.pod_changed(Change.MODIFIED, "default/p", asked)
        known = ledger.request_of(asked).known
        return known.name if known is not None else "", ledger.context.judge.version

    assert changed()[0] == ""
    before = changed(app="other")
    after = changed(app="s")
    assert (before[0], after[0]) == ("", "default/s")
    assert after[1] > before[1], "its neighbours are judged anew"
    assert changed(app="s", other="x") == after, "nothing that decides has changed"


def test_neighbours_are_judged_anew_where_another_gpushare_takes_pods_over_and_gives_them_back():
    """Before: a GpuShare without a profile and a tolerance was no news: sets kept the former one's profile."""
    news = []
    known = KnownWorkloads(lambda: news.append(1))
    known.put(GpuShare.from_object(gpushare("z", owner="o")))
    asked, first = pod(owner="o", app="x"), gpushare("a", selector={"app": "x"}, profiled=False)
    del first["spec"]["maxSlowdown"]
    assert (known.of(asked).name, len(news)) == ("default/z", 1)
    known.put(GpuShare.from_object(first))
    assert (known.of(asked).name, known.of(asked).profile, len(news)) == ("default/a", None, 2)
    known.drop("default", "a")
    assert (known.of(asked).name, len(news)) == ("default/z", 3)
    made = gpushare("b", owner="another", profiled=False)  # as the operator makes one for each owner
    del made["spec"]["maxSlowdown"]
    known.put(GpuShare.from_object(made))
    assert len(news) == 3, "that one takes over only pods that none applied to"


def test_the_first_point_of_a_cap_curve_is_a_new_profile():
    news = []
    known = KnownWorkloads(lambda: news.append(1))
    share = GpuShare.from_object(gpushare("s", owner="o"))
    known.put(share)
    whole = known.of(pod(owner="o"))
    profile = dataclasses.replace(share.status.profile, cap_curve=(CapPoint(25, 0.5),))
    known.put(dataclasses.replace(share, status=dataclasses.replace(share.status, profile=profile)))
    grown = known.of(pod(owner="o"))
    assert (len(news), grown.profile.cap_curve) == (2, {25: 0.5})
    assert whole.key != grown.key, "equal keys mean equal profiles"


def test_only_a_new_profile_or_tolerance_is_news():
    news = []
    known = KnownWorkloads(lambda: news.append(1))
    share = GpuShare.from_object(gpushare("s", owner="o"))
    known.put(dataclasses.replace(share, status=dataclasses.replace(share.status, profile=None)))
    assert news == []
    known.put(share)
    known.put(dataclasses.replace(share, generation=2))
    assert news == [1]
    known.put(dataclasses.replace(share, spec=dataclasses.replace(share.spec, max_slowdown=3.0)))
    assert news == [1, 1]
    known.drop("default", "s")
    assert known.of(pod(owner="o")) is None
    assert news == [1, 1, 1], "what is gone is news too"


async def test_over_http_a_pod_that_would_hurt_is_sent_elsewhere_and_not_bound(running):
    cluster = running.cluster
    for name in ("a", "b"):
        raw = cluster.make_pod(name, "0.5")
        cluster.put(GPUSHARES, gpushare(name, owner=raw["metadata"]["uid"]))
    await cluster.settle()
    assert await running.bind("a", "n1") == ""
    cluster.allocate("a")
    filler = cluster.make_pod("filler", "1")
    assert await running.bind("filler", "n1") == ""
    cluster.allocate("filler")
    await cluster.settle()
    assert (await running.filter("b"))["NodeNames"] == ["n2"]
    assert "is promised" in (await running.filter("b", ["n1"]))["FailedNodes"]["n1"]
    assert "is promised" in await running.bind("b", "n1")
    assert filler["metadata"]["uid"] in running.extender.ledger.state.reservations
    victims = {"n1": {"Pods": [], "NumPDBViolations": 0}}
    asked = {"Pod": cluster.pod("b") | {"spec": cluster.pod("b")["spec"] | {"priority": 5}}}
    answer = await running.post("preempt", asked | {"NodeNameToMetaVictims": victims})
    assert len(answer["NodeNameToMetaVictims"]["n1"]["Pods"]) == 1, (
        "one leaves: the neighbour, or the whole GPU's pod"
    )
    cluster.put(GPUSHARES, gpushare("a", owner=cluster.pod("a")["metadata"]["uid"], max_slowdown=900.0))
    cluster.put(GPUSHARES, gpushare("b", owner=cluster.pod("b")["metadata"]["uid"], max_slowdown=900.0))
    await cluster.settle()
    assert (await running.filter("b", ["n1"]))["NodeNames"] == ["n1"], "as soon as both tolerate it"
    assert (await running.filter("b"))["NodeNames"] == ["n2"], "a GPU of its own is worth more to it"


def test_a_tenant_that_no_watch_has_shown_yet_is_known_by_its_request():
    ledger = ShareLedger(Settings("bestfit", probation=NO_PROBATION))
    ledger.state.add_node(NodeSpec("n1", (GpuSpec("GPU-1", "H200", 143_771),)))
    ledger.share_changed(Change.ADDED, "default/s", GpuShare.from_object(gpushare("s", owner="o")))
    first, second = (
        dataclasses.replace(pod(uid, owner="o"), annotations={"gpushare.io/fraction": "0.5"}) for uid in "ab"
    )
    request = ledger.request_of(first)
    assert isinstance(request, PlacementRequest)
    chosen = ledger.choose(first, request, "n1")
    assert isinstance(chosen, Placement)
    ledger.reserve(request, chosen)  # as bind does for a pod that it read from the API server itself
    assert first.uid not in ledger.pods
    assert [one.reason for one in ledger.candidates(second, ["n1"]).rejections().values()] == [Reason.SLOWDOWN]


def test_a_request_asked_for_again_follows_a_changed_gpushare():
    ledger = ShareLedger(Settings("bestfit", probation=NO_PROBATION))
    asked = dataclasses.replace(pod("a", owner="o"), annotations={"gpushare.io/fraction": "0.5"})
    slowdowns = []
    for max_slowdown in (1.2, 1.2, 1.4):
        share = GpuShare.from_object(gpushare("s", owner="o", max_slowdown=max_slowdown))
        ledger.share_changed(Change.MODIFIED, "default/s", share)
        request = ledger.request_of(asked)
        assert isinstance(request, PlacementRequest)
        assert ledger.request_of(dataclasses.replace(asked)) is request, "prioritize asks what filter asked"
        slowdowns.append(request.max_slowdown)
    assert slowdowns == [1.2, 1.2, 1.4]
    ledger.share_changed(Change.DELETED, "default/s", share)
    assert ledger.request_of(asked).known is None


def test_waiting_pods_are_told_when_workloads_are_no_longer_kept_apart():
    """Nothing in the API changes then: before, a pod that waited for it waited on, for up to five minutes."""
    now, rooms = [1_795_402_800.0], []  # 2026-11-23T03:00:00Z
    ledger = ShareLedger(on_room=lambda: rooms.append(now[0]), now=lambda: now[0])
    raw = gpushare("s", owner="o", profiled=False)
    ends = [("03:10:00", ["default/a"]), ("03:20:00", ["default/b"]), (None, ["default/c"])]
    raw["status"]["retractions"] = [
        {"neighbours": neighbours, "at": "2026-11-23T02:10:00Z", "until": end and f"2026-11-23T{end}Z"}
        for end, neighbours in ends
    ]
    ledger.share_changed(Change.ADDED, "default/s", GpuShare.from_object(raw))
    rooms.clear()
    for second in range(0, 1800, 60):
        now[0] = 1_795_402_800.0 + second
        ledger.end_probations()
    assert rooms == [1_795_402_800.0 + 600, 1_795_402_800.0 + 1200]
