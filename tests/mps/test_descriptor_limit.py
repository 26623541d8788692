"""The host raises its limit of descriptors as far as it may; in a process of its own, since limits stay."""

import json
import os
import resource
import socket
import subprocess
import sys

import pytest

from gpushare.mps.asks import boottime
from gpushare.mps.layout import GpuDirectory, throttled_reader
from gpushare.mps.thawing import ThrottleProcess

from .conftest import SRC, until

PROGRAM = """
import json, os, resource, sys
from pathlib import Path
from gpushare.mps.host import raise_descriptor_limit
hard = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
if sys.argv[2] == "tenant" and os.geteuid() == 0:
    os.setuid(65534)
said = raise_descriptor_limit()
print(json.dumps([said, *resource.getrlimit(resource.RLIMIT_NOFILE)]))
"""


def limits(hard: int, who: str) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(hard), who],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_without_the_right_to_more_it_takes_all_of_the_hard_limit():
    assert limits(4096, "tenant") == [4096, 4096, 4096]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_with_the_right_to_more_it_takes_more():
    reported, soft, hard = limits(4096, "root")
    assert reported == soft
    assert hard >= soft >= 4096


FD_SETSIZE = 1024  # select(2) takes no descriptor from this number on


@pytest.fixture
def many_descriptors():
    """As many open as copies of connections in a host, of which one pod may cause 4,096."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 2 * FD_SETSIZE:
        pytest.skip("too few descriptors are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * FD_SETSIZE, hard))
    taken = [socket.socket(socket.AF_UNIX) for _ in range(FD_SETSIZE)]
    yield
    for each in taken:
        each.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_host_with_very_many_connections_starts_the_throttle_again(tmp_path, many_descriptors, caplog):
    """Before: select(2) refused the throttle's pipe, and no pod was throttled until they were closed."""
    gpu = GpuDirectory.of(tmp_path, "GPU-1")
    gpu.create()
    throttle, reader = ThrottleProcess(tmp_path, tmp_path), throttled_reader(gpu)
    throttle.start()
    try:
        until(lambda: throttle.restarts > 0 or reader.read().beat > 0, "it looks, or has ended")
        began = boottime()
        until(lambda: throttle.restarts > 0 or reader.read().beat > began + 1, "it goes on looking")
        assert (throttle.restarts, caplog.messages) == (0, [])
    finally:
        throttle.stop()
