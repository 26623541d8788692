"""What the fake API server promises, and the real one keeps: both are asked the same questions."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestServer
from tests.operator.conftest import api_server, kubeconfig  # noqa: F401 - fixtures: a real API server

from gpushare.kube import PODS, AlreadyExists, Api, Conflict, Gone, Invalid, NotFound, PatchType, connect
from gpushare.kube.fake import FakeApi, ObjectStore, app

PATIENCE_SECONDS = 60.0
NAMESPACE = "default"
_names = (f"pod-{number}" for number in itertools.count())


REAL = pytest.param("real", marks=[pytest.mark.integration, pytest.mark.own_server])


@pytest.fixture(params=["in process", "over HTTP", REAL])
async def api(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Api]:
    if request.param == "in process":
        yield FakeApi()
    elif request.param == "over HTTP":
        async with TestServer(app(ObjectStore())) as server:
            path = tmp_path / "kubeconfig"
            path.write_text(
                f"""{{apiVersion: v1, kind: Config, current-context: c,
clusters: [{{name: c, cluster: {{server: "{str(server.make_url("")).rstrip("/")}"}}}}],
users: [{{name: c, user: {{token: t}}}}], contexts: [{{name: c, context: {{cluster: c, user: c}}}}]}}"""
            )
            async with connect(path) as connected:
                yield connected
    else:
        async with connect(request.getfixturevalue("kubeconfig")) as connected:
            yield connected


def pod(name: str, **labels: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels},
        "spec": {"schedulerName": "nobody", "containers": [{"name": "c", "image": "none"}]},
    }


@pytest.fixture
def create(api: Api) -> Callable[..., Any]:
    async def made(**labels: str) -> dict[str, Any]:
        return await api.create(PODS, pod(next(_names), **labels), namespace=NAMESPACE)

    return made


async def test_what_is_created_is_there_once(api, create):
    made = await create()
    name = made["metadata"]["name"]
    read = await api.get(PODS, name, namespace=NAMESPACE)
    assert read["metadata"]["uid"] == made["metadata"]["uid"]
    assert int(read["metadata"]["resourceVersion"]) > 0
    with pytest.raises(AlreadyExists):
        await api.create(PODS, pod(name), namespace=NAMESPACE)
    with pytest.raises(NotFound):
        await api.get(PODS, "nobody", namespace=NAMESPACE)


async def test_lists_are_selected_and_paged(api, create):
    names = sorted([(await create(set="paged", odd=str(i % 2)))["metadata"]["name"] for i in range(5)])
    await create()

    async def listed(**query: Any) -> list[str]:
        pages = [page.items async for page in api.pages(PODS, **query)]
        return sorted(one["metadata"]["name"] for page in pages for one in page)

    assert await listed(label_selector="set=paged") == names
    assert await listed(label_selector="set=paged", limit=2, namespace=NAMESPACE) == names
    assert len(await listed(label_selector="set=paged,odd!=1")) == 3
    assert len(await listed(label_selector="set,odd=1")) == 2
    assert await listed(label_selector="set=paged", field_selector="spec.nodeName!=") == []
    await api.bind(
        names[0],
        "n1",
        namespace=NAMESPACE,
        uid=(await api.get(PODS, names[0], namespace=NAMESPACE))["metadata"]["uid"],
    )
    assert await listed(label_selector="set=paged", field_selector="spec.nodeName=n1") == names[:1]


async def test_a_watch_tells_what_matches_its_selector(api, create):
    seen: asyncio.Queue[tuple[str, str, str]] = asyncio.Queue()
    before = await create(watched="yes")
    listing = await api.list(PODS, lambda obj: obj, label_selector="watched=yes")

    async def follow() -> None:
        async for event in api.watch(
            PODS, resource_version=listing.resource_version, label_selector="watched=yes"
        ):
            if event.type != "BOOKMARK":
                metadata = event.object["metadata"]
                assert int(metadata["resourceVersion"]) > int(listing.resource_version)
                seen.put_nowait((event.type, metadata["name"], metadata["labels"].get("step", "")))

    watching = asyncio.create_task(follow())
    try:
        made = await create(watched="yes")
        name, first = made["metadata"]["name"], before["metadata"]["name"]
        for labels in ({"step": "2"}, {"watched": "no"}, {"watched": "yes"}):
            await api.patch(PODS, name, {"metadata": {"labels": labels}}, namespace=NAMESPACE)
        await api.delete(PODS, first, namespace=NAMESPACE, grace_seconds=0)
        told = [await asyncio.wait_for(seen.get(), PATIENCE_SECONDS) for _ in range(5)]
        if told[-1][0] == "MODIFIED":  # a real server may mark a pod before it deletes it
            told[-1] = await asyncio.wait_for(seen.get(), PATIENCE_SECONDS)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    assert told == [
        ("ADDED", name, ""),
        ("MODIFIED", name, "2"),
        ("DELETED", name, "2"),
        ("ADDED", name, "2"),
        ("DELETED", first, ""),
    ]


async def test_a_group_that_is_not_served_has_no_versions(api):
    assert await api.versions_of("nobody.example.com") == ()


async def test_a_patch_merges_and_minds_its_preconditions(api, create):
    made = await create(a="1", b="2")
    name, metadata = made["metadata"]["name"], made["metadata"]
    body = {"metadata": {"uid": metadata["uid"], "labels": {"a": None, "c": "3"}}}
    patched = await api.patch(PODS, name, body, namespace=NAMESPACE)
    assert patched["metadata"]["labels"] == {"b": "2", "c": "3"}
    assert int(patched["metadata"]["resourceVersion"]) > int(metadata["resourceVersion"])
    again = await api.patch(PODS, name, body, namespace=NAMESPACE)
    assert again["metadata"]["resourceVersion"] == patched["metadata"]["resourceVersion"], "nothing to write"
    stale = {"resourceVersion": metadata["resourceVersion"], "labels": {"d": "4"}}
    with pytest.raises(Conflict):
        await api.patch(PODS, name, {"metadata": stale}, namespace=NAMESPACE)
    with pytest.raises(Invalid):
        await api.patch(PODS, name, {"metadata": {"uid": "another", "labels": {"d": "4"}}}, namespace=NAMESPACE)
    operations = [{"op": "replace", "path": "/metadata/labels/b", "value": "5"}]
    patched = await api.patch(PODS, name, operations, namespace=NAMESPACE, patch_type=PatchType.JSON)
    assert patched["metadata"]["labels"] == {"b": "5", "c": "3"}
    with pytest.raises(NotFound):
        await api.patch(PODS, "nobody", body, namespace=NAMESPACE)


async def test_a_status_is_written_apart_from_the_rest(api, create):
    name = (await create())["metadata"]["name"]
    both = {"metadata": {"labels": {"x": "1"}}, "status": {"message": "told"}}
    patched = await api.patch(PODS, name, both, namespace=NAMESPACE)
    assert patched["metadata"]["labels"]["x"] == "1"
    assert "message" not in (patched.get("status") or {})
    patched = await api.patch(
        PODS, name, {"status": {"message": "told"}}, namespace=NAMESPACE, subresource="status"
    )
    assert patched["status"]["message"] == "told"
    assert patched["metadata"]["labels"]["x"] == "1"


async def test_a_binding_is_of_that_very_pod_and_only_once(api, create):
    metadata = (await create())["metadata"]
    name, uid = metadata["name"], metadata["uid"]
    with pytest.raises(Conflict):
        await api.bind(name, "n1", namespace=NAMESPACE, uid="another")
    await api.bind(name, "n1", namespace=NAMESPACE, uid=uid, annotations={"gpushare.io/note": "here"})
    bound = await api.get(PODS, name, namespace=NAMESPACE)
    assert (bound["spec"]["nodeName"], bound["metadata"]["annotations"]["gpushare.io/note"]) == ("n1", "here")
    with pytest.raises(Conflict):
        await api.bind(name, "n2", namespace=NAMESPACE, uid=uid)
    with pytest.raises(NotFound):
        await api.bind("nobody", "n1", namespace=NAMESPACE, uid=uid)


async def test_a_deletion_is_of_that_very_pod(api, create):
    metadata = (await create())["metadata"]
    with pytest.raises(Conflict):
        await api.delete(PODS, metadata["name"], namespace=NAMESPACE, uid="another", grace_seconds=0)
    await api.delete(PODS, metadata["name"], namespace=NAMESPACE, uid=metadata["uid"], grace_seconds=0)
    with pytest.raises(NotFound):
        await api.get(PODS, metadata["name"], namespace=NAMESPACE)


async def test_a_put_needs_the_version_it_was_read_at(api, create):
    made = await create()
    name = made["metadata"]["name"]
    read = await api.get(PODS, name, namespace=NAMESPACE)
    read["metadata"]["labels"] = {"put": "1"}
    written = await api.replace(PODS, name, read, namespace=NAMESPACE)
    assert written["metadata"]["labels"] == {"put": "1"}
    read["metadata"]["labels"] = {"put": "2"}
    with pytest.raises(Conflict):
        await api.replace(PODS, name, read, namespace=NAMESPACE)


async def test_a_forgotten_version_is_gone():
    api = FakeApi()
    await api.create(PODS, pod("a"), namespace=NAMESPACE)
    version = (await api.list(PODS, lambda obj: obj)).resource_version
    api.store.forget_history()
    with pytest.raises(Gone):
        async for _ in api.watch(PODS, resource_version=version):
            pass
    version = (await api.list(PODS, lambda obj: obj)).resource_version
    api.store.break_watches()
    watch = api.watch(PODS, resource_version=version)
    await api.create(PODS, pod("b"), namespace=NAMESPACE)
    assert (await anext(watch)).object["metadata"]["name"] == "b"
