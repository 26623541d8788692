"""What a list of Kopf's lacks of what was known before it is gone; what came in the meantime is not."""

from typing import Any

from gpushare.core.admission import ShareKey
from gpushare.kube import GPUSHARES
from gpushare_operator.intake import Intake
from gpushare_operator.listings import KopfListings, KopfNamespaces
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


def test_nobody_waits_for_lists_of_namespaces_that_do_not_exist() -> None:
    found = {name: made(namespace=name)[0] for name in ("shop", "bank", "leaving", None)}
    namespaces = KopfNamespaces(found.values())
    path = "/api/v1/namespaces"
    leaving = {"metadata": {"name": "leaving", "deletionTimestamp": "2026-11-29T06:00:00Z"}}
    namespaces.begins(path)
    namespaces.page("/api/v1/namespaces/shop/pods", page(9))
    namespaces.page(path, page(10, {"metadata": {"name": "other"}}, more=True))
    assert not any(each.done.is_set() for each in found.values()), "there are more pages"
    namespaces.page(path, page(10, {"metadata": {"name": "shop"}}, leaving))
    assert {name for name, each in found.items() if each.done.is_set()} == {"bank", "leaving"}
