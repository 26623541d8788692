"""The operator's memory agrees with the rule after any history, and tells whom it concerns."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sharerule import share_of

from gpushare.core.admission import ShareKey
from gpushare.core.api import GpuShare, LabelSelector, LearnedEffect, PodView, names
from gpushare.core.control import PodReport
from gpushare_operator.world import ClusterView, Key, PodKey

Json = dict[str, Any]


def pod(
    name: str, *owners: str, labels: Json | None = None, fraction: str | None = "0.25", phase: str = ""
) -> PodView:
    metadata = {
        "namespace": "shop",
        "name": name,
        "uid": f"uid-{name}",
        "labels": labels or {},
        "ownerReferences": [{"uid": uid} for uid in owners],
        "annotations": {names.FRACTION: fraction} if fraction else {},
    }
    return PodView.from_object({"metadata": metadata, "spec": {"nodeName": "n1"}, "status": {"phase": phase}})


def share(name: str, *owners: str, selector: Json | None = None, phase: str = "Pending") -> GpuShare:
    metadata = {"name": name, "namespace": "shop", "ownerReferences": [{"uid": uid} for uid in owners]}
    spec = (
        {}
        if selector is None
        else {"selector": selector if "matchExpressions" in selector else {"matchLabels": selector}}
    )
    return GpuShare.from_object({"metadata": metadata, "spec": spec, "status": {"phase": phase}})


def test_a_pod_without_a_gpushare_is_told_and_then_its_gpushare() -> None:
    touched: list[Key] = []
    world = ClusterView(touched.append)
    world.put_pod(pod("a", "rs1"))
    assert touched == [PodKey("shop", "uid-a")]
    touched.clear()
    world.put_share(share("s", "rs1"))
    assert set(touched) == {ShareKey("shop", "s")}
    assert [p.name for p in world.pods_of(ShareKey("shop", "s"))] == ["a"]


def test_a_selector_wins_over_the_owner_and_gives_back() -> None:
    touched: list[Key] = []
    world = ClusterView(touched.append)
    world.put_share(share("made", "rs1"))
    world.put_pod(pod("a", "rs1", labels={"app": "web"}))
    world.put_share(share("own", selector={"app": "web"}))
    assert world.share_of_pod("uid-a") == ShareKey("shop", "own")
    touched.clear()
    world.drop_share("shop", "own")
    assert world.share_of_pod("uid-a") == ShareKey("shop", "made")
    assert ShareKey("shop", "made") in touched


def test_of_two_gpushares_that_select_a_pod_the_second_says_whose_it_is() -> None:
    touched: set[Key] = set()
    world = ClusterView(touched.add)
    first, second = ShareKey("shop", "a"), ShareKey("shop", "b")
    world.put_share(share("b", selector={"app": "web"}))
    world.put_pod(pod("one", labels={"app": "web"}))
    assert world.standing_of(second).overlaps == ()
    touched.clear()
    world.put_share(share("a", selector={"tier": "x"}))
    world.put_pod(pod("two", labels={"app": "web", "tier": "x"}))
    assert {first, second} <= touched, "the second one is told of a pod that it does not get"
    assert world.share_of_pod("uid-two") == first
    assert world.standing_of(second).overlaps == (("a", 1),)
    assert world.standing_of(first).overlaps == ()
    touched.clear()
    world.drop_pod("uid-two")
    assert second in touched
    assert world.standing_of(second).overlaps == ()
    world.put_pod(pod("two", labels={"app": "web", "tier": "x"}))
    touched.clear()
    world.drop_share("shop", "a")
    assert second in touched
    assert world.share_of_pod("uid-two") == second
    assert world.standing_of(second).overlaps == ()


def test_a_gpushare_deleted_under_running_pods_leaves_them_to_the_next() -> None:
    touched: set[Key] = set()
    world = ClusterView(touched.add)
    world.put_share(share("own", selector={"app": "web"}))
    world.put_pod(pod("a", "rs1", labels={"app": "web"}))
    touched.clear()
    world.drop_share("shop", "own")
    assert world.share_of_pod("uid-a") is None
    assert PodKey("shop", "uid-a") in touched, "it gets one of its owner's"
    world.put_share(share("made", "rs1"))
    assert world.share_of_pod("uid-a") == ShareKey("shop", "made")


def test_a_pod_with_the_label_but_no_annotation_is_not_ours() -> None:
    touched: list[Key] = []
    world = ClusterView(touched.append)
    world.put_pod(pod("a", fraction=None))
    assert (touched, dict(world.pods)) == ([], {})


def test_a_finished_pod_asks_for_no_gpushare() -> None:
    touched: list[Key] = []
    ClusterView(touched.append).put_pod(pod("a", phase="Succeeded"))
    assert touched == []


def test_what_a_node_reports_touches_only_those_it_changed() -> None:
    touched: list[Key] = []
    world = ClusterView(touched.append)
    for name in ("a", "b"):
        world.put_share(share(f"s-{name}", f"rs-{name}"))
        world.put_pod(pod(name, f"rs-{name}"))
    touched.clear()
    world.put_node("n1", {"uid-a": PodReport(0.5, 2.0), "uid-b": PodReport(1.0, 1.0)})
    assert set(touched) == {ShareKey("shop", "s-a"), ShareKey("shop", "s-b")}
    touched.clear()
    world.put_node("n1", {"uid-a": PodReport(0.4, 2.5), "uid-b": PodReport(1.0, 1.0)})
    assert touched == [ShareKey("shop", "s-a")]
    assert world.pod_reports_of(ShareKey("shop", "s-a")) == {"uid-a": PodReport(0.4, 2.5)}
    world.put_node("n1", {})
    assert world.pod_reports_of(ShareKey("shop", "s-a")) == {}


def test_reports_of_figures_alone_and_what_is_learnt_are_told_apart() -> None:
    touched: list[Key] = []
    measured: list[Key] = []
    world, key = ClusterView(touched.append, measured=measured.append), ShareKey("shop", "s")
    world.put_share(share("s", "rs"))
    world.put_pod(pod("a", "rs"))
    report = PodReport(0.9, 1.1, error_ratio=0.05, promise_ratio=0.6)
    for reported in (report, replace(report, progress_ratio=0.5)):
        touched.clear()
        world.put_node("n1", {"uid-a": reported})
        assert (touched, measured) == ([key], [])
    touched.clear()
    world.put_node("n1", {"uid-a": replace(report, progress_ratio=0.4)})
    world.learn(key, LearnedEffect("NVIDIA H200"))
    assert (touched, measured) == ([], [key, key])
    world.put_node("n1", {})
    assert touched == [key]


LABELS = st.dictionaries(st.sampled_from(["app", "tier"]), st.sampled_from(["x", "y"]))
UIDS = st.lists(st.sampled_from(["rs1", "rs2", "d1", "uid-p0"]), max_size=2, unique=True)
EXPRESSIONS = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {
                "key": st.sampled_from(["app", "tier"]),
                "operator": st.sampled_from(["In", "NotIn"]),
                "values": st.lists(st.sampled_from(["x", "y"]), min_size=1, max_size=3),
            }
        ),
        st.fixed_dictionaries(
            {"key": st.sampled_from(["app", "tier"]), "operator": st.sampled_from(["Exists", "DoesNotExist"])}
        ),
    ),
    max_size=2,
)
SELECTORS = st.fixed_dictionaries({"matchLabels": LABELS, "matchExpressions": EXPRESSIONS})
ACTIONS = st.one_of(
    st.tuples(st.just("pod"), st.integers(0, 3), UIDS, LABELS),
    st.tuples(st.just("share"), st.integers(0, 3), UIDS, st.none() | SELECTORS),
    st.tuples(st.sampled_from(["drop pod", "drop share"]), st.integers(0, 3), st.none(), st.none()),
)


@settings(max_examples=200)
@given(st.lists(ACTIONS, max_size=20))
def test_any_history_leaves_what_share_of_says(history: list[tuple[str, int, Any, Any]]) -> None:
    touched: set[Key] = set()
    world = ClusterView(touched.add)
    pods: dict[str, PodView] = {}
    shares: dict[str, GpuShare] = {}
    for what, number, owners, labels in history:
        if what == "pod":
            pods[f"p{number}"] = pod(f"p{number}", *owners, labels=labels)
            world.put_pod(pods[f"p{number}"])
        elif what == "share":
            shares[f"s{number}"] = share(f"s{number}", *owners, selector=labels)
            world.put_share(shares[f"s{number}"])
        elif what == "drop pod":
            pods.pop(f"p{number}", None)
            world.drop_pod(f"uid-p{number}")
        else:
            shares.pop(f"s{number}", None)
            world.drop_share("shop", f"s{number}")
    for one in pods.values():
        expected = share_of(one.labels, (*one.owner_uids, one.uid), shares.values())
        found = world.share_of_pod(one.uid)
        assert (found.name if found else None) == (expected.name if expected else None)
        assert (found or PodKey("shop", one.uid)) in touched, "whoever has work is told"
    for name, one_share in shares.items():
        mine = {p.uid for p in world.pods_of(ShareKey("shop", name))}
        assert mine == {p.uid for p in pods.values() if world.share_of_pod(p.uid) == ShareKey("shop", name)}
        selector = one_share.spec.selector
        others = Counter(
            found.name
            for p in pods.values()
            if selector is not None and selector.matches(p.labels)
            if (found := world.share_of_pod(p.uid)) is not None and found.name != name
        )
        assert dict(world.standing_of(ShareKey("shop", name)).overlaps) == others
    assert {p.uid for p in world.pods.values()} == {p.uid for p in pods.values()}


def test_a_selector_is_held_against_the_pods_that_may_match_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """600 GpuShares with selectors and 300 pods stood the operator still for 86 s."""
    asked = 0
    matches = LabelSelector.matches

    def counted(self: LabelSelector, labels: Mapping[str, str]) -> bool:
        nonlocal asked
        asked += 1
        return matches(self, labels)

    monkeypatch.setattr(LabelSelector, "matches", counted)
    world = ClusterView(lambda _: None)
    for number in range(200):
        world.put_pod(pod(f"p{number}", labels={"app": f"a{number}", "team": "one"}))
    for number in range(200):
        world.put_share(share(f"s{number:03}", selector={"app": f"a{number}", "team": "one"}))
    assert [world.share_of_pod(f"uid-p{n}") for n in (0, 199)] == [ShareKey("shop", f"s{n:03}") for n in (0, 199)]
    assert asked == 200, "each selector asked its own pod"
    for number in range(200, 400):
        world.put_share(share(f"s{number}", selector={"team": "one"}))
    assert asked == 200 + 200 * 200, "each selector asked each pod once, and nobody else again"
    assert world.share_of_pod("uid-p7") == ShareKey("shop", "s007")
