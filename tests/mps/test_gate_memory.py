"""Memory at the gate before a real twin daemon: a pod has its limit, whatever its processes and contexts."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from gpushare.mps.ending import Endings
from gpushare.mps.status import HoldReason

from .conftest import SRC, decide, eventually

pytestmark = pytest.mark.slow  # real processes throughout: part of `make test`


# Makes three contexts, asks 3,000 MiB in each, then gives up the last and makes another one.
SEVERAL_CONTEXTS = """
import os, time
from gpushare.twin.contention import WORKLOADS
from gpushare.twin.mps.client import CudaError, TwinContext
held = []
def one():
    held.append(TwinContext(os.environ, WORKLOADS["stream"]))
    print(f"context sms={held[-1].attached.sm_count}", flush=True)
    try:
        held[-1].allocate(3000)
    except CudaError as error:
        print(error, flush=True)
for _ in range(3):
    one()
held.pop().close()
one()
time.sleep(1000)
"""


CONTEXTS_BY_THREADS = """
import os, threading
from gpushare.twin.contention import WORKLOADS
from gpushare.twin.mps.client import TwinContext
def one():
    context = TwinContext(os.environ, WORKLOADS["stream"])
    print(f"context sms={context.attached.sm_count}", flush=True)
    threading.Event().wait()
for _ in range(8):
    threading.Thread(target=one).start()
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
    """A process that makes several contexts, and what it logs."""
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


async def test_a_further_context_of_a_process_waits_where_its_pod_named_one_process(stage, several_contexts):
    """Before: each context had the pod's whole cap, and the process three times its part of the GPU."""
    process, log = several_contexts
    decide(stage.gpu, a=(20, 4096))
    stage.pods[process.pid] = "a"
    await eventually(lambda: stage.reasons().get(process.pid) is HoldReason.POD_CAP, "the second waits, and why")
    assert log.read_text().count("context sms=26") == 1


async def test_contexts_that_threads_make_at_once_do_not_pass_in_one_turn(stage, short_path):
    """Before: eight threads had the pod's whole cap each."""
    decide(stage.gpu, a=(20, 4096))
    log = short_path / "log"
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(SRC),
        "CUDA_MPS_PIPE_DIRECTORY": str(stage.gpu.tenant),
    }
    with log.open("w") as file:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CONTEXTS_BY_THREADS, env=environment, stdout=file, stderr=file
        )
    stage.pods[process.pid] = "a"
    try:
        await eventually(
            lambda: stage.reasons().get(process.pid) is HoldReason.POD_CAP, "the others wait, and why"
        )
        await asyncio.sleep(1)
        assert log.read_text().count("context sms=26") == 1
    finally:
        process.kill()
        await process.wait()


async def test_contexts_of_a_process_share_its_pods_cap_and_memory(stage, several_contexts):
    process, log = several_contexts
    decide(stage.gpu, processes=3, a=(20, 4096))
    stage.pods[process.pid] = "a"
    # The fourth is let in because the third was given up.
    await eventually(lambda: log.read_text().count("context sms=") == 4, "three contexts, and one in place of one")
    await stage.look()
    assert [client.pid for client in stage.ledger.clients()] == [process.pid]
    # Which of the third and the fourth counts depends on when the server told of the third's end.
    assert stage.ledger.percentages("a", process.pid) in {(7, 7, 6), (7, 7, 7)}
    assert log.read_text().count("context sms=8") == 4
    await eventually(lambda: log.read_text().count("out of memory") == 3, "one limit for all of them")
