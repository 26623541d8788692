"""What a list of Kopf's lacks of what was known before it is gone; what came in the meantime is not."""

import logging
from typing import Any

import pytest

from gpushare.core.admission import ShareKey
from gpushare.kube import GPUSHARES
from gpushare_operator.intake import Intake
from gpushare_operator.listings import KopfListings, KopfRefusals
from gpushare_operator.running import watched_resources
from gpushare_operator.world import ClusterView

Json = dict[str, Any]
EVERYWHERE = "/apis/gpushare.io/v1alpha1/gpushares"
SHOP = "/apis/gpushare.io/v1alpha1/namespaces/shop/gpushares"


def share(version: int, uid: str) -> Json:
    return {"metadata": {"namespace": "shop", "name": uid, "uid": uid, "resourceVersion": str(version)}}


def page(version: int, *items: Json, more: bool = False) -> Json:
    metadata = {"resourceVersion": str(version)} | ({"continue": "token"} if more else {})
    return {"metadata": metadata, "items": list(items)}


def made(namespace: str | None = None) -> tuple[KopfListings, Intake, ClusterView]:
    world = ClusterView(lambda _: None)
    intake = Intake(world)
    (watched,) = (each for each in watched_resources(intake) if each.resource is GPUSHARES)
    return KopfListings(watched, namespace), intake, world


def names(world: ClusterView) -> set[str]:
    return {key.name for key in world.shares}


def test_what_is_not_listed_any_more_is_forgotten_after_the_last_page() -> None:
    listings, intake, world = made()
    for obj in (share(3, "a"), share(3, "gone"), share(3, "gone too")):
        intake.share(obj)
    listings.begins(EVERYWHERE)
    listings.page(EVERYWHERE, page(10, share(4, "a"), more=True))
    assert names(world) == {"a", "gone", "gone too"}
    assert not listings.done.is_set()
    listings.page(EVERYWHERE, page(10, share(5, "new")))
    assert names(world) == {"a", "new"}
    assert listings.missed == 2
    assert listings.done.is_set()


def test_what_is_made_during_the_list_stays() -> None:
    listings, intake, world = made()
    listings.begins(EVERYWHERE)
    intake.share(share(12, "just made"))
    listings.page(EVERYWHERE, page(10))
    assert names(world) == {"just made"}
    assert listings.missed == 0


def test_after_a_restore_from_a_backup_the_list_is_the_newest() -> None:
    """Its versions are lower than those known, and stay so for as many writes as the backup lacks."""
    listings, intake, world = made()
    for obj in (share(900, "a"), share(901, "made since")):
        obj["spec"] = {"maxSlowdown": 9.0}
        intake.share(obj)
    intake.share(share(702, "a"))
    assert world.shares[ShareKey("shop", "a")].spec.max_slowdown == 9.0, "an old state, as far as is known yet"
    listings.begins(EVERYWHERE)
    listings.page(EVERYWHERE, page(720, share(700, "a")))
    assert names(world) == {"a"}
    assert world.shares[ShareKey("shop", "a")].spec.max_slowdown is None
    intake.share(share(721, "b"))
    intake.share(share(722, "a"), deleted=True)
    intake.share(share(715, "a"))
    assert names(world) == {"b"}, "the newest state wins as before"


def test_what_changes_during_a_list_is_no_restore() -> None:
    listings, intake, world = made()
    listings.begins(EVERYWHERE)
    listings.page(EVERYWHERE, page(10, share(5, "a"), more=True))
    intake.share(share(12, "a") | {"spec": {"maxSlowdown": 9.0}})
    listings.page(EVERYWHERE, page(10, share(6, "b")))
    assert world.shares[ShareKey("shop", "a")].spec.max_slowdown == 9.0


def test_a_list_that_breaks_off_and_begins_anew_forgets_nothing_of_what_the_second_one_has() -> None:
    listings, intake, world = made()
    intake.share(share(3, "a"))
    listings.begins(EVERYWHERE)
    listings.page(EVERYWHERE, page(10, share(4, "b"), more=True))
    assert names(world) == {"a", "b"}
    assert not listings.done.is_set()
    listings.begins(EVERYWHERE)
    listings.page(EVERYWHERE, page(11, share(3, "a")))
    assert names(world) == {"a"}
    assert listings.missed == 1


def test_a_page_that_no_request_announced_is_not_read() -> None:
    listings, intake, world = made()
    intake.share(share(3, "a"))
    listings.page(EVERYWHERE, page(10))
    assert names(world) == {"a"}
    assert not listings.done.is_set()


def test_other_namespaces_and_types_are_left_alone_and_a_prefix_of_the_address_is_not() -> None:
    listings, intake, world = made(namespace="shop")
    intake.share(share(3, "a"))
    for path in (EVERYWHERE, SHOP.replace("shop", "bank"), "/api/v1/namespaces/shop/pods"):
        listings.begins(path)
        listings.page(path, page(10))
    assert names(world) == {"a"}
    assert not listings.done.is_set()
    listings.begins(f"/behind/a/proxy{SHOP}")
    listings.page(f"/behind/a/proxy{SHOP}", page(10))
    assert names(world) == set()
    assert listings.done.is_set()


def test_an_object_of_another_namespace_is_none_that_this_list_lacks() -> None:
    listings, intake, world = made(namespace="bank")
    intake.share(share(3, "a"))
    path = SHOP.replace("shop", "bank")
    listings.begins(path)
    listings.page(path, page(10))
    assert names(world) == {"a"}


REFUSED, ALLOWED = 403, 200


def two_namespaces() -> tuple[KopfRefusals, dict[str, list[KopfListings]]]:
    """The lists of pods and GpuShares of two namespaces."""
    watched = watched_resources(Intake(ClusterView(lambda _: None)))
    found = {name: [KopfListings(each, name) for each in watched] for name in ("shop", "bank")}
    return KopfRefusals([each for listings in found.values() for each in listings]), found


def lists(listings: KopfListings) -> None:
    listings.begins(listings.path)
    listings.answered(listings.path, ALLOWED, 0.0)
    listings.page(listings.path, page(9))


def test_a_refusal_that_lasts_is_told_once_and_keeps_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    refusals, found = two_namespaces()
    for each in found["shop"]:
        lists(each)
    shares, pods = found["bank"]
    for now in (100.0, 104.0, 109.9):
        shares.answered(shares.path, REFUSED, now)
        refusals.look(now)
    assert not shares.done.is_set(), "an API server that starts refuses for a moment"
    assert (len(refusals), caplog.text) == (0, "")
    for now in (110.0, 118.0, 126.0, 9e9):
        shares.answered(shares.path, REFUSED, now)
        refusals.look(now)
    assert shares.done.is_set()
    assert pods.done.is_set()
    assert len(refusals) == 1
    (told,) = caplog.messages
    assert "may not list in namespace bank" in told
    assert (refusals.is_known("shop"), refusals.is_known("bank")) == (True, False)
    lists(shares)
    refusals.look(9e9)
    assert not refusals.is_known("bank"), "its pods were not listed yet"
    lists(pods)
    refusals.look(9e9)
    assert refusals.is_known("bank")
    assert len(refusals) == 0
    assert [each for each in caplog.messages if "bank" in each] == [
        told,
        "the operator may list and watch in namespace bank now",
    ]


def managed_pod(namespace: str, version: int, name: str) -> Json:
    metadata = {
        "namespace": namespace,
        "name": name,
        "uid": f"uid-{name}",
        "resourceVersion": str(version),
        "annotations": {"gpushare.io/fraction": "0.25"},
    }
    return {"metadata": metadata, "spec": {"nodeName": "n1", "containers": []}, "status": {"phase": "Running"}}


def test_what_was_known_of_a_namespace_that_is_refused_for_long_is_forgotten_until_a_list_has_it() -> None:
    """It may have been deleted for good while the watch was cut: its pods would be known until the next restart.

    One that was leaving would keep all other pods of its GPU from being moved.
    """
    world = ClusterView(lambda _: None)
    intake = Intake(world)
    shares, pods = (KopfListings(each, "bank") for each in watched_resources(intake))
    refusals = KopfRefusals([shares, pods])
    stays, ends = managed_pod("bank", 5, "stays"), managed_pod("bank", 6, "ends")
    account = share(4, "account")
    account["metadata"]["namespace"] = "bank"
    for listings, items in ((shares, [account]), (pods, [stays, ends])):
        listings.begins(listings.path)
        listings.page(listings.path, page(9, *items))
    intake.pod(managed_pod("shop", 8, "elsewhere"))
    assert not pods.must_list(pods.path)
    for now in (100.0, 109.9):
        pods.answered(pods.path, REFUSED, now)
        refusals.look(now)
    assert len(world.pods) == 3, "an API server that starts refuses for a moment"
    refusals.look(110.0)
    assert (set(world.pods), names(world)) == ({"uid-elsewhere"}, set())
    pods.answered(pods.path, ALLOWED, 200.0)
    refusals.look(200.0)
    assert pods.must_list(pods.path), "the watch alone would bring nothing that has not changed since"
    assert not refusals.is_known("bank")
    for listings, items in ((shares, [account]), (pods, [stays])):
        listings.begins(listings.path)
        listings.page(listings.path, page(20, *items))
    assert (set(world.pods), names(world)) == ({"uid-elsewhere", "uid-stays"}, {"account"})
    assert not pods.must_list(pods.path)
    assert refusals.is_known("bank")


def test_nothing_is_forgotten_where_all_namespaces_are_watched() -> None:
    """No namespace's end leads to a refusal there; the API server's own trouble with its roles does."""
    listings, intake, world = made()
    intake.share(share(3, "a"))
    refusals = KopfRefusals([listings])
    listings.answered(EVERYWHERE, REFUSED, 0.0)
    refusals.look(60.0)
    assert names(world) == {"a"}


def test_a_list_that_was_open_when_all_was_forgotten_is_no_whole_one() -> None:
    """Its first page's objects are among the forgotten ones."""
    listings, _, world = made("shop")
    listings.begins(SHOP)
    listings.page(SHOP, page(9, share(3, "a"), more=True))
    listings.forget()
    listings.page(SHOP, page(9, share(4, "b")))
    assert (names(world), listings.must_list(SHOP)) == (set(), True)
    listings.begins(SHOP)
    listings.page(SHOP, page(9, share(3, "a"), share(4, "b")))
    assert (names(world), listings.must_list(SHOP)) == ({"a", "b"}, False)


def test_a_refusal_that_ends_within_moments_is_none() -> None:
    refusals, found = two_namespaces()
    shares, _ = found["bank"]
    shares.answered(shares.path, REFUSED, 100.0)
    refusals.look(100.0)
    shares.answered(shares.path, 503, 105.0)
    assert not refusals.is_known("bank")
    shares.answered(found["shop"][0].path, ALLOWED, 106.0)
    assert shares.refused_since == 100.0, "an answer about another namespace"
    shares.answered(shares.path, ALLOWED, 107.0)
    refusals.look(200.0)
    assert len(refusals) == 0
    assert not shares.done.is_set()


def test_after_a_refused_list_the_whole_list_has_to_come_and_after_a_refused_watch_it_goes_on() -> None:
    refusals, found = two_namespaces()
    shares, pods = found["bank"]
    for each in (shares, pods):
        lists(each)
    pods.answered(pods.path, REFUSED, 50.0)
    assert not refusals.is_known("bank")
    pods.answered(pods.path, ALLOWED, 51.0)
    assert refusals.is_known("bank"), "the watch continues where it was"
    pods.begins(pods.path)
    pods.answered(pods.path, REFUSED, 60.0)
    pods.answered(pods.path, ALLOWED, 61.0)
    pods.page(pods.path, page(11, more=True))
    assert not refusals.is_known("bank")
    pods.answered(pods.path, ALLOWED, 61.0)
    pods.page(pods.path, page(11))
    assert refusals.is_known("bank")


def test_without_namespaces_a_refusal_is_told_and_the_start_waits(caplog: pytest.LogCaptureFixture) -> None:
    listings, _, _ = made()
    refusals = KopfRefusals([listings])
    listings.answered(EVERYWHERE, REFUSED, 0.0)
    refusals.look(60.0)
    assert "may not list in all namespaces" in caplog.text
    assert not listings.done.is_set(), "there is nothing else to do"
    assert not refusals.is_known("shop")


def test_an_answer_tells_whether_anything_has_changed_so_that_repeated_refusals_cost_nothing() -> None:
    _, found = two_namespaces()
    shares, _ = found["bank"]
    answers = [REFUSED, REFUSED, 503, REFUSED, ALLOWED, ALLOWED, REFUSED]
    assert [shares.answered(shares.path, status, 100.0 + at) for at, status in enumerate(answers)] == [
        True,
        False,
        False,
        False,
        True,
        False,
        True,
    ]
    assert not shares.answered(found["shop"][0].path, ALLOWED, 200.0), "an answer about another namespace"
    lists(shares)
    shares.begins(shares.path)
    assert shares.answered(shares.path, REFUSED, 300.0), "its list is asked for again"
    assert not shares.is_known
