"""An API server that only lists and watches a made-up fleet, fast enough to feed the extender at full size."""

import asyncio
import contextlib
import random
import sys

import orjson
from aiohttp import web

from bench import fleet
from gpushare.twin.contention import WORKLOADS


class FakeApi:
    """Serves /api/v1/{nodes,pods} and gpushare's two types in pages, then a stream of GpuNode updates."""

    def __init__(self, nodes: int, gpus: int, tenants: int, events_per_second: float, profiled: bool) -> None:
        self.events_per_second = events_per_second
        placed = fleet.place(nodes, gpus, tenants, seed=7)
        by_node: dict[int, dict[int, list[tuple[str, int]]]] = {}
        for index, (at, gpu, percent) in enumerate(placed):
            by_node.setdefault(at, {}).setdefault(gpu, []).append((fleet.pod_uid(index), percent))
        self.items = {
            "nodes": [orjson.dumps(fleet.node(i, gpus)) for i in range(nodes)],
            "gpunodes": [orjson.dumps(fleet.gpunode(i, gpus, by_node.get(i))) for i in range(nodes)],
            "pods": [
                orjson.dumps(fleet.pod(i, percent, node_index=at, gpu=gpu))
                for i, (at, gpu, percent) in enumerate(placed)
            ],
            "gpushares": profiled_shares() if profiled else [],
        }
        self.updates = [b'{"type":"MODIFIED","object":' + raw + b"}\n" for raw in self.items["gpunodes"]]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        kind = request.path.rsplit("/", 1)[-1]
        if "watch" in request.query:
            return await self.watch(request, kind)
        items = self.items[kind]
        start = int(request.query.get("continue") or 0)
        limit = int(request.query.get("limit") or len(items))
        token = str(start + limit) if start + limit < len(items) else ""
        head = b'{"metadata":{"resourceVersion":"1","continue":"%s"},"items":[' % token.encode()
        body = head + b",".join(items[start : start + limit]) + b"]}"
        return web.Response(body=body, content_type="application/json")

    async def watch(self, request: web.Request, kind: str) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        if kind != "gpunodes" or not self.events_per_second:
            await asyncio.Event().wait()
        at = 0
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(self.updates[at % len(self.updates)])
                at += 1
                await asyncio.sleep(1 / self.events_per_second)
        return response


def profiled_shares() -> list[bytes]:
    """One GpuShare for each kind of pod of the fleet, with a profile near that of one of the twin's workloads."""
    rng = random.Random(11)
    kinds = sorted({(index % 20, index % 50) for index in range(fleet.KINDS)})
    made = []
    for team, app in kinds:
        solo = rng.choice(list(WORKLOADS.values())).solo.as_dict()
        counters = {name: value * rng.uniform(0.8, 1.0) for name, value in solo.items() if value is not None}
        made.append(orjson.dumps(fleet.gpushare(team, app, counters)))
    return made


def main() -> None:
    port, nodes, gpus, tenants = map(int, sys.argv[1:5])
    app = web.Application()
    app.router.add_get(
        "/{path:.*}", FakeApi(nodes, gpus, tenants, float(sys.argv[5]), sys.argv[6] == "True").handle
    )
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


if __name__ == "__main__":
    main()
