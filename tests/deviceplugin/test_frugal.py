"""The agent stays small: what it loads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Each of these is megabytes that the agent has no use for (docs/adr/0100).
HEAVY = (
    "numpy",
    "pydantic",
    "requests",
    "kubernetes.client",
    "cryptography",
    "typer",
    "rich",
    "kopf",
    "networkx",
    "pynvml",
    "scipy",
    "sklearn",
    "matplotlib",
    "aiohttp.web",
    "unittest",
    "sqlite3",
)
PROGRAM = """
import importlib, sys
from gpushare_deviceplugin import frugal
frugal.before_imports()
import gpushare_deviceplugin.agent, gpushare.kube
print(*sorted(n for n in {heavy} if n in sys.modules), gpushare.kube.Api)
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}


def loaded() -> str:
    command = [sys.executable, "-c", PROGRAM.format(heavy=HEAVY)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


@pytest.mark.slow
def test_nothing_heavy_is_loaded() -> None:
    assert loaded() == "<class 'gpushare.kube.api.Api'>"


FORK = """
import asyncio, sys
from gpushare_deviceplugin import frugal
frugal.before_imports()
from gpushare_deviceplugin import forecaster_client, podresources_pb2
from gpushare_deviceplugin.podresources_pb2_grpc import PodResourcesListerServicer as Servicer
from gpushare_deviceplugin.podresources_pb2_grpc import PodResourcesListerStub as Stub
from gpushare_deviceplugin.podresources_pb2_grpc import add_PodResourcesListerServicer_to_server as add
from gpushare_deviceplugin.rpc import bind_server, open_channel
from pathlib import Path

class Lister(Servicer):
    async def List(self, request, context):
        assert await forecaster_client.ask_model([]) == []
        return podresources_pb2.ListPodResourcesResponse()

async def main():
    socket = Path(sys.argv[1])
    server = bind_server(socket)
    add(Lister(), server)
    await server.start()
    async with open_channel(socket) as channel:
        await Stub(channel).List(podresources_pb2.ListPodResourcesRequest())
        assert await forecaster_client.ask_model([]) == []
        await Stub(channel).List(podresources_pb2.ListPodResourcesRequest())
    await server.stop(0)

asyncio.run(main())
"""


@pytest.mark.slow
def test_grpc_and_the_forecasters_process_do_not_disturb_each_other(short_path: Path) -> None:
    command = [sys.executable, "-c", FORK, str(short_path / "a.sock")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=120)
    # gRPC may tell that the server's end closed its connection, as it did here.
    errors = [line for line in done.stderr.splitlines() if "Got goaway" not in line]
    assert (done.returncode, errors) == (0, [])
