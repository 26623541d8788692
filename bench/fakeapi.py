"""An API server that lists and watches a generated fleet, fast enough for the extender at full size.

Not the shipped fake (gpushare.kube.fake): that one keeps every object and its last state as Python dictionaries
and copies each page that it answers, so that with 100,000 pods the extender would be timed waiting for it, on a
machine whose memory the fake had taken. This one sends bytes made beforehand, or page by page. A reader gets the
same lists from both (tests/bench/test_fakeapi.py).
"""

import argparse
import asyncio
import contextlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orjson
from aiohttp import web

from bench import fleet
from gpushare.core.api import names
from gpushare.twin.contention import WORKLOADS


class PagedApiServer:
    """Serves /api/v1/{nodes,pods} and gpushare's two types in pages, then a stream of GpuNode updates.

    Pods that are not ours are made when their page is asked for: 100,000 of them are 350 MB.
    """

    def __init__(
        self,
        nodes: int,
        gpus: int,
        tenants: int,
        *,
        other_pods: int,
        waiting: int,
        events_per_second: float,
        turnover_per_second: float,
        profiled: bool,
    ) -> None:
        self.events_per_second = events_per_second
        self.turnover_per_second = turnover_per_second
        self.placed = fleet.place(nodes, gpus, tenants, seed=7)
        self.other_pods = _Made(other_pods, lambda index: orjson.dumps(fleet.other_pod(index, nodes)))
        by_node: dict[int, dict[int, list[tuple[str, int]]]] = {}
        for index, (at, gpu, percent) in enumerate(self.placed):
            by_node.setdefault(at, {}).setdefault(gpu, []).append((fleet.pod_uid(index), percent))
        self.items: dict[str, Sequence[bytes]] = {
            "nodes": [orjson.dumps(fleet.node(i, gpus)) for i in range(nodes)],
            "gpunodes": [orjson.dumps(fleet.gpunode(i, gpus, by_node.get(i))) for i in range(nodes)],
            "pods": [
                orjson.dumps(fleet.pod(i, percent, node_index=at, gpu=gpu))
                for i, (at, gpu, percent) in enumerate(self.placed)
            ]
            + [orjson.dumps(fleet.waiting_pod(2 * 10**6 + i)) for i in range(waiting)],
            "gpushares": profiled_shares() if profiled else [],
        }
        self.updates = [b'{"type":"MODIFIED","object":' + raw + b"}\n" for raw in self.items["gpunodes"]]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        kind = request.path.rsplit("/", 1)[-1]
        unmanaged = names.UNMANAGED_SELECTOR in request.query.get("labelSelector", "")
        if "watch" in request.query:
            return await self.watch(request, "other pods" if unmanaged and kind == "pods" else kind)
        items = self.other_pods if kind == "pods" and unmanaged else self.items[kind]
        start = int(request.query.get("continue") or 0)
        limit = int(request.query.get("limit") or len(items))
        token = str(start + limit) if start + limit < len(items) else ""
        head = b'{"metadata":{"resourceVersion":"1","continue":"%s"},"items":[' % token.encode()
        body = head + b",".join(items[start : start + limit]) + b"]}"
        return web.Response(body=body, content_type="application/json")

    async def watch(self, request: web.Request, kind: str) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        per_second = {"gpunodes": self.events_per_second, "pods": self.turnover_per_second}.get(kind)
        if not per_second:
            await asyncio.Event().wait()
        events = itertools.cycle(self.updates) if kind == "gpunodes" else self.turnover()
        with contextlib.suppress(ConnectionError):
            for event in events:
                await response.write(event)
                await asyncio.sleep(1 / (per_second or 1))
        return response

    def turnover(self) -> Iterator[bytes]:
        """Yield events of tenants that leave, each followed by another, of the same size or smaller."""
        rng = random.Random(13)
        for index, (at, gpu, percent) in enumerate(self.placed):
            smaller = rng.choice([each for each in fleet.FRACTIONS if each <= percent])
            left = fleet.pod(index, percent, node_index=at, gpu=gpu)
            came = fleet.pod(3 * 10**6 + index, smaller, node_index=at, gpu=gpu)
            for kind, pod in (("DELETED", left), ("ADDED", came)):
                pod["metadata"]["resourceVersion"] = str(2 + index)
                yield orjson.dumps({"type": kind, "object": pod}) + b"\n"


class _Made(Sequence[bytes]):
    """A sequence whose objects are made on access."""

    def __init__(self, length: int, make: Callable[[int], bytes]) -> None:
        self._indices, self._make = range(length), make

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, at: Any) -> Any:
        return [self._make(one) for one in self._indices[at]] if isinstance(at, slice) else self._make(at)


def profiled_shares() -> list[bytes]:
    """Return a GpuShare for each kind of pod in the fleet; its profile is near one of the twin's workloads."""
    rng = random.Random(11)
    kinds = sorted({(index % 20, index % 50) for index in range(fleet.KINDS)})
    made = []
    for team, app in kinds:
        solo = rng.choice(list(WORKLOADS.values())).solo.as_dict()
        counters = {name: value * rng.uniform(0.8, 1.0) for name, value in solo.items() if value is not None}
        made.append(orjson.dumps(fleet.gpushare(team, app, counters)))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("port", "nodes", "gpus", "tenants", "other-pods", "waiting"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--events-per-second", type=float, default=0)
    parser.add_argument("--turnover-per-second", type=float, default=0)
    parser.add_argument("--profiled", action="store_true")
    options = parser.parse_args()
    fake = PagedApiServer(
        options.nodes,
        options.gpus,
        options.tenants,
        other_pods=options.other_pods,
        waiting=options.waiting,
        events_per_second=options.events_per_second,
        turnover_per_second=options.turnover_per_second,
        profiled=options.profiled,
    )
    app = web.Application()
    app.router.add_get("/{path:.*}", fake.handle)
    web.run_app(app, host="127.0.0.1", port=options.port, print=None, access_log=None)


if __name__ == "__main__":
    main()
