"""Kopf compares and copies nothing of the objects that our handlers only observe."""

import copy
from typing import Any

import kopf
import pytest

from gpushare_operator import handlers
from gpushare_operator.storages import NoDiffBase, NoProgress, NothingStoredError

BODY = {"metadata": {"name": "s", "uid": "u", "annotations": {"a": "b"}}, "spec": {"x": 1}, "status": {"y": [2]}}


async def configured() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    await handlers.configure(settings=settings)
    return settings


async def test_no_part_of_an_object_is_copied_to_compare_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Kopf asks of its storages at each event, whatever the handlers are."""
    persistence = (await configured()).persistence
    copies: list[object] = []
    monkeypatch.setattr(copy, "deepcopy", lambda value: copies.append(value) or value)
    body: Any = kopf.Body(BODY)  # type: ignore[arg-type]
    assert persistence.diffbase_storage.fetch(body=body) is None
    essence = persistence.diffbase_storage.build(body=body, extra_fields=())
    assert persistence.progress_storage.clear(essence=essence) == {}
    assert persistence.progress_storage.fetch(key="h", body=body) is None  # type: ignore[arg-type]
    assert copies == []


def test_a_handler_that_needs_them_fails_loudly() -> None:
    """`on.update` and its like would see no change ever: whoever adds one must give Kopf its storages back."""
    with pytest.raises(NothingStoredError, match="compares no objects"):
        NoDiffBase().store()
    with pytest.raises(NothingStoredError, match="stores no progress"):
        NoProgress().store()


def test_all_handlers_only_observe() -> None:
    registry: Any = kopf.get_default_registry()
    assert [each.id for each in registry._watching.get_all_handlers()] == ["gpushare_changed", "pod_changed"]
    for kind in (registry._changing, registry._spawning, registry._indexing):
        assert list(kind.get_all_handlers()) == []


async def test_an_object_goes_from_kopf_to_the_handler() -> None:
    """Through Kopf's own work on an event: with our storages it calls the handler and writes nothing."""
    from kopf._cogs.structs.references import Resource  # noqa: PLC0415 - Kopf has no public way to feed an event
    from kopf._core.engines.indexing import OperatorIndexers  # noqa: PLC0415
    from kopf._core.reactor.inventory import ResourceMemories  # noqa: PLC0415
    from kopf._core.reactor.processing import process_resource_event  # noqa: PLC0415

    seen: list[tuple[Any, bool]] = []

    class Intake:
        def share(self, obj: Any, *, deleted: bool) -> None:
            seen.append((obj, deleted))

    class Running:
        intake = Intake()

    process: Any = process_resource_event
    for kind in (None, "MODIFIED", "DELETED"):
        patched = await process(
            lifecycle=kopf.lifecycles.all_at_once,
            indexers=OperatorIndexers(),
            registry=kopf.get_default_registry(),
            settings=await configured(),
            memories=ResourceMemories(),
            memobase=kopf.Memo(operator=Running()),
            resource=Resource("gpushare.io", "v1alpha1", "gpushares", namespaced=True),
            raw_event={"type": kind, "object": BODY},
            event_queue=None,
        )
        assert patched is None
    assert seen == [(BODY, False), (BODY, False), (BODY, True)]
