"""The operator as the chart starts it, on a real API server, and what a test sees of it."""

import asyncio
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from gpushare.core.api import Decision, GpuShare, names
from gpushare.kube import GPUSHARES, PODS, Api, Reflector

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 120


class Shares:
    """The GpuShares of a namespace as a watch brings them; `until` waits for them to fit."""

    def __init__(self, api: Api, namespace: str) -> None:
        self._changed = asyncio.Event()
        self.reflector = Reflector(
            api,
            GPUSHARES,
            lambda obj: (GpuShare.from_object(obj), obj),
            namespace=namespace,
            on_change=lambda *_: self._changed.set(),
        )

    def named(self, name: str) -> GpuShare | None:
        return next((share for share, _ in self.reflector.items.values() if share.name == name), None)

    def raw(self, name: str) -> Json:
        return next(obj for share, obj in self.reflector.items.values() if share.name == name)

    async def until(self, fits: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not fits():
                self._changed.clear()
                await self._changed.wait()


class Running:
    """The operator as the chart starts it, in a process of its own."""

    def __init__(self, kubeconfig: Path, probe_port: int, metrics_port: int, log: Path) -> None:
        self.kubeconfig, self.probe_port, self.metrics_port, self.log = kubeconfig, probe_port, metrics_port, log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *namespaces: str) -> None:
        paths = os.pathsep.join(str(ROOT / part) for part in ("src", "operator", "deviceplugin"))
        environment = {
            **os.environ,
            "KUBECONFIG": str(self.kubeconfig),
            "PYTHONPATH": paths,
            "GPUSHARE_METRICS_PORT": str(self.metrics_port),
            "GPUSHARE_PROBE_PORT": str(self.probe_port),
            "GPUSHARE_MAX_SLOWDOWN": "1.5",
            "GPUSHARE_NAMESPACES": ",".join(namespaces),
        }
        command = [
            sys.executable,
            "-m",
            "gpushare_operator",
            "run",
            "-m",
            "gpushare_operator.handlers",
            "--standalone",
            *([f"--namespace={name}" for name in namespaces] or ["--all-namespaces"]),
        ]
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, cwd="/")

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(how)
        return self.process.wait(timeout=PATIENCE_SECONDS)

    def get(self, path: str, port: int) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            text: str = answer.read().decode()
            return text


def controller(obj: Json) -> Json:
    meta = obj["metadata"]
    return {
        "apiVersion": obj["apiVersion"],
        "kind": obj["kind"],
        "name": meta["name"],
        "uid": meta["uid"],
        "controller": True,
    }


async def pod(api: Api, namespace: str, name: str, owner: Json | None = None, *, ours: bool = True) -> Json:
    metadata: Json = {"name": name}
    if ours:
        metadata |= {
            "annotations": {names.FRACTION: "0.25"},
            "labels": {names.MANAGED_LABEL: "true", "app": "web"},
        }
    if owner is not None:
        metadata["ownerReferences"] = [controller(owner)]
    share = {names.SHARE_RESOURCE: "25"} if ours else {}
    containers = [{"name": "main", "image": "x", "resources": {"limits": share}}]
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": containers}}
    return await api.create(PODS, body, namespace=namespace)


async def decide(api: Api, raw: Json, gpu: str, node: str = "n1") -> None:
    meta = raw["metadata"]
    decision = Decision((gpu,), 25, 8192, "2026-11-21T11:00:00Z")
    await api.bind(
        meta["name"], node, namespace=meta["namespace"], uid=meta["uid"], annotations=decision.to_annotations()
    )


class Cable:
    """TCP between the operator and the API server, through which nothing goes while it is pulled."""

    def __init__(self, kubeconfig: Path) -> None:
        self._config = yaml.safe_load(kubeconfig.read_text())
        self._address = urlsplit(self._config["clusters"][0]["cluster"]["server"])
        self._plugged = asyncio.Event()
        self._plugged.set()
        self._ends: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        """Listen; answers the kubeconfig for those who come through here."""
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self._config["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{port}"
        return yaml.safe_dump(self._config)

    def pull(self) -> None:
        """Break every connection; new ones wait."""
        self._plugged.clear()
        for end in self._ends:
            end.transport.abort()

    def plug(self) -> None:
        """Let everything through again."""
        self._plugged.set()

    async def close(self) -> None:
        """Listen no more."""
        self.pull()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._ends.add(writer)
        await self._plugged.wait()
        with suppress(OSError):
            far_reader, far = await asyncio.open_connection(self._address.hostname, self._address.port)
            self._ends.add(far)
            await asyncio.gather(_pump(reader, far), _pump(far_reader, writer))
            self._ends.discard(far)
        writer.transport.abort()
        self._ends.discard(writer)


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await source.read(65536):
            target.write(data)
            await target.drain()
    target.transport.abort()
