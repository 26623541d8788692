"""The benchmarks' API server answers a reader as the shipped fake does, which is held to a real API server."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from bench.fakeapi import PagedApiServer

from gpushare.core.api import MANAGED_SELECTOR, PodView, names
from gpushare.kube import GPUNODES, GPUSHARES, NODES, PODS, Api, Resource, connect
from gpushare.kube.fake import FakeApi

LISTS = [
    (NODES, None),
    (GPUNODES, None),
    (GPUSHARES, None),
    (PODS, MANAGED_SELECTOR),
    (PODS, names.UNMANAGED_SELECTOR),
]
"""Everything that the extender lists."""


@pytest.fixture
def paged() -> PagedApiServer:
    return PagedApiServer(
        nodes=6,
        gpus=2,
        tenants=9,
        other_pods=25,
        waiting=3,
        events_per_second=1000.0,
        turnover_per_second=1000.0,
        profiled=True,
    )


@pytest.fixture
async def bench_api(paged: PagedApiServer, tmp_path: Path) -> AsyncIterator[Api]:
    app = web.Application()
    app.router.add_get("/{path:.*}", paged.handle)
    async with TestServer(app) as server:
        path = tmp_path / "kubeconfig"
        address = str(server.make_url("")).rstrip("/")
        path.write_text(
            f"""{{apiVersion: v1, kind: Config, current-context: c,
clusters: [{{name: c, cluster: {{server: "{address}"}}}}],
users: [{{name: c, user: {{token: t}}}}], contexts: [{{name: c, context: {{cluster: c, user: c}}}}]}}"""
        )
        async with connect(path) as connected:
            yield connected


@pytest.fixture
def shipped(paged: PagedApiServer) -> FakeApi:
    """The shipped fake with the same objects."""
    api = FakeApi()
    for resource in (NODES, GPUNODES, GPUSHARES, PODS):
        for raw in paged.items[resource.plural]:
            api.store.put(resource, orjson.loads(raw))
    for raw in paged.other_pods[:]:
        api.store.put(PODS, orjson.loads(raw))
    return api


def told(obj: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """An object without the version that a server gives it, and what to sort it by."""
    metadata = {key: value for key, value in obj["metadata"].items() if key != "resourceVersion"}
    return f"{metadata.get('namespace')}/{metadata['name']}", {**obj, "metadata": metadata}


async def listed(api: Api, resource: Resource, selector: str | None, limit: int) -> list[Any]:
    """All objects of a list, by name; a list says how old it is."""
    pages = [page async for page in api.pages(resource, label_selector=selector, limit=limit)]
    assert all(page.resource_version for page in pages)
    assert not limit or all(len(page.items) == limit for page in pages[:-1])
    return sorted((told(obj) for page in pages for obj in page.items), key=lambda one: one[0])


@pytest.mark.parametrize(("resource", "selector"), LISTS)
@pytest.mark.parametrize("limit", [0, 3, 1000])
async def test_a_reader_gets_the_same_lists_whole_and_in_pages(bench_api, shipped, resource, selector, limit):
    found = await listed(bench_api, resource, selector, limit)
    assert found
    assert found == await listed(shipped, resource, selector, limit)


async def test_a_watch_tells_of_objects_that_were_listed(bench_api, shipped):
    for api in (bench_api, shipped):
        listing = await api.list(GPUNODES, lambda obj: obj["metadata"]["name"])
        if api is shipped:  # the other one changes them by itself
            name = listing.items[0]
            shipped.store.put(GPUNODES, shipped.store.objects(GPUNODES)[name])
        seen = []
        async with contextlib.aclosing(api.watch(GPUNODES, resource_version=listing.resource_version)) as events:
            async for event in events:
                seen.append((event.type, event.object["metadata"]["name"] in listing.items))
                if len(seen) == (1 if api is shipped else 2 * len(listing.items)):
                    break
        assert set(seen) == {("MODIFIED", True)}


async def test_where_tenants_come_and_go_each_that_leaves_is_followed_by_one_that_fits(bench_api, paged):
    listing = await bench_api.list(PODS, PodView.from_object)
    left, came = {}, []
    async with contextlib.aclosing(bench_api.watch(PODS, resource_version=listing.resource_version)) as events:
        async for event in events:
            pod = PodView.from_object(event.object)
            if event.type == "DELETED":
                left[pod.uid] = pod
            else:
                came.append(pod)
            if len(came) == len(paged.placed):
                break
    assert left.keys() <= {pod.uid for pod in listing.items}
    for before, after in zip(left.values(), came, strict=True):
        assert after.decision is not None
        assert before.decision is not None
        assert (after.node, after.decision.gpu_uuids) == (before.node, before.decision.gpu_uuids)
        assert after.limit_percent <= before.limit_percent
