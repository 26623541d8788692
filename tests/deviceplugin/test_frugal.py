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


SLACK = """
import asyncio, os, sys, threading
from gpushare_deviceplugin import frugal
frugal.before_imports()
from gpushare_deviceplugin.rpc import bind_server, open_channel
from pathlib import Path

def own():
    return Path(f"/proc/{threading.get_native_id()}/timerslack_ns").read_text().strip()

def slack():
    found = {}
    for thread in os.listdir("/proc/self/task"):
        name = Path(f"/proc/self/task/{thread}/comm").read_text().strip()
        found.setdefault(name, set()).add(int(Path(f"/proc/{thread}/timerslack_ns").read_text()))
    return found

async def main():
    server = bind_server(Path(sys.argv[1]))
    await server.start()
    async with open_channel(Path(sys.argv[1])):
        print(*slack()["event_engine"])
        print(await asyncio.to_thread(own))
        print(own())
    await server.stop(0)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="the slack of other threads is read with CAP_SYS_NICE")
def test_the_threads_of_grpcs_pool_may_wake_up_late_and_the_agents_own_may_not(short_path: Path) -> None:
    command = [sys.executable, "-c", SLACK, str(short_path / "a.sock")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.split() == ["1000000000", "50000", "50000"], done.stderr


@pytest.mark.slow
def test_grpc_and_the_forecasters_process_do_not_disturb_each_other(short_path: Path) -> None:
    command = [sys.executable, "-c", FORK, str(short_path / "a.sock")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=120)
    # gRPC may tell that the server's end closed its connection, as it did here.
    errors = [line for line in done.stderr.splitlines() if "Got goaway" not in line]
    assert (done.returncode, errors) == (0, [])
