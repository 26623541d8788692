"""Memory at the gate before a real twin daemon: a pod has its limit, whatever its processes and contexts."""

import os
import signal
import subprocess
import sys

import pytest

from gpushare.mps.ending import Endings

from .conftest import SRC, decide, eventually

pytestmark = pytest.mark.slow  # real processes throughout: part of `make test`


SEVERAL_CONTEXTS = """
import os, time
from gpushare.twin.contention import WORKLOADS
from gpushare.twin.mps.client import TwinContext
held = []
for _ in range(3):
    held.append(TwinContext(os.environ, WORKLOADS["stream"]))
    held[-1].allocate(3000)
print("all", flush=True)
time.sleep(1000)
"""


async def test_two_processes_of_a_pod_share_its_limit(stage, tenants):
    decide(stage.gpu, processes=2, a=(50, 8192))
    pair = [tenants(stage.gpu.tenant, "--workload", "stream", "--memory-mib", "6000") for _ in range(2)]
    stage.pods |= {tenant.pid: "a" for tenant in pair}
    await eventually(lambda: any("out of memory" in t.text() for t in pair), "one refused in CUDA's words")
    await eventually(lambda: any("iterations/s" in t.text() for t in pair), "the other runs")
    assert sum("out of memory" in t.text() for t in pair) == 1


async def test_when_an_older_process_grows_beyond_the_limit_the_newest_is_ended(stage, tenants):
    decide(stage.gpu, processes=2, a=(50, 4096))
    old = tenants(stage.gpu.tenant, "--workload", "stream", "--memory-mib", "500")
    stage.pods[old.pid] = "a"
    await eventually(lambda: "iterations/s" in old.text(), "running")
    new = tenants(stage.gpu.tenant, "--workload", "stream", "--memory-mib", "3000")
    stage.pods[new.pid] = "a"
    await eventually(lambda: "iterations/s" in new.text(), "running")
    grown = {old.pid: 2000, new.pid: 3125}
    stage.ledger._memory = type("Grown", (), {"used_mib": lambda self: grown})()
    now = 0.0
    stage.gate._endings = Endings(clock=lambda: now)
    for at in (0.0, 0.5, 1.5):
        assert new.process.poll() is None
        now = at
        await stage.look()
        await stage.gate.end_overruns()
    await eventually(lambda: new.process.poll() is not None, "the newest ended")
    assert (new.process.poll(), old.process.poll()) == (-signal.SIGKILL, None)
    assert ["ended process" in each.detail for each in stage.ledger.mismatches] == [True], "told once"


@pytest.fixture
def several_contexts(twin_gpu, short_path):
    """A process that makes three contexts with 3,000 MiB each, and what it logs."""
    log = short_path / "log"
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(SRC),
        "CUDA_MPS_PIPE_DIRECTORY": str(twin_gpu.tenant),
    }
    with log.open("w") as file:
        command = [sys.executable, "-c", SEVERAL_CONTEXTS]
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    yield process, log
    process.kill()
    process.wait(60)


async def test_a_process_of_several_contexts_has_no_more_memory_than_its_pod(stage, several_contexts):
    process, log = several_contexts
    decide(stage.gpu, a=(20, 4096))
    stage.pods[process.pid] = "a"
    now = 0.0
    stage.gate._endings = Endings(clock=lambda: now)
    await eventually(lambda: "all" in log.read_text(), "three contexts with 3,000 MiB each")
    await stage.look()
    await stage.ledger.watch_memory()
    await stage.gate.end_overruns()
    now = 2.0
    await stage.gate.end_overruns()
    await eventually(lambda: process.poll() == -signal.SIGKILL, "ended")
    assert f"of its 4096 MiB; ended process {process.pid}" in stage.ledger.mismatches[-1].detail
