"""A client of the admission server, as the API server is one."""

import asyncio
import json
import ssl
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp
from yarl import URL

Json = dict[str, Any]


class Client:
    """Posts reviews, trusting only the server's own certificate."""

    def __init__(self, session: aiohttp.ClientSession, base: str, trusted: ssl.SSLContext) -> None:
        self.session, self.base, self.trusted = session, base, trusted

    async def get(self, path: str) -> str:
        async with self.session.get(self.base + path) as response:
            assert response.status == 200
            return await response.text()

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        async with self.session.post(self.base + path, data=body) as response:
            return response.status, await response.read()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        address = URL(self.base)
        return await asyncio.open_connection(address.host, address.port, ssl=self.trusted)

    async def half_a_review(self, length: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Announces a body and sends its first byte."""
        reader, writer = await self.connect()
        writer.write(f"POST /mutate HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n{{".encode())
        await writer.drain()
        return reader, writer

    async def review(
        self, path: str, obj: Json, *, operation: str = "CREATE", kind: Json | None = None, **more: Json
    ) -> Json:
        request = {
            "uid": "r1",
            "operation": operation,
            "namespace": "shop",
            "object": obj,
            "kind": kind or {"group": "", "version": "v1", "kind": "Pod"},
            **more,
        }
        body = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
        status, raw = await self.post(path, json.dumps(body).encode())
        assert status == 200
        answer = json.loads(raw)
        assert (answer["apiVersion"], answer["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
        assert answer["response"]["uid"] == "r1"
        response: Json = answer["response"]
        return response


Serving = Callable[..., AbstractAsyncContextManager[Client]]


def pod(**annotations: str) -> Json:
    found = {f"gpushare.io/{key}": value for key, value in annotations.items()}
    return {"metadata": {"name": "p", "annotations": found}, "spec": {"containers": [{"name": "main"}]}}
