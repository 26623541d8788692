"""The operator's own part, in process: lists, GpuShares for pods, statuses; the API answers from memory.

    python -m bench operator [--live]

What is timed is what the operator does; a real API server adds its own time for each of the counted calls. So the
objects lie in plain dictionaries, not in the shipped fake's store (gpushare.kube.fake): that one copies an object
three times at each write, in the same process, which would count as the operator's processor time and its stalls.
"""

import argparse
import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, cast

from bench.operator_live import describe, measure_live
from gpushare.core.admission import Defaults
from gpushare.core.api import Decision, names
from gpushare.core.control import OperatorSettings
from gpushare.kube import GPUSHARES, PODS, AlreadyExists, Api, Page, Resource
from gpushare_operator.listings import KopfListings, WatchedResource
from gpushare_operator.metrics import OperatorMetrics
from gpushare_operator.reconciler import ShareReconciler
from gpushare_operator.running import watched_resources

Json = dict[str, Any]
PAGE = 500
MADE_AT = "2026-11-22T00:00:00Z"


@dataclass(frozen=True)
class Scene:
    """Numbers of GpuShares with a selector, of pods, and of namespaces.

    `hostile`: every selector asks for the same label, which every pod has, and leaves out what no pod has.
    `pods_first`: the pods are there when the GpuShares come, so that each of those may concern all of them.
    """

    shares: int
    pods: int
    namespaces: int
    hostile: bool = False
    pods_first: bool = False

    def share(self, i: int) -> Json:
        app = {"app": "web"} if self.hostile else {"app": f"app-{i}"}
        selector: Json = {"matchLabels": app}
        if self.hostile:
            selector["matchExpressions"] = [{"key": "tier", "operator": "NotIn", "values": [f"t{i}", "all"]}]
        metadata = {"name": f"s-{i}", "namespace": f"team-{i % self.namespaces}", "uid": f"share-{i}"}
        return {"metadata": {**metadata, "generation": 1}, "spec": {"selector": selector}}

    def pod(self, i: int) -> Json:
        annotations = {names.FRACTION: "0.25"}
        annotations |= Decision((f"GPU-{i // 4}",), 25, 8192, MADE_AT).to_annotations()
        labels = {"app": "web" if self.hostile else f"app-{i}", "tier": "x", names.MANAGED_LABEL: "true"}
        metadata = {"name": f"p-{i}", "namespace": f"team-{i % self.namespaces}", "uid": f"pod-{i}"}
        return {
            "metadata": {**metadata, "labels": labels, "annotations": annotations, "creationTimestamp": MADE_AT},
            "spec": {"nodeName": f"n-{i // 32}"},
        }


class Memory:
    """An API whose objects lie in memory; each call takes one turn of the loop."""

    def __init__(self, scene: Scene) -> None:
        self.calls: Counter[str] = Counter()
        self._version = itertools.count(1)
        self._objects = {
            GPUSHARES.plural: self._stored(map(scene.share, range(scene.shares))),
            PODS.plural: self._stored(map(scene.pod, range(scene.pods))),
        }

    def _stored(self, objects: Iterator[Json]) -> dict[tuple[str, str], Json]:
        made = {}
        for obj in objects:
            metadata = obj["metadata"]
            metadata["resourceVersion"] = str(next(self._version))
            made[metadata["namespace"], metadata["name"]] = obj
        return made

    def shares(self) -> list[Json]:
        return list(self._objects[GPUSHARES.plural].values())

    async def pages(self, resource: Resource, **_: Any) -> AsyncIterator[Page]:
        objects = list(self._objects[resource.plural].values())
        for start in range(0, len(objects), PAGE):
            await asyncio.sleep(0)
            yield Page(objects[start : start + PAGE], str(next(self._version)))

    async def get(self, resource: Resource, name: str, *, namespace: str) -> Json:
        await self._call("get", resource)
        return self._objects[resource.plural][namespace, name]

    async def create(self, resource: Resource, body: Json, *, namespace: str) -> Json:
        await self._call("create", resource)
        if resource.plural not in self._objects:
            return body
        key = namespace, body["metadata"]["name"]
        if key in self._objects[resource.plural]:
            raise AlreadyExists("it is there", status=409)
        uid = f"made-{len(self._objects[resource.plural])}"
        metadata = {**body["metadata"], "namespace": namespace, "uid": uid}
        metadata["resourceVersion"] = str(next(self._version))
        self._objects[resource.plural][key] = {**body, "metadata": metadata}
        return self._objects[resource.plural][key]

    async def patch(self, resource: Resource, name: str, body: Json, *, namespace: str, **_: Any) -> Json:
        await self._call("patch", resource)
        old = self._objects[resource.plural][namespace, name]
        metadata = {**old["metadata"], **body["metadata"], "resourceVersion": str(next(self._version))}
        self._objects[resource.plural][namespace, name] = {**old, **body, "metadata": metadata}
        return self._objects[resource.plural][namespace, name]

    async def _call(self, verb: str, resource: Resource) -> None:
        self.calls[f"{verb} {resource.plural}"] += 1
        await asyncio.sleep(0)


class Stalls:
    """Longest CPU time between two rounds of the event loop."""

    def __init__(self) -> None:
        self.longest_seconds = 0.0

    async def run(self) -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(0)
            self.longest_seconds = max(self.longest_seconds, time.thread_time() - before)


@dataclass(frozen=True)
class Result:
    seconds: float
    processor_seconds: float
    longest_stall_seconds: float
    calls: dict[str, int]


async def measure(scene: Scene) -> Result:
    """Measure from an empty state to a status that names each pod, with an empty queue."""
    memory, stalls = Memory(scene), Stalls()
    metrics = OperatorMetrics()
    reconciler = ShareReconciler(cast("Api", memory), OperatorSettings(Defaults()), metrics)
    intake = reconciler.intake
    tasks = [asyncio.create_task(stalls.run())]
    started, processor = time.monotonic(), time.thread_time()
    lists = watched_resources(intake)
    for watched in reversed(lists) if scene.pods_first else lists:
        await show_list(memory, watched)
    tasks.append(asyncio.create_task(reconciler.run()))
    while (  # noqa: ASYNC110 - counting must not be part of the work
        metrics.registry.get_sample_value("gpushare_operator_queue_length") or placements(memory) < scene.pods
    ):
        await asyncio.sleep(0.2)
    result = Result(
        time.monotonic() - started,
        time.thread_time() - processor,
        stalls.longest_seconds,
        dict(memory.calls),
    )
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return result


async def show_list(memory: Memory, watched: WatchedResource) -> None:
    """Give the operator a list as Kopf's session does."""
    listings = KopfListings(watched, None)
    listings.begins(listings.path)
    pages = [page async for page in memory.pages(watched.resource)]
    for number, page in enumerate(pages, start=1):
        token = {"continue": "more"} if number < len(pages) else {}
        metadata = {"resourceVersion": page.resource_version, **token}
        listings.page(listings.path, {"metadata": metadata, "items": page.items})
        await asyncio.sleep(0)


def placements(memory: Memory) -> int:
    return sum(len((share.get("status") or {}).get("placements") or ()) for share in memory.shares())


SCENES = {
    "one GpuShare for each pod": Scene(10_000, 10_000, 20),
    "no GpuShare yet": Scene(0, 10_000, 20),
    "one namespace, pods first": Scene(10_000, 10_000, 1, pods_first=True),
    "every selector asks for every pod": Scene(600, 300, 1, hostile=True, pods_first=True),
}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench operator", description=__doc__)
    parser.add_argument("--only", choices=SCENES, help="one scene")
    parser.add_argument("--live", action="store_true", help="a whole operator against a real API server")
    options = parser.parse_args(arguments)
    for name, scene in SCENES.items():
        if options.only not in {None, name}:
            continue
        if options.live:
            live = measure_live(
                list(map(scene.share, range(scene.shares))), list(map(scene.pod, range(scene.pods)))
            )
            print(f"{name}: {describe(asyncio.run(live))}", flush=True)
        else:
            result = asyncio.run(measure(scene))
            print(
                f"{name}: {scene.shares} GpuShares, {scene.pods} pods, {scene.namespaces} namespaces: "
                f"{result.seconds:.1f} s, processor {result.processor_seconds:.1f} s, longest stall "
                f"{result.longest_stall_seconds:.2f} s, calls {result.calls}"
            )
