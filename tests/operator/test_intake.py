"""Whatever order events, lists and answers come in, the newest state of each object stands."""

from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.core.admission import ShareKey
from gpushare.core.api import GpuShare, PodView, names
from gpushare.kube import GPUSHARES, PODS
from gpushare_operator.intake import Intake
from gpushare_operator.world import ClusterView

Json = dict[str, Any]
KEY = ShareKey("shop", "s")


def share(version: int, uid: str = "one", name: str = "s", namespace: str = "shop") -> Json:
    metadata = {"namespace": namespace, "name": name, "uid": uid, "resourceVersion": str(version)}
    return {"metadata": {**metadata, "generation": version}}


def pod(version: int, uid: str = "p", node: str = "n1") -> Json:
    metadata = {"namespace": "shop", "name": "p", "uid": uid, "annotations": {names.FRACTION: "0.5"}}
    return {"metadata": {**metadata, "resourceVersion": str(version)}, "spec": {"nodeName": node}}


def made() -> tuple[Intake, ClusterView]:
    world = ClusterView(lambda _: None)
    return Intake(world), world


def test_a_gpushare_deleted_and_made_anew_is_the_new_one_in_any_order() -> None:
    """Kopf has a task for each uid: the new one's first event can overtake the old one's last."""
    events = [(share(5, "old"), False), (share(7, "old"), True), (share(8, "new"), False)]
    for order in permutations(events):
        intake, world = made()
        for obj, deleted in order:
            intake.share(obj, deleted=deleted)
        assert world.shares[KEY].uid == "new"


def test_a_late_word_brings_no_deleted_object_back() -> None:
    intake, world = made()
    intake.share(share(9), deleted=True)
    intake.share(share(8))
    intake.pod(pod(9), deleted=True)
    intake.pod(pod(8))
    assert (dict(world.shares), dict(world.pods)) == ({}, {})
    intake.share(share(12, "new"))
    assert world.shares[KEY].uid == "new"


@given(st.permutations(range(1, 7)))
def test_the_newest_version_stands(order: list[int]) -> None:
    intake, world = made()
    for version in order:
        intake.share(share(version))
        intake.pod(pod(version, node=f"n{version}"))
    assert world.shares[KEY].generation == 6
    assert world.pods["p"].node == "n6"


def test_what_is_forgotten_is_gone_for_older_words_only() -> None:
    intake, world = made()
    intake.share(share(3))
    intake.share(share(4, "other", "t"))
    intake.pod(pod(5))
    assert intake.forget_shares({"one", "never known"}, 10) == 1
    assert intake.forget_pods({"p", "never known"}, 10) == 1
    intake.share(share(9))
    intake.pod(pod(9))
    assert {key.name for key in world.shares} == {"t"}
    assert dict(world.pods) == {}
    intake.share(share(11, "made anew"))
    assert intake.forget_shares({"one"}, 12) == 0, "another object by now"
    assert world.shares[KEY].uid == "made anew"


def test_known_uids_are_told_by_namespace() -> None:
    intake, _ = made()
    intake.share(share(1))
    intake.share(share(2, "two", namespace="bank"))
    intake.pod(pod(3))
    assert (intake.share_uids("shop"), intake.share_uids("bank")) == ({"one"}, {"two"})
    assert intake.share_uids(None) == {"one", "two"}
    assert (intake.pod_uids("shop"), intake.pod_uids("bank"), intake.pod_uids(None)) == ({"p"}, set(), {"p"})


def test_bad_objects_are_counted_and_stay_as_they_were() -> None:
    intake, world = made()
    intake.share(share(1))
    bad = share(2)
    bad["metadata"]["ownerReferences"] = ["nobody"]
    intake.share(bad)
    intake.pod({"metadata": {"uid": "q", "namespace": "shop"}})
    assert {kind: bad.count for kind, bad in intake.bad_objects.items()} == {GPUSHARES.kind: 1, PODS.kind: 1}
    assert world.shares[KEY].generation == 1


def broken_share(version: int, uid: str = "one") -> Json:
    obj = share(version, uid)
    obj["metadata"]["ownerReferences"] = ["nobody"]
    return obj


def broken_pod(version: int, uid: str = "p") -> Json:
    obj = pod(version, uid)
    obj["metadata"]["ownerReferences"] = ["nobody"]
    return obj


def present(intake: Intake) -> tuple[set[str], set[str]]:
    shares, pods = (intake.bad_objects[kind].present for kind in (GPUSHARES.kind, PODS.kind))
    return set(shares), set(pods)


def test_an_object_is_bad_until_it_is_mended() -> None:
    intake, _ = made()
    for version in (1, 2, 3):
        intake.share(broken_share(version))
        intake.pod(broken_pod(version))
    assert [bad.count for bad in intake.bad_objects.values()] == [3, 3]
    assert present(intake) == ({"one"}, {"p"})
    intake.share(share(4))
    intake.pod(pod(4))
    assert present(intake) == (set(), set())


def test_a_deletion_ends_what_was_bad_of_that_object_alone() -> None:
    """The word of the earlier object's deletion comes late, after the one that has its name."""
    intake, _ = made()
    intake.share(broken_share(1, "old"))
    intake.pod(broken_pod(1, "old"))
    intake.share(broken_share(5, "new"))
    intake.pod(broken_pod(5, "new"))
    intake.share(broken_share(3, "old"), deleted=True)
    intake.pod(broken_pod(3, "old"), deleted=True)
    assert present(intake) == ({"new"}, {"new"})
    intake.share(broken_share(6, "new"), deleted=True)
    intake.pod(broken_pod(6, "new"), deleted=True)
    assert present(intake) == (set(), set())


def test_bad_objects_that_a_list_lacks_are_forgotten() -> None:
    intake, _ = made()
    intake.share(broken_share(1))
    intake.pod(broken_pod(1))
    assert (intake.share_uids("shop"), intake.pod_uids(None)) == ({"one"}, {"p"})
    assert (intake.share_uids("bank"), intake.pod_uids("bank")) == (set(), set())
    assert (intake.forget_shares({"one"}, 9), intake.forget_pods({"p"}, 9)) == (0, 0)
    assert present(intake) == (set(), set())


def test_a_state_that_comes_again_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists are read twice, and the watch repeats each answer: of 10,000 GpuShares that is seconds of work."""
    read: list[str] = []
    for kind in (GpuShare, PodView):
        real = kind.from_object
        monkeypatch.setattr(kind, "from_object", lambda obj, real=real: read.append(obj["kind"]) or real(obj))
    intake, world = made()
    for version in (3, 3, 4, 4, 3):
        intake.share({**share(version), "kind": "GpuShare"})
        intake.pod({**pod(version), "kind": "Pod"})
    assert read == ["GpuShare", "Pod"] * 2
    assert world.shares[KEY].generation == 4


def test_a_deletion_counts_at_the_version_that_is_known() -> None:
    intake, world = made()
    intake.share(share(3))
    intake.pod(pod(3))
    intake.share(share(3), deleted=True)
    intake.pod(pod(3), deleted=True)
    intake.share(share(3))
    intake.pod(pod(3))
    assert (dict(world.shares), dict(world.pods)) == ({}, {})


def test_objects_without_a_version_are_read_each_time() -> None:
    intake, world = made()
    for node in ("n1", "n2"):
        intake.pod(pod(0, node=node))
    assert world.pods["p"].node == "n2"
