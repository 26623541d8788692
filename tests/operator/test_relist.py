"""What a list lacks of what was known before it is gone; what came in the meantime is not."""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from yarl import URL

from gpushare.core.admission import ShareKey
from gpushare.kube import GPUSHARES, Api, Page, Resource, Retryable
from gpushare_operator.intake import Intake
from gpushare_operator.relist import Relist, WatchedResource
from gpushare_operator.session import is_list
from gpushare_operator.world import ClusterView

Json = dict[str, Any]


def share(version: int, uid: str) -> Json:
    return {"metadata": {"namespace": "shop", "name": uid, "uid": uid, "resourceVersion": str(version)}}


class Pages:
    """Answers with these pages; `between` runs before each."""

    def __init__(self, *pages: Page, between: Callable[[], None] = lambda: None, fail: bool = False) -> None:
        self._pages, self._between, self._fail = pages, between, fail
        self.asked: list[tuple[str, str | None, str | None]] = []

    async def pages(
        self, resource: Resource, *, namespace: str | None, label_selector: str | None
    ) -> AsyncIterator[Page]:
        self.asked.append((resource.plural, namespace, label_selector))
        for page in self._pages:
            self._between()
            yield page
        if self._fail:
            raise Retryable("gone away", retry_after_seconds=0.0)


def made(api: Pages, namespace: str | None = None) -> tuple[Relist, Intake, ClusterView]:
    world = ClusterView(lambda _: None)
    intake = Intake(world)
    watched = WatchedResource(
        GPUSHARES,
        intake.share,
        intake.share_uids,
        intake.forget_shares,
        partial(intake.newest, GPUSHARES.kind),
        partial(intake.start_over, GPUSHARES.kind),
        "a=b",
    )
    return Relist(cast("Api", api), watched, namespace), intake, world


async def test_what_is_not_listed_any_more_is_forgotten() -> None:
    api = Pages(Page([share(4, "a")], "10"), Page([share(5, "new")], "10"))
    relist, intake, world = made(api)
    for obj in (share(3, "a"), share(3, "gone"), share(3, "gone too")):
        intake.share(obj)
    await relist.look()
    assert {key.name for key in world.shares} == {"a", "new"}
    assert relist.missed == 2
    assert relist.done.is_set()
    assert api.asked == [("gpushares", None, "a=b")]


async def test_what_is_made_during_the_list_stays() -> None:
    api = Pages(Page([], "10"), between=lambda: intake.share(share(12, "just made")))
    relist, intake, world = made(api)
    await relist.look()
    assert {key.name for key in world.shares} == {"just made"}
    assert relist.missed == 0


async def test_after_a_restore_from_a_backup_the_list_is_the_newest() -> None:
    """Its versions are lower than those known, and stay so for as many writes as the backup lacks."""
    api = Pages(Page([share(700, "a")], "720"))
    relist, intake, world = made(api)
    for obj in (share(900, "a"), share(901, "made since")):
        obj["spec"] = {"maxSlowdown": 9.0}
        intake.share(obj)
    intake.share(share(702, "a"))
    assert world.shares[ShareKey("shop", "a")].spec.max_slowdown == 9.0, "an old state, as far as is known yet"
    await relist.look()
    assert {key.name for key in world.shares} == {"a"}
    assert world.shares[ShareKey("shop", "a")].spec.max_slowdown is None
    intake.share(share(721, "b"))
    intake.share(share(722, "a"), deleted=True)
    intake.share(share(715, "a"))
    assert {key.name for key in world.shares} == {"b"}, "the newest state wins as before"


async def test_what_changes_during_a_list_is_no_restore() -> None:
    api = Pages(Page([share(5, "a")], "10"), Page([share(6, "b")], "10"), between=lambda: intake.share(new))
    new = share(12, "a") | {"spec": {"maxSlowdown": 9.0}}
    relist, intake, world = made(api)
    await relist.look()
    assert world.shares[ShareKey("shop", "a")].spec.max_slowdown == 9.0


async def test_a_list_that_breaks_off_forgets_nothing() -> None:
    relist, intake, world = made(Pages(Page([], "10"), fail=True))
    intake.share(share(3, "a"))
    with pytest.raises(Retryable):
        await relist.look()
    assert {key.name for key in world.shares} == {"a"}
    assert not relist.done.is_set()


async def test_another_namespace_is_left_alone() -> None:
    relist, intake, world = made(Pages(Page([], "10")), namespace="bank")
    intake.share(share(3, "a"))
    await relist.look()
    assert {key.name for key in world.shares} == {"a"}


async def test_each_list_of_kopfs_is_followed_by_one_of_ours() -> None:
    api = Pages(Page([], "10"))
    relist, _, _ = made(api, namespace="shop")
    task = asyncio.create_task(relist.run())
    for path in ("/apis/gpushare.io/v1alpha1/gpushares", "/api/v1/namespaces/shop/pods"):
        relist.kopf_listed(path)
    await asyncio.sleep(0)
    assert api.asked == []
    for _ in range(2):
        relist.done.clear()
        relist.kopf_listed("/behind/a/proxy/apis/gpushare.io/v1alpha1/namespaces/shop/gpushares")
        await asyncio.wait_for(relist.done.wait(), 30)
    assert len(api.asked) == 2
    task.cancel()


@pytest.mark.parametrize(
    ("method", "query", "status", "expected"),
    [
        ("get", "limit=500", 200, True),
        ("GET", "", 200, True),
        ("get", "limit=500&continue=xyz", 200, False),
        ("get", "watch=true&resourceVersion=5", 200, False),
        ("get", "", 503, False),
        ("patch", "", 200, False),
    ],
)
def test_a_list_is_told_from_other_requests(method: str, query: str, status: int, expected: bool) -> None:
    url = URL(f"https://server/api/v1/pods?{query}")
    request = SimpleNamespace(method=method, url=url, response=SimpleNamespace(status=status))
    assert is_list(cast("Any", request)) is expected
