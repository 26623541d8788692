"""A cluster that the command line asks over HTTP."""

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from fakecluster import HttpApiServer, busy_node, kubeconfig, pod_object

from gpushare.cli import root
from gpushare.core.api import names
from gpushare.kube import GPUNODES, PODS
from gpushare.kube.fake import app


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpApiServer]:
    fake = HttpApiServer()
    fake.store.served[names.GROUP] = (names.VERSION,)
    started, loop = threading.Event(), asyncio.new_event_loop()
    port = 0

    async def serve() -> web.AppRunner:
        nonlocal port
        application = app(fake.store)
        application.middlewares.append(fake.rights)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        started.set()
        return runner

    runner = loop.create_task(serve())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    assert started.wait(30)
    fake.kubeconfig = tmp_path / "kubeconfig"
    fake.kubeconfig.write_text(kubeconfig(f"http://127.0.0.1:{port}"))
    monkeypatch.setenv("KUBECONFIG", str(fake.kubeconfig))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    yield fake
    asyncio.run_coroutine_threadsafe(runner.result().cleanup(), loop).result(30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)
    loop.close()


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run the command line; its exit status, stdout and stderr."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["kubectl-gpushare", *map(str, words)])
        try:
            root.main()
            code: Any = 0
        except SystemExit as stop:
            code = stop.code or 0
        out, err = capsys.readouterr()
        return int(code), out, err

    return run


@pytest.fixture
def narrow(
    call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Run the command line as on a terminal of 40 columns; every line of stdout fits, colours are taken off."""

    def run(*words: object) -> tuple[int, str, str]:
        with monkeypatch.context() as terminal:
            for name, value in {"COLUMNS": "40", "TTY_COMPATIBLE": "1", "TERM": "xterm"}.items():
                terminal.setenv(name, value)
            code, out, err = call(*words)
        lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", out).split("\n")]
        assert max(map(len, lines)) <= 40
        return code, "\n".join(lines), re.sub(r"\x1b\[[0-9;]*m", "", err)

    return run


@pytest.fixture
def busy(cluster: HttpApiServer) -> HttpApiServer:
    """A cluster with four pods, one of which waits."""
    cluster.put(GPUNODES, busy_node())
    cluster.put(
        PODS,
        pod_object(
            "serve-7c9f8d6b5-xk2lp",
            "u1",
            gpu="GPU-0",
            annotations={names.CLASS: "latency", names.WORKLOAD: "bert"},
        ),
        pod_object("train-5d4c-p9", "u2", gpu="GPU-0", share=50),
        pod_object("lab", "u3", namespace="research", gpu="GPU-1", share=10),
        pod_object("late", "u4", share=60),
    )
    return cluster
